"""How soon a request is found that its engine has lost, and how often one is given up that would have gone on.

    python scripts/lab performance.lost_requests --output docs/results/lost-requests.json

Engines are drawn at random: slots, speed, prompts, load, how many requests wait in the engine, and what makes answers
silent:

stalls    the whole engine stands still (garbage, swap, a graph that is compiled); probes are answered
pauses    the whole machine stands still for minutes; probes are not answered
memory    one request is evicted and waits, while no other begins
hiccups   one stream stands still, while others begin
prompts   some have 100,000 tokens, and shorter ones overtake them
tools     some answers, or the second half of them, come as a whole at their end

Both studies are made a second time with engines that tell at each look how many requests they have: as of the last
step, without those whose prompts they have yet to tokenize; one engine in three counts those of one of its two
processes only.

One stall, eviction or hiccup in a hundred is `--times` as long as usual. No request is lost in the first study, so all
that the watch gives up are false ends; in the second, one request in a hundred is lost, half of them in mid-answer. The
seeds are none of those that the constants of live/silence.py were chosen with (1 to 99).
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from kit.arguments import add_results, parser_of
from kit.progress import log
from kit.results import day_and_machine, write_json

from llmserve.live.silence import NEWER, Run, Silences

TICK_S, LOOK_S = 0.25, 2.0
TOKENIZED_PER_S = 50_000.0  # tokens
IDLE_S = 600.0  # --engine-idle-s
SPREAD = 0.8  # of the logarithm of a length around its forecast
LIKELY = math.exp(1.83 * SPREAD)  # the last of 15 equally likely lengths, over the median
SEEDS_FROM = 1000


@dataclass
class Asked:
    """A request at the engine. rest_s : of the prompt.  silent : tokens from which on nothing is sent before the end"""

    run: Run
    length: float
    rest_s: float
    silent: float = math.inf
    tokens: float = 0.0
    stands_until_s: float = 0.0
    lost_at: float = math.inf  # tokens
    counted_from_s: float = math.inf  # the engine's count includes the request from then on; inf: it never does
    gone_s: float | None = None  # when it was lost


@dataclass
class World:
    """One engine, drawn from a seed.

    times : length of one stall in a hundred, in usual ones.  losing : share of requests that are lost
    counts : whether it tells how many requests it has
    """

    seed: int
    times: float
    losing: float
    counts: bool = False
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.slots = rng.choice((1, 2, 4, 8, 16, 64))
        self.inside = self.slots + rng.choice((0, 0, 1, self.slots // 2, 2 * self.slots))  # running and waiting there
        self.token_s = math.exp(rng.uniform(math.log(0.005), math.log(0.08)))
        self.prompts_per_s = math.exp(rng.uniform(math.log(500), math.log(20_000)))
        self.load = rng.uniform(0.2, 1.1)
        self.median = math.exp(rng.uniform(math.log(50), math.log(600)))
        self.whole, self.tools = rng.choice((0.0, 0.2, 0.6)), rng.choice((0.0, 0.001, 0.01, 0.2))
        self.long_prompts = rng.choice((0.0, 0.001, 0.01))
        self.stall_s, self.memory_s, self.hiccup_s = (
            rng.uniform(0.2, 4.0),
            rng.uniform(1.0, 15.0),
            rng.uniform(0.2, 3.0),
        )
        self.stalls_every_s, self.memory_every_s = rng.uniform(60, 600), rng.uniform(120, 3600)
        self.hiccups = rng.choice((0.0, 1e-3, 1e-2))
        self.counting = random.Random(
            -self.seed
        )  # of its own: the other draws are those of a world that counts nothing
        self.half = self.counting.random() < 1 / 3
        mean = self.median * math.exp(SPREAD**2)
        self.answer_s = mean * self.token_s + 800 / self.prompts_per_s

    def lasts_s(self, usual_s: float) -> float:
        return usual_s * self.rng.lognormvariate(0.0, 0.7) * (self.times if self.rng.random() < 0.01 else 1.0)

    def ask(self, now_s: float) -> Asked:
        rng = self.rng
        forecast = self.median * rng.lognormvariate(0.0, SPREAD)
        length = max(1.0, forecast * rng.lognormvariate(0.0, SPREAD))
        prompt = 100_000.0 if rng.random() < self.long_prompts else min(30_000.0, rng.lognormvariate(5.5, 1.3))
        stream = rng.random() >= self.whole
        bound = rng.choice((math.inf, 2.0 ** math.ceil(math.log2(length) + rng.random())))
        run = Run("m", is_stream=stream, prompt_tokens=prompt, likely=min(forecast * LIKELY, bound), bound=bound)
        run.heard_s = now_s
        asked = Asked(run, min(length, bound), prompt / self.prompts_per_s)
        if not self.half or self.counting.random() < 0.5:
            asked.counted_from_s = now_s + prompt / TOKENIZED_PER_S
        if not stream:
            asked.silent = 0.0
        elif rng.random() < self.tools:
            asked.silent = rng.choice((0.0, length / 2.0))
        if rng.random() < self.losing:
            asked.lost_at = rng.choice((0.0, rng.uniform(0.0, length)))
        return asked


@dataclass
class Found:
    """What the watch did with one engine.

    overtaken_s, others_s : seconds from the last sign of a lost request until it was found, whether newer answers had
    overtaken it or not.  missed : lost requests that were not found within IDLE_S.  without_bound : those of them that
    are not streamed, and whose length has no bound
    """

    answers: int = 0
    false_ends: list[dict[str, float]] = field(default_factory=list)
    overtaken_s: list[float] = field(default_factory=list)
    others_s: list[float] = field(default_factory=list)
    missed: int = 0
    without_bound: int = 0
    counted: int = 0


def play(world: World, answers: int) -> Found:
    """Let the engine answer so many requests."""
    rng, silences, result = world.rng, Silences(), Found()
    waiting, running, held = deque[float](), deque[Asked](), deque[Asked]()  # in the front-end, in slots, in the engine
    ended: list[Run] = []
    lost: list[Asked] = []
    now_s = stands_until_s = paused_until_s = full_until_s = 0.0
    next_s, look_s, told = 0.0, LOOK_S, 0
    while result.answers < answers:
        now_s += TICK_S
        surge = 3.0 if now_s % 1800.0 < 60.0 else 1.0
        while next_s <= now_s:
            if len(waiting) < 10 * world.slots:
                waiting.append(next_s)
            next_s += rng.expovariate(world.load * surge * world.slots / world.answer_s)
        while waiting and len(running) + len(held) + len(lost) < world.inside:
            waiting.popleft()
            held.append(world.ask(now_s))
        stopped = now_s < stands_until_s or now_s < paused_until_s
        if not stopped:
            if rng.random() < TICK_S / world.stalls_every_s:
                stands_until_s = now_s + world.lasts_s(world.stall_s)
            if rng.random() < TICK_S / 20_000.0:
                paused_until_s = now_s + rng.uniform(30.0, 600.0)
            if running and now_s >= full_until_s and rng.random() < TICK_S / world.memory_every_s:
                full_until_s = now_s + world.lasts_s(world.memory_s)
                running[-1].stands_until_s = full_until_s
            while held and len(running) < world.slots and now_s >= full_until_s:
                running.append(held.popleft())
            for asked in list(running):
                _go_on(world, asked, now_s)
                if asked.tokens >= asked.lost_at and asked.rest_s <= 0:
                    running.remove(asked)
                    asked.gone_s = now_s
                    lost.append(asked)
                elif asked.tokens >= asked.length:
                    running.remove(asked)
                    asked.run.complete, asked.run.tokens = True, asked.tokens
                    ended.append(asked.run)
                    result.answers += 1
            told = sum(asked.counted_from_s <= now_s for asked in (*running, *held))
        if now_s >= look_s:
            look_s = now_s + LOOK_S * rng.uniform(0.9, 1.2)
            everything = [*running, *held, *lost]
            runs, by_run = [asked.run for asked in everything], {id(asked.run): asked for asked in everything}
            probed = now_s >= paused_until_s
            counts = told if world.counts and probed else None
            for run in silences.look(now_s, runs, ended, probed=probed, told=counts):
                asked = by_run[id(run)]
                if asked.gone_s is None:
                    result.false_ends.append(_described(world, asked, silences))
                    (running if asked in running else held).remove(asked)
                else:
                    found_s = result.overtaken_s if run.overtaken >= NEWER else result.others_s
                    result.counted += run.missed_s > silences.patience.floor_s
                    found_s.append(now_s - run.heard_s)
                    lost.remove(asked)
            ended = []
            for asked in [asked for asked in lost if now_s - asked.run.heard_s > IDLE_S]:
                lost.remove(asked)
                result.missed += 1
                result.without_bound += not asked.run.is_stream and asked.run.bound == math.inf
    return result


def _go_on(world: World, asked: Asked, now_s: float) -> None:
    """Work on a request for a tick."""
    if now_s < asked.stands_until_s:
        return
    if asked.rest_s > 0:
        asked.rest_s -= TICK_S
        return
    asked.tokens += TICK_S / world.token_s
    run = asked.run
    if asked.tokens < asked.silent:
        run.began, run.tokens, run.heard_s = True, asked.tokens, now_s
        if world.rng.random() < world.hiccups * TICK_S / world.answer_s:
            asked.stands_until_s = now_s + world.lasts_s(world.hiccup_s)


def _described(world: World, asked: Asked, silences: Silences) -> dict[str, float]:
    run, normal = asked.run, silences.of("m")
    return {
        "seed": world.seed,
        "silent_s": run.silent_s,
        "overtaken": run.overtaken,
        "began": run.began,
        "stream": run.is_stream,
        "prompt": run.prompt_tokens,
        "answers": normal.answers if normal is not None else 0,
    }


def study(engines: int, answers: int, times: float, losing: float, seeds_from: int, *, counts: bool) -> dict[str, Any]:
    """All engines, with the sums of what was found."""
    results = [play(World(seeds_from + number, times, losing, counts), answers) for number in range(engines)]
    overtaken_s = [seconds for result in results for seconds in result.overtaken_s]
    others_s = [seconds for result in results for seconds in result.others_s]
    false_ends = [end for result in results for end in result.false_ends]
    summary: dict[str, Any] = {
        "engines": engines,
        "answers": sum(result.answers for result in results),
        "times": times,
        "counts": counts,
        "false_ends": len(false_ends),
        "false_ends_shown": false_ends[:5],
    }
    if losing:
        summary |= {
            "overtaken": _quantiles(overtaken_s),
            "not_overtaken": _quantiles(others_s),
            "found_by_counts": sum(result.counted for result in results),
            "found_within_idle": len(overtaken_s) + len(others_s),
            "not_found_within_idle": sum(result.missed for result in results),
            "of_these_whole_without_bound": sum(result.without_bound for result in results),
        }
    return summary


def _quantiles(found_s: list[float]) -> dict[str, float]:
    found_s = sorted(found_s)
    return {
        "found": len(found_s),
        "s_median": statistics.median(found_s) if found_s else math.nan,
        "s_p90": found_s[int(0.9 * len(found_s))] if found_s else math.nan,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--engines", type=int, default=100)
    parser.add_argument("--answers", type=int, default=1000, help="of each engine")
    parser.add_argument("--times", type=float, nargs="+", default=[1.0, 10.0, 30.0])
    parser.add_argument("--seeds-from", type=int, default=SEEDS_FROM)
    add_results(parser)
    args = parser.parse_args()
    result: dict[str, Any] = {**day_and_machine(), "look_s": LOOK_S, "idle_s": IDLE_S, "healing": [], "losing": []}
    for times in args.times:
        for counts in (False, True):
            for name, losing in (("healing", 0.0), ("losing", 0.01)):
                part = study(args.engines, args.answers, times, losing, args.seeds_from, counts=counts)
                log(f"{name}: {json.dumps(part)}")
                result[name].append(part)
    write_json(args.output, result)


if __name__ == "__main__":
    main()
