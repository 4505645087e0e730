"""How figures look: one colour and marker for each policy on every page."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
from numpy.typing import NDArray

COLOURS = {
    "smdp": "#d55e00",
    "greedy": "#0072b2",
    "static 8": "#009e73",
    "static 16": "#cc79a7",
    "static 32": "#555555",
    "ad hoc": "#0072b2",  # is greedy
    "largest batch": "#555555",
    "rate": "#e69f00",
    "rate repaired": "#f5d58a",
}
LABELS = {
    "smdp": "SMDP",
    "greedy": "greedy",
    "static 8": "static 8",
    "static 16": "static 16",
    "static 32": "static 32",
}
MARKERS = {"smdp": "o", "greedy": "^", "static 8": "s", "static 16": "D", "static 32": "v"}


def new_figure(rows: int, columns: int, *, width: float, height: float) -> tuple[Figure, NDArray[Any]]:
    """A figure and its axes, (rows, columns). width, height : inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#e6e6e6", linewidth=0.6)
        axis.set_axisbelow(True)
        axis.tick_params(labelsize=8)
    return figure, axes


def log_ticks(axis: Axes) -> None:
    """A logarithmic x-axis with plain numbers at 1, 2 and 5."""
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())


def finish(figure: Figure) -> Figure:
    """Legends without a frame, in small type."""
    for axis in figure.axes:
        legend = axis.get_legend()
        if legend is not None:
            legend.set_frame_on(False)
            for text in legend.get_texts():
                text.set_fontsize(8)
    return figure
