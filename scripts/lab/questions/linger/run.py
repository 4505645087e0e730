"""Slot linger: is a slot better kept for the next request of its session than given to the first request that waits?

    python scripts/lab linger --seeds 3 --output docs/results/linger.json

The question comes before the scheduler, so the script has slots and a queue of its own, first come, first served: 1, 4
or 8 slots at 50 tokens a second, prompts at 2,000 tokens a second. Half of the sessions are agents: loops of 8 requests
in the mean (geometric, at most 40), a first prompt of 4,000 tokens in the median, then 400 new tokens a request, and
answers of 120; between an answer and the next request passes a gap of 0.05, 0.3, 1 or 5 s in the median. The others are
chats of one request: 300 tokens, answered with 200. Sessions arrive Poisson, at a load with all prompts warm.

    cache slot   a slot keeps the tokens of its last request: a session that comes back to another slot, or after
                 another session, has its whole prompt computed again
    cache host   as slot, and 65,536 tokens of sessions that lost their slot wait in the host's memory, those used last
                 (8 GiB at 128 KiB a token, of an 8B model with grouped heads)

After a request of an agent the slot waits for t seconds, where t maximises F(t) R - margin E[min(X, t)]. X is the time
to the next request, learnt from the last 400 of agents; sessions that have ended never come back. F is its
distribution. R is the time to compute the prompt, which is known here, times the learnt share of the sessions that lost
their slot and then had to compute the prompt again.

Prints a Markdown table, over no lingering with the same sessions: the mean over the seeds of the ratio in one seed.
"""

from __future__ import annotations

import argparse
import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean

import numpy as np
from kit.arguments import add_seeds, parser_of, whole
from kit.rows import Case, Row, group, measured, read_rows, save_rows
from kit.tables import markdown

TOKEN_S, PROMPT_TOKEN_S = 1 / 50, 1 / 2_000
HOST_TOKENS = 65_536
CHATS, STEPS_MEAN, STEPS_MAX = 0.5, 8.0, 40
FIRST_TOKENS, NEW_TOKENS, ANSWER_TOKENS = (4_000.0, 0.6), (400.0, 0.8), (120.0, 0.7)  # median, sigma; of agents
CHAT_TOKENS, CHAT_ANSWER_TOKENS = (300.0, 0.8), (200.0, 0.8)
GAP_SIGMA, GAPS_KEPT, GAPS_LEAST = 0.8, 400, 8
MARGINS = (0.0, 1.0, 2.0, 4.0)  # 0: no lingering
CASE = ("slots", "cache", "gap_s", "load", "margin", "seed")
QUANTITIES = {"request": "latency_s_mean", "p95": "latency_s_p95", "loop": "loop_s_mean", "chat": "chat_s_mean"}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--sessions", type=whole(10), default=200)
    add_seeds(parser, 5)
    args = parser.parse_args()
    rows = read_rows(args.results, CASE) if args.results else measure(args)
    print(table(rows))
    save_rows(args.output, rows)


def measure(args: argparse.Namespace) -> list[Row]:
    cases = list(cases_of(range(args.first_seed, args.first_seed + args.seeds)))
    return measured(partial(serve, args.sessions), cases, args.jobs)


def cases_of(seeds: Sequence[int]) -> Iterator[Case]:
    for slots in (1, 4, 8):
        for cache in ("slot", "host"):
            for gap_s in (0.05, 0.3, 1.0, 5.0):
                for load in (0.5, 0.8):
                    for margin in MARGINS:
                        for seed in seeds:
                            yield dict(zip(CASE, (slots, cache, gap_s, load, margin, seed), strict=True))


# ---- sessions ---------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Session:
    """The requests of a session, one after another. tokens : computed so far.  step : of the next request"""

    agent: bool
    new_tokens: list[float]
    answers: list[float]
    gaps_s: list[float]
    tokens: float = 0.0
    step: int = 0
    arrived_s: float = 0.0
    ended_s: float = 0.0

    @property
    def warm_s(self) -> float:
        """Seconds of a slot for all requests, if nothing is computed twice."""
        return sum(self.new_tokens) * PROMPT_TOKEN_S + sum(self.answers) * TOKEN_S


def draw(rng: np.random.Generator, gap_s: float) -> Session:
    agent = bool(rng.random() >= CHATS)
    steps = min(STEPS_MAX, int(rng.geometric(1 / STEPS_MEAN))) if agent else 1
    new = lognormal(rng, NEW_TOKENS, steps)
    new[0] = lognormal(rng, FIRST_TOKENS if agent else CHAT_TOKENS, 1)[0]
    answers = lognormal(rng, ANSWER_TOKENS if agent else CHAT_ANSWER_TOKENS, steps)
    return Session(agent, new, answers, lognormal(rng, (gap_s, GAP_SIGMA), steps))


def lognormal(rng: np.random.Generator, median_sigma: tuple[float, float], count: int) -> list[float]:
    median, sigma = median_sigma
    return rng.lognormal(math.log(median), sigma, count).tolist()


# ---- returns ----------------------------------------------------------------------------------------------------


class Returns:
    """The gaps of agents that came back, how many of those that could have did, and how many that had lost their slots
    computed their prompts again.
    """

    def __init__(self) -> None:
        self.gaps_s: deque[float] = deque(maxlen=GAPS_KEPT)
        self.ended = self.returned = self.without_slot = self.cold = 0

    def linger_s(self, saved_s: float, margin: float) -> float:
        """How long to wait for a return whose prompt takes so long; 0: not at all."""
        if len(self.gaps_s) < GAPS_LEAST or not margin:
            return 0.0
        t = np.sort(np.array(self.gaps_s))
        count, back = len(t), self.returned / self.ended
        saved_s *= (self.cold + 1) / (self.without_slot + 2)
        number = np.arange(1, count + 1)
        waits = back * (np.cumsum(t) + t * (count - number)) / count + (1.0 - back) * t  # E[min(X, t)]
        gains = back * number / count * saved_s - margin * waits
        best = int(np.argmax(gains))
        return float(t[best]) if gains[best] > 0 else 0.0


# ---- slots ------------------------------------------------------------------------------------------------------


@dataclass
class Slot:
    """session : whose tokens it has.  kept_until_s : it takes no other session before"""

    session: Session | None = None
    busy: bool = False
    used_s: float = -1.0
    kept_until_s: float = -1.0

    def takes(self, session: Session, now_s: float) -> bool:
        return not self.busy and (now_s >= self.kept_until_s or self.session is session)


@dataclass
class Engine:
    """Slots and a queue. latencies_s : of (agents', chats') requests.  turn : breaks ties of events"""

    slots: list[Slot]
    cache: str
    margin: float
    returns: Returns = field(default_factory=Returns)
    host: list[Session] = field(
        default_factory=list
    )  # whose tokens are in the host's memory, those used last at the end
    waiting: list[tuple[float, Session]] = field(default_factory=list)
    events: list[tuple[float, int, Session | None, Slot | None]] = field(default_factory=list)
    latencies_s: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    turn: int = 0

    def at(self, at_s: float, session: Session | None = None, slot: Slot | None = None) -> None:
        """A session's next request arrives; with a slot, its request there ends; without a session, look again."""
        self.turn += 1
        heapq.heappush(self.events, (at_s, self.turn, session, slot))

    def run(self) -> None:
        while self.events:
            now_s, _, session, slot = heapq.heappop(self.events)
            if session is not None and slot is not None:
                self._end(session, slot, now_s)
            elif session is not None:
                self._arrive(session, now_s)
            while self._start_first(now_s):
                pass

    def _arrive(self, session: Session, now_s: float) -> None:
        if session.step:
            self.returns.gaps_s.append(now_s - session.ended_s)
        session.arrived_s = now_s
        self.waiting.append((now_s, session))

    def _start_first(self, now_s: float) -> bool:
        """Start the first request that a slot takes: on a slot that has its tokens, or on the one used longest ago."""
        for entry in self.waiting:
            session = entry[1]
            able = [slot for slot in self.slots if slot.takes(session, now_s)]
            if able:
                self.waiting.remove(entry)
                self._start(session, min(able, key=lambda slot: (slot.session is not session, slot.used_s)), now_s)
                return True
        return False

    def _start(self, session: Session, slot: Slot, now_s: float) -> None:
        new, answer = session.new_tokens[session.step], session.answers[session.step]
        is_warm = slot.session is session or session in self.host
        if session.step and slot.session is not session:
            self.returns.without_slot += 1
            self.returns.cold += not is_warm
        self._move_to_host(slot, session)
        prompt = new if is_warm else session.tokens + new
        session.tokens += new + answer
        slot.session, slot.busy = session, True
        self.at(now_s + prompt * PROMPT_TOKEN_S + answer * TOKEN_S, session, slot)

    def _move_to_host(self, slot: Slot, session: Session) -> None:
        """Keep the tokens of the session whose slot is taken by another one, which leaves the host's memory."""
        if self.cache != "host" or slot.session is session:
            return
        self.host = [other for other in self.host if other not in (session, slot.session)]
        self.host += [slot.session] if slot.session is not None else []
        while sum(other.tokens for other in self.host) > HOST_TOKENS:
            del self.host[0]

    def _end(self, session: Session, slot: Slot, now_s: float) -> None:
        slot.busy, slot.used_s, session.ended_s = False, now_s, now_s
        self.latencies_s[not session.agent].append(now_s - session.arrived_s)
        session.step += 1
        goes_on = session.step < len(session.new_tokens)
        if goes_on:
            self.at(now_s + session.gaps_s[session.step], session)
        if session.agent:
            self.returns.ended += 1
            self.returns.returned += goes_on
            slot.kept_until_s = now_s + self.returns.linger_s(session.tokens * PROMPT_TOKEN_S, self.margin)
            self.at(slot.kept_until_s)


def serve(count: int, case: Case) -> Row:
    rng = np.random.default_rng([case["seed"], case["slots"]])
    sessions = [draw(rng, case["gap_s"]) for _ in range(count)]
    mean_s = fmean(session.warm_s for session in sessions)
    arrivals_s = np.cumsum(rng.exponential(mean_s / case["slots"] / case["load"], count)).tolist()
    engine = Engine([Slot() for _ in range(case["slots"])], case["cache"], case["margin"])
    for at_s, session in zip(arrivals_s, sessions, strict=True):
        engine.at(at_s, session)
    engine.run()
    agents, chats = engine.latencies_s
    loops_s = [s.ended_s - at_s for at_s, s in zip(arrivals_s, sessions, strict=True) if s.agent]
    numbers = {
        "latency_s_mean": fmean(agents + chats),
        "latency_s_p95": float(np.quantile(agents + chats, 0.95)),
        "loop_s_mean": fmean(loops_s),
        "chat_s_mean": fmean(chats),
    }
    return Row(case, {name: float(f"{value:.6g}") for name, value in numbers.items()})


# ---- table ------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    head = [f"margin {margin:g}: {', '.join(QUANTITIES)}" for margin in MARGINS[1:]]
    return markdown(["slots, cache, gap, load", "no lingering: request, loop", *head], lines(rows), right=True)


def lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    for (slots, cache, gap_s, load), own in group(rows, "slots", "cache", "gap_s", "load").items():
        of = {margin: same for (margin,), same in group(own, "margin").items()}
        plain = of[0.0]
        request_s, loop_s = (fmean(row[QUANTITIES[name]] for row in plain) for name in ("request", "loop"))
        ratios = [
            ", ".join([f"{over(of[margin], plain, quantity):.2f}" for quantity in QUANTITIES.values()])
            for margin in MARGINS[1:]
        ]
        yield [f"{slots}, {cache}, {gap_s:g} s, {load:g}", f"{request_s:.3g} s, {loop_s:.3g} s", *ratios]


def over(rows: Sequence[Row], references: Sequence[Row], name: str) -> float:
    """Mean over the seeds of the ratio in one seed."""
    by_seed = {row["seed"]: row[name] for row in references}
    return fmean(row[name] / by_seed[row["seed"]] for row in rows)


if __name__ == "__main__":
    main()
