"""The figure of docs/results/jobs.md: what lines get, and what that costs online requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kit.figures import BLUE, DPI, GREEN, GREY, ORANGE, PINK, SKY, new_figure

COLOURS = (GREY, PINK, ORANGE, GREEN, BLUE, SKY)


def draw_figure(result: dict[str, Any], path: Path) -> None:
    """One point for each scenario and seed."""
    figure, axes = new_figure(1, 1, width=6.5, height=4.0)
    axis = axes[0, 0]
    for row, colour in zip(result["summary"], COLOURS, strict=True):
        points = [point for point in result["rows"] if point["scenario"] == row["scenario"]]
        x = [point["tokens_of_idle_slots"] for point in points]
        y = [point["burst_ttft_p99_ratio"] for point in points]
        axis.plot(x, y, "o", color=colour, label=row["scenario"], markersize=6)
    axis.axhline(1.05, color=GREY, linewidth=0.8, linestyle="--")
    axis.set_yscale("log")
    axis.set_xlim(0.0, 1.05)
    axis.set_xlabel("tokens of lines, over what the slots that online requests leave could give", fontsize=9)
    axis.set_ylabel("p99 of the time to first token in bursts,\nover online requests alone", fontsize=9)
    axis.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=DPI)
