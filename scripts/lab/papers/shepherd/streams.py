"""Streams of requests to several models: how many requests come in each window of a trace, when, and their deadlines.

    stream   requests of one application to one model, with one SLO (Shepherd, Section 2.1)
    window   the time over which a trace counts requests: usually a minute
    phase    whether a burst is in progress; all streams of a model share one phase

A trace gives the number of requests in a window, not their times. The times are drawn from a Poisson process, or from a
Markov-modulated Poisson process with two states, whose rates are scaled in each window so that the expected number of
requests in the window is the number of the trace.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from llmserve.errors import ConfigError
from llmserve.request import Request
from llmserve.simulation.files import UNREADABLE, open_text
from llmserve.simulation.workload import BURSTS_MAX, Bursts, Times

NAME_COLUMNS = (
    "fn_hash8",
    "HashFunction",
)  # function names: in a sample of the Azure Functions trace, and in the trace
MINUTE_COLUMN = re.compile(r"^m?([1-9]\d*)$")  # m1, m2, ... in the sample; 1, 2, ... in the trace
MINUTE_S = 60.0
REQUESTS_MAX = 50_000_000  # expected requests of a run: more requests would fill the memory

Indices = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Traffic:
    """The expected number of requests of each stream in each window.

    streams   names; at least one
    expected  (streams, windows) requests, real numbers >= 0; at least one window
    window_s  seconds of a window, > 0
    """

    streams: tuple[str, ...]
    expected: NDArray[np.float64]
    window_s: float = MINUTE_S

    @classmethod
    def constant(cls, streams: Sequence[str], rates_per_s: ArrayLike, duration_s: float) -> Traffic:
        """Return one window of constant rates. rates_per_s : (streams,), or one number for all, finite and >= 0."""
        rates = np.broadcast_to(np.asarray(rates_per_s, dtype=float), (len(streams),))
        if not streams or not (np.isfinite(rates) & (rates >= 0)).all() or not 0 < duration_s < math.inf:
            raise ConfigError("constant traffic needs streams, finite rates of at least 0, and a duration above 0")
        return cls(tuple(streams), rates[:, np.newaxis] * duration_s, duration_s)

    @property
    def duration_s(self) -> float:
        return self.window_s * self.windows

    @property
    def windows(self) -> int:
        return int(self.expected.shape[1])

    @property
    def rate_per_s(self) -> float:
        """Mean rate of all streams together, over all windows."""
        return float(self.expected.sum()) / self.duration_s

    def part(self, first: int, windows: int) -> Traffic:
        """Return some of the windows. first : >= 0.  windows : >= 1. Raises ConfigError if there are too few."""
        if first < 0 or windows < 1 or first + windows > self.windows:
            raise ConfigError(f"there are no {windows} windows from {first} on: there are {self.windows}")
        return replace(self, expected=self.expected[:, first : first + windows])

    def at_rate(self, rate_per_s: float) -> Traffic:
        """Multiply all numbers by one factor, so that the mean rate is rate_per_s. rate_per_s : finite, > 0.

        Raises ConfigError on traffic without a request.
        """
        if not 0 < rate_per_s < math.inf:
            raise ConfigError(f"the arrival rate must be positive and finite, not {rate_per_s}")
        if not self.expected.any():
            raise ConfigError("traffic without a request cannot be scaled to an arrival rate")
        return replace(self, expected=self.expected * (rate_per_s / self.rate_per_s))


def read_traffic(name: str) -> Traffic:
    """Read the calls of functions in each minute from a CSV file (.gz: compressed) of the Azure Functions 2019 trace.

    The file has a row for each function: the name in a column of NAME_COLUMNS, the calls in columns m1, m2, ... (or
    1, 2, ...), in this order. Other columns are ignored. Raises ConfigError with the file and the row that is wrong.
    Source: github.com/Azure/AzurePublicDataset, AzureFunctionsDataset2019.
    """
    names: list[str] = []
    rows: list[NDArray[np.float64]] = []
    with open_text(name, "trace") as file:
        reader = csv.reader(file)
        try:
            name_column, minutes = _find_columns(next(reader, []))
            for row in reader:
                rows.append(_calls(row[minutes], minutes.stop - minutes.start))
                names.append(row[name_column])
        except (ValueError, *UNREADABLE) as error:
            raise ConfigError(f"the trace {name!r}, row {reader.line_num}: {error}") from error
    if not rows:
        raise ConfigError(f"the trace {name!r} has no rows")
    return Traffic(tuple(names), np.array(rows))


def _find_columns(header: Sequence[str]) -> tuple[int, slice]:
    """Return the column of the name, and the adjacent columns of the minutes. Raises ValueError."""
    name_column = next((header.index(column) for column in NAME_COLUMNS if column in header), None)
    if name_column is None:
        raise ValueError(f"there is no column {' or '.join(NAME_COLUMNS)}; the first row names the columns")
    minutes = [(index, int(match[1])) for index, cell in enumerate(header) if (match := MINUTE_COLUMN.match(cell))]
    if not minutes:
        raise ValueError("there are no columns m1, m2, ... of calls in each minute")
    first = minutes[0][0]
    if minutes != [(first + place, place + 1) for place in range(len(minutes))]:
        raise ValueError("the columns m1, m2, ... must stand side by side, in this order")
    return name_column, slice(first, first + len(minutes))


def _calls(cells: list[str], minutes: int) -> NDArray[np.float64]:
    if len(cells) != minutes:
        raise ValueError(f"{len(cells)} minutes, where the header names {minutes}")
    calls = np.array([float(cell) for cell in cells])
    if not (np.isfinite(calls) & (calls >= 0)).all():
        raise ValueError("calls in a minute must be finite and at least 0")
    return calls


# ---- streams ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Streams:
    """The model and the SLO of each stream.

    names     of streams
    models    names of models
    model_of  (streams,) index of each stream's model
    slo_s     (streams,) seconds from arrival to deadline; inf: no deadline
    """

    names: tuple[str, ...]
    models: tuple[str, ...]
    model_of: Indices
    slo_s: Times

    @classmethod
    def of(cls, names: Sequence[str], models: Sequence[str], model_of: ArrayLike, slo_s: ArrayLike) -> Streams:
        """slo_s : (streams,), or one number for all, > 0. Raises ConfigError."""
        indices = np.asarray(model_of, dtype=np.intp)
        slos_s = np.asarray(slo_s, dtype=float)
        if not names or not models or indices.shape != (len(names),):
            raise ConfigError("there must be streams, and models, and one model for each stream")
        if not ((indices >= 0) & (indices < len(models))).all():
            raise ConfigError(f"a stream's model must be one of the {len(models)} models")
        if not (slos_s > 0).all() or slos_s.shape not in ((), (len(names),)):
            raise ConfigError("slo_s must be above 0: one number, or one for each stream")
        return cls(tuple(names), tuple(models), indices, np.broadcast_to(slos_s, (len(names),)))

    @classmethod
    def round_robin(cls, names: Sequence[str], models: Sequence[str], slo_s: ArrayLike) -> Streams:
        """Assign the models to the streams in turn."""
        if not models:
            raise ConfigError("there must be models")
        return cls.of(names, models, np.arange(len(names)) % len(models), slo_s)


# ---- arrivals ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests in order of time; arrays of shape (count,).

    times_s  >= 0
    stream   index of the stream of each request
    """

    streams: Streams
    times_s: Times
    stream: Indices

    @classmethod
    def of(cls, streams: Streams, times_s: ArrayLike, stream: ArrayLike) -> Arrivals:
        """Sort requests by time; requests of the same time keep their order. times_s, stream : (count,)."""
        times, indices = np.asarray(times_s, dtype=float), np.asarray(stream, dtype=np.intp)
        assert times.shape == indices.shape, f"{times.size} times of {indices.size} requests"
        order = np.argsort(times, kind="stable")
        return cls(streams, times[order], indices[order])

    def __len__(self) -> int:
        return self.times_s.size

    @property
    def model(self) -> Indices:
        """(count,) index of the model of each request."""
        return self.streams.model_of[self.stream]

    @property
    def deadlines_s(self) -> Times:
        """(count,) deadline of each request; inf: none."""
        return self.times_s + self.streams.slo_s[self.stream]

    def requests(self) -> Iterator[tuple[float, Request]]:
        """Yield (time_s, request) in order of arrival; ids count from 0. Each request is one token long."""
        streams, models = self.streams.names, [self.streams.models[index] for index in self.streams.model_of]
        rows = zip(self.times_s.tolist(), self.deadlines_s.tolist(), self.stream.tolist(), strict=True)
        for id_, (at_s, deadline_s, stream) in enumerate(rows):
            deadline = deadline_s if deadline_s < math.inf else None
            yield at_s, Request(id_, 1.0, deadline, model=models[stream], stream=streams[stream])


def draw_requests(
    traffic: Traffic, streams: Streams, rng: np.random.Generator, *, bursts: Bursts | None = None
) -> Arrivals:
    """Draw the requests of all streams. The number in a window is Poisson, with the expected number as its mean.

    streams : the streams of the traffic, in the same order
    bursts  : None: requests are spread evenly over their window. Otherwise requests are denser during a burst; only the
    ratio of the two rates matters, and both must be above 0. A window without a burst has even arrivals.
    Raises ConfigError if the streams differ, and on more requests or bursts than the memory can hold.
    """
    if traffic.streams != streams.names:
        raise ConfigError("the traffic is not that of these streams")
    if traffic.expected.sum() > REQUESTS_MAX:
        raise ConfigError(f"{traffic.expected.sum():.3g} requests are more than the {REQUESTS_MAX:,} that can be kept")
    counts = rng.poisson(traffic.expected)
    stream, window = np.divmod(np.repeat(np.arange(counts.size), counts.ravel()), traffic.windows)
    places = window + rng.random(stream.size)  # (requests,) in windows
    if bursts is None:
        return Arrivals.of(streams, places * traffic.window_s, stream)
    _check_bursts(bursts, traffic, int(streams.model_of.max()) + 1)
    return Arrivals.of(streams, _in_bursts(places, streams.model_of[stream], bursts, traffic, rng), stream)


def _check_bursts(bursts: Bursts, traffic: Traffic, phases: int) -> None:
    if not all(0 < rate < math.inf for rate in bursts.rates_per_s):
        raise ConfigError("bursts: both rates must be above 0 and finite, or a window without a burst would be empty")
    if not phases * traffic.duration_s <= BURSTS_MAX * sum(bursts.sojourns_s):
        raise ConfigError(f"bursts: their states are too short: more than {BURSTS_MAX} bursts would be drawn")


def _in_bursts(places: Times, phase: Indices, bursts: Bursts, traffic: Traffic, rng: np.random.Generator) -> Times:
    """Return (requests,) times in seconds. places, phase : (requests,); places are in expected windows, see _clock."""
    times_s = np.empty_like(places)
    order = np.argsort(phase, kind="stable")
    firsts = np.flatnonzero(np.diff(phase[order], prepend=-1))  # first request of each phase
    for rows in np.split(order, firsts[1:]):
        times_s[rows] = np.interp(places[rows], *_clock(bursts, traffic, rng))
    return times_s


def _clock(bursts: Bursts, traffic: Traffic, rng: np.random.Generator) -> tuple[Times, Times]:
    """Draw one path of bursts. Returns points (expected, seconds), both increasing, to interpolate linearly.

    `expected` counts windows by expected arrivals: within window w it grows from w to w + 1.
    """
    changes_s, state = _state_changes(bursts, traffic.duration_s, rng)
    windows = traffic.windows
    borders_s = np.arange(windows + 1) * traffic.window_s
    at_s = np.union1d(changes_s, borders_s)
    states = (state + np.searchsorted(changes_s, at_s[:-1], side="right")) % 2
    expected = np.concatenate([[0.0], np.cumsum(np.diff(at_s) * np.array(bursts.rates_per_s)[states])])
    return np.interp(expected, expected[np.searchsorted(at_s, borders_s)], np.arange(windows + 1.0)), at_s


def _state_changes(bursts: Bursts, duration_s: float, rng: np.random.Generator) -> tuple[Times, int]:
    """Draw the times at which the state changes before the end, and the first state, of a stationary process."""
    high_s, low_s = bursts.sojourns_s
    state = 0 if rng.random() < high_s / (high_s + low_s) else 1
    means_s = np.array(bursts.sojourns_s)[[state, 1 - state]]
    parts, last_s = [np.zeros(0)], 0.0
    while last_s < duration_s:
        cycles = int((duration_s - last_s) / (high_s + low_s)) + 2
        parts.append(last_s + np.cumsum(rng.exponential(means_s, (cycles, 2)).ravel()))
        last_s = float(parts[-1][-1])
    changes_s = np.concatenate(parts)
    return changes_s[changes_s < duration_s], state
