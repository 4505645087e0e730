"""The figures of Shepherd, drawn from the rows."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib

matplotlib.use("Agg")

import numpy as np
from kit.figures import finish, log_ticks, new_figure
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from papers.rows import Row, Rows
from papers.shepherd import load, micro, scaling, slo
from papers.shepherd.runs import (
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
from papers.shepherd.worlds import BURSTY, STABLE

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
SYSTEMS = (FLEX, CLOCKWORK, NEXUS, FFFS)  # the systems of the paper, and first come, first served
LABELS = {CLOCKWORK: "Clockwork, as described"}
THOUSANDS = FuncFormatter(lambda value, _: f"{value / 1e3:g}k")


def _label(policy: str) -> str:
    return LABELS.get(policy, policy)


def _policy(row: Row) -> str:
    return str(row.case["policy"])


def _points(axis: Axes, rows: Sequence[Row], along: str, policy: str) -> None:
    _line(axis, rows, along, **{"linewidth": 1.4, "label": _label(policy), **STYLES[policy]})


def _line(axis: Axes, rows: Sequence[Row], along: str = "workers", **style: object) -> None:
    ordered = sorted(rows, key=lambda row: float(row.case[along]))
    x = [float(row.case[along]) for row in ordered]
    style = {"linewidth": 1.6, "markersize": 4.5, **style}
    axis.plot(x, [row.measured or 0.0 for row in ordered], **style)  # type: ignore[arg-type]


def _bars(
    axis: Axes, rows: Sequence[Row], values: Sequence[float], texts: Sequence[str], text_x: Sequence[float]
) -> None:
    """Horizontal bars in the colours of the policies, each with a text at text_x."""
    places = np.arange(len(rows))
    axis.barh(places, values, color=[str(STYLES[_policy(row)]["color"]) for row in rows], height=0.7)
    for place, text, x in zip(places, texts, text_x, strict=True):
        axis.text(x, place, text, va="center", fontsize=8)
    axis.set_yticks(places, [_label(_policy(row)) for row in rows])
    axis.grid(visible=False, axis="y")


def _rates_axis(axis: Axes, values: Sequence[float]) -> None:
    axis.set_xscale("log")
    axis.set_xticks(values, [f"{value / 1e3:g}k" for value in values])
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("arrival rate (1/s)")


def loads(rows: Rows) -> Figure:
    """Fig. 7: goodput above, utilisation below; a column for each trace."""
    drawn, panels = new_figure(2, 2, width=13, height=8.2)
    for column, trace in enumerate((STABLE, BURSTY)):
        goodput, busy = panels[:, column]
        goodputs = rows.of(load.FIGURE, load.GOODPUT, trace=trace)
        rates = sorted({float(row.case["rate"]) for row in goodputs})
        goodput.plot(rates, rates, color="#cccccc", linewidth=0.9, label="arrival rate")
        for policy in SYSTEMS:  # the figure `readings` has the other readings
            _points(goodput, rows.of(load.FIGURE, load.GOODPUT, trace=trace, policy=policy), "rate", policy)
            _points(busy, rows.of(load.FIGURE, load.UTILISATION, trace=trace, policy=policy), "rate", policy)
        top = max(row.measured or 0.0 for row in goodputs)
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
            style = {"linewidth": 1.8, "label": _label(_policy(row)), **STYLES[_policy(row)], "marker": None}
            axis.plot(1e3 * np.array(row.curve.values), row.curve.at, **style)
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
        slos_s = sorted({float(row.case["slo_s"]) for row in rows.of(slo.FIGURE, slo.GOODPUT)})
        axis.set(title=f"{trace}, 3,000 requests/s", ylim=(0, None), xlabel="SLO (ms)")
        axis.set_xscale("log")
        axis.set_xticks(slos_s, [f"{1e3 * slo_s:g}" for slo_s in slos_s])
        axis.xaxis.set_minor_formatter(NullFormatter())
    panels[0].set_ylabel("goodput (1/s)")
    panels[1].legend(loc="lower right")
    return finish(drawn)


def workers(rows: Rows) -> Figure:
    """Fig. 10: goodput of groups and of one scheduler; times of steps; and Fig. 11 (b)."""
    drawn, ((total, steps, limits),) = new_figure(1, 3, width=16, height=4.6)
    for trace, colour, marker in ((STABLE, "#d55e00", "o"), (BURSTY, "#e69f00", "s")):
        goodputs = rows.of(scaling.FIGURE, scaling.GOODPUT, trace=trace)
        _line(total, goodputs, color=colour, marker=marker, label=f"groups of 12, {trace}")
    counts = [float(row.case["workers"]) for row in rows.of(scaling.FIGURE, scaling.GOODPUT, trace=STABLE)]
    offered = [scaling.RATE_PER_WORKER_PER_S * count for count in counts]
    total.plot(counts, offered, color="#cccccc", linewidth=0.9, label="arrival rate")
    for policy in (FLEX, CLOCKWORK):
        style = {"color": STYLES[policy]["color"], "marker": STYLES[policy]["marker"]}
        sustained = rows.of(scaling.STEPS, scaling.SUSTAINED, policy=policy)
        _line(total, sustained, **style, linestyle=":", label=f"one scheduler, {policy}: limit of its core")
        _line(steps, rows.of(scaling.STEPS, scaling.MEDIAN, policy=policy), **style, label=f"{policy}, median")
        means = rows.of(scaling.STEPS, scaling.MEAN, policy=policy)
        _line(steps, means, **style, linestyle=":", label=f"{policy}, mean")
    steps.axhline(1e6 * scaling.STEP_S_MAX, color="#bbbbbb", linewidth=0.9)
    steps.set(title="a step of one scheduler for all (µs of processor time)", ylim=(5, None))
    log_ticks(steps, "y")
    total.set(title="Fig. 10: goodput (1/s)", ylim=(0, None))
    for limit, colour, marker in ((12, "#d55e00", "o"), (1, "#0072b2", "^"), ("none", "#555555", "s")):
        for trace, line in ((STABLE, "-"), (BURSTY, ":")):
            label = f"{'no limit: one scheduler' if limit == 'none' else f'limit {limit}'}, {trace}"
            if goodputs := rows.of(scaling.LIMITS, scaling.GOODPUT, limit=limit, trace=trace):
                _line(limits, goodputs, color=colour, marker=marker, linestyle=line, label=label)
    limits.set(title="Fig. 11 (b): workers in a group, goodput (1/s)", ylim=(0, None))
    for axis in (total, limits):
        axis.yaxis.set_major_formatter(THOUSANDS)
    for axis in (total, steps, limits):
        axis.set_xlabel("workers")
        axis.legend()
    return finish(drawn)


def bursts(rows: Rows) -> Figure:
    """Fig. 11 (a): a panel for each SLO and load, a bar for each policy."""
    drawn, (panels,) = new_figure(1, 4, width=16, height=4.4)
    cases = [(slo_s, name) for slo_s in micro.SLOS_S for name in (micro.STEADY, micro.ISOLATED)]
    for axis, (slo_s, name) in zip(panels, cases, strict=True):
        from_below = rows.of(micro.FIGURE, micro.IN_TIME, slo_s=slo_s, load=name)[::-1]
        counts = [row.measured or 0.0 for row in from_below]
        ends = [count + 0.015 * max(counts) for count in counts]
        _bars(axis, from_below, counts, [f"{count:,.0f}" for count in counts], ends)
        if axis is not panels[0]:
            axis.set_yticklabels([])
        axis.set(title=f"{name}, {1e3 * slo_s:g} ms", xlabel="requests in time", xlim=(0, 1.2 * max(counts)))
    return finish(drawn)


def readings(rows: Rows) -> Figure:
    """FLEX's goodput over each baseline's, at the highest load at which all policies are simulated."""
    rate_per_s = load.all_per_s(sorted({float(row.case["rate"]) for row in rows.of(load.FIGURE, load.GOODPUT)}))
    drawn, (panels,) = new_figure(1, 2, width=13, height=4.4)
    for axis, trace in zip(panels, (STABLE, BURSTY), strict=True):
        at_rate = [rows.of(name, load.RATIO, trace=trace, rate=rate_per_s) for name in (load.READINGS, load.FIGURE)]
        ratios = sorted((row for part in at_rate for row in part), key=lambda row: row.measured or 0.0)
        values = [row.measured or 0.0 for row in ratios]
        lengths = [min(value, 40.0) for value in values]
        texts = [f"{value:.1f}" if value < 1_000 else "over 1,000" for value in values]
        _bars(axis, ratios, lengths, texts, [1.04 * length for length in lengths])
        axis.set(
            title=f"{trace}, {rate_per_s:,.0f} requests/s",
            xlabel="FLEX's goodput over the policy's",
            xscale="log",
            xlim=(0.9, 80),
        )
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.axvline(1, color="#333333", linewidth=0.8)
    return finish(drawn)
