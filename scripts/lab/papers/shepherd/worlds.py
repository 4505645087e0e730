"""The simulations of Shepherd, and their execution on several cores.

A world is a workload, a number of GPUs, and the policies to compare; all policies get the same requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from llmserve.simulation.estimates import estimate
from papers.rows import Case, Report, Row
from papers.shepherd import nexus, workloads
from papers.shepherd.models import TABLE_4
from papers.shepherd.runs import BY_PLAN, PLANNED_SHARE, Outcome, run
from papers.shepherd.streams import Arrivals, Traffic, read_traffic
from papers.simulated import Key, ends_of, run_all

STABLE, BURSTY = "MAF-stable", "MAF-bursty"
GPUS = 12
SEEDS = 3
WITHIN = 0.25  # tolerance of a published ratio: workloads and details of the baselines differ from the paper's

Trace = Literal["MAF-stable", "MAF-bursty"]
Outcomes = Sequence[Mapping[str, Outcome]]
"""The outcome of each policy, for each seed of a world."""
Results = Mapping[Key, Outcomes]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is simulated.

    traffic  the trace, or synthetic traffic; traced: whether it is the trace
    seeds    of a world
    spans    factor of the simulated time
    ends     use only the two ends of each range of parameters
    """

    traffic: Traffic
    traced: bool
    seed: int = 1
    jobs: int = 1
    seeds: int = SEEDS
    spans: float = 1.0
    ends: bool = False

    @classmethod
    def of(cls, seed: int, jobs: int, trace: Path | None, *, quick: bool) -> Effort:
        traffic = made_up() if trace is None else read_traffic(str(trace))
        effort = cls(traffic, trace is not None, seed, jobs)
        if not quick:
            return effort
        return replace(effort, jobs=1, seeds=1, spans=0.1, ends=True)  # starting processes takes longer than they save

    def some(self, values: Sequence[T]) -> Sequence[T]:
        return ends_of(values) if self.ends else values

    def minute(self, seed: int) -> Traffic:
        """Draw a minute of the traffic that has requests."""
        minutes = np.flatnonzero(self.traffic.expected.sum(axis=0) > 0)
        return self.traffic.part(int(np.random.default_rng([seed, 7]).choice(minutes)), 1)

    def run_seeds(self, count: int | None = None) -> list[int]:
        return [1_000 * self.seed + run for run in range(self.seeds if count is None else min(count, self.seeds))]


def made_up() -> Traffic:
    """Return synthetic traffic: an hour of equal minutes, and 1,350 functions of which few send most requests."""
    rng = np.random.default_rng(2019)
    rates = np.minimum(rng.pareto(0.6, 1_350) + 0.01, 3_000.0)
    names = tuple(f"f{index}" for index in range(rates.size))
    return Traffic(names, np.repeat(rates[:, np.newaxis], 60, axis=1))


@dataclass(frozen=True, slots=True)
class World:
    """Parameters of a simulation.

    traffic     a minute, of which the first span_s seconds are simulated; answers are counted from from_s on
    group_gpus  GPUs of each group; None: one group of all GPUs
    timed       measure the scheduler's steps
    """

    trace: Trace
    traffic: Traffic
    rate_per_s: float
    slo_s: float
    policies: tuple[str, ...]
    seed: int
    span_s: float
    from_s: float
    gpus: int = GPUS
    group_gpus: int | None = None
    timed: bool = False

    @property
    def work(self) -> float:
        """Approximate work, in simulated requests; to draw a request of the minute is a thirtieth of the work."""
        return self.rate_per_s * (self.span_s * len(self.policies) + 60 / 30)

    def arrivals(self) -> Arrivals:
        """Return the requests of the whole minute."""
        draw = workloads.stable if self.trace == STABLE else workloads.bursty
        return draw(self.traffic, self.rate_per_s, np.random.default_rng(self.seed), slo_s=self.slo_s)


def simulate(world: World) -> dict[str, Outcome]:
    """Return the outcome of each policy."""
    minute = world.arrivals()
    batch_s = [TABLE_4[name].batch_s for name in minute.streams.models]
    plans = list(nexus.plans(minute, batch_s, world.gpus)) if set(BY_PLAN) & set(world.policies) else []
    arrivals = first(minute, world.span_s)
    admitted = _planned_share(arrivals, plans, np.random.default_rng([world.seed, 9]))
    if world.group_gpus is None:
        parts, sizes = [arrivals], [world.gpus]
    else:
        sizes = group_sizes(world.gpus, world.group_gpus)
        parts = divide(arrivals, world.traffic, sizes, np.random.default_rng([world.seed, 8]))
    return {
        policy: together(
            [
                run(
                    admitted if policy == PLANNED_SHARE else part,
                    policy,
                    gpus,
                    plans=plans,
                    from_s=world.from_s,
                    until_s=world.span_s,
                    timed=world.timed,
                )
                for part, gpus in zip(parts, sizes, strict=True)
                if len(part)
            ],
            world.gpus,
        )
        for policy in world.policies
    }


def _planned_share(arrivals: Arrivals, plans: Sequence[nexus.Plan], rng: np.random.Generator) -> Arrivals:
    """Draw requests with the probability of the first plan's share."""
    chosen = rng.random(len(arrivals)) < (plans[0].share if plans else 1.0)
    return Arrivals(arrivals.streams, arrivals.times_s[chosen], arrivals.stream[chosen])


def first(arrivals: Arrivals, span_s: float) -> Arrivals:
    """Return the requests before span_s seconds."""
    count = int(np.searchsorted(arrivals.times_s, span_s))
    return Arrivals(arrivals.streams, arrivals.times_s[:count], arrivals.stream[:count])


# ---- groups -----------------------------------------------------------------------------------------------------

PART = 0.25  # share of a group's work: a larger stream is cut into parts


def group_sizes(gpus: int, most: int) -> list[int]:
    """Divide GPUs into groups of `most`; the last group has the rest."""
    return [most] * (gpus // most) + ([gpus % most] if gpus % most else [])


def divide(arrivals: Arrivals, traffic: Traffic, sizes: Sequence[int], rng: np.random.Generator) -> list[Arrivals]:
    """Divide the requests among groups of these sizes, with equal work for each GPU.

    The work of a request is its time in the largest batch. Streams with more than PART of a group's work are cut into
    equal parts, and each request goes to a random part. The largest part goes first, to the least loaded group.
    """
    models = [TABLE_4[arrivals.streams.models[index]] for index in arrivals.streams.model_of]
    batches = [max(1, model.size_within(slo_s)) for model, slo_s in zip(models, arrivals.streams.slo_s, strict=True)]
    work = traffic.expected.sum(axis=1) * [
        model.batch_s(size) / size for model, size in zip(models, batches, strict=True)
    ]
    cuts = np.maximum(1, np.ceil(work / (PART * work.sum() / len(sizes)))).astype(int)
    firsts = np.concatenate([[0], np.cumsum(cuts)])
    group = _dealt(np.repeat(work / cuts, cuts), sizes)
    drawn = np.floor(rng.random(len(arrivals)) * cuts[arrivals.stream]).astype(int)
    of = group[firsts[arrivals.stream] + drawn]
    return [
        Arrivals(arrivals.streams, arrivals.times_s[of == index], arrivals.stream[of == index])
        for index in range(len(sizes))
    ]


def _dealt(work: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """Return (parts,) the group of each part."""
    group = np.zeros(work.size, dtype=int)
    load, gpus = np.zeros(len(sizes)), np.asarray(sizes, float)
    for part in np.argsort(-work, kind="stable"):
        group[part] = chosen = int(np.argmin((load + work[part]) / gpus))
        load[chosen] += work[part]
    return group


def together(outcomes: Sequence[Outcome], gpus: int) -> Outcome:
    """Add up the outcomes of independent groups. Latencies are those of the first group."""
    if len(outcomes) == 1:
        return outcomes[0]
    names = (
        "offered",
        "offered_in_time",
        "in_time",
        "late",
        "busy_s",
        "wasted_s",
        "batches",
        "preemptions",
        "started",
        "arrived",
    )
    sums = {name: sum(getattr(outcome, name) for outcome in outcomes) for name in (*names, "steps")}
    return replace(
        outcomes[0],
        **sums,
        by_model={name: sum(outcome.by_model[name] for outcome in outcomes) for name in outcomes[0].by_model},
        utilisation=sum(outcome.utilisation * outcome.gpus for outcome in outcomes) / gpus,
        gpus=gpus,
        step_s_median=float(np.median([outcome.step_s_median for outcome in outcomes])),
        step_s_mean=sum(outcome.step_s_mean * outcome.steps for outcome in outcomes) / max(1, sums["steps"]),
    )


# ---- all worlds -------------------------------------------------------------------------------------------------


def simulate_all(worlds: Mapping[Key, Sequence[World]], effort: Effort, report: Report) -> Results:
    """Return outcomes by ascending seed. Except for times, they are the same for any number of jobs."""
    by_seed = {key: sorted(with_key, key=lambda world: world.seed) for key, with_key in worlds.items()}
    return run_all(simulate, by_seed, lambda world: world.work, effort.jobs, report)


mean_row = partial(Row.mean, tolerance=WITHIN)


def values(outcomes: Outcomes, policy: str, name: str) -> list[float]:
    """Return a number of a policy's outcome for each seed. name : field or property of Outcome"""
    return [getattr(by_policy[policy], name) for by_policy in outcomes if policy in by_policy]


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def mean_of(outcomes: Outcomes, policy: str, name: str) -> float:
    return mean(values(outcomes, policy, name))


def ratio_row(
    figure: str,
    case: Case,
    quantity: str,
    above: Sequence[float],
    below: Sequence[float],
    *,
    expected: float | None = None,
    tolerance: float = WITHIN,
    note: str = "",
) -> Row:
    """Return the ratio of two sums over the same seeds, with a jackknife interval (leave one seed out)."""
    ratio = sum(above) / sum(below) if sum(below) else math.inf
    low = high = None
    count = len(above)
    if count > 1 and math.isfinite(ratio):
        without_one = [(sum(above) - a) / max(1e-9, sum(below) - b) for a, b in zip(above, below, strict=True)]
        half_width = estimate([count * ratio - (count - 1) * partial_ratio for partial_ratio in without_one]).half_width
        low, high = ratio - half_width, ratio + half_width
    return Row(figure, case, quantity, "1", ratio, expected, tolerance, low, high, note)
