"""The timeline of a round: the arrivals, the batches on the GPUs, and the missed deadlines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from kit.figures import new_figure

from questions.deadlines.ledger import IN_TIME
from questions.deadlines.runs import Run
from questions.deadlines.traffic import Arrival, Setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DRAWN = ("flex", "flex, no preemption", "fffs")
COLOURS = ("#0072B2", "#D55E00")  # of streams
MISSED = "#333333"
GAP = 0.3  # between the rows of two workers, each 1 high
MISSES_AT = -0.42  # height of the missed deadlines, below the row of the last worker
BEFORE_S, AFTER_S = 3.0, 5.0  # drawn before and after the burst


def timeline(engines: str, setting: Setting, runs: Sequence[Run], arrivals: Sequence[Arrival]) -> Figure:
    """The first round: arrivals on top, then the batches on the GPUs under each policy of DRAWN."""
    shown = [run for policy in DRAWN for run in runs if (run.policy, run.round) == (policy, 1)]
    workers = sorted({bar[0] for run in shown for bar in run.bars})
    panel = 0.55 + 0.62 * len(workers)
    ratios = [0.8, *[panel] * len(shown)]
    height = 1.9 + len(shown) * panel
    figure, grid = new_figure(1 + len(shown), 1, width=12.5, height=height, sharex=True, height_ratios=ratios)
    axes = grid[:, 0]
    colour = {stream.name: COLOURS[index] for index, stream in enumerate(setting.streams)}
    _draw_arrivals(axes[0], setting, arrivals, colour)
    for axis, run in zip(axes[1:], shown, strict=True):
        _draw_panel(axis, setting, run, workers, colour)
    for axis in axes:
        axis.axvspan(*setting.burst_s, color="#F2EFE4", zorder=-5, linewidth=0)
        axis.spines["left"].set_visible(False)
        axis.grid(visible=False)
        axis.tick_params(axis="y", length=0)
    axes[-1].set_xlabel("seconds")
    axes[-1].set_xlim(setting.burst_s[0] - BEFORE_S, setting.burst_s[1] + AFTER_S)
    figure.suptitle(f"Two streams, a burst: {engines}", x=0.01, ha="left", fontsize=12)
    _explain(figure, setting, colour)
    return figure


def _draw_arrivals(axis: Axes, setting: Setting, arrivals: Sequence[Arrival], colour: Mapping[str, str]) -> None:
    width_s = 0.5
    edges = np.arange(0.0, setting.seconds + width_s, width_s)
    counts = [np.histogram([a.at_s for a in arrivals if a.stream == s], edges)[0] / width_s for s in setting.streams]
    bottom = np.zeros(edges.size - 1)
    for stream, count in zip(setting.streams, counts, strict=True):
        axis.bar(edges[:-1], count, width_s * 0.9, bottom, align="edge", color=colour[stream.name])
        bottom += count
    axis.set_yticks([0, round(float(bottom.max()), -1)])
    axis.set_title("requests that come, a second", loc="left", fontsize=10)
    axis.text(setting.burst_s[0] + 0.06, 1.32 * bottom.max(), "burst", va="top", fontsize=10, style="italic")
    axis.set_ylim(0, 1.35 * bottom.max())


def _draw_panel(axis: Axes, setting: Setting, run: Run, workers: Sequence[str], colour: Mapping[str, str]) -> None:
    base = {worker: (len(workers) - 1 - index) * (1 + GAP) for index, worker in enumerate(workers)}
    for worker, stream, size, began_s, ended_s, stopped in run.bars:
        height = max(0.1, size / setting.batch_size)
        style: dict[str, Any] = {"facecolor": colour[stream], "edgecolor": "white", "linewidth": 0.4}
        if stopped:
            style = {"facecolor": "white", "edgecolor": colour[stream], "linewidth": 0.6, "hatch": "/////"}
        axis.bar(began_s, height, ended_s - began_s, base[worker], align="edge", **style)
        if stopped:
            axis.plot(
                [ended_s] * 2, [base[worker] - 0.04, base[worker] + height + 0.12], color="#CC0000", linewidth=1.6
            )
    for number, stream_ in enumerate(setting.streams):
        at = [deadline_s for name, deadline_s in run.missed if name == stream_.name]
        place = MISSES_AT - 0.3 * number
        axis.plot(at, [place] * len(at), "|", color=colour[stream_.name], markersize=7, markeredgewidth=1.0)
        axis.axhline(place, color="#E4E4E4", linewidth=0.5, zorder=-3)
    for worker in workers:
        axis.axhline(base[worker], color="#BBBBBB", linewidth=0.6, zorder=-2)
    axis.set_yticks([*[base[worker] + 0.5 for worker in workers], MISSES_AT - 0.15], [*workers, "missed"])
    axis.set_ylim(MISSES_AT - 0.55, max(base.values()) + 1.15)
    parts = ", ".join(f"{stream.name} {run.share(stream.name):.0%}" for stream in setting.streams)
    preempted = sum(run.preempted.values())
    again = f"; {preempted} requests preempted, {run.preempted[IN_TIME]} of them in time all the same"
    ending = again if preempted else ""
    axis.set_title(f"{run.policy}: {run.share():.0%} in time ({parts}){ending}", loc="left", fontsize=10)


def _explain(figure: Figure, setting: Setting, colour: Mapping[str, str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    names: list[Any] = [
        Patch(color=colour[stream.name], label=f"{stream.name}: within {stream.slo_s:g} s")
        for stream in setting.streams
    ]
    names.append(
        Patch(facecolor="white", edgecolor=colour[setting.streams[1].name], hatch="/////", label="stopped for others")
    )
    names.append(
        Line2D([], [], marker="|", linestyle="", color=MISSED, markersize=8, label="a deadline that was missed")
    )
    names.append(Patch(color="none", label=f"height: batch size, up to {setting.batch_size}"))
    figure.legend(handles=names, loc="outside lower center", ncols=len(names), frameon=False, fontsize=9)
