"""What is simulated for Multi-Bin, and all of it under every seed, on several cores.

A world is the model of the paper's Section 3, run by llmserve's own scheduler: Poisson arrivals, bins with edges that
stay, a batch goes when its bin holds B requests, first formed first served, and takes as long as its longest request.
Two things that llmserve does of itself are switched off: edges that follow the lengths, and doubt about predictions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from bins.edges import Edges
from llmserve.policies import SchedulingConfig
from llmserve.simulate import Scenario, simulate
from llmserve.simulation.report import Summary
from reproduction.rows import Report, Row
from reproduction.simulated import Key, ends_of, run_all

AT_ONCE = math.inf  # as an arrival rate
ABOVE = 1.05  # times what k bins serve: from there on a rate is taken to saturate them
BATCHES = 1_000  # of requests in a run: the paper's 128,000 at B = 128 and 200,000 at B = 200
SEEDS = 10
WITHIN = 0.01  # of a throughput that theory gives

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Effort:
    """seeds : of a world, as a rule.  batches : of requests in a run.  ends : of what is varied, only the two ends.
    gsm8k : answers whose lengths Fig. 6 takes; None: it is left out.
    """

    seed: int = 1
    jobs: int = 1
    gsm8k: Path | None = None
    seeds: int = SEEDS
    batches: int = BATCHES
    ends: bool = False

    @classmethod
    def quick(cls, seed: int, jobs: int, gsm8k: Path | None) -> Effort:
        return cls(seed, jobs, gsm8k, seeds=2, batches=32, ends=True)

    def some(self, values: Sequence[T]) -> Sequence[T]:
        return ends_of(values) if self.ends else values


@dataclass(frozen=True, slots=True)
class World:
    """seeds : how many times it is run, under different ones."""

    scenario: Scenario
    scheduling: SchedulingConfig
    seeds: int

    @classmethod
    def of(
        cls,
        lengths: str,
        edges: Edges,
        batch_size: int,
        rate_per_s: float,
        requests: int,
        seeds: int,
        *,
        step_s: float = 1.0,
        engines: int = 1,
        predictions: str = "oracle",
        last_batch: Literal["drop", "flush"] = "drop",
    ) -> World:
        """lengths : as the simulator reads them; times step_s they are seconds.

        last_batch : "drop": what is left in the bins when no more arrive is neither served nor counted.
        """
        scenario = Scenario(
            requests=requests,
            arrival_rate=rate_per_s,
            lengths=lengths,
            step_s=step_s,
            engines=engines,
            barrier=True,
            predictions=predictions,
            last_batch=last_batch,
        )
        scheduling = SchedulingConfig(
            bins=len(edges) + 1,
            edges=edges,
            batch_size=batch_size,
            release="full",
            order="fffs",
            edges_refit_every=0,
            trust_window=2 * requests + 2,  # judged when half of it is full: never
            queue_requests_max=requests,
        )
        return cls(scenario, scheduling, seeds)

    def runs(self, seed: int) -> Iterator[Scenario]:
        """The scenario under each of its seeds, which are the same for all worlds."""
        for run in range(self.seeds):
            yield msgspec.structs.replace(self.scenario, seed=1_000 * seed + run)


def rates_up_to(rates_per_s: Iterable[float], capacity_per_s: float) -> Iterator[float]:
    """Those below a capacity and the first well above it: beyond, nothing changes but how long the queue gets."""
    for rate_per_s in rates_per_s:
        yield rate_per_s
        if rate_per_s >= ABOVE * capacity_per_s:
            return


def simulate_all(worlds: Mapping[Key, World], effort: Effort, report: Report) -> dict[Key, list[Summary]]:
    """Summaries of each world, one for each of its seeds."""
    tasks = {key: [(run, world.scheduling) for run in world.runs(effort.seed)] for key, world in worlds.items()}
    return run_all(_run, tasks, lambda task: task[0].requests or 0, effort.jobs, report)


def _run(task: tuple[Scenario, SchedulingConfig]) -> Summary:
    return simulate(*task)


mean_row = partial(Row.mean, tolerance=WITHIN, kind="computed")


def throughputs(summaries: Iterable[Summary]) -> list[float]:
    return [summary.throughput_per_s for summary in summaries]


def latencies(summaries: Iterable[Summary]) -> list[float]:
    return [summary.latency_s_mean for summary in summaries]
