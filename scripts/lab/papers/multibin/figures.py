"""The figures of Multi-Bin's simulations, drawn from the rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import matplotlib

matplotlib.use("Agg")

import numpy as np
from kit.figures import finish, log_ticks, new_figure
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from papers.multibin import exponential, gsm8k, uniform
from papers.multibin.exponential import EQUAL_MASS, LEMMA_A1
from papers.multibin.uniform import THEOREM
from papers.multibin.worlds import LATENCY, THROUGHPUT, least_latency
from papers.rows import Row, Rows

THEORY = {"color": "#333333", "linewidth": 0.9, "linestyle": "--"}
RATE = "arrival rate λ (1/s)"


def colours(counts: Sequence[float]) -> dict[float, tuple[float, ...]]:
    """Return a colour for each number of bins, lighter for more bins."""
    shades = colormaps["viridis"](np.linspace(0.0, 0.88, len(counts)))
    return dict(zip(counts, map(tuple, shades), strict=True))


def counts_of(rows: Iterable[Row]) -> list[float]:
    """Return the numbers of bins, ascending."""
    return sorted({float(row.case["k"]) for row in rows if "k" in row.case})


def draw_points(
    axis: Axes, rows: Iterable[Row], along: str, *, colour: object, label: str | None = None, line: str = "-"
) -> None:
    """Draw measured numbers with confidence intervals against a number of their cases."""
    ordered = sorted(
        (row for row in rows if isinstance(row.case[along], float | int)), key=lambda row: float(row.case[along])
    )
    x = [float(row.case[along]) for row in ordered]
    y = [row.measured or 0.0 for row in ordered]
    half = [(row.high or 0.0) - (row.measured or 0.0) for row in ordered]
    axis.errorbar(x, y, half, color=colour, label=label, linestyle=line, linewidth=1.5, marker="o", markersize=3.5)


def doubling_bins(axis: Axes, counts: Sequence[float]) -> None:
    """Make the x-axis a logarithmic axis of numbers of bins."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(counts, [f"{bins:g}" for bins in counts])
    axis.set_xlabel("bins k")


def uniform_lengths(rows: Rows) -> Figure:
    """Fig. 3 and 4, and Theorem 4.2 for more bins."""
    drawn, ((served, waited, limits),) = new_figure(1, 3, width=15, height=4.6)
    counts = counts_of(rows.of("Fig. 4", LATENCY))
    rates = sorted({float(row.case["rate"]) for row in rows.of("Fig. 4", LATENCY)})
    dense = np.linspace(rates[0], rates[-1], 200)
    served.plot(dense, np.minimum(dense, uniform.C_MAX), color="#bbbbbb", linewidth=0.9, label="arrival rate")
    for bins, colour in colours(counts).items():
        label = f"k = {bins:g}"
        draw_points(served, rows.of("Fig. 3", THROUGHPUT, k=bins), "rate", colour=colour, label=label)
        served.axhline(uniform.capacity(int(bins)), **{**THEORY, "color": colour})
        draw_points(waited, rows.of("Fig. 4", LATENCY, k=bins), "rate", colour=colour, label=label)
        waited.plot(dense, [uniform.lemma(int(bins), rate) for rate in dense], **{**THEORY, "color": colour})
    served.axhline(uniform.C_MAX, color="#d55e00", linewidth=1.2)
    served.annotate("$c_{max}$", (rates[0], uniform.C_MAX), xytext=(0, -12), textcoords="offset points")
    served.set(title="Fig. 3: dashed, Theorem 4.2", xlabel=RATE, ylabel="throughput (1/s)", ylim=(0, 13))
    waited.set(title="Fig. 4: dashed, Lemma 5.1", xlabel=RATE, ylabel="mean latency (s)")
    log_ticks(waited, "y")
    served.legend(loc="lower right")
    waited.legend()
    _limits(limits, rows)
    return finish(drawn)


def _limits(axis: Axes, rows: Rows) -> None:
    """Draw throughput at saturation against the number of bins."""
    saturated = [row for row in rows.of(THEOREM, THROUGHPUT) if row.expected is not None]
    dense = np.arange(1, max(counts_of(saturated)) + 1)
    axis.plot(dense, [uniform.capacity(int(bins)) for bins in dense], **THEORY, label="Theorem 4.2")
    draw_points(axis, saturated, "k", colour="#0072b2", label="simulated", line="none")
    axis.axhline(uniform.C_MAX, color="#d55e00", linewidth=1.2, label="$c_{max}$")
    axis.set(title="all at once", ylabel="throughput (1/s)")
    doubling_bins(axis, counts_of(saturated))
    axis.legend(loc="lower right")


def errors(rows: Rows) -> Figure:
    """Fig. 8: a panel for each number of bins."""
    counts = counts_of(rows.of("Fig. 8", THROUGHPUT))
    drawn, (panels,) = new_figure(1, len(counts), width=4.6 * len(counts), height=3.8)
    dense = 0.5 * np.linspace(0.0, 1.0, 41) ** 2  # densest where the curve bends most
    for axis, bins in zip(panels, counts, strict=True):
        exact = [uniform.throughput_with_errors(int(bins), error) for error in dense]
        axis.plot(dense, exact, **THEORY, label="derived")
        draw_points(
            axis, rows.of("Fig. 8", THROUGHPUT, k=bins), "p_e", colour="#0072b2", label="simulated", line="none"
        )
        axis.axhline(uniform.capacity(1), color="#d55e00", linewidth=1.2, label="one bin")
        axis.set(title=f"k = {bins:g}", xlabel="error probability $p_e$", ylim=(6, 11.3))
    panels[0].set_ylabel("throughput (1/s)")
    panels[0].legend()
    return finish(drawn)


def exponential_lengths(rows: Rows) -> Figure:
    """Fig. 9 with both kinds of edges."""
    figure = exponential.FIGURE
    drawn, ((served, waited),) = new_figure(1, 2, width=13, height=5)
    rates = sorted({float(row.case["rate"]) for row in rows.of(figure, LATENCY)})
    dense = np.linspace(rates[0], rates[-1], 200)
    served.plot(dense, dense, color="#bbbbbb", linewidth=0.9, label="arrival rate")
    for bins, colour in colours(counts_of(rows.of(figure, LATENCY))).items():
        for name, line in ((LEMMA_A1, "-"), (EQUAL_MASS, ":")):
            for axis, quantity in ((served, THROUGHPUT), (waited, LATENCY)):
                label = f"k = {bins:g}" if name == LEMMA_A1 else None
                points = rows.of(figure, quantity, edges=name, k=bins)
                draw_points(axis, points, "rate", colour=colour, label=label, line=line)
        served.axhline(exponential.bound(int(bins)), **{**THEORY, "color": colour})
        waited.plot(dense, [exponential.lemma(int(bins), rate) for rate in dense], **{**THEORY, "color": colour})
    served.plot([], [], color="#777777", linestyle=":", label="equal mass")
    served.set(title="(a) dashed: bound of Corollary A.1.1", xlabel=RATE, ylabel="throughput (1/s)", ylim=(0, 17))
    waited.set(title="(b) dashed: Lemma 5.1, Lemma A.1's edges", xlabel=RATE, ylabel="mean latency (s)")
    log_ticks(waited, "y")
    served.legend(loc="lower right")
    return finish(drawn)


def answers(rows: Rows) -> Figure:
    """Fig. 6: latency against the rate; least latency and throughput at saturation against the number of bins."""
    figure = gsm8k.FIGURE
    drawn, ((waited, least),) = new_figure(1, 2, width=13, height=4.8)
    counts = counts_of(rows.of(figure, LATENCY))
    for bins, colour in colours(counts).items():
        draw_points(waited, rows.of(figure, LATENCY, k=bins), "rate", colour=colour, label=f"k = {bins:g}")
    waited.set(title="latency as traffic increases", xlabel=RATE, ylabel="mean latency (s)")
    log_ticks(waited, "y")
    waited.legend(ncols=2)
    best = [least_latency(rows, figure, k=bins).measured for bins in counts]
    served = [rows.number(figure, THROUGHPUT, k=bins, rate="at once") for bins in counts]
    least.plot(counts, best, color="#0072b2", marker="o", markersize=4, label="least mean latency (s)")
    least.plot(counts, served, color="#d55e00", marker="s", markersize=4, label="throughput, all at once (1/s)")
    least.set(title="at the best rate, and at saturation", ylim=(0, None))
    doubling_bins(least, counts)
    least.legend()
    return finish(drawn)
