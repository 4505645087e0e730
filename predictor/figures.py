"""The figures of a predictor's report, as PNG files."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter, StrMethodFormatter
from numpy.typing import ArrayLike, NDArray

from bins.calibration import midpoints
from predictor.evaluate import Gains

DPI = 150
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")  # Okabe and Ito, and a grey
MARKERS = "osD^vPX"
GAIN_TICKS = (0.9, 1, 1.1, 1.2, 1.3, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 10, 15, 20)


def confusion_figure(
    path: Path, confusions: Mapping[int, NDArray[np.intp]], edges: Mapping[int, Sequence[float]], title: str
) -> None:
    """Confusion matrices side by side, as in Multi-Bin's figure 10.

    confusions : by number of bins, (bins, bins) answers by real bin (rows) and predicted bin (columns).
    edges : by number of bins, the inner edges, tokens. Each cell shows its share of the row, in per cent.
    """
    sizes = [len(counts) for counts in confusions.values()]
    figure = Figure(figsize=(4 + 0.85 * sum(sizes), 2.2 + 0.62 * max(sizes)), layout="constrained", facecolor="white")
    panels = figure.subplots(1, len(sizes), width_ratios=[size + 1.5 for size in sizes], squeeze=False)[0]
    for axes, (count, counts) in zip(panels, confusions.items(), strict=True):
        _confusion_panel(axes, counts, _interval_names(edges[count]))
    panels[0].set_ylabel("real length, tokens")
    figure.suptitle(title)
    figure.savefig(path, dpi=DPI)


def _confusion_panel(axes: Axes, counts: NDArray[np.intp], names: list[str]) -> None:
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for (row, column), share in np.ndenumerate(shares):
        color = "white" if share > 0.55 else "black"
        axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", color=color, fontsize=10)
    turned: dict[str, Any] = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if len(names) > 4 else {}
    axes.set_xticks(range(len(names)), names, **turned)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(length=0)
    accuracy = np.trace(counts) / max(counts.sum(), 1)
    axes.set_title(f"{len(names)} bins: {accuracy:.1%} right", fontsize=11)
    axes.set_xlabel("predicted length, tokens")


def _interval_names(edges: Sequence[float]) -> list[str]:
    """The whole lengths of each bin: "< 12", "12-39", "≥ 40"."""
    if not len(edges):
        return ["all"]
    first = [int(np.ceil(edge)) for edge in edges]  # first length of each bin except the first bin
    between = [f"{low}–{high - 1}" if high - 1 > low else f"{low}" for low, high in pairwise(first)]
    return [f"< {first[0]}", *between, f"≥ {first[-1]}"]


def calibration_figure(path: Path, coverages: Mapping[str, ArrayLike], title: str) -> None:
    """Share of answers at or below the predicted quantile, against the level of the quantile.

    coverages : by predictor, (Q,) shares at the levels (i + 0.5) / Q. A predictor on the diagonal is calibrated; above
    the diagonal its lengths are too long, below too short.
    """
    figure = Figure(figsize=(5.6, 5.6), layout="constrained", facecolor="white")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="black", linewidth=1, linestyle="--", label="calibrated")
    for i, (name, coverage) in enumerate(coverages.items()):
        shares = np.asarray(coverage, float)
        color, marker = COLORS[i % len(COLORS)], MARKERS[i % len(MARKERS)]
        axes.plot(midpoints(shares.size), shares, label=name, markersize=5, color=color, marker=marker)
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", title=title)
    axes.set_xlabel("level of the predicted quantile")
    axes.set_ylabel("answers at or below the quantile")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.text(0.30, 0.80, "predictions too long", color="#666666", ha="center")
    axes.text(0.70, 0.20, "predictions too short", color="#666666", ha="center")
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=DPI)


def gains_figure(path: Path, gains: Mapping[str, Gains], title: str) -> None:
    """Saturated throughput gain against the number of bins: a panel per batch size, a line per way to bin.

    The first way to bin (the oracle) is drawn in black, the last way (random bins) dotted in grey.
    """
    batch_sizes = list(next(iter(gains.values())))
    figure = Figure(figsize=(1.4 + 4.0 * len(batch_sizes), 6.2), layout="constrained", facecolor="white")
    panels = figure.subplots(1, len(batch_sizes), sharey=True, squeeze=False)[0]
    for axes, size in zip(panels, batch_sizes, strict=True):
        for i, (name, by_size) in enumerate(gains.items()):
            counts = [1, *by_size[size]]
            axes.plot(counts, [1.0, *by_size[size].values()], label=name, markersize=5, **_line(i, len(gains)))
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(counts))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.set_yscale("log")  # gains are ratios, and the oracle's would compress the other lines
        axes.yaxis.set_major_locator(FixedLocator(GAIN_TICKS))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.set_xlabel("bins")
        axes.set_title(f"batches of {size}", fontsize=11)
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("throughput / throughput without bins")
    figure.suptitle(title)
    lines, names = panels[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=min(len(names), 4), frameon=False)
    figure.savefig(path, dpi=DPI)


def _line(index: int, count: int) -> dict[str, Any]:
    if index == 0:
        return {"color": "black", "marker": "*"}
    if index == count - 1:
        return {"color": "#7F7F7F", "linestyle": ":", "marker": "."}
    return {"color": COLORS[(index - 1) % len(COLORS)], "marker": MARKERS[(index - 1) % len(MARKERS)]}
