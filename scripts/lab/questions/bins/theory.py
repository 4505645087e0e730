"""How many length bins theory recommends, with their edges, gain and waiting time.

    python scripts/lab bins.theory --lengths lengths.csv:output_tokens --batch-size 8 --arrival-rate 4 --plot theory.png

For engines that run each batch to its end (--barrier): requests of similar length wait together until a batch is full,
as under --release full. Prints the performance of each number of bins, by the theory in bins/capacity.py, and
recommends one number.

The performance is cross-validated: edges are fitted to one half of the lengths and judged by the other half, and the
other way round. The recommended edges are fitted to all lengths.
"""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from rich.console import Console
from rich.table import Table

from bins.capacity import batch_time, batch_time_window, forming_s, latency, throughput_max, utilisation
from bins.edges import Edges, equal_mass_edges, index_of, optimal_edges
from bins.profile import PROFILES, StepTimes, resolve
from llmserve.errors import ConfigError
from llmserve.runtime.extras import need_plot
from llmserve.settings.load import add_flags, convert
from llmserve.settings.policies import WINDOW_BATCHES
from llmserve.simulation import workload
from llmserve.simulation.scenario import STEP_S

HEADROOM = 0.8  # above this utilisation engines still keep up, but batches wait long for an engine
ENOUGH = 0.99  # share of the highest throughput that is enough: the last bins cost more waiting than they gain
DRAWN = 20_000  # lengths drawn from a distribution
WINDOW_DRAWS = 1 << 19  # lengths drawn to judge windows

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

Positive = Annotated[float, Meta(gt=0)]


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """The question. None: a default or another field decides, or there is no value."""

    lengths: Annotated[
        str | None, Meta(description=f"output tokens: PATH[:COLUMN] of a file, or {workload.LENGTHS_HELP}; required")
    ] = None
    arrival_rate: Annotated[Positive | None, Meta(description="Poisson arrivals per second; required")] = None
    batch_size: Annotated[int, Meta(ge=1, description="requests in a batch")] = 8
    step_s: Annotated[Positive | None, Meta(description=f"seconds per token (default {STEP_S})")] = None
    profile: Annotated[
        str | None, Meta(description=f"duration of steps: {', '.join(PROFILES)}, or a file; instead of step-s")
    ] = None
    engines: Annotated[int, Meta(ge=1, description="number of equal engines")] = 1
    bins_max: Annotated[int, Meta(ge=1, le=64, description="largest number of bins to try")] = 32
    latency_target_s: Annotated[
        Positive | None, Meta(description="highest throughput within this mean latency, instead of the least latency")
    ] = None
    seed: Annotated[int, Meta(ge=0, description="seed of all random draws")] = 0

    def check(self) -> tuple[str, float]:
        """Return the lengths and the arrival rate. Raises ConfigError if one is missing, or settings contradict."""
        if self.lengths is None:
            raise ConfigError(
                "lengths is required: a file of output lengths, or a distribution such as lognormal:5.2,0.8"
            )
        if self.arrival_rate is None:
            raise ConfigError("arrival_rate is required: requests per second")
        if not math.isfinite(self.arrival_rate):
            raise ConfigError(f"arrival_rate: the number must be finite, not {self.arrival_rate}")
        if self.profile is not None and self.step_s is not None:
            raise ConfigError("step_s cannot be given with profile, which decides it")
        return self.lengths, self.arrival_rate


class BinsRow(msgspec.Struct, frozen=True, kw_only=True):
    """The performance of a number of bins, with optimal edges except in the fields with equal_mass.

    edges                 interior edges, tokens, fitted to all lengths
    throughput_per_s      of all engines at saturation, requests per second; gain: relative to one bin, 0 for no gain
    forming_s             mean wait until the batch is full
    forming_s_rarest      the same in the bin with the fewest requests
    batch_s               mean time of a batch
    latency_s             mean latency by Lemma 5.1, without waiting for an engine
    utilisation           share of time in which engines are busy; from 1 on engines do not keep up
    """

    bins: int
    edges: Edges
    throughput_per_s: float
    gain: float
    throughput_per_s_equal_mass: float
    gain_equal_mass: float
    forming_s: float
    forming_s_rarest: float
    batch_s: float
    latency_s: float
    utilisation: float


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """The result, as --json prints it.

    rows                  performance of 1, 2, ... bins
    bins, edges, reason   the recommendation and its reason
    throughput_per_s_max  limit of all engines without padding, for any number of bins
    window                number of requests in a window of --release window; window_gain: relative to one bin
    """

    lengths: int
    length_mean: float
    batch_size: int
    arrival_rate_per_s: float
    step_s: float
    prefill_s: float
    engines: int
    rows: list[BinsRow]
    bins: int
    edges: Edges
    reason: str
    throughput_per_s_max: float
    window: int
    window_throughput_per_s: float
    window_gain: float

    @property
    def recommended(self) -> BinsRow:
        return self.rows[self.bins - 1]


# ---- the answer ---------------------------------------------------------------------------------------------------


def advise(question: Question) -> tuple[Advice, workload.Lengths]:
    """Return the answer and the lengths behind it. Raises ConfigError on an invalid question."""
    text, rate_per_s = question.check()
    rng = np.random.default_rng(question.seed)
    lengths = rng.permutation(_lengths(text, rng))
    if lengths.size < 2:
        raise ConfigError(
            f"lengths {text!r}: at least two are required, to fit edges to one half and judge by the other"
        )
    step_s, prefill_s = _times(question)
    times = StepTimes(prefill_s, (step_s,))
    rows = _rows(question, lengths, rate_per_s, times)
    row, reason = recommend(rows, question, rate_per_s)
    size, window = question.batch_size, WINDOW_BATCHES * question.batch_size
    window_s = times.batch_s(_judged_window(lengths, window, size, rng), size)
    length_mean = float(lengths.mean())
    answer = Advice(
        lengths=lengths.size,
        length_mean=length_mean,
        batch_size=size,
        arrival_rate_per_s=rate_per_s,
        step_s=step_s,
        prefill_s=prefill_s,
        engines=question.engines,
        rows=rows,
        bins=row.bins,
        edges=row.edges,
        reason=reason,
        throughput_per_s_max=question.engines * throughput_max(size, times.batch_s(length_mean, size)),
        window=window,
        window_throughput_per_s=question.engines * size / window_s,
        window_gain=rows[0].batch_s / window_s - 1,
    )
    return answer, lengths


def _lengths(text: str, rng: np.random.Generator) -> workload.Lengths:
    """Return a file's lengths, each once, or DRAWN lengths from a distribution."""
    if is_file(text):
        return workload.read_lengths(text.removeprefix("file:"))
    return workload.draw_lengths(text, DRAWN, rng)


def is_file(text: str) -> bool:
    """Whether the text names a file, existing or not; otherwise it describes a distribution."""
    name, colon, _ = text.partition(":")
    like_a_path = "*" not in name and ("." in name or "/" in name)  # 0.5*uniform is a distribution
    return name == "file" or not colon or like_a_path or Path(name).is_file()


def _times(question: Question) -> tuple[float, float]:
    """Return (step_s, prefill_s) of a full batch."""
    if question.profile is None:
        return (STEP_S if question.step_s is None else question.step_s), 0.0
    try:
        profile = resolve(question.profile)
    except ValueError as error:
        raise ConfigError(f"profile: {error}") from error
    if profile.slots_max is not None and question.batch_size > profile.slots_max:
        raise ConfigError(
            f"profile {profile.name} covers up to {profile.slots_max} sequences, not {question.batch_size}"
        )
    return float(profile.step_s.at(question.batch_size)), profile.prefill_s


def _rows(question: Question, lengths: workload.Lengths, rate_per_s: float, times: StepTimes) -> list[BinsRow]:
    """Return rows for 1, 2, ... bins, up to bins_max or the largest number into which the lengths can be split."""
    size, engines = question.batch_size, question.engines
    optimal = partial(optimal_edges, batch_size=size)
    rows: list[BinsRow] = []
    for bins in range(1, question.bins_max + 1):
        edges = optimal(lengths, bins)
        if len(edges) + 1 < bins:
            break
        batch_s = times.batch_s(_judged(lengths, bins, size, optimal), size)
        equal_s = times.batch_s(_judged(lengths, bins, size, equal_mass_edges), size)
        one_bin_s = rows[0].batch_s if rows else batch_s
        rarest = float(np.bincount(index_of(edges, lengths)).min()) / lengths.size
        rows.append(
            BinsRow(
                bins=bins,
                edges=edges,
                throughput_per_s=engines * size / batch_s,
                gain=one_bin_s / batch_s - 1,
                throughput_per_s_equal_mass=engines * size / equal_s,
                gain_equal_mass=one_bin_s / equal_s - 1,
                forming_s=forming_s(bins, size, rate_per_s),
                forming_s_rarest=forming_s(1, size, rarest * rate_per_s),
                batch_s=batch_s,
                latency_s=latency(bins, size, rate_per_s, batch_s),
                utilisation=utilisation(size, rate_per_s, batch_s, engines),
            )
        )
    return rows


def _judged(
    lengths: workload.Lengths, bins: int, batch_size: int, fit: Callable[[workload.Lengths, int], Edges]
) -> float:
    """Return the mean steps of a batch, with edges fitted to each half of the lengths and judged by the other half."""
    first, second = _halves(lengths)
    pairs = (first, second), (second, first)
    return sum([test.size * batch_time(test, fit(train, bins), batch_size) for test, train in pairs]) / lengths.size


def _judged_window(lengths: workload.Lengths, window: int, batch_size: int, rng: np.random.Generator) -> float:
    """Return the mean steps of a batch from a window, over each half of the lengths, for comparison with `_judged`."""
    windows = max(1, WINDOW_DRAWS // (2 * window))
    tokens = 0.0
    for half in _halves(lengths):
        tokens += half.size * batch_time_window(half, window, batch_size, rng, windows=windows)
    return tokens / lengths.size


def _halves(lengths: workload.Lengths) -> tuple[workload.Lengths, workload.Lengths]:
    return lengths[::2], lengths[1::2]


# ---- the recommendation -------------------------------------------------------------------------------------------


def recommend(rows: Sequence[BinsRow], question: Question, rate_per_s: float) -> tuple[BinsRow, str]:
    """Return the recommended row and the reason. rows : of 1, 2, ... bins.

    More throughput than the arrivals need has no value. Of the rows with a utilisation of at most HEADROOM, the row
    with the least latency is recommended; with a target, the row with the highest throughput within the target. If no
    row has that utilisation, the fewest bins with nearly the highest throughput (ENOUGH) are recommended.
    """
    candidates = [row for row in rows if row.utilisation <= HEADROOM]
    if not candidates:
        return _highest_throughput(rows, question, rate_per_s)
    fastest = min(candidates, key=lambda row: row.latency_s)
    subject = (
        f"among the numbers that keep up with {rate_per_s:.4g} requests/s and leave engines {1 - HEADROOM:.0%} idle"
    )
    target_s = question.latency_target_s
    if target_s is None:
        return fastest, f"{subject}, the least latency, {fastest.latency_s:.3g} s; more throughput is not needed"
    within = [row for row in candidates if row.latency_s <= target_s]
    if not within:
        return (
            fastest,
            f"{subject}, none has a latency within {target_s:g} s; this is the least, {fastest.latency_s:.3g} s",
        )
    return max(within, key=_throughput), f"{subject}, the highest throughput with a latency within {target_s:g} s"


def _highest_throughput(rows: Sequence[BinsRow], question: Question, rate_per_s: float) -> tuple[BinsRow, str]:
    """Return the recommendation and the reason if engines are too busy with any number of bins."""
    enough = ENOUGH * max(map(_throughput, rows))
    best = next(row for row in rows if row.throughput_per_s >= enough)
    state = f"no number of bins keeps up with {rate_per_s:.4g} requests/s"
    if best.utilisation < 1:
        state += f" and leaves engines {1 - HEADROOM:.0%} idle"
    if question.latency_target_s is not None:
        state += f", as a latency within {question.latency_target_s:g} s requires"
    needed = math.ceil(best.utilisation * question.engines / HEADROOM)
    return (
        best,
        f"{state}, so the highest throughput, {best.throughput_per_s:.3g} requests/s; {needed} engines would suffice",
    )


def _throughput(row: BinsRow) -> float:
    return row.throughput_per_s


# ---- print and draw ----


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


# ---- the command --------------------------------------------------------------------------------------------------


def main(words: Sequence[str] | None = None) -> int:
    """Raises ConfigError on an invalid question."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser, Question, "question")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw edges, throughput and latency")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    args = parser.parse_args(words)
    need_plot(args.plot)
    flags = vars(args)
    question = convert(Question, {name: flags[name] for name in Question.__struct_fields__ if name in flags})
    answer, lengths = advise(question)
    if args.json:
        print(msgspec.json.encode(answer).decode())
    else:
        print_answer(question, answer, Console())
    if args.plot is not None:  # last, so that the answer is printed even if drawing fails
        plot(answer, lengths, args.plot)
    return 0
