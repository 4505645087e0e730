"""Fig. 3, 4 and 8: uniform lengths, batches of 128, one server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bins.capacity import batch_time, batch_time_uniform, latency, throughput_max, throughput_uniform
from bins.edges import Edges
from llmserve.simulation.report import Summary
from papers.multibin.worlds import (
    ABOVE,
    AT_ONCE,
    LATENCY,
    THROUGHPUT,
    Effort,
    Key,
    World,
    latency_row,
    rates_up_to,
    throughput_row,
)
from papers.rows import Row, Rows, claim

BATCH, LOW, HIGH = 128, 1.0, 20.0  # lengths in seconds
C_MAX = throughput_max(BATCH, (LOW + HIGH) / 2)
C_MAX_TEXT = "c_max"
C_MAX_PRINTED, C_MAX_ROUNDING = 12.3, 0.05
BINS = (1, 2, 3, 5)
SATURATED_BINS = (1, 2, 3, 4, 5, 8, 16, 32)
RATES_PER_S = (1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0)
MANY_ENGINES, MANY_ENGINES_RATE_PER_S = 16, 6.0  # less than one is busy, so that 16 are as good as infinitely many
FLUSHED_BINS, FEW_SEEDS = (8, 32), 3
ERROR_BINS, ERRORS = (2, 4, 8), (0.0, 0.01, 0.1, 0.5)
NEAR_CAPACITY = 0.95  # above this share of the capacity, queues may grow faster than bins fill
DRAWS = 20_000  # lengths that represent a uniform distribution

THEOREM, LEMMA = "Theorem 4.2", "Lemma 5.1"  # in place of a figure


def edges(bins: int) -> Edges:
    """Return edges of equal mass."""
    return tuple(np.linspace(LOW, HIGH, bins + 1)[1:-1].tolist())


def capacity(bins: int) -> float:
    """Theorem 4.2, requests a second."""
    return throughput_uniform(bins, BATCH, LOW, HIGH)


def lemma(bins: int, rate_per_s: float) -> float:
    """Lemma 5.1, seconds."""
    return latency(bins, BATCH, rate_per_s, batch_time_uniform(bins, BATCH, LOW, HIGH))


def throughput_with_errors(bins: int, error: float) -> float:
    """Return the throughput of Theorem 4.2 with the paper's model of errors, requests a second.

    A request goes into each neighbouring bin with probability `error`, so that a bin mixes its own requests with its
    neighbours'. The bins keep equal mass: the two outer bins keep 1 - error of their own requests, inner bins
    1 - 2 error.
    """
    cuts = (LOW, *edges(bins), HIGH)
    times_s = []
    for bin_ in range(bins):
        shares = {near: error for near in (bin_ - 1, bin_ + 1) if 0 <= near < bins}
        shares[bin_] = 1 - sum(shares.values())
        parts = [_evenly(cuts[index], cuts[index + 1], round(share * DRAWS)) for index, share in shares.items()]
        times_s.append(batch_time(np.concatenate(parts), (), BATCH))
    return BATCH / float(np.mean(times_s))


def _evenly(low: float, high: float, count: int) -> NDArray[np.float64]:
    """Return the midpoints of `count` equal parts of an interval."""
    return low + (high - low) * (np.arange(count) + 0.5) / max(1, count)


# ---- simulations ------------------------------------------------------------------------------------------------


def worlds(effort: Effort) -> dict[Key, World]:
    few = min(FEW_SEEDS, effort.seeds)
    by_key: dict[Key, World] = {}
    for bins in effort.some(BINS):
        for rate_per_s in rates_up_to(effort.some(RATES_PER_S), capacity(bins)):
            by_key["Fig. 3 and 4", bins, rate_per_s] = _world(effort, bins, rate_per_s)
        by_key[LEMMA, bins] = _world(effort, bins, MANY_ENGINES_RATE_PER_S, few, engines=MANY_ENGINES)
    for bins in sorted({*effort.some(SATURATED_BINS), *effort.some(ERROR_BINS)}):
        by_key[THEOREM, bins] = _world(effort, bins, AT_ONCE)
    for bins in effort.some(FLUSHED_BINS):
        by_key["flushed", bins] = _world(effort, bins, AT_ONCE, few, last_batch="flush")
    for bins in effort.some(ERROR_BINS):
        for error in effort.some(ERRORS)[1:]:
            predictions = f"neighbour:{bins},{error}"
            by_key["Fig. 8", bins, error] = _world(effort, bins, AT_ONCE, predictions=predictions)
    return by_key


def _world(effort: Effort, bins: int, rate_per_s: float, seeds: int | None = None, **options: Any) -> World:
    lengths, requests = f"uniform:{LOW},{HIGH}", BATCH * effort.batches
    return World.of(lengths, edges(bins), BATCH, rate_per_s, requests, seeds or effort.seeds, **options)


# ---- rows -------------------------------------------------------------------------------------------------------


def rows(summaries: Mapping[Key, list[Summary]], effort: Effort) -> Iterator[Row]:
    note = f"{BATCH} / {(LOW + HIGH) / 2:g}"
    yield Row("Fig. 3", {}, C_MAX_TEXT, "1/s", C_MAX, C_MAX_PRINTED, C_MAX_ROUNDING / C_MAX_PRINTED, note=note)
    measured = Rows()
    measured.extend(_against_rates(summaries, effort))
    measured.extend(_against_theory(summaries, effort))
    measured.extend(_with_errors(summaries, effort))
    yield from measured
    yield from _statements(measured, effort)


def _against_rates(summaries: Mapping[Key, list[Summary]], effort: Effort) -> Iterator[Row]:
    """Fig. 3 and 4. Throughputs above capacity and latencies at the lowest rate are compared with theory."""
    for bins in effort.some(BINS):
        for rate_per_s in rates_up_to(effort.some(RATES_PER_S), capacity(bins)):
            runs, case = summaries["Fig. 3 and 4", bins, rate_per_s], {"k": bins, "rate": rate_per_s}
            above = rate_per_s >= ABOVE * capacity(bins)
            yield throughput_row("Fig. 3", case, runs, capacity(bins) if above else None)
            yield latency_row("Fig. 4", case, runs, lemma(bins, rate_per_s) if rate_per_s == RATES_PER_S[0] else None)


def _against_theory(summaries: Mapping[Key, list[Summary]], effort: Effort) -> Iterator[Row]:
    for bins in effort.some(SATURATED_BINS):
        yield throughput_row(THEOREM, {"k": bins}, summaries[THEOREM, bins], capacity(bins), note="all at once")
    for bins in effort.some(FLUSHED_BINS):
        yield throughput_row(THEOREM, {"k": bins, "last batches": "flushed"}, summaries["flushed", bins])
    rate_per_s = MANY_ENGINES_RATE_PER_S
    for bins in effort.some(BINS):
        case = {"k": bins, "rate": rate_per_s, "engines": MANY_ENGINES}
        yield latency_row(LEMMA, case, summaries[LEMMA, bins], lemma(bins, rate_per_s))


def _with_errors(summaries: Mapping[Key, list[Summary]], effort: Effort) -> Iterator[Row]:
    """Fig. 8. The paper prints no numbers; the expected numbers are derived from its model of errors."""
    for bins in effort.some(ERROR_BINS):
        for error in effort.some(ERRORS):
            runs = summaries["Fig. 8", bins, error] if error else summaries[THEOREM, bins]
            exact = throughput_with_errors(bins, error)
            yield throughput_row("Fig. 8", {"k": bins, "p_e": error}, runs, exact, kind="derived")


def _statements(measured: Rows, effort: Effort) -> Iterator[Row]:
    """Statements of the text about Fig. 3, 4 and 8."""
    some_bins, saturated = effort.some(BINS), effort.some(SATURATED_BINS)
    served = [measured.number(THEOREM, THROUGHPUT, k=bins) for bins in saturated if bins in (*BINS, 4)]
    yield claim("Fig. 3", {}, "throughput increases with the number of bins", served == sorted(served))
    least, most = some_bins[0], some_bins[-1]
    if most in saturated:
        share = measured.number(THEOREM, THROUGHPUT, k=most) / C_MAX
        yield Row("Fig. 3", {"k": most}, "throughput over c_max", "1", share)
    falls = all(_falls(measured, bins) for bins in some_bins)
    yield claim("Fig. 4", {}, "latency falls with the rate until the system is saturated", falls)
    rate_per_s = RATES_PER_S[0]
    fewest, many = (measured.number("Fig. 4", LATENCY, k=bins, rate=rate_per_s) for bins in (least, most))
    yield claim("Fig. 4", {"rate": rate_per_s}, "latency increases with the number of bins", fewest < many)
    by_bins = {
        bins: [measured.number("Fig. 8", THROUGHPUT, k=bins, p_e=error) for error in effort.some(ERRORS)]
        for bins in effort.some(ERROR_BINS)
    }
    rising = all(list(at_error) == sorted(at_error) for at_error in zip(*by_bins.values(), strict=True))
    yield claim("Fig. 8", {}, "at any p_e throughput increases with the number of bins", rising)
    shares = [values[-1] / values[0] for values in by_bins.values()]
    for bins, share in zip(by_bins, shares, strict=True):
        yield Row("Fig. 8", {"k": bins}, "throughput at p_e = 0.5 over that without errors", "1", share)
    yield claim("Fig. 8", {}, "systems with more bins lose less by errors", shares == sorted(shares))


def _falls(measured: Rows, bins: int) -> bool:
    points = measured.of("Fig. 4", LATENCY, k=bins)
    below = [row.measured or 0.0 for row in points if float(row.case["rate"]) < NEAR_CAPACITY * capacity(bins)]
    return below == sorted(below, reverse=True)
