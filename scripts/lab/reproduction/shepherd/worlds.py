"""What is simulated for Shepherd, and all of it, on several cores.

A world is a workload, some GPUs and the policies that are compared on them: all see the very same requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from llmserve.simulation.estimates import estimate
from reproduction.rows import Case, Report, Row
from reproduction.shepherd import nexus, workloads
from reproduction.shepherd.models import TABLE_4
from reproduction.shepherd.runs import BY_PLAN, PLANNED_SHARE, Outcome, run
from reproduction.shepherd.streams import Arrivals, Traffic, read_traffic
from reproduction.simulated import Key, ends_of, run_all

STABLE, BURSTY = "MAF-stable", "MAF-bursty"
GPUS = 12
SEEDS = 3
WITHIN = 0.25  # of a published ratio: workloads, and what the baselines do in detail, are not the paper's

Trace = Literal["MAF-stable", "MAF-bursty"]
Found = Mapping[Key, Sequence[Mapping[str, Outcome]]]
"""Of each world, for each of its seeds: what each policy came to."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Effort:
    """traffic : the trace, or what stands in for it.  traced : whether it is the trace.
    seeds : of a world.  spans : times the time that is simulated as a rule.  ends : of what is varied, only the ends.
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
        made = cls(traffic, trace is not None, seed, jobs)
        if not quick:
            return made
        return replace(made, jobs=1, seeds=1, spans=0.1, ends=True)  # processes would take longer than they save

    def some(self, values: Sequence[T]) -> Sequence[T]:
        return ends_of(values) if self.ends else values

    def minute(self, seed: int) -> Traffic:
        """One of the traffic, another for each seed, with a request at least."""
        minutes = np.flatnonzero(self.traffic.expected.sum(axis=0) > 0)
        return self.traffic.part(int(np.random.default_rng([seed, 7]).choice(minutes)), 1)

    def run_seeds(self, count: int | None = None) -> list[int]:
        return [1_000 * self.seed + run for run in range(self.seeds if count is None else min(count, self.seeds))]


def made_up() -> Traffic:
    """In place of the trace: 1,350 functions, a few of which bring most, as there; an hour, all minutes alike."""
    rng = np.random.default_rng(2019)
    rates = np.minimum(rng.pareto(0.6, 1_350) + 0.01, 3_000.0)
    names = tuple(f"f{index}" for index in range(rates.size))
    return Traffic(names, np.repeat(rates[:, np.newaxis], 60, axis=1))


@dataclass(frozen=True, slots=True)
class World:
    """traffic : a minute, of which the first span_s seconds are simulated; counted from from_s on.
    group_gpus : of each of the groups into which the GPUs are divided; None: one group of them all.
    timed : the scheduler's steps are.
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
    def requests(self) -> float:
        """About so many are simulated."""
        return self.rate_per_s * self.span_s * len(self.policies)

    def arrivals(self) -> Arrivals:
        """All of the minute."""
        make: Callable[..., Arrivals] = workloads.stable if self.trace == STABLE else workloads.bursty
        return make(self.traffic, self.rate_per_s, np.random.default_rng(self.seed), slo_s=self.slo_s)


def simulate(world: World) -> dict[str, Outcome]:
    """What each policy came to."""
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
    """Those that are drawn of all, with the probability of the share that the first plan is made for."""
    chosen = rng.random(len(arrivals)) < (plans[0].share if plans else 1.0)
    return Arrivals(arrivals.streams, arrivals.times_s[chosen], arrivals.stream[chosen])


def first(arrivals: Arrivals, span_s: float) -> Arrivals:
    """Those before span_s seconds."""
    count = int(np.searchsorted(arrivals.times_s, span_s))
    return Arrivals(arrivals.streams, arrivals.times_s[:count], arrivals.stream[:count])


# ---- groups -----------------------------------------------------------------------------------------------------

PART = 0.25  # of what a GPU group is to serve: a stream that brings more goes to several


def group_sizes(gpus: int, most: int) -> list[int]:
    """Groups of `most`, the last of what is left."""
    return [most] * (gpus // most) + ([gpus % most] if gpus % most else [])


def divide(arrivals: Arrivals, traffic: Traffic, sizes: Sequence[int], rng: np.random.Generator) -> list[Arrivals]:
    """The requests of each group of so many GPUs, as a plan divides streams: as much work for each GPU.

    Work is what a request takes in the largest batch. Streams that bring more than PART of a group's are cut into equal
    parts, and each request goes to one of its stream's, drawn; parts go to the group that is the emptiest, the largest
    first.
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
    """(parts,) the group of each."""
    group = np.zeros(work.size, dtype=int)
    load, gpus = np.zeros(len(sizes)), np.asarray(sizes, float)
    for part in np.argsort(-work, kind="stable"):
        group[part] = chosen = int(np.argmin((load + work[part]) / gpus))
        load[chosen] += work[part]
    return group


def together(outcomes: Sequence[Outcome], gpus: int) -> Outcome:
    """What groups that know nothing of each other came to, all together. Of one of them its latencies are kept."""
    if len(outcomes) == 1:
        return outcomes[0]
    names = ("offered", "kept", "in_time", "late", "busy_s", "wasted_s", "batches", "preemptions", "started", "arrived")
    sums = {name: sum(getattr(outcome, name) for outcome in outcomes) for name in (*names, "steps")}
    return replace(
        outcomes[0],
        **sums,
        by_model={name: sum(each.by_model[name] for each in outcomes) for name in outcomes[0].by_model},
        utilisation=sum(each.utilisation * each.gpus for each in outcomes) / gpus,
        gpus=gpus,
        step_s_median=float(np.median([each.step_s_median for each in outcomes])),
        step_s_mean=sum(each.step_s_mean * each.steps for each in outcomes) / max(1, sums["steps"]),
    )


# ---- all of them ------------------------------------------------------------------------------------------------


def simulate_all(worlds: Mapping[Key, Sequence[World]], effort: Effort, report: Report) -> Found:
    """Of each world's seeds in ascending order; the same however many jobs there are, but for what is timed."""
    by_seed = {key: sorted(each, key=lambda world: world.seed) for key, each in worlds.items()}
    return run_all(simulate, by_seed, lambda world: world.requests, effort.jobs, report)


mean_row = partial(Row.mean, tolerance=WITHIN)


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
    """The quotient of two sums over the same seeds; its interval is the jackknife's, which leaves out one at a time."""
    ratio = sum(above) / sum(below) if sum(below) else math.inf
    low = high = None
    count = len(above)
    if count > 1 and math.isfinite(ratio):
        left_out = [(sum(above) - a) / max(1e-9, sum(below) - b) for a, b in zip(above, below, strict=True)]
        found = estimate([count * ratio - (count - 1) * each for each in left_out])
        low, high = ratio - found.half_width, ratio + found.half_width
    return Row(figure, case, quantity, "1", ratio, expected, tolerance, low, high, note)
