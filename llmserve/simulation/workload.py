"""The workload of a simulation: arrival times of the requests and lengths of their answers.

Every draw comes from the generator that is passed in; a short text such as `lognormal:5.2,0.8` names a distribution.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from llmserve.errors import ConfigError
from llmserve.request import Request
from llmserve.simulation import trace_files
from llmserve.simulation.files import UNREADABLE, is_number, open_text, records
from llmserve.simulation.kv_pool import Text, hashes
from llmserve.simulation.predictions import Predictions
from predictor.records import delimiter_of

ARRIVALS_HELP = (
    "poisson | constant | mmpp:RATIO,HIGH_S[,LOW_S] (bursts: Poisson at a high rate for HIGH_S seconds on average, "
    "then at a rate RATIO times lower for LOW_S, by default as long; RATIO inf: silence between bursts)"
)
LENGTHS_HELP = (
    "uniform:LO,HI | exponential:MEAN[,MAX] | lognormal:MU,SIGMA[,MAX] (cut off at MAX) | constant:N | "
    "file:PATH[:COLUMN], or of several models: WEIGHT*LENGTHS+WEIGHT*LENGTHS"
)

CUT_OFF = ("exponential", "lognormal")  # distributions without a longest length, which take MAX
HASHED_TOKENS = 128  # of a block of a prompt that the scheduler knows, as it is of a text's characters
TOKENS_MIN = 1e-6  # keeps a drawn length positive
BURSTS_MAX = 10_000_000  # limit of a run's bursts: more bursts even out, and would fill the memory
MIXED = re.compile(r"^[0-9.]+\*")  # a weight before a distribution
NEXT_PART = re.compile(r"\+(?=[0-9.]+\*)")  # a plus before a weight, unlike the plus of a file name or an exponent

Lengths = NDArray[np.float64]
Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded or drawn requests: (count,) each, in order of arrival, count >= 1.

    arrivals_s  >= 0.  output_tokens  > 0.  input_tokens  0 where unknown.
    texts       the prompts, for engines with a KV cache; None: prompts share nothing
    """

    arrivals_s: Times
    output_tokens: Lengths
    input_tokens: Lengths
    texts: tuple[Text, ...] | None = None

    def __len__(self) -> int:
        return self.arrivals_s.size

    @property
    def rate_per_s(self) -> float:
        """Mean arrivals/s: one over the mean gap; inf when all requests come at once."""
        span_s = float(self.arrivals_s[-1] - self.arrivals_s[0])
        return (len(self) - 1) / span_s if span_s > 0 else math.inf


def draw_lengths(text: str, count: int, rng: np.random.Generator) -> Lengths:
    """`count` output lengths in tokens, > 0. Raises ConfigError when `text` is not one of LENGTHS_HELP.

    Lengths are real numbers, as in the theory of the papers. Lengths of a file are drawn with replacement, so that any
    count is possible. In a mixture a weight is the probability that a length comes from its part.
    """
    if MIXED.match(text):
        return _draw_mixture(text, count, rng)
    kind, _, rest = text.partition(":")
    if kind == "file":
        drawn: Lengths = rng.choice(read_lengths(rest), size=count)
        return drawn
    lengths = np.maximum(_distribution(kind, rest, text)(count, rng), TOKENS_MIN)
    if not np.isfinite(lengths).all():
        raise ConfigError(f"lengths {text!r}: some lengths are too large for a floating-point number")
    return lengths


def _draw_mixture(text: str, count: int, rng: np.random.Generator) -> Lengths:
    """text : WEIGHT*LENGTHS+WEIGHT*LENGTHS. Weights are relative: their sum need not be 1."""
    parts = [part.partition("*") for part in NEXT_PART.split(text)]
    weights = np.array([float(weight) if is_number(weight) else math.nan for weight, _, _ in parts])
    if not (weights > 0).all():
        raise ConfigError(f"lengths {text!r}: weights above 0 are needed")
    of_part = rng.choice(len(parts), size=count, p=weights / weights.sum())
    lengths = np.empty(count)
    for index, (_, _, distribution) in enumerate(parts):
        in_part = of_part == index
        lengths[in_part] = draw_lengths(distribution, int(in_part.sum()), rng)
    return lengths


def _distribution(kind: str, rest: str, text: str) -> Callable[[int, np.random.Generator], NDArray[np.float64]]:
    arity = {"uniform": 2, "exponential": 1, "lognormal": 2, "constant": 1}
    try:
        values = [float(value) for value in rest.split(",")]
        if kind not in arity or not np.isfinite(values).all():
            raise ValueError
        most = values.pop() if kind in CUT_OFF and len(values) == arity[kind] + 1 else math.inf
        if len(values) != arity[kind]:
            raise ValueError
    except ValueError:
        raise ConfigError(f"lengths {text!r} is not one of {LENGTHS_HELP}") from None
    if kind == "uniform":
        low, high = values
        if not 0 <= low <= high:
            raise ConfigError(f"lengths {text!r}: 0 <= LO <= HI is needed")
        return lambda count, rng: rng.uniform(low, high, count)
    if values[-1] < 0 or most <= 0 or (kind != "lognormal" and values[0] <= 0):
        raise ConfigError(f"lengths {text!r}: MEAN, N and MAX must be above 0, and SIGMA at least 0")
    if kind == "lognormal":
        return lambda count, rng: np.minimum(rng.lognormal(values[0], values[1], count), most)
    if kind == "exponential":
        return lambda count, rng: np.minimum(rng.exponential(values[0], count), most)
    return lambda count, rng: np.full(count, values[0])


def read_lengths(place: str) -> NDArray[np.float64]:
    """The lengths of PATH[:COLUMN]: a column of a table by name or number, a field of JSON lines, or one number a line.

    Default column: of a trace (trace_files.FORMS) the output tokens, without the requests that have failed; otherwise
    `output_tokens`, or the last. Raises ConfigError naming the file.
    """
    name, _, column = place.partition(":")
    first = next((record for _, record in records(name, "lengths file")), None)
    if not column and trace_files.forms_of(first):
        return trace_files.read_rows(name).output_tokens
    is_table = first is None or (isinstance(first, Mapping) and all(isinstance(cell, str) for cell in first.values()))
    try:
        cells = _table_cells(name, column) if is_table else _field(name, column or "output_tokens")
        values = np.array([float(cell) for cell in cells])
    except (TypeError, ValueError, LookupError) as error:
        raise ConfigError(f"the lengths file {name!r} has a row without a number in that column") from error
    if values.size == 0 or not (np.isfinite(values).all() and (values > 0).all()):
        raise ConfigError(f"the lengths file {name!r} must hold positive finite lengths")
    return values


def _field(name: str, column: str) -> list[Any]:
    return [record[column] for _, record in records(name, "lengths file")]


def _table_cells(name: str, column: str) -> list[str]:
    with open_text(name, "lengths file") as file:
        try:
            lines = [line for line in file if line.strip()]
            rows = list(csv.reader(lines, delimiter=delimiter_of(lines[0]))) if lines else []
        except UNREADABLE as error:
            raise ConfigError(f"cannot read the lengths file {name!r}: {error}") from error
    if not rows:
        raise ConfigError(f"the lengths file {name!r} is empty")
    index, body = _find_column(rows, column, name)
    return [row[index] for row in body]


def _find_column(rows: list[list[str]], column: str, name: str) -> tuple[int, list[list[str]]]:
    has_header = not all(is_number(cell) for cell in rows[0])
    header, body = (rows[0], rows[1:]) if has_header else ([], rows)
    if column in header:
        return header.index(column), body
    if column.isdigit() and int(column) < len(rows[0]):
        return int(column), body
    if column:
        raise ConfigError(f"the lengths file {name!r} has no column {column!r}; it has {', '.join(header)}")
    return header.index("output_tokens") if "output_tokens" in header else len(rows[0]) - 1, body


def read_trace(name: str, count_max: int | None = None) -> Trace:
    """The first requests, at most count_max, of a file in one of trace_files.FORMS.

    Raises ConfigError naming the file, and the line that cannot be used.
    """
    rows = trace_files.read_rows(name, count_max)
    return Trace(rows.arrivals_s, rows.output_tokens, rows.input_tokens, rows.texts)


def replay_faster(trace: Trace, speed: float) -> Trace:
    """The same requests at `speed` times the rate. speed : > 0; inf: all requests at once."""
    return replace(trace, arrivals_s=trace.arrivals_s / speed)


def replay_at(trace: Trace, rate_per_s: float) -> Trace:
    """The same requests at this mean rate, all gaps scaled by one factor. rate_per_s : > 0; inf: all at once.

    Raises ConfigError on a trace whose requests all come at once.
    """
    if math.isinf(trace.rate_per_s):
        raise ConfigError("a trace whose requests all come at once has no rate to scale to an arrival rate or a load")
    return replay_faster(trace, rate_per_s / trace.rate_per_s)


# ---- arrivals ---------------------------------------------------------------------------------------------------


def draw_arrivals(text: str, rate_per_s: float, count: int, rng: np.random.Generator) -> Times:
    """(count,) arrival times in seconds, non-decreasing, of this mean rate; all 0 for an infinite rate.

    Raises ConfigError when `text` is not one of ARRIVALS_HELP, or the rate is not above 0.
    """
    kind, _, rest = text.partition(":")
    if kind == "mmpp":
        return bursty_arrivals(_bursts(rest, text, rate_per_s), count, rng)
    if text == "poisson":
        return poisson_arrivals(rate_per_s, count, rng)
    if text == "constant":
        _check_rate(rate_per_s)
        return np.arange(1, count + 1) / rate_per_s
    raise ConfigError(f"arrivals {text!r} is not one of {ARRIVALS_HELP}")


def poisson_arrivals(rate_per_s: float, count: int, rng: np.random.Generator) -> Times:
    """(count,) arrival times in seconds, non-decreasing; all 0 for an infinite rate."""
    _check_rate(rate_per_s)
    if np.isinf(rate_per_s):
        return np.zeros(count)
    return np.cumsum(rng.exponential(1.0 / rate_per_s, count))


def _check_rate(rate_per_s: float) -> None:
    if not rate_per_s > 0:
        raise ConfigError(f"the arrival rate must be positive, not {rate_per_s}")


@dataclass(frozen=True, slots=True)
class Bursts:
    """A Markov-modulated Poisson process of two states.

    rates_per_s  arrival rates in the high and in the low state; both inf, or finite and at least 0
    sojourns_s   mean seconds in each state, exponentially distributed; > 0
    """

    rates_per_s: tuple[float, float]
    sojourns_s: tuple[float, float]

    @classmethod
    def of(cls, rate_per_s: float, ratio: float, high_s: float, low_s: float) -> Bursts:
        """A process of this mean rate. ratio : high rate / low rate, >= 1; inf: no arrivals in the low state."""
        high_per_s = rate_per_s * (high_s + low_s) / (high_s + low_s / ratio)
        return cls((high_per_s, rate_per_s if math.isinf(rate_per_s) else high_per_s / ratio), (high_s, low_s))


def bursty_arrivals(bursts: Bursts, count: int, rng: np.random.Generator) -> Times:
    """(count,) arrival times in seconds, non-decreasing; the first state has the stationary distribution.

    The times of a Poisson process of rate 1 are values of the expected number of arrivals, which is linear in time
    while a state lasts. Its inverse maps them to seconds: exact, and without a loop over arrivals.
    Raises ConfigError when the arrivals would need more than BURSTS_MAX bursts.
    """
    if math.isinf(bursts.rates_per_s[0]):
        return np.zeros(count)
    expected = np.cumsum(rng.exponential(1.0, count))
    high_s, low_s = bursts.sojourns_s
    state = 0 if rng.random() < high_s / (high_s + low_s) else 1
    per_cycle = high_s * bursts.rates_per_s[0] + low_s * bursts.rates_per_s[1]
    if count > BURSTS_MAX * per_cycle:
        raise ConfigError(f"arrivals: mmpp's states are too short: {per_cycle:.2g} arrivals per burst on average")
    times_s, means = [0.0], [0.0]  # times of the state changes, and the expected number of arrivals until then
    while means[-1] < expected[-1]:
        cycles = int((expected[-1] - means[-1]) / per_cycle) + 2
        order = [state, 1 - state]
        sojourns_s = rng.exponential(np.array(bursts.sojourns_s)[order], (cycles, 2)).ravel()
        rates_per_s = np.tile(np.array(bursts.rates_per_s)[order], cycles)
        times_s += (times_s[-1] + np.cumsum(sojourns_s)).tolist()
        means += (means[-1] + np.cumsum(sojourns_s * rates_per_s)).tolist()
    return np.interp(expected, means, times_s)


def _bursts(rest: str, text: str, rate_per_s: float) -> Bursts:
    try:
        ratio, high_s, *optional = [float(value) for value in rest.split(",")]
        low_s = optional[0] if optional else high_s
        if len(optional) > 1 or not (ratio >= 1 and 0 < high_s < math.inf and 0 < low_s < math.inf):
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"arrivals {text!r}: mmpp:RATIO,HIGH_S[,LOW_S] with RATIO at least 1 and positive seconds is needed"
        ) from None
    _check_rate(rate_per_s)
    return Bursts.of(rate_per_s, ratio, high_s, low_s)


# ---- requests ---------------------------------------------------------------------------------------------------


def requests(
    trace: Trace, predictions: Predictions | None, deadlines_s: Times | None = None
) -> Iterator[tuple[float, Request]]:
    """(time_s, request) in order of arrival; request ids count from 0. deadlines_s : (count,)"""
    times, prompts = trace.arrivals_s.tolist(), trace.input_tokens.tolist()
    medians = [None] * len(times) if predictions is None else predictions.medians.tolist()
    quantiles = None if predictions is None else predictions.quantiles
    due_s = [None] * len(times) if deadlines_s is None else deadlines_s.tolist()
    texts = trace.texts
    for request_id, (at_s, prompt, median) in enumerate(zip(times, prompts, medians, strict=True)):
        likely = () if quantiles is None else tuple(quantiles[request_id].tolist())
        prompt_tokens = (prompt,) if prompt else ()  # an unknown prompt size stays the default: the journal omits it
        request = Request(request_id, median, due_s[request_id], likely, *prompt_tokens)
        yield at_s, request if texts is None else with_blocks(request, texts[request_id])


def with_blocks(request: Request, text: Text) -> Request:
    """The request with the hashes of its prompt's blocks."""
    return msgspec.structs.replace(request, blocks=hashes(text, HASHED_TOKENS), block_tokens=HASHED_TOKENS)
