"""The style of figures. Functions that draw import matplotlib themselves: measuring does not need it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

DPI = 130
GREY, BLUE, ORANGE, GREEN = "#8c8c8c", "#0072b2", "#d55e00", "#009e73"  # Okabe and Ito's, as are the next
SKY, YELLOW, PINK = "#56b4e9", "#e69f00", "#cc79a7"


def new_figure(rows: int, columns: int, *, width: float, height: float, **subplots: Any) -> tuple[Figure, NDArray[Any]]:
    """A figure and its axes, an array (rows, columns). width, height : inches.  subplots : matplotlib's options."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    axes = figure.subplots(rows, columns, squeeze=False, **subplots)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#e6e6e6", linewidth=0.6)
        axis.set_axisbelow(True)
        axis.tick_params(labelsize=8)
    return figure, axes


def log_ticks(axis: Axes, which: str = "x") -> None:
    """Make an axis logarithmic, with plain numbers at 1, 2 and 5 times powers of ten. which : "x" or "y"."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set(**{f"{which}scale": "log"})
    ticks: Axis = axis.xaxis if which == "x" else axis.yaxis
    ticks.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ticks.set_major_formatter(StrMethodFormatter("{x:g}"))
    ticks.set_minor_formatter(NullFormatter())


def finish(figure: Figure) -> Figure:
    """Give all legends small type and no frame."""
    for axis in figure.axes:
        legend = axis.get_legend()
        if legend is not None:
            legend.set_frame_on(False)
            for text in legend.get_texts():
                text.set_fontsize(8)
    return figure


def save(figure: Figure, path: Path, *, dpi: int = DPI) -> None:
    """Finish the figure and write it; make the folder if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    finish(figure).savefig(path, dpi=dpi)
