"""The results of a run: a summary of the times of its requests, as a table or as one JSON object."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from llmserve.scheduling.messages import (
    Action,
    BatchEnded,
    Event,
    FailRequest,
    PreemptBatch,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    StartBatch,
)

if TYPE_CHECKING:  # a run that prints JSON needs no tables
    from rich.console import Console
    from rich.table import Table

Times = NDArray[np.float64]

ROUNDING_S = 1e-9  # rounding may move an answer at its deadline past the deadline
PERCENTILES = (50, 90, 95, 99)
SPREAD = ("mean", *(f"p{percent}" for percent in PERCENTILES))


class Summary(msgspec.Struct, frozen=True):
    """Rates are over `elapsed_s`, from the first arrival to the last end. Latency: arrival to end; waiting: arrival to
    start; slow-down: latency over the time of the request alone on an engine.

    in_system_mean        mean number of requests in the system: arrived, not yet completed, failed or cancelled. By
                          Little's law throughput_per_s * latency_s_mean, if all requests are completed
    batch_size_mean       mean requests per formed batch
    batch_fill_mean       batch_size_mean over the batch size
    utilisation           mean over engines of the busy share of their time (refill: of their slots' time)
    cached_share          prompt tokens that the KV caches had, over all prompt tokens; None without KV caches
    in_time_share         requests answered by their deadlines, over all requests; None without deadlines, like the
                          next two
    goodput_per_s         requests answered by their deadlines, per second
    preempted             number of preemptions of requests
    energy_j              of all engines, busy and idle, over elapsed_s; None when the energy is not known, like the
                          next three
    energy_j_per_token    over the output tokens of the completed requests
    energy_j_per_request  over the completed requests
    power_w_mean          of all engines together
    """

    completed: int
    elapsed_s: float
    throughput_per_s: float
    output_tokens_per_s: float
    latency_s_mean: float
    latency_s_p50: float
    latency_s_p90: float
    latency_s_p95: float
    latency_s_p99: float
    waiting_s_mean: float
    waiting_s_p50: float
    waiting_s_p90: float
    waiting_s_p95: float
    waiting_s_p99: float
    slowdown_mean: float
    slowdown_p50: float
    slowdown_p90: float
    slowdown_p95: float
    slowdown_p99: float
    batch_size_mean: float
    batch_fill_mean: float
    utilisation: float
    in_system_mean: float
    cached_share: float | None = None
    in_time_share: float | None = None
    goodput_per_s: float | None = None
    preempted: float | None = None
    energy_j: float | None = None
    energy_j_per_token: float | None = None
    energy_j_per_request: float | None = None
    power_w_mean: float | None = None


class Recorder:
    """Listens to the steps of a run and notes when each request (ids 0 .. count-1) arrived, started and ended.

    left_s     when a request was cancelled or failed, by id; without meaning for a request that was completed later
    batches    number of started requests, by batch id
    preempted  number of preemptions of requests
    """

    def __init__(self, count: int) -> None:
        self.arrived_s = [math.nan] * count
        self.started_s = [math.nan] * count
        self.ended_s = [math.nan] * count
        self.left_s: dict[int, float] = {}
        self.batches: dict[int, int] = {}
        self.preempted = 0

    def __call__(self, now_s: float, event: Event, actions: list[Action]) -> None:
        if type(event) is RequestArrived:
            self.arrived_s[event.request.id] = now_s
        elif type(event) is BatchEnded:
            for request_id in event.output_tokens:
                self.ended_s[request_id] = now_s
        elif type(event) is RequestEnded and event.outcome == "completed":
            self.ended_s[event.request_id] = now_s
        elif type(event) is RequestEnded or type(event) is RequestCancelled:
            self.left_s[event.request_id] = now_s
        for action in actions:
            if type(action) is StartBatch:
                self._start(now_s, action)
            elif type(action) is FailRequest:
                self.left_s[action.request_id] = now_s
            elif type(action) is PreemptBatch:
                self._stop(now_s, action)

    def _start(self, now_s: float, action: StartBatch) -> None:
        batch = action.batch
        for request in batch.requests:
            self.started_s[request.id] = now_s
        self.batches[batch.id] = self.batches.get(batch.id, 0) + len(batch.requests)

    def _stop(self, now_s: float, action: PreemptBatch) -> None:
        self.preempted += len(action.request_ids)


@dataclass(frozen=True, slots=True)
class Start:
    """Requests of one batch that started together. request_ids : in the order of the batch."""

    batch_id: int
    started_s: float
    formed_s: float
    engine: str
    bin: int
    request_ids: tuple[int, ...]


class BatchRecorder(Recorder):
    """Also notes, for figures, every start, and when a batch was preempted, by batch id."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.starts: list[Start] = []
        self.stopped_s: dict[int, float] = {}

    def _stop(self, now_s: float, action: PreemptBatch) -> None:
        super()._stop(now_s, action)
        self.stopped_s[action.batch_id] = now_s

    def _start(self, now_s: float, action: StartBatch) -> None:
        super()._start(now_s, action)
        batch = action.batch
        ids = tuple([request.id for request in batch.requests])
        self.starts.append(Start(batch.id, now_s, batch.formed_at_s, action.engine, batch.bin, ids))


def summarise(
    recorder: Recorder,
    output_tokens: Times,
    services_s: Times,
    batch_size: int,
    busy_share: list[float],
    energy_j: float | None = None,
    deadlines_s: Times | None = None,
    cached_share: float | None = None,
) -> Summary:
    """The summary of a run. output_tokens : (count,) by request id.  services_s : (count,) seconds of each request
    alone.  busy_share : utilisation of each engine.  energy_j : of all engines, over the same elapsed time.
    deadlines_s : (count,) by request id; None: no deadlines.  cached_share : None: engines have no KV caches
    """
    arrived, started, ended = (np.array(times) for times in (recorder.arrived_s, recorder.started_s, recorder.ended_s))
    done = ~np.isnan(ended)
    elapsed_s = elapsed(recorder)
    latency, waiting = (ended - arrived)[done], (started - arrived)[done]
    slowdown = np.divide(latency, services_s[done], out=np.ones_like(latency), where=services_s[done] > 0)
    completed, tokens = int(done.sum()), float(output_tokens[done].sum())
    size_mean = sum(recorder.batches.values()) / len(recorder.batches) if recorder.batches else 0.0
    return Summary(
        completed=completed,
        elapsed_s=elapsed_s,
        throughput_per_s=_over(completed, elapsed_s),
        output_tokens_per_s=_over(tokens, elapsed_s),
        **_spread("latency_s", latency),
        **_spread("waiting_s", waiting),
        **_spread("slowdown", slowdown),
        batch_size_mean=size_mean,
        batch_fill_mean=size_mean / batch_size,
        utilisation=float(np.mean(busy_share)) if busy_share else 0.0,
        in_system_mean=_over(present_s(recorder), elapsed_s),
        cached_share=cached_share,
        **(_in_time(recorder, deadlines_s, elapsed_s) if deadlines_s is not None else {}),
        **(_energy(energy_j, elapsed_s, completed, tokens) if energy_j is not None else {}),
    )


def _in_time(recorder: Recorder, deadlines_s: Times, elapsed_s: float) -> dict[str, Any]:
    in_time = int((np.array(recorder.ended_s) <= deadlines_s + ROUNDING_S).sum())  # False for NaN: never ended
    return {
        "in_time_share": _over(in_time, int((~np.isnan(np.array(recorder.arrived_s))).sum())),
        "goodput_per_s": _over(in_time, elapsed_s),
        "preempted": recorder.preempted,
    }


def _energy(energy_j: float, elapsed_s: float, completed: int, tokens: float) -> dict[str, float]:
    return {
        "energy_j": energy_j,
        "energy_j_per_token": _over(energy_j, tokens),
        "energy_j_per_request": _over(energy_j, completed),
        "power_w_mean": _over(energy_j, elapsed_s),
    }


def elapsed(recorder: Recorder) -> float:
    """Seconds from the first arrival to the last end; 0 when nothing ended."""
    ended = np.array(recorder.ended_s)
    if not (~np.isnan(ended)).any():
        return 0.0
    return float(np.nanmax(ended) - np.nanmin(np.array(recorder.arrived_s)))


def present_s(recorder: Recorder) -> float:
    """Request-seconds: the integral of the number of requests in the system, from the first arrival to the last end.

    Computed without latencies: the number grows by one at each arrival, and falls by one at each end or cancellation.
    """
    arrived, ended = np.array(recorder.arrived_s), np.array(recorder.ended_s)
    if not (~np.isnan(ended)).any():
        return 0.0
    last_s = float(np.nanmax(ended))
    for request_id, left_s in recorder.left_s.items():
        if math.isnan(ended[request_id]):
            ended[request_id] = left_s
    came = ~np.isnan(arrived)
    gone = np.where(np.isnan(ended), last_s, ended)[came]
    times = np.minimum(np.concatenate([arrived[came], gone]), last_s)
    order = np.argsort(times, kind="stable")
    present = np.cumsum(np.repeat([1, -1], gone.size)[order])
    return float(present[:-1] @ np.diff(times[order]))


def _over(total: float, parts: float) -> float:
    return total / parts if parts > 0 else 0.0


def _spread(name: str, values: Times) -> dict[str, float]:
    """Mean and percentiles; zeros when there is no value."""
    if not values.size:
        return {f"{name}_{part}": 0.0 for part in SPREAD}
    parts = [float(values.mean()), *np.percentile(values, PERCENTILES).tolist()]
    return {f"{name}_{part}": value for part, value in zip(SPREAD, parts, strict=True)}


# ---- tables -----------------------------------------------------------------------------------------------------

SPREADS = (("latency (s)", "latency_s"), ("waiting (s)", "waiting_s"), ("slow-down", "slowdown"))
TOTALS = (  # rows: label, quantity, format
    ("requests/s", "throughput_per_s", ".4f"),
    ("output tokens/s", "output_tokens_per_s", ".1f"),
    ("completed", "completed", ",.0f"),
    ("elapsed (s)", "elapsed_s", ".1f"),
    ("batch size", "batch_size_mean", ".2f"),
    ("batch fill", "batch_fill_mean", ".1%"),
    ("engine utilisation", "utilisation", ".1%"),
    ("requests present", "in_system_mean", ".2f"),
    ("prompt tokens cached", "cached_share", ".1%"),
    ("in time", "in_time_share", ".1%"),
    ("in time/s", "goodput_per_s", ".4f"),
    ("preempted", "preempted", ",.0f"),
    ("energy (J)", "energy_j", ",.0f"),
    ("energy/token (J)", "energy_j_per_token", ".4f"),
    ("energy/request (J)", "energy_j_per_request", ".2f"),
    ("mean power (W)", "power_w_mean", ".1f"),
)

Cell = Callable[[str, str], str | None]
"""(quantity, format) -> text; None when the quantity is not known."""


def print_table(summary: Summary, title: str, console: Console) -> None:
    """Print the summary as a table."""

    def cell(name: str, form: str) -> str | None:
        value = getattr(summary, name)
        return None if value is None else format(value, form)

    console.print(table_of(cell, title))


def table_of(cell: Cell, title: str) -> Table:
    """A table of all quantities for which `cell` gives a text."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in ("", *SPREAD):
        table.add_column(column, justify="right" if column else "left", no_wrap=not column)
    for label, name in SPREADS:
        table.add_row(label, *(cell(f"{name}_{part}", ".3f") for part in SPREAD))
    table.add_section()
    for label, name, form in TOTALS:
        if (text := cell(name, form)) is not None:
            table.add_row(label, text)
    return table
