"""An engine that is hardly used, with a long prompt now and then: are its slots found too low?

    python scripts/lab slots.light --output docs/results/slots-light.json

Poisson arrivals before the engine of engine.py: answers of 30 steps in the median, a first token after some 40 ms, and
one prompt in fifty of 6,900 tokens, which takes a second. Answers are streams, or come whole. Each run is made with its
slots known and learnt.

too_low  share of the time for which the number was found, and was more than a tenth too low
latency  mean, over that with known slots
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from kit.arguments import add_results, parser_of, whole
from kit.results import day_and_machine, rounded, write_json
from kit.rows import Row
from kit.tables import cells, markdown

from llmserve.engines.slots import SlotsLearner
from llmserve.request import Request
from llmserve.scheduling.messages import Event
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.cluster import SimulatedCluster
from questions.slots.engine import Job, UnknownEngine, World
from questions.slots.run import KNOWN_AHEAD

CASES = [(8, 2.0), (8, 6.0), (8, 10.0), (16, 6.0), (4, 3.0), (2, 1.5), (1, 1.0)]  # slots, requests a second
REQUESTS, LONG_SHARE, LONG_TOKENS = 240, 0.02, 6_900
LOW = 0.9  # of the slots
COLUMNS = {
    "answers": ("answers", ""),
    "slots": ("slots", ""),
    "requests/s": ("rate_per_s", ""),
    "too low: mean": ("too_low_mean", ".2f"),
    "most": ("too_low_max", ".2f"),
    "latency: mean": ("latency_mean", ".2f"),
    "most ": ("latency_max", ".2f"),
}


class LightEngine(UnknownEngine):
    """An engine that counts for how long its slots are found too low."""

    low_s = 0.0
    _low_since_s: float | None = None

    def _followed(self, event: Event | None) -> Event | None:
        learner = self.learner
        is_low = learner is not None and learner.found and learner.slots < LOW * self.world.slots
        if is_low and self._low_since_s is None:
            self._low_since_s = self._now_s
        elif not is_low:
            self.close()
        return super()._followed(event)

    def close(self) -> None:
        if self._low_since_s is not None:
            self.low_s += self._now_s - self._low_since_s
            self._low_since_s = None


def run(
    slots: int, rate_per_s: float, seed: int, learner: SlotsLearner | None, *, streams: bool
) -> tuple[float, float]:
    """The mean latency, and the share of the time for which the slots were found too low."""
    world = World(
        slots=slots,
        slots_after=None,
        requests=REQUESTS,
        step_s=0.0133,
        spread=64.0,
        token_s=1.4e-4,
        chunk=2048,
        way_s=0.002,
        stall_share=0.0,
        stall_s=1.0,
        streams=float(streams),
        tokens=30.0,
        tokens_sigma=0.6,
        prompt=60.0,
        prompt_sigma=0.6,
    )
    rng = random.Random(seed)

    def length(median: float, sigma: float) -> int:
        return max(1, round(median * rng.lognormvariate(0.0, sigma)))

    jobs = [
        Job(
            length(world.tokens, world.tokens_sigma),
            LONG_TOKENS if rng.random() < LONG_SHARE else length(world.prompt, world.prompt_sigma),
            streams,
        )
        for _ in range(REQUESTS)
    ]
    arrivals_s = np.cumsum([rng.expovariate(rate_per_s) for _ in jobs]).tolist()
    engine = LightEngine(world, jobs, learner, KNOWN_AHEAD if learner is None else 0)
    scheduler = SchedulingConfig(order="fffs", release="greedy", bins=1, batch_size=1).scheduler()
    requests = [
        (at_s, Request(n, float(job.tokens))) for n, (at_s, job) in enumerate(zip(arrivals_s, jobs, strict=True))
    ]
    SimulatedCluster(scheduler, [engine]).run(iter(requests))
    engine.close()
    ends_s = [at_s for at_s, _ in engine.ends]
    return (sum(ends_s) - sum(arrivals_s)) / REQUESTS, engine.low_s / max(ends_s)


def row_of(slots: int, rate_per_s: float, seeds: Sequence[int], *, streams: bool) -> Row:
    latency, too_low = [], []
    for seed in seeds:
        known_s, _ = run(slots, rate_per_s, seed, None, streams=streams)
        own_s, low = run(slots, rate_per_s, seed, SlotsLearner(), streams=streams)
        latency.append(own_s / known_s)
        too_low.append(low)
    case = {"answers": "streams" if streams else "whole", "slots": slots, "rate_per_s": rate_per_s}
    found = {
        "too_low_mean": float(np.mean(too_low)),
        "too_low_max": max(too_low),
        "latency_mean": float(np.mean(latency)),
        "latency_max": max(latency),
    }
    return Row(case, found)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=whole(1), default=30, help="runs of each case (%(default)s)")
    add_results(parser)
    args = parser.parse_args()
    rows = [row_of(*case, range(args.seeds), streams=streams) for streams in (True, False) for case in CASES]
    results: dict[str, Any] = {**day_and_machine(), "seeds": args.seeds, "rows": [row.record for row in rows]}
    if args.output:
        write_json(args.output, rounded(results))
    print(markdown(list(COLUMNS), cells(rows, COLUMNS)))


if __name__ == "__main__":
    main()
