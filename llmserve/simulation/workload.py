"""What a simulation serves: arrival times, output lengths and what is predicted of them.

Every draw comes from the generator that is passed in; the distributions are read from short texts such as
`lognormal:5.2,0.8`.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmserve.errors import ConfigError
from llmserve.request import Request

LENGTHS_HELP = "uniform:LO,HI | exponential:MEAN | lognormal:MU,SIGMA | constant:N | file:PATH[:COLUMN]"
PREDICTIONS_HELP = "oracle | none | lognormal:SIGMA (oracle times a lognormal error)"

TOKENS_MIN = 1e-6  # keeps a drawn length positive

Lengths = NDArray[np.float64]


def draw_lengths(text: str, count: int, rng: np.random.Generator) -> Lengths:
    """`count` output lengths in tokens, > 0. Raises ConfigError when `text` is not one of LENGTHS_HELP.

    They are real numbers, as in the papers' theory; a file's are drawn with replacement, so that any number can be
    asked for.
    """
    kind, _, rest = text.partition(":")
    if kind == "file":
        drawn: Lengths = rng.choice(_read_lengths(rest), size=count)
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


def _read_lengths(place: str) -> NDArray[np.float64]:
    """PATH[:COLUMN]: a CSV column by name or number (default: `output_tokens`, else the last), or one number a line."""
    name, _, column = place.partition(":")
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"there is no lengths file {name!r}")
    with path.open(newline="") as file:
        rows = [row for row in csv.reader(file) if row]
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


def poisson_arrivals(rate_per_s: float, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """(count,) arrival times in seconds, non-decreasing; an infinite rate puts them all at 0."""
    if not rate_per_s > 0:
        raise ConfigError(f"the arrival rate must be positive, not {rate_per_s}")
    if np.isinf(rate_per_s):
        return np.zeros(count)
    return np.cumsum(rng.exponential(1.0 / rate_per_s, count))


def predict(text: str, lengths: Lengths, rng: np.random.Generator) -> NDArray[np.float64] | None:
    """What a predictor would have said of these lengths; None: nothing predicts."""
    kind, _, rest = text.partition(":")
    if text == "oracle":
        return lengths.astype(float)
    if text == "none":
        return None
    try:
        sigma = float(rest)
        if kind != "lognormal" or not 0 <= sigma < np.inf:
            raise ValueError
        return lengths * rng.lognormal(0.0, sigma, lengths.size)
    except ValueError:
        raise ConfigError(f"predictions {text!r} is not one of {PREDICTIONS_HELP}") from None


def requests(
    arrivals_s: NDArray[np.float64], predictions: NDArray[np.float64] | None
) -> Iterator[tuple[float, Request]]:
    """(time_s, request) in order of arrival; request ids count from 0."""
    times = arrivals_s.tolist()
    if predictions is None:
        for request_id, at_s in enumerate(times):
            yield at_s, Request(request_id)
    else:
        for request_id, (at_s, tokens) in enumerate(zip(times, predictions.tolist(), strict=True)):
            yield at_s, Request(request_id, tokens)
