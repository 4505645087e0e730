"""Figures that compare the arrangements on the same requests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kit.figures import BLUE, GREEN, GREY, ORANGE, PINK, SKY, YELLOW, new_figure, save

COLORS = {
    "direct": GREY, "priority": ORANGE, "fffs": SKY, "shortest": BLUE, "boost": PINK, "edf": GREEN,
    "round_robin": GREY, "power_of_two": YELLOW,
}  # fmt: skip
SIZE = {"fontsize": 9}
WIDTH = 9.0  # inches: reads well at 900 pixels


def draw_bars(axes: Any, section: Mapping[str, Any], values: Mapping[str, float], shape: str, label: str) -> None:
    """Draw a bar for each arrangement of the section, the first on top. shape : format of the value beside a bar"""
    drawn = [row for row in section["rows"] if row["arrangement"] in values]
    places = range(len(drawn))
    lengths = [values[row["arrangement"]] for row in drawn]
    axes.barh(places, lengths, color=[COLORS[row["way"]] for row in drawn], height=0.72)
    for place, length in zip(places, lengths, strict=True):
        text = axes.text(length + 0.015 * max(lengths), place, format(length, shape), va="center", **SIZE)
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # a line may pass behind it
    axes.set_yticks(places, [row["arrangement"] for row in drawn], **SIZE)
    axes.set_ylim(len(drawn) - 0.4, -0.6)
    axes.set_xlim(0, 1.17 * max(lengths))
    axes.set_xlabel(label, **SIZE)
    axes.tick_params(axis="x", labelsize=9)
    axes.grid(visible=False, axis="y")


def ratios_to(section: Mapping[str, Any], baseline: str, name: str) -> dict[str, float]:
    """Ratios by arrangement; the baseline has 1."""
    return {row["arrangement"]: row.ratios.get(baseline, {}).get(name, 1.0) for row in section["rows"]}


def column_of(section: Mapping[str, Any], name: str) -> dict[str, float]:
    return {row["arrangement"]: row[name] for row in section["rows"]}


def draw_burst(section: Mapping[str, Any], path: Path) -> None:
    figure, ((left, right),) = new_figure(1, 2, width=WIDTH, height=0.32 * len(section["rows"]) + 1.5)
    draw_bars(
        left, section, ratios_to(section, "direct", "latency_s_mean"), ".2f", "mean latency, ratio to vLLM directly"
    )
    draw_bars(right, section, ratios_to(section, "direct", "tokens_per_s"), ".2f", "throughput, ratio to vLLM directly")
    for axes in (left, right):
        axes.axvline(1, color="#555555", lw=1, ls="--")
    right.set_yticklabels([])
    figure.suptitle(f"{section['requests']} requests at once, {section['slots']} slots", fontsize=11)
    save(figure, path)


def draw_load(results: Mapping[str, Any], path: Path) -> None:
    """Rows: slow-down, p99 latency. Columns: the measured loads."""
    titles = {
        "poisson-0.7": "Poisson, 0.7 of capacity",
        "poisson-0.9": "Poisson, 0.9",
        "trace": "conversation trace, 0.9",
    }
    parts = [part for part in titles if part in results]
    height = 2 * (0.27 * len(results[parts[0]]["rows"]) + 0.8)
    figure, grid = new_figure(2, len(parts), width=WIDTH, height=height)
    for column, part in enumerate(parts):
        section = results[part]
        for axes, name, shape, label in (
            (grid[0][column], "slowdown_mean", ".2f", "mean slow-down"),
            (grid[1][column], "latency_s_p99", ".1f", "p99 latency (s)"),
        ):
            draw_bars(axes, section, column_of(section, name), shape, label)
            if column:
                axes.set_yticklabels([])
        grid[0][column].set_title(titles[part], fontsize=10)
    figure.suptitle("Slow-down is latency over the service time of the request on an idle server", fontsize=10)
    save(figure, path)


def draw_routers(section: Mapping[str, Any], path: Path) -> None:
    figure, ((left, right),) = new_figure(1, 2, width=WIDTH, height=0.34 * len(section["rows"]) + 1.5)
    draw_bars(left, section, column_of(section, "latency_s_p95"), ".2f", "p95 latency (s)")
    draw_bars(right, section, column_of(section, "latency_s_mean"), ".2f", "mean latency (s)")
    right.set_yticklabels([])
    figure.suptitle(
        f"Two vLLM servers of {section['slots']} slots, Poisson arrivals at {section['load']:g}", fontsize=11
    )
    save(figure, path)


def draw_figures(results: Mapping[str, Any], prefix: str) -> None:
    """Draw prefix-burst.png, prefix-load.png and prefix-routers.png, as far as their parts were measured."""
    if "burst" in results:
        draw_burst(results["burst"], Path(f"{prefix}-burst.png"))
    if any(part in results for part in ("poisson-0.7", "poisson-0.9", "trace")):
        draw_load(results, Path(f"{prefix}-load.png"))
    if "routers" in results:
        draw_routers(results["routers"], Path(f"{prefix}-routers.png"))
