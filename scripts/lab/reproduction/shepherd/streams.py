"""What the streams of several models bring: how many requests in each window of a trace, when within it, and for when.

    stream   requests of one application to one model, wanted within one time (Shepherd, Section 2.1)
    window   what a trace counts requests by: a minute, as a rule
    phase    whether a burst goes on; streams share it or have one each

A trace tells how many requests come in a window, not when within it. They are put there as a Poisson process puts them,
or in bursts: as a Markov-modulated Poisson process of two states does, whose both rates are scaled in each window so
that the number to be expected there, bursts and all, remains what the trace says.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from llmserve.errors import ConfigError
from llmserve.request import Request
from llmserve.simulation.files import UNREADABLE, open_text
from llmserve.simulation.workload import BURSTS_MAX, Bursts, Times

NAME_COLUMNS = ("fn_hash8", "HashFunction")  # of a function: in a sample of the Azure Functions trace, and in itself
MINUTE_COLUMN = re.compile(r"^m?([1-9]\d*)$")  # m1, m2, ... there, 1, 2, ... here
MINUTE_S = 60.0
REQUESTS_MAX = 50_000_000  # to be expected of a run: more would fill the memory

Indices = NDArray[np.intp]
Phases = Literal["stream", "model", "common"]
"""Who shares the phases of bursts: nobody, the streams of one model, or all.

The more streams with phases of their own there are, the smoother is their sum.
"""


@dataclass(frozen=True, slots=True)
class Traffic:
    """How many requests each stream is expected to send in each window.

    streams   their names; at least one
    expected  (streams, windows) requests, real numbers >= 0; at least one window
    window_s  seconds of a window, > 0
    """

    streams: tuple[str, ...]
    expected: NDArray[np.float64]
    window_s: float = MINUTE_S

    @classmethod
    def constant(cls, streams: Sequence[str], rates_per_s: ArrayLike, duration_s: float) -> Traffic:
        """Streams of rates that stay: one window. rates_per_s : (streams,), or one number for all, finite and >= 0."""
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
        """Mean, over all streams and windows."""
        return float(self.expected.sum()) / self.duration_s

    def part(self, first: int, windows: int) -> Traffic:
        """These windows of it. first : >= 0.  windows : >= 1. Raises ConfigError where there are not so many."""
        if first < 0 or windows < 1 or first + windows > self.windows:
            raise ConfigError(f"there are no {windows} windows from {first} on: there are {self.windows}")
        return replace(self, expected=self.expected[:, first : first + windows])

    def at_rate(self, rate_per_s: float) -> Traffic:
        """The same, with this mean rate in all: every number is multiplied alike. rate_per_s : finite, > 0.

        Raises ConfigError on traffic without a request.
        """
        if not 0 < rate_per_s < math.inf:
            raise ConfigError(f"the arrival rate must be positive and finite, not {rate_per_s}")
        if not self.expected.any():
            raise ConfigError("traffic without a request cannot be scaled to an arrival rate")
        return replace(self, expected=self.expected * (rate_per_s / self.rate_per_s))


def read_traffic(name: str) -> Traffic:
    """Calls of functions in each minute, from a CSV file (.gz: compressed) of the Azure Functions 2019 trace's form.

    A row for each function, named in a column of NAME_COLUMNS, with its calls in columns m1, m2, ... (or 1, 2, ...), in
    this order; other columns are not read. Raises ConfigError naming the file and the row that cannot be used.
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
    """Of the name and of the minutes, which stand side by side. Raises ValueError."""
    name_column = next((header.index(column) for column in NAME_COLUMNS if column in header), None)
    if name_column is None:
        raise ValueError(f"there is no column {' or '.join(NAME_COLUMNS)}; the first row names the columns")
    found = [(index, int(match[1])) for index, cell in enumerate(header) if (match := MINUTE_COLUMN.match(cell))]
    if not found:
        raise ValueError("there are no columns m1, m2, ... of calls in each minute")
    first = found[0][0]
    if found != [(first + place, place + 1) for place in range(len(found))]:
        raise ValueError("the columns m1, m2, ... must stand side by side, in this order")
    return name_column, slice(first, first + len(found))


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
    """Who asks, whom, and how soon the answer is wanted.

    names     of streams
    models    names of models
    model_of  (streams,) index of each stream's model
    slo_s     (streams,) seconds from arrival to deadline; inf: there is none
    """

    names: tuple[str, ...]
    models: tuple[str, ...]
    model_of: Indices
    slo_s: Times

    @classmethod
    def of(cls, names: Sequence[str], models: Sequence[str], model_of: ArrayLike, slo_s: ArrayLike) -> Streams:
        """slo_s : (streams,), or one number for all, > 0. Raises ConfigError."""
        indices = np.asarray(model_of, dtype=np.intp)
        wanted_s = np.asarray(slo_s, dtype=float)
        if not names or not models or indices.shape != (len(names),):
            raise ConfigError("there must be streams, and models, and one model for each stream")
        if not ((indices >= 0) & (indices < len(models))).all():
            raise ConfigError(f"a stream's model must be one of the {len(models)} that there are")
        if not (wanted_s > 0).all() or wanted_s.shape not in ((), (len(names),)):
            raise ConfigError("slo_s must be above 0: one number, or one for each stream")
        return cls(tuple(names), tuple(models), indices, np.broadcast_to(wanted_s, (len(names),)))

    @classmethod
    def round_robin(cls, names: Sequence[str], models: Sequence[str], slo_s: ArrayLike) -> Streams:
        """The first stream asks the first model, the next one the next, and so on in turn."""
        if not models:
            raise ConfigError("there must be models")
        return cls.of(names, models, np.arange(len(names)) % len(models), slo_s)

    def phase_of(self, phases: Phases) -> Indices:
        """(streams,) of which phase each stream is, counted from 0."""
        if phases not in get_args(Phases):
            raise ConfigError(f"phases {phases!r} is not one of {', '.join(get_args(Phases))}")
        if phases == "model":
            return self.model_of
        return np.arange(len(self.names)) if phases == "stream" else np.zeros(len(self.names), dtype=np.intp)


# ---- arrivals ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests as they come, (count,) each, in order of time.

    times_s  >= 0
    stream   index of the stream of each
    """

    streams: Streams
    times_s: Times
    stream: Indices

    @classmethod
    def of(cls, streams: Streams, times_s: ArrayLike, stream: ArrayLike) -> Arrivals:
        """Of requests in any order; those of one instant keep theirs. times_s, stream : (count,)."""
        times, indices = np.asarray(times_s, dtype=float), np.asarray(stream, dtype=np.intp)
        assert times.shape == indices.shape, f"{times.size} times of {indices.size} requests"
        order = np.argsort(times, kind="stable")
        return cls(streams, times[order], indices[order])

    def __len__(self) -> int:
        return self.times_s.size

    @property
    def model(self) -> Indices:
        """(count,) index of the model of each."""
        return self.streams.model_of[self.stream]

    @property
    def deadlines_s(self) -> Times:
        """(count,) when each must have been answered; inf: it need not."""
        return self.times_s + self.streams.slo_s[self.stream]

    def requests(self) -> Iterator[tuple[float, Request]]:
        """(time_s, request) in order of arrival; request ids count from 0. Each is one token long."""
        streams, models = self.streams.names, [self.streams.models[index] for index in self.streams.model_of]
        each = zip(self.times_s.tolist(), self.deadlines_s.tolist(), self.stream.tolist(), strict=True)
        for id_, (at_s, deadline_s, stream) in enumerate(each):
            deadline = deadline_s if deadline_s < math.inf else None
            yield at_s, Request(id_, 1.0, deadline, model=models[stream], stream=streams[stream])


def draw_requests(
    traffic: Traffic,
    streams: Streams,
    rng: np.random.Generator,
    *,
    bursts: Bursts | None = None,
    phases: Phases = "stream",
) -> Arrivals:
    """Requests of these streams, in each window as many as a Poisson draw of the expected number gives.

    streams : those of the traffic, in the same order.
    bursts  : None: they are spread evenly over their window. Else more densely while a burst lasts; of its two rates,
    which must be above 0, only their ratio matters. A window without a burst is one of even arrivals.
    Raises ConfigError when the streams differ, and on more requests or bursts than can be kept.
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
    phase_of = streams.phase_of(phases)
    _check_bursts(bursts, traffic, int(phase_of.max()) + 1)
    return Arrivals.of(streams, _in_bursts(places, phase_of[stream], bursts, traffic, rng), stream)


def _check_bursts(bursts: Bursts, traffic: Traffic, phases: int) -> None:
    if not all(0 < rate < math.inf for rate in bursts.rates_per_s):
        raise ConfigError("bursts: both rates must be above 0 and finite, or a window without a burst would be empty")
    if not phases * traffic.duration_s <= BURSTS_MAX * sum(bursts.sojourns_s):
        raise ConfigError(f"bursts: their states are too short: more than {BURSTS_MAX} bursts would be drawn")


def _in_bursts(places: Times, phase: Indices, bursts: Bursts, traffic: Traffic, rng: np.random.Generator) -> Times:
    """(requests,) times in seconds. places : (requests,) on the clock of each window's arrivals.  phase : of each."""
    times_s = np.empty_like(places)
    order = np.argsort(phase, kind="stable")
    firsts = np.flatnonzero(np.diff(phase[order], prepend=-1))  # of each phase that has requests
    for rows in np.split(order, firsts[1:]):
        times_s[rows] = np.interp(places[rows], *_clock(bursts, traffic, rng))
    return times_s


def _clock(bursts: Bursts, traffic: Traffic, rng: np.random.Generator) -> tuple[Times, Times]:
    """One drawn path of bursts: windows passed by the arrivals to be expected, and by time, in seconds.

    Both are increasing and linear between the places given; within window w the first goes from w to w + 1.
    """
    changes_s, state = _state_changes(bursts, traffic.duration_s, rng)
    windows = traffic.windows
    borders_s = np.arange(windows + 1) * traffic.window_s
    at_s = np.union1d(changes_s, borders_s)
    states = (state + np.searchsorted(changes_s, at_s[:-1], side="right")) % 2
    expected = np.concatenate([[0.0], np.cumsum(np.diff(at_s) * np.array(bursts.rates_per_s)[states])])
    return np.interp(expected, expected[np.searchsorted(at_s, borders_s)], np.arange(windows + 1.0)), at_s


def _state_changes(bursts: Bursts, duration_s: float, rng: np.random.Generator) -> tuple[Times, int]:
    """When the state changes before the end, and the first one, drawn as it is met at a random moment."""
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


def index_of_dispersion(times_s: Times, window_s: float, duration_s: float) -> float:
    """Variance over mean of the arrivals in windows of this length: 1 for a Poisson process, more in bursts.

    times_s : (count,), of which those in whole windows before duration_s are counted. Raises ConfigError without two
    windows, or without arrivals in them.
    """
    windows = math.floor(duration_s / window_s * (1 + 1e-12)) if window_s > 0 else 0
    if windows < 2:
        raise ConfigError(f"there are no two windows of {window_s} s in {duration_s} s")
    window = np.floor_divide(times_s, window_s).astype(np.intp)
    counts = np.bincount(window[window < windows], minlength=windows)
    if not counts.any():
        raise ConfigError("without arrivals there is no dispersion")
    return float(counts.var(ddof=1) / counts.mean())
