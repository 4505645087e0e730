"""Prints and draws the result of `llmserve advise`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from llmserve.commands.advise import Advice, BinsRow, Question, is_file
from llmserve.errors import ConfigError
from llmserve.simulation import workload

FEW = 50  # lengths per request of a batch below which a sample is too small to contain the longest batches
SHOWN = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)  # bins in the table, besides the recommended number
DRAWN_SHARE = 0.995  # share of the lengths that is drawn: the few longest would compress the picture
LATENCY_NOTE = (
    "Latency is the time until the batch is full plus the batch's run time. At high load batches also wait for an "
    "engine: simulate. A bin with few requests fills slowly; --release timeout limits the wait."
)
REFILL_NOTE = (
    "Engines with continuous batching, such as vLLM, gain nothing from bins: no answer waits for a longer answer."
)
OPTIMAL_COLOUR, EQUAL_MASS_COLOUR = "#d55e00", "#0072b2"


def print_answer(question: Question, answer: Advice, console: Console) -> None:
    bins = "1 bin, that is no binning" if answer.bins == 1 else f"{answer.bins} bins"
    edges = ", ".join([f"{edge:.6g}" for edge in answer.edges])
    console.print(_title(answer), highlight=False, soft_wrap=True)
    console.print(_table(answer))
    for line in (
        f"Recommended: {bins}: {answer.reason}.",
        *([f"Edges, in tokens: {edges}"] if edges else []),
        f"To try it: {_trial(question, answer, _bins_flags(answer))}",
        *([_few_note(answer)] if answer.lengths < FEW * answer.batch_size else []),
        LATENCY_NOTE,
        _window_note(answer, _trial(question, answer, ["--release", "window"])),
        REFILL_NOTE,
    ):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _title(answer: Advice) -> str:
    engines = f"{answer.engines} engine{'s' if answer.engines > 1 else ''}"
    steps = f"steps of {answer.step_s * 1e3:.4g} ms" + (f" after {answer.prefill_s:.4g} s" if answer.prefill_s else "")
    return (
        f"{answer.lengths:,} lengths of mean {answer.length_mean:.4g} tokens, {answer.arrival_rate_per_s:.4g} "
        f"requests/s in batches of {answer.batch_size}, {engines}, {steps}"
    )


def _trial(question: Question, answer: Advice, release: Sequence[str]) -> str:
    """Return the command that simulates a release, with the effects that the theory ignores."""
    text = question.lengths or ""
    lengths = f"file:{text.removeprefix('file:')}" if is_file(text) else text
    steps = ["--profile", question.profile] if question.profile else ["--step-s", f"{answer.step_s:g}"]
    engines = ["--barrier", "--engines", f"{answer.engines}", "--batch-size", f"{answer.batch_size}"]
    load = ["--lengths", lengths, "--arrival-rate", f"{answer.arrival_rate_per_s:g}", *steps]
    return shlex.join(["llmserve", "simulate", *engines, *release, *load])


def _bins_flags(answer: Advice) -> list[str]:
    edges = ["--edges", ",".join([f"{edge:.6g}" for edge in answer.edges])] if answer.edges else []
    return ["--release", "full", "--bins", f"{answer.bins}", *edges, "--edges-refit-every", "0"]


def _few_note(answer: Advice) -> str:
    return (
        f"With {answer.lengths:,} lengths the figures are rough: if the longest are missing, the throughput is too "
        f"high. Batches of {answer.batch_size} need {FEW * answer.batch_size:,} lengths or more."
    )


def _window_note(answer: Advice, trial: str) -> str:
    return (
        f"--release window, the default with --barrier, needs no bins: a free engine takes requests of similar length "
        f"among the first {answer.window:,} waiting requests, without delay. With a full window it serves "
        f"{answer.window_throughput_per_s:.4g} requests/s, {answer.window_gain:+z.1%}. "
        f"To try it: {trial}"
    )


def _table(answer: Advice) -> Table:
    most = f"{answer.throughput_per_s_max:.4g} requests/s"
    table = Table(caption=f"gains are relative to one bin; limit without padding: {most}")
    headings = ("bins", "equal\nmass", "optimal", "req/s", "fill\n(s)", "rarest\nbin (s)", "latency\n(s)", "busy")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in answer.rows:
        if row.bins in SHOWN or row.bins == answer.bins or row is answer.rows[-1]:
            table.add_row(*_cells(row), style="bold" if row.bins == answer.bins else None)
    return table


def _cells(row: BinsRow) -> list[str]:
    keeps_up = row.utilisation < 1
    return [
        f"{row.bins}",
        f"{row.gain_equal_mass:+z.1%}",
        f"{row.gain:+z.1%}",
        f"{row.throughput_per_s:.4g}",
        _seconds(row.forming_s),
        _seconds(row.forming_s_rarest),
        _seconds(row.latency_s) if keeps_up else "-",
        f"{row.utilisation:.0%}" if keeps_up else "overloaded",
    ]


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def plot(answer: Advice, lengths: workload.Lengths, path: Path) -> None:
    """Draw the lengths with the edges, and throughput and latency by the number of bins.

    Raises ConfigError on a path that cannot be written or has no known picture format.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 9), layout="constrained")
    spread, throughput, latencies = figure.subplots(3, 1)
    _draw_edges(spread, answer, lengths)
    _draw_throughput(throughput, answer)
    _draw_latency(latencies, answer)
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot: cannot draw {path}: {error}") from error


def _draw_edges(axis: Any, answer: Advice, lengths: workload.Lengths) -> None:
    axis.hist(lengths[lengths <= np.quantile(lengths, DRAWN_SHARE)], bins=60, color="0.75")
    for edge in answer.edges:
        axis.axvline(edge, color=OPTIMAL_COLOUR, linewidth=1)
    axis.set(xlabel="output tokens", ylabel="requests", title=f"edges of {answer.bins} bins")


def _draw_throughput(axis: Any, answer: Advice) -> None:
    rows, best = answer.rows, answer.recommended
    bins = [row.bins for row in rows]
    axis.plot(bins, [row.throughput_per_s for row in rows], ".-", color=OPTIMAL_COLOUR, label="optimal edges")
    equal = [row.throughput_per_s_equal_mass for row in rows]
    axis.plot(bins, equal, ".-", color=EQUAL_MASS_COLOUR, label="equal mass")
    axis.plot(best.bins, best.throughput_per_s, "o", markersize=9, color=OPTIMAL_COLOUR, label="recommended")
    for level, style, label in (
        (answer.throughput_per_s_max, ":", "no padding"),
        (answer.window_throughput_per_s, "--", f"window of {answer.window}"),
        (answer.arrival_rate_per_s, "-", "arrivals"),
    ):
        axis.axhline(level, color="0.5", linestyle=style, linewidth=1, label=label)
    axis.set(xlabel="bins", ylabel="requests/s at saturation", ylim=(0, None))
    axis.legend(fontsize=8, framealpha=1, loc="lower right", ncols=2)


def _draw_latency(axis: Any, answer: Advice) -> None:
    rows, best = answer.rows, answer.recommended
    parts = [row.batch_s for row in rows], [row.forming_s for row in rows]
    labels, colours = ["the batch runs", "the batch fills"], ["#d9d9d9", "#a6bddb"]
    axis.stackplot([row.bins for row in rows], *parts, labels=labels, colors=colours)
    axis.plot(best.bins, best.latency_s, "o", markersize=9, color=OPTIMAL_COLOUR, label="recommended")
    axis.set(xlabel="bins", ylabel="mean latency (s)\nwithout waiting for an engine", ylim=(0, None))
    axis.legend(fontsize=8, loc="upper left")
