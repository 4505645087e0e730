"""Fig. 10: up to 400 emulated workers in groups of 12, or under one scheduler; and Fig. 11 (b): other sizes of groups.

Groups know nothing of each other, so they are simulated one after the other. What one scheduler can do is measured as
processor time of its steps, and nothing else: on the wire, a request and its answer cost more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reproduction.rows import Row, claim
from reproduction.shepherd.load import COUNTED_FROM_S, SPAN_S_MIN, mean, of
from reproduction.shepherd.runs import CLOCKWORK, FLEX, Outcome
from reproduction.shepherd.workloads import SLO_S
from reproduction.shepherd.worlds import BURSTY, GPUS, STABLE, Effort, Found, Key, World

FIGURE, LIMITS, STEPS = "Fig. 10", "Fig. 11 (b)", "Fig. 10, the scheduler"
WORKERS = (12, 48, 96, 200, 400)
CENTRAL_WORKERS_MAX = 96  # of one scheduler: beyond, a second takes minutes, for it falls behind still more
RATE_PER_WORKER_PER_S = 250.0  # so that 200 of them get the 50,000 a second at which the paper's Clockwork saturates
SPAN_S = 1.5
CENTRAL_REQUESTS = 25_000  # about so many, which take a fraction of a second for many workers
SEEDS = 1  # of groups, and of the one scheduler
LINEAR_WITHIN = 0.1
STEP_S_MAX = 1e-4
GOODPUT = "goodput, of the load to be expected"
OVER_ALONE = "groups of 12 over each alone"
CAPACITY, LINEARITY = "requests a second that one scheduler's core decides on", "goodput per worker over that of 12"
MEDIAN, MEAN = "a step, median", "a step, mean"
SUSTAINED = "goodput that a scheduler of that capacity sustains"
ALONE = 1  # workers in a group


def worlds(effort: Effort) -> dict[Key, list[World]]:
    span_s = max(SPAN_S_MIN, effort.spans * SPAN_S)
    made: dict[Key, list[World]] = {}
    for trace in (STABLE, BURSTY):
        for workers in _counts(effort):
            for figure, group in ((FIGURE, GPUS), (LIMITS, ALONE)):
                made[figure, trace, workers] = [
                    _grouped(effort, trace, workers, group, span_s, seed) for seed in effort.run_seeds(SEEDS)
                ]
    for workers in _central(effort):
        central_s = max(0.5, effort.spans * CENTRAL_REQUESTS / (RATE_PER_WORKER_PER_S * workers))
        made[STEPS, STABLE, workers] = [
            World(
                STABLE,
                effort.minute(seed),
                RATE_PER_WORKER_PER_S * workers,
                SLO_S,
                (FLEX, CLOCKWORK),
                seed,
                central_s,
                min(COUNTED_FROM_S, central_s / 2),
                workers,
                timed=True,
            )
            for seed in effort.run_seeds(SEEDS)
        ]
    return made


def _counts(effort: Effort) -> tuple[int, ...]:
    return (12, 24) if effort.ends else WORKERS


def _central(effort: Effort) -> tuple[int, ...]:
    return tuple(workers for workers in _counts(effort) if workers <= CENTRAL_WORKERS_MAX)


def _grouped(effort: Effort, trace: str, workers: int, group: int, span_s: float, seed: int) -> World:
    rate_per_s = RATE_PER_WORKER_PER_S * workers
    return World(
        trace,  # type: ignore[arg-type]
        effort.minute(seed),
        rate_per_s,
        SLO_S,
        (FLEX,),
        seed,
        span_s,
        COUNTED_FROM_S,
        workers,
        group,
        timed=True,
    )


def capacity_per_s(outcomes: Sequence[Outcome]) -> float:
    return 1.0 / mean([one.request_s for one in outcomes])


def rows(found: Found, effort: Effort) -> Iterator[Row]:
    for trace in (STABLE, BURSTY):
        yield from _groups(found, trace, effort)
    yield from _steps(found, effort)
    yield from _limits(found, effort)


def _groups(found: Found, trace: str, effort: Effort) -> Iterator[Row]:
    one_per_s = _goodput_per_s(of(found[FIGURE, trace, GPUS], FLEX), GPUS) / GPUS
    for workers in _counts(effort):
        case = {"trace": trace, "workers": workers}
        each = of(found[FIGURE, trace, workers], FLEX)
        goodput = _goodput_per_s(each, workers)
        yield Row(FIGURE, case, GOODPUT, "1/s", goodput)
        note = f"{100 * mean([one.share_in_time for one in each]):.1f} % of the requests are in time"
        ratio = goodput / workers / one_per_s
        yield Row(FIGURE, case, LINEARITY, "1", ratio, 1.0, LINEAR_WITHIN, note=note)


def _steps(found: Found, effort: Effort) -> Iterator[Row]:
    """In a group of 12, and of one scheduler for all workers."""
    for workers in _central(effort):
        for policy in (FLEX, CLOCKWORK):
            case = {"workers": workers, "policy": policy}
            each = of(found[STEPS, STABLE, workers], policy)
            yield Row(STEPS, case, MEDIAN, "µs", 1e6 * mean([one.step_s_median for one in each]))
            yield Row(STEPS, case, MEAN, "µs", 1e6 * mean([one.step_s_mean for one in each]))
            yield Row(STEPS, case, CAPACITY, "1/s", capacity_per_s(each))
            yield Row(STEPS, case, SUSTAINED, "1/s", _sustained_per_s(each, workers))
    group = of(found[STEPS, STABLE, GPUS], FLEX)
    for name, step_s in (
        ("median", mean([one.step_s_median for one in group])),
        ("mean", mean([one.step_s_mean for one in group])),
    ):
        text = f"in a group of {GPUS} a step takes less than {1e6 * STEP_S_MAX:.0f} µs ({name})"
        yield claim(STEPS, {"workers": GPUS}, text, step_s < STEP_S_MAX, f"{1e6 * step_s:.0f} µs; the issue's figure")


def _goodput_per_s(outcomes: Sequence[Outcome], workers: int) -> float:
    """The share of the requests that was in time, of the load to be expected: in so short a time more or fewer come."""
    return mean([one.share_in_time for one in outcomes]) * RATE_PER_WORKER_PER_S * workers


def _sustained_per_s(outcomes: Sequence[Outcome], workers: int) -> float:
    """Goodput of one scheduler that is given the load, or as much of it as its core decides on."""
    share = min(1.0, capacity_per_s(outcomes) / (RATE_PER_WORKER_PER_S * workers))
    return share * mean([one.goodput_per_s for one in outcomes])


def _limits(found: Found, effort: Effort) -> Iterator[Row]:
    """What limits of workers per group come to: each alone, 12, all of them."""
    last = _counts(effort)[-1]
    for trace in (STABLE, BURSTY):
        for workers in _counts(effort):
            alone, grouped = (
                _goodput_per_s(of(found[figure, trace, workers], FLEX), workers) for figure in (LIMITS, FIGURE)
            )
            for limit, goodput in (("1", alone), ("12", grouped)):
                yield Row(LIMITS, {"trace": trace, "limit": limit, "workers": workers}, GOODPUT, "1/s", goodput)
        case = {"trace": trace, "workers": last}
        note = "published of workloads whose rates are not printed"
        yield Row(LIMITS, case, OVER_ALONE, "1", grouped / alone, 1.7, 0.25, note=note)
    for workers in _central(effort):
        central = _sustained_per_s(of(found[STEPS, STABLE, workers], FLEX), workers)
        yield Row(LIMITS, {"trace": STABLE, "limit": "none", "workers": workers}, GOODPUT, "1/s", central)
    ratio = (
        _goodput_per_s(of(found[FIGURE, STABLE, last], FLEX), last) / central
    )  # of the most workers it was tried for
    note = f"of one scheduler: as much as its core decides on for {workers} workers, and it is less for more"
    case = {"trace": STABLE, "workers": last}
    yield Row(LIMITS, case, "groups of 12 over one scheduler for all", "1", ratio, 2.5, 0.25, note=note)
