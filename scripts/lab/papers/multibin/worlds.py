"""The simulations of Multi-Bin, and their execution with every seed, on several cores.

A world is the model of the paper's Section 3, run by llmserve's own scheduler: Poisson arrivals, and bins with fixed
edges. A bin with B requests releases a batch; batches start in the order of release, and take as long as their longest
request. Two default features of llmserve are off: refitting edges to the lengths, and testing predictions for trust.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from bins.edges import Edges
from llmserve.commands.simulate import Scenario, simulate
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.report import Summary
from papers.rows import Case, Report, Row, Rows
from papers.simulated import Key, ends_of, run_all

AT_ONCE = math.inf  # arrival rate when all requests come at the same time
ABOVE = 1.05  # an arrival rate of at least so many times the capacity saturates the bins
BATCHES = 1_000  # batches' worth of requests in a run: the paper's 128,000 at B = 128 and 200,000 at B = 200
SEEDS = 10
WITHIN, LEMMA_WITHIN = 0.01, 0.02  # tolerances of throughputs, and of latencies by Lemma 5.1
THROUGHPUT, LATENCY = "throughput", "mean latency"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is simulated.

    gsm8k    file of the answers for Fig. 6; None: Fig. 6 is left out
    seeds    of a world, unless a figure has fewer
    batches  batches' worth of requests in a run
    ends     use only the two ends of each range of parameters
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
    """seeds : number of runs, each with another seed"""

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
        """lengths : in the simulator's syntax, in units of step_s seconds.

        last_batch : "drop": the requests that remain in the bins after the last arrival are neither served nor counted
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
            trust_window=2 * requests + 2,  # never half full, so that trust is never tested
            queue_requests_max=requests,
        )
        return cls(scenario, scheduling, seeds)

    def runs(self, seed: int) -> Iterator[Scenario]:
        """Yield the scenario with each seed; all worlds have the same seeds."""
        for run in range(self.seeds):
            yield msgspec.structs.replace(self.scenario, seed=1_000 * seed + run)


def rates_up_to(rates_per_s: Iterable[float], capacity_per_s: float) -> Iterator[float]:
    """Yield the rates below a capacity, and the first well above it: at higher rates only the queue grows longer."""
    for rate_per_s in rates_per_s:
        yield rate_per_s
        if rate_per_s >= ABOVE * capacity_per_s:
            return


def simulate_all(worlds: Mapping[Key, World], effort: Effort, report: Report) -> dict[Key, list[Summary]]:
    """Return the summaries of each world, one for each seed."""
    tasks = {key: [(run, world.scheduling) for run in world.runs(effort.seed)] for key, world in worlds.items()}
    return run_all(_run, tasks, lambda task: task[0].requests or 0, effort.jobs, report)


def _run(task: tuple[Scenario, SchedulingConfig]) -> Summary:
    return simulate(*task)


mean_row = partial(Row.mean, tolerance=WITHIN, kind="computed")


def throughput_row(
    figure: str, case: Case, runs: Iterable[Summary], expected: float | None = None, **fields: Any
) -> Row:
    values = [run.throughput_per_s for run in runs]
    return mean_row(figure, case, THROUGHPUT, "1/s", values, expected=expected, **fields)


def latency_row(figure: str, case: Case, runs: Iterable[Summary], expected_s: float | None = None) -> Row:
    values = [run.latency_s_mean for run in runs]
    return mean_row(figure, case, LATENCY, "s", values, expected=expected_s, tolerance=LEMMA_WITHIN)


def least_latency(rows: Rows, figure: str, **case: float | str) -> Row:
    """Return the row with the least mean latency over all rates."""
    return min(rows.of(figure, LATENCY, **case), key=lambda row: row.measured or 0.0)
