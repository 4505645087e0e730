"""What a simulation serves: arrival times, output lengths and what is predicted of them.

Every draw comes from the generator that is passed in; the distributions are read from short texts such as
`lognormal:5.2,0.8`.
"""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

from llmserve.errors import ConfigError
from llmserve.request import Request

LENGTHS_HELP = "uniform:LO,HI | exponential:MEAN | lognormal:MU,SIGMA | constant:N | file:PATH[:COLUMN]"
PREDICTIONS_HELP = (
    "oracle | none | lognormal:SIGMA (oracle times a lognormal error) | quantiles:SIGMA (such an error, and known: "
    "a distribution)"
)
TRACE_COLUMNS = ("arrival_s", "input_tokens", "output_tokens")

TOKENS_MIN = 1e-6  # keeps a drawn length positive
LEVELS = tuple([(number - 0.5) / 15 for number in range(1, 16)])  # of predicted quantiles, equally likely

UNREADABLE = (OSError, EOFError, UnicodeDecodeError, zlib.error, csv.Error)  # what a file may turn out to be

Lengths = NDArray[np.float64]
Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Predictions:
    """What a predictor says of requests.

    medians    (count,) tokens
    quantiles  of each over its median, ascending; () when it predicts medians only
    """

    medians: NDArray[np.float64]
    quantiles: tuple[float, ...] = ()

    def quantiles_of(self, median: float) -> tuple[float, ...]:
        return tuple([median * factor for factor in self.quantiles])


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests as they come, recorded or drawn: (count,) each, in order of arrival, count >= 1.

    arrivals_s  >= 0.  output_tokens  > 0.  input_tokens  0 where they are not known.
    """

    arrivals_s: Times
    output_tokens: Lengths
    input_tokens: Lengths

    def __len__(self) -> int:
        return self.arrivals_s.size

    @property
    def rate_per_s(self) -> float:
        """Mean arrivals a second; inf when all come at once."""
        span_s = float(self.arrivals_s[-1] - self.arrivals_s[0])
        return len(self) / span_s if span_s > 0 else math.inf


def draw_lengths(text: str, count: int, rng: np.random.Generator) -> Lengths:
    """`count` output lengths in tokens, > 0. Raises ConfigError when `text` is not one of LENGTHS_HELP.

    They are real numbers, as in the papers' theory; a file's are drawn with replacement, so that any number can be
    asked for.
    """
    kind, _, rest = text.partition(":")
    if kind == "file":
        drawn: Lengths = rng.choice(read_lengths(rest), size=count)
        return drawn
    return np.maximum(_distribution(kind, rest, text)(count, rng), TOKENS_MIN)


def _distribution(kind: str, rest: str, text: str) -> Callable[[int, np.random.Generator], NDArray[np.float64]]:
    arity = {"uniform": 2, "exponential": 1, "lognormal": 2, "constant": 1}
    try:
        values = [float(value) for value in rest.split(",")]
        if kind not in arity or len(values) != arity[kind] or not np.isfinite(values).all():
            raise ValueError
    except ValueError:
        raise ConfigError(f"lengths {text!r} is not one of {LENGTHS_HELP}") from None
    if kind == "uniform":
        low, high = values
        if not 0 <= low <= high:
            raise ConfigError(f"lengths {text!r}: 0 <= LO <= HI is needed")
        return lambda count, rng: rng.uniform(low, high, count)
    if values[-1] < 0 or (kind != "lognormal" and values[0] <= 0):
        raise ConfigError(f"lengths {text!r}: a mean or length above 0, and SIGMA at least 0, are needed")
    if kind == "lognormal":
        return lambda count, rng: rng.lognormal(values[0], values[1], count)
    if kind == "exponential":
        return lambda count, rng: rng.exponential(values[0], count)
    return lambda count, rng: np.full(count, values[0])


def read_lengths(place: str) -> NDArray[np.float64]:
    """PATH[:COLUMN]: a CSV column by name or number (default: `output_tokens`, else the last), or one number a line."""
    name, _, column = place.partition(":")
    with _open(name, "lengths file") as file:
        try:
            rows = [row for row in csv.reader(file) if row]
        except UNREADABLE as error:
            raise ConfigError(f"cannot read the lengths file {name!r}: {error}") from error
    if not rows:
        raise ConfigError(f"the lengths file {name!r} is empty")
    index, body = _find_column(rows, column, name)
    try:
        values = np.array([float(row[index]) for row in body])
    except (ValueError, IndexError) as error:
        raise ConfigError(f"the lengths file {name!r} has a row without a number in that column") from error
    if values.size == 0 or not (np.isfinite(values).all() and (values > 0).all()):
        raise ConfigError(f"the lengths file {name!r} must hold positive finite lengths")
    return values


def _find_column(rows: list[list[str]], column: str, name: str) -> tuple[int, list[list[str]]]:
    has_header = not all(_is_number(cell) for cell in rows[0])
    header, body = (rows[0], rows[1:]) if has_header else ([], rows)
    if column in header:
        return header.index(column), body
    if column.isdigit() and int(column) < len(rows[0]):
        return int(column), body
    if column:
        raise ConfigError(f"the lengths file {name!r} has no column {column!r}; it has {', '.join(header)}")
    return header.index("output_tokens") if "output_tokens" in header else len(rows[0]) - 1, body


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _open(name: str, what: str) -> TextIO:
    """A text file, plain or (.gz) compressed. Raises ConfigError when it cannot be opened."""
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"there is no {what} {name!r}")
    try:
        return gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="")
    except OSError as error:
        raise ConfigError(f"cannot read the {what} {name!r}: {error.strerror}") from error


def read_trace(name: str, count_max: int | None = None) -> Trace:
    """The first requests, at most count_max, of a CSV file (.gz: compressed) with TRACE_COLUMNS by name.

    Raises ConfigError naming the file and the row (its line; 1 is the header) that cannot be used.
    """
    rows: list[tuple[float, float, float]] = []
    last_s = 0.0
    with _open(name, "trace") as file:
        reader = csv.DictReader(file)
        try:
            _check_header(reader.fieldnames, name)
            for row in reader:
                if count_max is not None and len(rows) == count_max:
                    break
                rows.append(_trace_row(row, last_s))
                last_s = rows[-1][0]
        except (ValueError, *UNREADABLE) as error:
            raise ConfigError(f"the trace {name!r}, row {reader.line_num}: {error}") from error
    if not rows:
        raise ConfigError(f"the trace {name!r} has no rows")
    return Trace(*np.array(rows).T)


def replay_faster(trace: Trace, speed: float) -> Trace:
    """The same requests at `speed` times the rate. speed : > 0."""
    return Trace(trace.arrivals_s / speed, trace.output_tokens, trace.input_tokens)


def _check_header(header: Sequence[str] | None, name: str) -> None:
    missing = [column for column in TRACE_COLUMNS if column not in (header or ())]
    if missing:
        raise ConfigError(f"the trace {name!r} has no column {', '.join(missing)}; its first row names its columns")


def _trace_row(row: dict[str, str], last_s: float) -> tuple[float, float, float]:
    """(arrival_s, output_tokens, input_tokens), as in a Trace. Raises ValueError."""
    arrival_s, input_tokens, output_tokens = [_amount(row[column], column) for column in TRACE_COLUMNS]
    if output_tokens == 0:
        raise ValueError("output_tokens must be above 0")
    if arrival_s < last_s:
        raise ValueError(f"arrivals must be in order, but {arrival_s} follows {last_s}")
    return arrival_s, output_tokens, input_tokens


def _amount(text: str | None, column: str) -> float:
    """A number >= 0. text: None in a row that is too short. Raises ValueError naming the column."""
    try:
        amount = float(text or "")
    except ValueError:
        raise ValueError(f"{column} must be a number, not {text!r}") from None
    if not 0 <= amount < math.inf:
        raise ValueError(f"{column} must be finite and at least 0, not {text}")
    return amount


def poisson_arrivals(rate_per_s: float, count: int, rng: np.random.Generator) -> Times:
    """(count,) arrival times in seconds, non-decreasing; an infinite rate puts them all at 0."""
    if not rate_per_s > 0:
        raise ConfigError(f"the arrival rate must be positive, not {rate_per_s}")
    if np.isinf(rate_per_s):
        return np.zeros(count)
    return np.cumsum(rng.exponential(1.0 / rate_per_s, count))


def predict(text: str, lengths: Lengths, rng: np.random.Generator) -> Predictions | None:
    """What a predictor would have said of these lengths; None: nothing predicts.

    quantiles:SIGMA is a predictor whose medians are off by a lognormal error, and which knows by how much: its
    quantiles are those of its median times such an error, at LEVELS.
    """
    kind, _, rest = text.partition(":")
    if text == "oracle":
        return Predictions(lengths.astype(float))
    if text == "none":
        return None
    try:
        sigma = float(rest)
        if kind not in ("lognormal", "quantiles") or not 0 <= sigma < np.inf:
            raise ValueError
    except ValueError:
        raise ConfigError(f"predictions {text!r} is not one of {PREDICTIONS_HELP}") from None
    medians = lengths * rng.lognormal(0.0, sigma, lengths.size)
    probit = NormalDist().inv_cdf
    spread = [math.exp(sigma * probit(level)) for level in LEVELS] if kind == "quantiles" else []
    return Predictions(medians, tuple(spread))


def requests(trace: Trace, predictions: Predictions | None) -> Iterator[tuple[float, Request]]:
    """(time_s, request) in order of arrival; request ids count from 0."""
    times, prompts = trace.arrivals_s.tolist(), trace.input_tokens.tolist()
    medians = [None] * len(times) if predictions is None else predictions.medians.tolist()
    for request_id, (at_s, prompt, median) in enumerate(zip(times, prompts, medians, strict=True)):
        quantiles = predictions.quantiles_of(median) if predictions is not None and predictions.quantiles else ()
        # What is not known of a prompt is left out, and so out of the journal.
        known = (prompt,) if prompt else ()
        yield at_s, Request(request_id, median, None, quantiles, *known)
