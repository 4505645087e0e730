"""Fig. 6: lengths of answers to GSM8K, batches of 8, eight servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bins.capacity import latency, throughput
from bins.edges import equal_mass_edges
from llmserve.errors import ConfigError
from llmserve.simulation.files import records
from llmserve.simulation.report import Summary
from papers.multibin.worlds import (
    AT_ONCE,
    THROUGHPUT,
    Effort,
    Key,
    World,
    latency_row,
    least_latency,
    rates_up_to,
    throughput_row,
)
from papers.rows import Row, Rows, claim

FIGURE = "Fig. 6"
BATCH, ENGINES = 8, 8
BATCHES_FACTOR = 2  # a run has twice the batches of other figures; assumed
SEEDS = 5  # assumed
STEP_S = 0.025  # seconds a token, assumed: it only scales times
BINS = (1, 2, 4, 8, 16, 32)
RATES_PER_S = (1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 20.0, 24.0)
FIELDS = ("output_tokens", "response_tokens_llama3")  # fields with the number of tokens; the first present field counts
GAIN = "gain over one bin, all at once"
FIG_7_GAINS = {4: 1.45, 32: 1.70}  # published, of the paper's model on a GPU
FIG_7_WITHIN = 0.1


def read_lengths(path: Path) -> NDArray[np.float64]:
    """Read (answers,) tokens from a file of JSON lines, which may be compressed (.gz). Raises ConfigError."""
    lengths = []
    for line, answer in records(str(path), "file of answers to GSM8K"):
        tokens = next((answer[field] for field in FIELDS if field in answer), None)
        if not isinstance(tokens, int | float) or tokens <= 0:
            raise ConfigError(f"the answers to GSM8K, line {line}: no tokens above 0 in {' or '.join(FIELDS)}")
        lengths.append(float(tokens))
    if not lengths:
        raise ConfigError(f"the file of answers to GSM8K {str(path)!r} is empty")
    return np.array(lengths)


def requests_of(batches: int) -> int:
    """Return the requests of a run. batches : of the other figures' runs"""
    return BATCH * BATCHES_FACTOR * batches


def worlds(effort: Effort, lengths: NDArray[np.float64], folder: Path) -> dict[Key, World]:
    """folder : for the file of lengths that the simulations read"""
    file = folder / "gsm8k.csv"
    file.write_text("".join(f"{length:g}\n" for length in lengths))
    requests, seeds = requests_of(effort.batches), min(SEEDS, effort.seeds)
    by_key: dict[Key, World] = {}
    for bins in effort.some(BINS):
        edges = equal_mass_edges(lengths, bins)
        for rate_per_s in (*_rates(effort, lengths, bins), AT_ONCE):
            by_key[FIGURE, bins, rate_per_s] = World.of(
                f"file:{file}", edges, BATCH, rate_per_s, requests, seeds, step_s=STEP_S, engines=ENGINES
            )
    return by_key


def capacity(lengths: NDArray[np.float64], bins: int) -> float:
    """Return the requests a second that all engines serve at saturation."""
    return ENGINES * throughput(lengths, equal_mass_edges(lengths, bins), BATCH) / STEP_S


def rows(summaries: Mapping[Key, list[Summary]], lengths: NDArray[np.float64], effort: Effort) -> Iterator[Row]:
    quantiles = np.percentile(lengths, (50, 95))
    spread = {"mean": lengths.mean(), "median": quantiles[0], "95th percentile": quantiles[1], "longest": lengths.max()}
    for name, value in spread.items():
        yield Row(FIGURE, {"answers": f"{lengths.size:,}"}, f"length, {name}", "tokens", float(value))
    measured = Rows()
    for bins in effort.some(BINS):
        measured.extend(_of(summaries, lengths, effort, bins))
    yield from measured
    yield from _gains(measured, effort)
    yield from _statements(measured, effort)


def _rates(effort: Effort, lengths: NDArray[np.float64], bins: int) -> Iterator[float]:
    return rates_up_to(effort.some(RATES_PER_S), capacity(lengths, bins))


def _of(
    summaries: Mapping[Key, list[Summary]], lengths: NDArray[np.float64], effort: Effort, bins: int
) -> Iterator[Row]:
    """Latencies at the lowest rate, and the throughput with all requests at once, are compared with theory."""
    served = capacity(lengths, bins)
    batch_s = BATCH * ENGINES / served
    for rate_per_s in _rates(effort, lengths, bins):
        expected_s = latency(bins, BATCH, rate_per_s, batch_s) if rate_per_s == RATES_PER_S[0] else None
        yield latency_row(FIGURE, {"k": bins, "rate": rate_per_s}, summaries[FIGURE, bins, rate_per_s], expected_s)
    at_once = {"k": bins, "rate": "at once"}
    yield throughput_row(FIGURE, at_once, summaries[FIGURE, bins, AT_ONCE], served, kind="derived")


def _gains(measured: Rows, effort: Effort) -> Iterator[Row]:
    fewest, *more = effort.some(BINS)
    single = measured.number(FIGURE, THROUGHPUT, k=fewest, rate="at once")
    for bins in more:
        gain = measured.number(FIGURE, THROUGHPUT, k=bins, rate="at once") / single
        note = "expected: Fig. 7's, of another model on a GPU" if bins in FIG_7_GAINS else ""
        yield Row(FIGURE, {"k": bins}, GAIN, "1", gain, FIG_7_GAINS.get(bins), FIG_7_WITHIN, note=note)


def _statements(measured: Rows, effort: Effort) -> Iterator[Row]:
    counts = effort.some(BINS)
    served = [measured.number(FIGURE, THROUGHPUT, k=bins, rate="at once") for bins in counts]
    yield claim(FIGURE, {}, "throughput increases with the number of bins", served == sorted(served))
    least_s = {bins: least_latency(measured, FIGURE, k=bins).measured or 0.0 for bins in counts}
    for bins in (2, 4):
        if bins in least_s:
            text = "the least latency is below that of one bin"
            yield claim(FIGURE, {"k": bins}, text, least_s[bins] < least_s[1])
    yield claim(
        FIGURE, {}, "latency drops, then rises with the number of bins", drops_then_rises(list(least_s.values()))
    )


def drops_then_rises(values: list[float]) -> bool:
    """Return whether the values fall to an inner minimum and then rise."""
    turn = values.index(min(values))
    down, up = values[: turn + 1], values[turn:]
    return 0 < turn < len(values) - 1 and down == sorted(down, reverse=True) and up == sorted(up)
