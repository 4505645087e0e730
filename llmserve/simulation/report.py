"""What a run came to: a summary of every request's times, as a table or as one JSON object."""

from __future__ import annotations

import math

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from llmserve.scheduling.messages import Action, BatchEnded, Event, RequestArrived, RequestEnded, StartBatch

Times = NDArray[np.float64]

PERCENTILES = (50, 90, 95, 99)
SPREAD = ("mean", *(f"p{percent}" for percent in PERCENTILES))


class Summary(msgspec.Struct, frozen=True):
    """Rates are over `elapsed_s`, from the first arrival to the last end. Latency: arrival to end; waiting: to start;
    slow-down: latency over the time that the request alone would take.

    batch_size_mean       requests per formed batch
    batch_fill_mean       the same over the batch size
    utilisation           mean over engines of the share of their time (refill: of their slots' time) at work
    energy_j              of all engines, idle or not, over elapsed_s; None when their energy is not known, as of the
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
    energy_j: float | None = None
    energy_j_per_token: float | None = None
    energy_j_per_request: float | None = None
    power_w_mean: float | None = None


class Recorder:
    """Listens to the steps of a run and keeps when each request (ids 0 .. count-1) arrived, started and ended."""

    def __init__(self, count: int) -> None:
        self.arrived_s = [math.nan] * count
        self.started_s = [math.nan] * count
        self.ended_s = [math.nan] * count
        self.batches: dict[int, int] = {}  # batch id -> requests started

    def __call__(self, now_s: float, event: Event, actions: list[Action]) -> None:
        if type(event) is RequestArrived:
            self.arrived_s[event.request.id] = now_s
        elif type(event) is BatchEnded:
            for request_id in event.output_tokens:
                self.ended_s[request_id] = now_s
        elif type(event) is RequestEnded and event.outcome == "completed":
            self.ended_s[event.request_id] = now_s
        for action in actions:
            if type(action) is StartBatch:
                self._start(now_s, action)

    def _start(self, now_s: float, action: StartBatch) -> None:
        batch = action.batch
        for request in batch.requests:
            self.started_s[request.id] = now_s
        self.batches[batch.id] = self.batches.get(batch.id, 0) + len(batch.requests)


def summarise(
    recorder: Recorder,
    output_tokens: Times,
    services_s: Times,
    batch_size: int,
    busy_share: list[float],
    energy_j: float | None = None,
) -> Summary:
    """output_tokens, services_s : (count,) by request id, the latter the time that each alone would take.
    busy_share, energy_j : utilisation of each engine, and the energy of all, over the same elapsed time.
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
        **(_energy(energy_j, elapsed_s, completed, tokens) if energy_j is not None else {}),
    )


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


def _over(total: float, parts: float) -> float:
    return total / parts if parts > 0 else 0.0


def _spread(name: str, values: Times) -> dict[str, float]:
    """Mean and percentiles; zeros when there is no value."""
    if not values.size:
        return {f"{name}_{part}": 0.0 for part in SPREAD}
    parts = [float(values.mean()), *np.percentile(values, PERCENTILES).tolist()]
    return {f"{name}_{part}": value for part, value in zip(SPREAD, parts, strict=True)}


def print_table(summary: Summary, title: str, console: Console) -> None:
    """The summary as a person reads it."""
    table = Table(title=title, title_justify="left")
    for column in ("", *SPREAD):
        table.add_column(column, justify="left" if not column else "right")
    values = msgspec.structs.asdict(summary)
    for label, name in (("latency (s)", "latency_s"), ("waiting (s)", "waiting_s"), ("slow-down", "slowdown")):
        spread = (values[f"{name}_{part}"] for part in SPREAD)
        table.add_row(label, *(f"{value:.3f}" for value in spread))
    table.add_section()
    for label, text in (*_totals(summary), *_energy_rows(summary)):
        table.add_row(label, text)
    console.print(table)


def _totals(summary: Summary) -> list[tuple[str, str]]:
    return [
        ("requests/s", f"{summary.throughput_per_s:.4f}"),
        ("output tokens/s", f"{summary.output_tokens_per_s:.1f}"),
        ("completed", f"{summary.completed:,}"),
        ("elapsed (s)", f"{summary.elapsed_s:.1f}"),
        ("batch size", f"{summary.batch_size_mean:.2f}"),
        ("batch fill", f"{summary.batch_fill_mean:.1%}"),
        ("engine utilisation", f"{summary.utilisation:.1%}"),
    ]


def _energy_rows(summary: Summary) -> list[tuple[str, str]]:
    if summary.energy_j is None:
        return []
    return [
        ("energy (J)", f"{summary.energy_j:,.0f}"),
        ("energy/token (J)", f"{summary.energy_j_per_token:.4f}"),
        ("energy/request (J)", f"{summary.energy_j_per_request:.2f}"),
        ("mean power (W)", f"{summary.power_w_mean:.1f}"),
    ]
