"""Fig. 10: up to 400 emulated workers in groups of 12, or under one scheduler; and Fig. 11 (b): other sizes of groups.

Groups are independent, so they are simulated one after the other. The capacity of a scheduler is measured as processor
time of its steps only; receiving a request and sending its answer cost more.
"""

from __future__ import annotations

from collections.abc import Iterator

from papers.rows import HOLDS, Row
from papers.shepherd.load import COUNTED_FROM_S, SPAN_S_MIN
from papers.shepherd.runs import CLOCKWORK, FLEX
from papers.shepherd.workloads import SLO_S
from papers.shepherd.worlds import BURSTY, GPUS, STABLE, Effort, Key, Outcomes, Results, Trace, World, mean_of

FIGURE, LIMITS, STEPS = "Fig. 10", "Fig. 11 (b)", "Fig. 10, the scheduler"
WORKERS = (12, 48, 96, 200, 400)
CENTRAL_WORKERS_MAX = 96  # of one scheduler: with more workers a simulated second takes minutes
RATE_PER_WORKER_PER_S = 250.0  # 200 workers then get 50,000 a second, at which the paper's Clockwork saturates
SPAN_S = 1.5
CENTRAL_REQUESTS = 25_000  # approximate requests under one scheduler: a fraction of a second with many workers
SEEDS = 1  # of groups, and of the one scheduler
LINEAR_WITHIN = 0.1
STEP_S_MAX = 1e-4
GOODPUT = "goodput, of the load to be expected"
OVER_ONE = "groups of 12 over one scheduler for all"
OVER_ALONE = "groups of 12 over each alone"
CAPACITY, LINEARITY = "requests a second that one scheduler's core decides on", "goodput per worker over that of 12"
MEDIAN, MEAN = "a step, median", "a step, mean"
SUSTAINED = "goodput that a scheduler of that capacity sustains"
ALONE = 1  # workers in a group


def worlds(effort: Effort) -> dict[Key, list[World]]:
    span_s = max(SPAN_S_MIN, effort.spans * SPAN_S)
    by_key: dict[Key, list[World]] = {}
    for trace in (STABLE, BURSTY):
        for workers in _counts(effort):
            for figure, group in ((FIGURE, GPUS), (LIMITS, ALONE)):
                by_key[figure, trace, workers] = _worlds(effort, trace, workers, (FLEX,), span_s, group)
    for workers in _central(effort):
        central_s = max(0.5, effort.spans * CENTRAL_REQUESTS / (RATE_PER_WORKER_PER_S * workers))
        by_key[STEPS, STABLE, workers] = _worlds(effort, STABLE, workers, (FLEX, CLOCKWORK), central_s, None)
    return by_key


def _counts(effort: Effort) -> tuple[int, ...]:
    return (12, 24) if effort.ends else WORKERS


def _central(effort: Effort) -> tuple[int, ...]:
    return tuple(workers for workers in _counts(effort) if workers <= CENTRAL_WORKERS_MAX)


def _worlds(
    effort: Effort, trace: Trace, workers: int, policies: tuple[str, ...], span_s: float, group: int | None
) -> list[World]:
    """group : workers of each group; None: one scheduler for all"""
    rate_per_s = RATE_PER_WORKER_PER_S * workers
    from_s = min(COUNTED_FROM_S, span_s / 2)
    return [
        World(trace, effort.minute(seed), rate_per_s, SLO_S, policies, seed, span_s, from_s, workers, group, timed=True)
        for seed in effort.run_seeds(SEEDS)
    ]


def rows(results: Results, effort: Effort) -> Iterator[Row]:
    for trace in (STABLE, BURSTY):
        yield from _groups(results, trace, effort)
    yield from _steps(results, effort)
    yield from _limits(results, effort)


def _groups(results: Results, trace: str, effort: Effort) -> Iterator[Row]:
    reference_per_s = _goodput_per_s(results[FIGURE, trace, GPUS], GPUS) / GPUS
    for workers in _counts(effort):
        case = {"trace": trace, "workers": workers}
        outcomes = results[FIGURE, trace, workers]
        goodput = _goodput_per_s(outcomes, workers)
        yield Row(FIGURE, case, GOODPUT, "1/s", goodput)
        note = f"{100 * mean_of(outcomes, FLEX, 'share_in_time'):.1f} % of the requests are in time"
        ratio = goodput / workers / reference_per_s
        yield Row(FIGURE, case, LINEARITY, "1", ratio, 1.0, LINEAR_WITHIN, note=note)


def _steps(results: Results, effort: Effort) -> Iterator[Row]:
    """Step times in a group of 12, and of one scheduler for all workers."""
    for workers in _central(effort):
        outcomes = results[STEPS, STABLE, workers]
        for policy in (FLEX, CLOCKWORK):
            case = {"workers": workers, "policy": policy}
            yield Row(STEPS, case, MEDIAN, "µs", 1e6 * mean_of(outcomes, policy, "step_s_median"))
            yield Row(STEPS, case, MEAN, "µs", 1e6 * mean_of(outcomes, policy, "step_s_mean"))
            yield Row(STEPS, case, CAPACITY, "1/s", 1.0 / mean_of(outcomes, policy, "request_s"))
            yield Row(STEPS, case, SUSTAINED, "1/s", _sustained_per_s(outcomes, policy, workers))
    for name in ("median", "mean"):
        step_s = mean_of(results[STEPS, STABLE, GPUS], FLEX, f"step_s_{name}")
        text = f"in a group of {GPUS} a step takes less than {1e6 * STEP_S_MAX:.0f} µs ({name})"
        holds = float(step_s < STEP_S_MAX)
        yield Row(STEPS, {"workers": GPUS}, text, HOLDS, holds, note=f"{1e6 * step_s:.0f} µs")


def _goodput_per_s(outcomes: Outcomes, workers: int) -> float:
    """Return the share of requests in time, times the expected load: in so short a time the real load differs."""
    return mean_of(outcomes, FLEX, "share_in_time") * RATE_PER_WORKER_PER_S * workers


def _sustained_per_s(outcomes: Outcomes, policy: str, workers: int) -> float:
    """Return the goodput of one scheduler that gets the load, up to the capacity of its core."""
    share = min(1.0, 1.0 / mean_of(outcomes, policy, "request_s") / (RATE_PER_WORKER_PER_S * workers))
    return share * mean_of(outcomes, policy, "goodput_per_s")


def _limits(results: Results, effort: Effort) -> Iterator[Row]:
    """Goodput with at most 1 or 12 workers in a group, and without a limit."""
    last = _counts(effort)[-1]
    for trace in (STABLE, BURSTY):
        for workers in _counts(effort):
            alone, grouped = (_goodput_per_s(results[figure, trace, workers], workers) for figure in (LIMITS, FIGURE))
            for limit, goodput in ((ALONE, alone), (GPUS, grouped)):
                yield Row(LIMITS, {"trace": trace, "limit": limit, "workers": workers}, GOODPUT, "1/s", goodput)
        case = {"trace": trace, "workers": last}
        note = "published of workloads whose rates are not printed"
        yield Row(LIMITS, case, OVER_ALONE, "1", grouped / alone, 1.7, 0.25, note=note)
    for workers in _central(effort):
        central = _sustained_per_s(results[STEPS, STABLE, workers], FLEX, workers)
        yield Row(LIMITS, {"trace": STABLE, "limit": "none", "workers": workers}, GOODPUT, "1/s", central)
    ratio = _goodput_per_s(results[FIGURE, STABLE, last], last) / central  # of the most workers of one scheduler
    note = f"of one scheduler: as much as its core decides on for {workers} workers, and it is less for more"
    case = {"trace": STABLE, "workers": last}
    yield Row(LIMITS, case, OVER_ONE, "1", ratio, 2.5, 0.25, note=note)
