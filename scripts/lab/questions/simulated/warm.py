"""Conversations over shared prefixes on two simulated engines: waiting for the busy engine that has the prompt.

    python scripts/lab simulated.warm --output docs/results/simulated-warm.json

The engines have the costs of those of `simulated.long`, and caches that together hold all prefixes once, but not twice,
beside the conversations: of the CPU 20 prefixes of some 2,100 tokens, of the GPU 40 of some 8,000. A conversation has 8
turns; its next request comes a pause after the answer. The first eighth of the requests is not counted. Ways:

    most of the prompt  each request goes at once to the engine that has most of its prompt, of equals the less busy
    any free slot       llmserve as it is, but the first request in the order takes a free slot wherever that is
    llmserve            as it is: a request may wait for a busy engine (choice/placement.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from kit.arguments import parser_of
from kit.results import rounded, write_json
from kit.rows import Row, medians, ratio, select
from kit.tables import cells, show

from llmserve.live.journal import Header
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.choice import choice, fixed_choice
from llmserve.scheduling.engines import EngineState
from llmserve.scheduling.messages import Action, Event, RequestEnded
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.cluster import SimulatedCluster
from llmserve.simulation.engine_model import Costs
from llmserve.simulation.kv_engine import KVEngine, KVLimits
from llmserve.simulation.kv_pool import Text, hashes
from questions.simulated.long import SETTINGS, STRAIGHT

MOST, ANY, OURS = WAYS = ("most of the prompt", "any free slot", "llmserve")
BLOCK_TOKENS, TURNS = 128, 8


@dataclass(frozen=True, slots=True)
class Talk:
    """Engines of such costs and limits, and the conversations with them. Pairs are the least and the most.

    answer  tokens of each.  rates_per_s : at which conversations begin
    """

    costs: Costs
    limits: KVLimits
    prefixes: int
    prefix_tokens: tuple[int, int]
    new_tokens: tuple[int, int]
    answer: int
    pause_s: float
    rates_per_s: tuple[float, ...]


TALKS = {
    "CPU": Talk(
        SETTINGS["CPU"].costs, KVLimits(25_600, 2_048, 8, 32), 20, (1_890, 2_310), (20, 60), 16, 1.5,
        (1.0, 2.0, 3.0, 4.0),
    ),
    "GPU": Talk(
        SETTINGS["GPU"].costs, KVLimits(215_000, 8_192, 256), 40, (7_200, 8_800), (50, 450), 200, 10.0,
        (0.5, 1.0, 1.5, 2.0),
    ),
}  # fmt: skip
COLUMNS = {
    "engines": ("engines", ""),
    "conversations/s": ("begin_per_s", ".1f"),
    "way": ("way", ""),
    "hit rate": ("hit_rate", ".3f"),
    "first token mean (s)": ("first_s_mean", ".3f"),
    "p50": ("first_s_p50", ".3f"),
    "p95": ("first_s_p95", ".3f"),
    "p99": ("first_s_p99", ".3f"),
}
RATIOS = ("hit_rate", "first_s_mean", "first_s_p99")


def most_of_the_prompt(
    pool: Any, queues: Any, queued: Any, engines: Sequence[EngineState], now_s: float
) -> EngineState:
    hits = pool.residency.hit_tokens
    return max(engines, key=lambda one: (hits(one.info.name, queued.request), -len(one.running), one.info.name))


class Load:
    """Conversations whose turns follow the answers."""

    def __init__(self, talk: Talk, conversations: int, begin_per_s: float, seed: int) -> None:
        self._talk = talk
        self.rng = np.random.default_rng([seed, 0])
        self.prefixes = self.rng.integers(*talk.prefix_tokens, talk.prefixes).tolist()
        self.begins_s = np.cumsum(self.rng.exponential(1 / begin_per_s, conversations)).tolist()
        self.lengths: dict[int, float] = {}
        self.texts: dict[int, Text] = {}
        self.arrived_s: dict[int, float] = {}
        self.follows: dict[int, Callable[[float], tuple[Request, float]]] = {}
        self._seed = seed

    def first_turns(self) -> Iterator[tuple[float, Request]]:
        for number, begin_s in enumerate(self.begins_s):
            prefix = int(self.rng.integers(self._talk.prefixes))
            text: Text = (((f"prefix {prefix}"), self.prefixes[prefix]),)
            rng = np.random.default_rng([self._seed, 1, number])
            yield begin_s, self._turn(begin_s, text, number, TURNS, rng)

    def _turn(self, at_s: float, text: Text, number: int, left: int, rng: np.random.Generator) -> Request:
        talk = self._talk
        text = (*text, ((number, left), int(rng.integers(*talk.new_tokens))))
        request_id, tokens = len(self.lengths), sum([part for _, part in text])
        self.lengths[request_id], self.texts[request_id], self.arrived_s[request_id] = talk.answer, text, at_s
        if left > 1:
            *parts, (name, last) = text

            def follow(now_s: float) -> tuple[Request, float]:
                next_s = now_s + float(rng.exponential(talk.pause_s))
                return self._turn(next_s, (*parts, (name, last + talk.answer)), number, left - 1, rng), next_s

            self.follows[request_id] = follow
        blocks = hashes(text, BLOCK_TOKENS)
        return Request(request_id, prompt_tokens=float(tokens), blocks=blocks, block_tokens=float(BLOCK_TOKENS))


class All:
    """Every request: all clients stream."""

    def __contains__(self, request_id: object) -> bool:
        return True

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def __len__(self) -> int:
        return 0


def passed(
    talk: Talk, way: str, conversations: int, begin_per_s: float, seed: int, *, engines: int = 2, told: bool = True
) -> dict[str, float]:
    """The figures of a pass. told : whether engines tell the size of their caches"""
    load, limits = Load(talk, conversations, begin_per_s, seed), talk.limits
    straight, first_s = way == MOST, dict[int, float]()
    scheduler = Header(SchedulingConfig(order="fffs" if straight else "boost").resolved(False)).scheduler()
    fleet = [
        KVEngine(
            EngineInfo(name, STRAIGHT if straight else limits.sequences, False, 0, limits.kv_tokens if told else None),
            load.lengths,
            talk.costs,
            limits,
            texts=load.texts,
            streaming=All(),
            wants=scheduler.wants_first_token,
            on_first_token=first_s.setdefault,
        )
        for name in [f"vLLM {number}" for number in range(engines)]
    ]

    ended_s = dict[int, float]()

    def follow(now_s: float, event: Event, actions: list[Action]) -> None:
        if isinstance(event, RequestEnded):
            ended_s[event.request_id] = now_s
            if (then := load.follows.pop(event.request_id, None)) is not None:
                cluster.arrive_later(*then(now_s))

    cluster = SimulatedCluster(scheduler, list(fleet), on_step=follow)
    with ExitStack() as patches:
        if straight:
            patches.enter_context(patch.object(choice, "preferred", most_of_the_prompt))
        if way != OURS:
            patches.enter_context(patch.object(fixed_choice, "later", lambda *_: None))
        cluster.run(load.first_turns(), flush=False)
    counted = range(len(load.lengths) // 8, len(load.lengths))
    waits_s, latencies_s = [
        np.array([at_s[number] - load.arrived_s[number] for number in counted]) for at_s in (first_s, ended_s)
    ]
    hits = sum([engine.cached_tokens for engine in fleet]) / sum([engine.prompt_tokens for engine in fleet])
    return {
        "hit_rate": hits,
        "first_s_mean": float(waits_s.mean()),
        **{f"first_s_p{q}": float(np.percentile(waits_s, q)) for q in (50, 95, 99)},
        "latency_s_mean": float(latencies_s.mean()),
        "preemptions": float(sum([engine.preemptions for engine in fleet])),
    }


def ratios_to(passes: Sequence[Row], ways: Sequence[str], figures: Sequence[str], **case: Any) -> list[dict[str, Any]]:
    """The figures of OURS over those of each of the ways, in one case."""
    own = select(passes, **case, way=OURS)
    return [
        {**case, "to": way} | {of: ratio(own, select(passes, **case, way=way), of, "seed") for of in figures}
        for way in ways
    ]


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--conversations", type=int, default=150, help="of each pass (%(default)s)")
    add("--engines", nargs="+", default=list(TALKS), choices=TALKS, help="(default: all)")
    add("--seeds", type=int, default=8, help="passes of each way (%(default)s)")
    add("--first-seed", type=int, default=101, help="(%(default)s)")
    add("--output", type=Path, help="write the results as JSON")
    args = parser.parse_args()
    passes = [
        Row(
            {"engines": name, "begin_per_s": rate, "way": way, "seed": seed},
            passed(TALKS[name], way, args.conversations, rate, seed),
        )
        for name in args.engines
        for rate in TALKS[name].rates_per_s
        for seed in range(args.first_seed, args.first_seed + args.seeds)
        for way in WAYS
    ]
    rows = medians(passes, "seed")
    show("conversations before two engines", list(COLUMNS), cells(rows, COLUMNS))
    ratios = []
    for name in args.engines:
        for rate in TALKS[name].rates_per_s:
            ratios += ratios_to(passes, (MOST, ANY), RATIOS, engines=name, begin_per_s=rate)
    lines = [
        [one["engines"], f"{one['begin_per_s']:.1f}", one["to"], *[f"{one[name]:.2f}" for name in RATIOS]]
        for one in ratios
    ]
    show("llmserve", ("engines", "conversations/s", "to", *RATIOS), lines, left=("engines", "to"))
    setting = {name: getattr(args, name) for name in ("conversations", "seeds", "first_seed")}
    records = {"rows": [row.record for row in rows], "passes": [row.record for row in passes]}
    write_json(args.output, rounded({**setting, "ratios": ratios, **records}))


if __name__ == "__main__":
    main()
