"""Conversations over shared prefixes on two simulated engines: waiting for the busy engine that has the prompt.

    python scripts/lab simulated.warm --output docs/results/simulated-warm.json

The engines have the costs of the CPU of `simulated.long`, and caches of 25,600 tokens, which hold 20 prefixes of some
2,100 tokens once together with the conversations. A conversation has 8 turns of 16 tokens; its next request comes a
pause after the answer. The first eighth of the requests is not counted. Ways:

    most of the prompt  each request goes at once to the engine that has most of its prompt, of equals the less busy
    any free slot       llmserve as it is, but the first request in the order takes a free slot wherever that is
    llmserve            as it is: a request may wait for a busy engine (choice/placement.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
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
from llmserve.simulation.kv_engine import KVEngine, KVLimits
from llmserve.simulation.kv_pool import Text, hashes
from questions.simulated.long import SETTINGS, STRAIGHT

MOST, ANY, OURS = WAYS = ("most of the prompt", "any free slot", "llmserve")
SLOTS, KV_TOKENS, BLOCK_TOKENS = 8, 25_600, 128
PREFIXES, PREFIX_TOKENS, NEW_TOKENS = 20, (1_890, 2_310), (20, 60)
TURNS, ANSWER, PAUSE_S = 8, 16, 1.5
COLUMNS = {
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

    def __init__(self, conversations: int, begin_per_s: float, seed: int) -> None:
        self.rng = np.random.default_rng([seed, 0])
        self.prefixes = self.rng.integers(*PREFIX_TOKENS, PREFIXES).tolist()
        self.begins_s = np.cumsum(self.rng.exponential(1 / begin_per_s, conversations)).tolist()
        self.lengths: dict[int, float] = {}
        self.texts: dict[int, Text] = {}
        self.arrived_s: dict[int, float] = {}
        self.follows: dict[int, Callable[[float], tuple[Request, float]]] = {}
        self._seed = seed

    def first_turns(self) -> Iterator[tuple[float, Request]]:
        for number, begin_s in enumerate(self.begins_s):
            prefix = int(self.rng.integers(PREFIXES))
            text: Text = (((f"prefix {prefix}"), self.prefixes[prefix]),)
            rng = np.random.default_rng([self._seed, 1, number])
            yield begin_s, self._turn(begin_s, text, number, TURNS, rng)

    def _turn(self, at_s: float, text: Text, number: int, left: int, rng: np.random.Generator) -> Request:
        text = (*text, ((number, left), int(rng.integers(*NEW_TOKENS))))
        request_id, tokens = len(self.lengths), sum([part for _, part in text])
        self.lengths[request_id], self.texts[request_id], self.arrived_s[request_id] = ANSWER, text, at_s
        if left > 1:
            *parts, (name, last) = text

            def follow(now_s: float) -> tuple[Request, float]:
                next_s = now_s + float(rng.exponential(PAUSE_S))
                return self._turn(next_s, (*parts, (name, last + ANSWER)), number, left - 1, rng), next_s

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


def passed(way: str, conversations: int, begin_per_s: float, seed: int) -> dict[str, float]:
    """The figures of a pass."""
    load = Load(conversations, begin_per_s, seed)
    straight, first_s = way == MOST, dict[int, float]()
    scheduler = Header(SchedulingConfig(order="fffs" if straight else "boost").resolved(False)).scheduler()
    engines = [
        KVEngine(
            EngineInfo(name, STRAIGHT if straight else SLOTS, False, 0, KV_TOKENS),
            load.lengths,
            SETTINGS["CPU"].costs,
            KVLimits(KV_TOKENS, 2_048, SLOTS, 32),
            texts=load.texts,
            streaming=All(),
            wants=scheduler.wants_first_token,
            on_first_token=first_s.setdefault,
        )
        for name in ("vLLM 0", "vLLM 1")
    ]

    def follow(now_s: float, event: Event, actions: list[Action]) -> None:
        if isinstance(event, RequestEnded) and (then := load.follows.pop(event.request_id, None)) is not None:
            cluster.arrive_later(*then(now_s))

    cluster = SimulatedCluster(scheduler, list(engines), on_step=follow)
    with ExitStack() as patches:
        if straight:
            patches.enter_context(patch.object(choice, "preferred", most_of_the_prompt))
        if way != OURS:
            patches.enter_context(patch.object(fixed_choice, "later", lambda *_: None))
        cluster.run(load.first_turns(), flush=False)
    count = len(load.lengths)
    waits_s = np.array([first_s[number] - load.arrived_s[number] for number in range(count // 8, count)])
    hits = sum([engine.cached_tokens for engine in engines]) / sum([engine.prompt_tokens for engine in engines])
    figures = {f"first_s_p{q}": float(np.percentile(waits_s, q)) for q in (50, 95, 99)}
    return {"hit_rate": hits, "first_s_mean": float(waits_s.mean()), **figures}


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--conversations", type=int, default=150, help="of each pass (%(default)s)")
    add("--begin-per-s", type=float, nargs="+", default=[1.0, 2.0, 3.0, 4.0], help="that begin in a second")
    add("--seeds", type=int, default=8, help="passes of each way (%(default)s)")
    add("--first-seed", type=int, default=101, help="(%(default)s)")
    add("--output", type=Path, help="write the results as JSON")
    args = parser.parse_args()
    passes = [
        Row({"begin_per_s": rate, "way": way, "seed": seed}, passed(way, args.conversations, rate, seed))
        for rate in args.begin_per_s
        for seed in range(args.first_seed, args.first_seed + args.seeds)
        for way in WAYS
    ]
    rows = medians(passes, "seed")
    show("conversations before two engines", list(COLUMNS), cells(rows, COLUMNS))
    ratios = []
    for rate in args.begin_per_s:
        own = select(passes, begin_per_s=rate, way=OURS)
        for way in (MOST, ANY):
            to = select(passes, begin_per_s=rate, way=way)
            ratios.append({"begin_per_s": rate, "to": way} | {of: ratio(own, to, of, "seed") for of in RATIOS})
    lines = [[f"{one['begin_per_s']:.1f}", one["to"], *[f"{one[name]:.2f}" for name in RATIOS]] for one in ratios]
    show("llmserve", ("conversations/s", "to", *RATIOS), lines, left=("to",))
    setting = {name: getattr(args, name) for name in ("conversations", "seeds", "first_seed")}
    records = {"rows": [row.record for row in rows], "passes": [row.record for row in passes]}
    write_json(args.output, rounded({**setting, "ratios": ratios, **records}))


if __name__ == "__main__":
    main()
