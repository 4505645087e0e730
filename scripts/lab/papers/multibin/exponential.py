"""Fig. 9: exponential lengths, batches of 200, one server; with the edges of Lemma A.1, and with equal-mass edges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

import numpy as np

from bins.capacity import (
    batch_time,
    batch_time_exponential,
    latency,
    throughput_exponential,
    throughput_exponential_bound,
    throughput_max,
)
from bins.edges import Edges, exponential_edges
from llmserve.simulation.report import Summary
from papers.multibin.worlds import (
    Effort,
    Key,
    World,
    latency_row,
    least_latency,
    mean_row,
    rates_up_to,
    throughput_row,
)
from papers.rows import Row, Rows, claim

FIGURE = "Fig. 9"
BATCH, MEAN = 200, 10.0  # mu = 0.1; lengths in seconds
C_MAX = throughput_max(BATCH, MEAN)
BINS = (1, 2, 4, 8)
RATES_PER_S = (1.0, 3.0, 6.0, 10.0, 14.0, 18.0)
FEW_SEEDS = 3
EXCESS_WITHIN = 0.05  # relative tolerance of EXCESS
LEMMA_BINS_MAX = 4  # with more bins, the dropped last batches of the rarest bins matter
QUANTILES = 1_000_000  # lengths that represent the distribution
LEMMA_A1, EQUAL_MASS = "Lemma A.1", "equal mass"
BUSY = "throughput of the busy server"
AT_LEAST = f"{BUSY} is at least B μ / L_k (Corollary A.1.1)"
LOWER = "more bins first lower the least latency"
EXCESS = "throughput, Lemma A.1 above equal mass"


def edges_of(name: str, bins: int) -> Edges:
    if name == LEMMA_A1:
        return exponential_edges(BATCH, bins, MEAN)
    return tuple((-MEAN * np.log(1 - np.arange(1, bins) / bins)).tolist())


@cache
def batch_s(name: str, bins: int) -> float:
    """Return the expected time of a batch: exact for Lemma A.1, from QUANTILES lengths for equal mass."""
    if name == LEMMA_A1:
        return batch_time_exponential(bins, BATCH, MEAN)
    return batch_time(-MEAN * np.log((np.arange(QUANTILES) + 0.5) / QUANTILES), edges_of(name, bins), BATCH)


def bound(bins: int) -> float:
    """Corollary A.1.1, requests a second."""
    return throughput_exponential_bound(bins, BATCH, MEAN)


def lemma(bins: int, rate_per_s: float, name: str = LEMMA_A1) -> float:
    """Lemma 5.1, seconds."""
    return latency(bins, BATCH, rate_per_s, batch_s(name, bins))


def cases(effort: Effort) -> Iterator[tuple[str, int]]:
    """Yield (edges, number of bins). A single bin has no edges, and counts as Lemma A.1."""
    single, *more = effort.some(BINS)
    yield LEMMA_A1, single
    yield from ((name, bins) for name in (LEMMA_A1, EQUAL_MASS) for bins in more)


def worlds(effort: Effort) -> dict[Key, World]:
    lengths, requests = f"exponential:{MEAN}", BATCH * effort.batches
    by_key: dict[Key, World] = {}
    for name, bins in cases(effort):
        seeds = effort.seeds if name == LEMMA_A1 else min(FEW_SEEDS, effort.seeds)
        edges = edges_of(name, bins)
        for rate_per_s in _rates(effort, bins):
            by_key[FIGURE, name, bins, rate_per_s] = World.of(lengths, edges, BATCH, rate_per_s, requests, seeds)
    return by_key


def _rates(effort: Effort, bins: int) -> Iterator[float]:
    """Yield the arrival rates, which are the same for both kinds of edges."""
    return rates_up_to(effort.some(RATES_PER_S), throughput_exponential(bins, BATCH, MEAN))


def rows(summaries: Mapping[Key, list[Summary]], effort: Effort) -> Iterator[Row]:
    measured = Rows()
    for name, bins in cases(effort):
        measured.extend(_of(summaries, effort, name, bins))
    measured.extend(_beside_equal_mass(measured, effort))
    yield from measured
    yield from _statements(measured, effort)


def _of(summaries: Mapping[Key, list[Summary]], effort: Effort, name: str, bins: int) -> Iterator[Row]:
    """Latencies at the lowest rate are compared with theory, and throughputs at the highest rate.

    The throughput is that of the busy server, because the server waits for the first full batches.
    """
    rates_per_s = list(_rates(effort, bins))
    for rate_per_s in rates_per_s:
        runs = summaries[FIGURE, name, bins, rate_per_s]
        case = {"edges": name, "k": bins, "rate": rate_per_s}
        yield throughput_row(FIGURE, case, runs)
        low = rate_per_s == RATES_PER_S[0] and bins <= LEMMA_BINS_MAX
        yield latency_row(FIGURE, case, runs, lemma(bins, rate_per_s, name) if low else None)
    busy = [run.throughput_per_s / run.utilisation for run in summaries[FIGURE, name, bins, rates_per_s[-1]]]
    yield mean_row(FIGURE, {"edges": name, "k": bins}, BUSY, "1/s", busy, expected=BATCH / batch_s(name, bins))


def _beside_equal_mass(measured: Rows, effort: Effort) -> Iterator[Row]:
    for bins in effort.some(BINS)[1:]:
        lemma, even = (measured.number(FIGURE, BUSY, edges=name, k=bins) for name in (LEMMA_A1, EQUAL_MASS))
        exact = 100 * (batch_s(EQUAL_MASS, bins) / batch_s(LEMMA_A1, bins) - 1)
        yield Row(FIGURE, {"k": bins}, EXCESS, "%", 100 * (lemma / even - 1), exact, EXCESS_WITHIN, kind="derived")


def _statements(measured: Rows, effort: Effort) -> Iterator[Row]:
    """Corollary A.1.1, and statements of the text about Fig. 9, for either kind of edges."""
    for bins in effort.some(BINS):
        row = measured.only(FIGURE, BUSY, edges=LEMMA_A1, k=bins)
        note = f"{row.measured:.4g} and {bound(bins):.4g} /s"
        yield claim(FIGURE, {"edges": LEMMA_A1, "k": bins}, AT_LEAST, (row.high or 0.0) >= bound(bins), note)
    single, *more = effort.some(BINS)
    for name in (LEMMA_A1, EQUAL_MASS):
        settings = ((LEMMA_A1, single), *((name, bins) for bins in more))
        served = [measured.number(FIGURE, BUSY, edges=kind, k=bins) for kind, bins in settings]
        least_s = [least_latency(measured, FIGURE, edges=kind, k=bins).measured or 0.0 for kind, bins in settings]
        case = {"edges": name}
        yield claim(FIGURE, case, "throughput increases with the number of bins", served == sorted(served))
        yield claim(FIGURE, case, LOWER, min(least_s) < least_s[0])
        yield claim(FIGURE, case, "beyond a certain number of bins it increases again", min(least_s) < least_s[-1])
