"""The figures of Shepherd, drawn from the rows."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib

matplotlib.use("Agg")

import numpy as np
from bench.figures import finish, log_ticks, new_figure
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from reproduction.rows import Row, Rows
from reproduction.shepherd import load, micro, scaling, slo
from reproduction.shepherd.runs import (
    CLOCKWORK,
    EDF,
    FFFS,
    FLEX,
    LARGEST,
    NEXUS,
    PLANNED_SHARE,
    PRINTED,
    RELEASED,
    RELEASED_128,
    WITHOUT_PREEMPTION,
)
from reproduction.shepherd.worlds import BURSTY, STABLE

STYLES: dict[str, dict[str, object]] = {
    FLEX: {"color": "#d55e00", "marker": "o", "linewidth": 2.2, "zorder": 5},
    WITHOUT_PREEMPTION: {"color": "#e69f00", "marker": "s", "linestyle": "--", "zorder": 6, "markersize": 3},
    PRINTED: {"color": "#cc79a7", "marker": "D"},
    CLOCKWORK: {"color": "#0072b2", "marker": "^"},
    RELEASED: {"color": "#56b4e9", "marker": "v"},
    NEXUS: {"color": "#009e73", "marker": "P"},
    PLANNED_SHARE: {"color": "#7fcdb3", "marker": "X"},
    LARGEST: {"color": "#8fa8c8", "marker": "<", "linestyle": ":"},
    RELEASED_128: {"color": "#56b4e9", "marker": ">", "linestyle": ":"},
    FFFS: {"color": "#888888", "marker": "x"},
    EDF: {"color": "#333333", "marker": "+"},
}
SYSTEMS = (FLEX, CLOCKWORK, NEXUS, FFFS)  # of the paper, and a queue by arrival beside them
LABELS = {CLOCKWORK: "Clockwork, as described"}
THOUSANDS = FuncFormatter(lambda value, _: f"{value / 1e3:g}k")


def _points(axis: Axes, found: Sequence[Row], along: str, policy: str) -> None:
    listed = sorted(found, key=lambda row: float(row.case[along]))
    x = [float(row.case[along]) for row in listed]
    y = [row.measured or 0.0 for row in listed]
    style: dict[str, object] = {"linewidth": 1.4, "markersize": 4.5, **STYLES[policy]}
    axis.plot(x, y, label=LABELS.get(policy, policy), **style)  # type: ignore[arg-type]


def _rates_axis(axis: Axes, values: Sequence[float]) -> None:
    axis.set_xscale("log")
    axis.set_xticks(values, [f"{value / 1e3:g}k" for value in values])
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("requests/s that arrive")


def loads(rows: Rows) -> Figure:
    """Fig. 7: goodput above, utilisation below; one column for each trace."""
    drawn, panels = new_figure(2, 2, width=13, height=8.2)
    for column, trace in enumerate((STABLE, BURSTY)):
        goodput, busy = panels[:, column]
        found = rows.of(load.FIGURE, load.GOODPUT, trace=trace)
        rates = sorted({float(row.case["rate"]) for row in found})
        goodput.plot(rates, rates, color="#cccccc", linewidth=0.9, label="all that arrives")
        for policy in SYSTEMS:  # how else their sentences can be read stands in the next figure
            _points(goodput, rows.of(load.FIGURE, load.GOODPUT, trace=trace, policy=policy), "rate", policy)
            _points(busy, rows.of(load.FIGURE, load.UTILISATION, trace=trace, policy=policy), "rate", policy)
        top = max(row.measured or 0.0 for row in found)
        goodput.set(title=f"{trace}: answers in time", ylabel="goodput (1/s)", ylim=(0, 1.12 * top))
        goodput.yaxis.set_major_formatter(THOUSANDS)
        busy.set(title=f"{trace}: time at work", ylabel="utilisation", ylim=(0, 1.05))
        busy.axhline(load.UTILISATION_MAX[trace], color="#009e73", linewidth=0.8, linestyle=":")
        busy.annotate(
            "published: Nexus stays below",
            (rates[-1], load.UTILISATION_MAX[trace]),
            xytext=(0, -11),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color="#009e73",
        )
        for axis in (goodput, busy):
            _rates_axis(axis, rates)
    panels[0, 0].legend(loc="upper left")
    return finish(drawn)


def latencies(rows: Rows) -> Figure:
    """Fig. 8: distribution functions."""
    drawn, (panels,) = new_figure(1, 2, width=12, height=4.4)
    for axis, name in zip(panels, ("low", "high"), strict=True):
        for row in rows.of(load.LATENCIES, load.LATENCY, load=name):
            assert row.curve is not None, "latencies are curves"
            style = {"linewidth": 1.8, **STYLES[str(row.case["policy"])], "marker": None}
            policy = str(row.case["policy"])
            axis.plot(1e3 * np.array(row.curve.values), row.curve.at, label=LABELS.get(policy, policy), **style)
        axis.axvline(250, color="#bbbbbb", linewidth=0.9)
        axis.set(title=f"{name} load, MAF-stable", xlabel="latency (ms)", xlim=(0, 260), ylim=(0, 1.01))
    panels[0].set_ylabel("share of the requests in time")
    panels[0].legend(loc="lower right")
    return finish(drawn)


def slos(rows: Rows) -> Figure:
    """Fig. 9."""
    drawn, (panels,) = new_figure(1, 2, width=12, height=4.4)
    for axis, trace in zip(panels, (STABLE, BURSTY), strict=True):
        for policy in slo.POLICIES:
            _points(axis, rows.of(slo.FIGURE, slo.GOODPUT, trace=trace, policy=policy), "slo_s", policy)
        wanted = sorted({float(row.case["slo_s"]) for row in rows.of(slo.FIGURE, slo.GOODPUT)})
        axis.set(title=f"{trace}, 3,000 requests/s", ylim=(0, None), xlabel="SLO (ms)")
        axis.set_xscale("log")
        axis.set_xticks(wanted, [f"{1e3 * each:g}" for each in wanted])
        axis.xaxis.set_minor_formatter(NullFormatter())
    panels[0].set_ylabel("goodput (1/s)")
    panels[1].legend(loc="lower right")
    return finish(drawn)


def workers(rows: Rows) -> Figure:
    """Fig. 10: goodput of groups and of one scheduler; steps; and Fig. 11 (b)."""
    drawn, ((total, steps, limits),) = new_figure(1, 3, width=16, height=4.6)
    for trace, colour, marker in ((STABLE, "#d55e00", "o"), (BURSTY, "#e69f00", "s")):
        found = rows.of(scaling.FIGURE, scaling.GOODPUT, trace=trace)
        _line(total, found, color=colour, marker=marker, label=f"groups of 12, {trace}")
    counts = [float(row.case["workers"]) for row in rows.of(scaling.FIGURE, scaling.GOODPUT, trace=STABLE)]
    offered = [scaling.RATE_PER_WORKER_PER_S * count for count in counts]
    total.plot(counts, offered, color="#cccccc", linewidth=0.9, label="all that arrives")
    for policy in (FLEX, CLOCKWORK):
        style = {"color": STYLES[policy]["color"], "marker": STYLES[policy]["marker"]}
        found = rows.of(scaling.STEPS, scaling.SUSTAINED, policy=policy)
        _line(total, found, **style, linestyle=":", label=f"one scheduler, {policy}: what its core decides on")
        found = rows.of(scaling.STEPS, "a step, median", policy=policy)
        _line(steps, found, **style, label=f"{policy}, median")
        found = rows.of(scaling.STEPS, "a step, mean", policy=policy)
        _line(steps, found, **style, linestyle=":", label=f"{policy}, mean")
    steps.axhline(1e6 * scaling.STEP_S_MAX, color="#bbbbbb", linewidth=0.9)
    steps.set(title="a step of one scheduler for all (µs of processor time)", ylim=(5, None))
    log_ticks(steps, "y")
    total.set(title="Fig. 10: goodput (1/s)", ylim=(0, None))
    for limit, colour, marker in (("12", "#d55e00", "o"), ("1", "#0072b2", "^"), ("none", "#555555", "s")):
        for trace, line in ((STABLE, "-"), (BURSTY, ":")):
            label = f"{'no limit: one scheduler' if limit == 'none' else f'limit {limit}'}, {trace}"
            if found := rows.of(scaling.LIMITS, scaling.GOODPUT, limit=limit, trace=trace):
                _line(limits, found, color=colour, marker=marker, linestyle=line, label=label)
    limits.set(title="Fig. 11 (b): workers in a group, goodput (1/s)", ylim=(0, None))
    for axis in (total, limits):
        axis.yaxis.set_major_formatter(THOUSANDS)
    for axis in (total, steps, limits):
        axis.set_xlabel("workers")
        axis.legend()
    return finish(drawn)


def _line(axis: Axes, found: Sequence[Row], **style: object) -> None:
    listed = sorted(found, key=lambda row: float(row.case["workers"]))
    x = [float(row.case["workers"]) for row in listed]
    axis.plot(x, [row.measured or 0.0 for row in listed], linewidth=1.6, markersize=4.5, **style)  # type: ignore[arg-type]


def bursts(rows: Rows) -> Figure:
    """Fig. 11 (a): a panel for each SLO and load, a bar for each policy."""
    drawn, (panels,) = new_figure(1, 4, width=16, height=4.4)
    cases = [(slo_s, name) for slo_s in micro.SLOS_S for name in (micro.STEADY, micro.ISOLATED)]
    for axis, (slo_s, name) in zip(panels, cases, strict=True):
        found = rows.of(micro.FIGURE, micro.IN_TIME, slo_s=slo_s, load=name)
        places = np.arange(len(found))[::-1]
        counts = [row.measured or 0.0 for row in found]
        colours = [str(STYLES[str(row.case["policy"])]["color"]) for row in found]
        axis.barh(places, counts, color=colours, height=0.7)
        for place, count in zip(places, counts, strict=True):
            axis.text(count + 0.015 * max(counts), place, f"{count:,.0f}", va="center", fontsize=8)
        labels = [LABELS.get(str(row.case["policy"]), str(row.case["policy"])) for row in found]
        axis.set_yticks(places, labels if axis is panels[0] else [""] * len(found))
        axis.set(title=f"{name}, {1e3 * slo_s:g} ms", xlabel="requests in time", xlim=(0, 1.2 * max(counts)))
        axis.grid(visible=False, axis="y")
    return finish(drawn)


def readings(rows: Rows) -> Figure:
    """How many times each baseline's goodput FLEX's is, at the highest load of which all were simulated."""
    rate_per_s = load.all_per_s(sorted({float(row.case["rate"]) for row in rows.of(load.FIGURE, load.GOODPUT)}))
    drawn, (panels,) = new_figure(1, 2, width=13, height=4.4)
    for axis, trace in zip(panels, (STABLE, BURSTY), strict=True):
        found = [
            row
            for name in (load.READINGS, load.FIGURE)
            for row in rows.of(name, load.RATIO, trace=trace, rate=rate_per_s)
        ]
        found.sort(key=lambda row: row.measured or 0.0)
        places = np.arange(len(found))
        colours = [str(STYLES[str(row.case["policy"])]["color"]) for row in found]
        values = [min(row.measured or 0.0, 40.0) for row in found]
        axis.barh(places, values, color=colours, height=0.7)
        for place, row in zip(places, found, strict=True):
            value = row.measured or 0.0
            label = f"{value:.1f}" if value < 1_000 else "over 1,000"
            axis.text(min(value, 40.0) * 1.04, place, label, va="center", fontsize=8)
        axis.set_yticks(places, [LABELS.get(str(row.case["policy"]), str(row.case["policy"])) for row in found])
        axis.set(
            title=f"{trace}, {rate_per_s:,.0f} requests/s",
            xlabel="FLEX's goodput over its",
            xscale="log",
            xlim=(0.9, 80),
        )
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.axvline(1, color="#333333", linewidth=0.8)
        axis.grid(visible=False, axis="y")
    return finish(drawn)
