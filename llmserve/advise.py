"""Advise: how many length bins, which edges, what gain, what wait.

For engines that run a batch to its end (--barrier): requests of like length wait together until a batch is full, as
under --release full. Prints what each number of bins comes to, by the theory in bins/capacity.py, and recommends one.

Edges are fitted to one half of the lengths and judged by the other, both ways; the edges to use are fitted to all.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from rich.console import Console

from bins.capacity import batch_time, batch_time_window, forming_s, latency, throughput_max, utilisation
from bins.edges import Edges, equal_mass_edges, index_of, optimal_edges
from bins.profile import PROFILES, StepTimes, resolve
from llmserve.config import add_flags, convert
from llmserve.errors import ConfigError
from llmserve.extras import need_plot
from llmserve.policies import WINDOW_BATCHES
from llmserve.simulation import workload
from llmserve.simulation.scenario import STEP_S

HEADROOM = 0.8  # engines busier than this share of their time keep up, but batches wait long for them
ENOUGH = 0.99  # of the most throughput is as good: the last bins cost more waiting than they give
DRAWN = 20_000  # lengths, where a distribution is given
WINDOW_DRAWS = 1 << 19  # lengths that go through windows

Positive = Annotated[float, Meta(gt=0)]


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked. None where a default or another field decides, or nothing is said."""

    lengths: Annotated[
        str | None, Meta(description=f"output tokens: PATH[:COLUMN] of a file, or {workload.LENGTHS_HELP}; needed")
    ] = None
    arrival_rate: Annotated[Positive | None, Meta(description="Poisson arrivals a second; needed")] = None
    batch_size: Annotated[int, Meta(ge=1, description="requests in a batch")] = 8
    step_s: Annotated[Positive | None, Meta(description=f"seconds a token (default {STEP_S})")] = None
    profile: Annotated[
        str | None, Meta(description=f"what steps take: {', '.join(PROFILES)}, or a file; instead of step-s")
    ] = None
    engines: Annotated[int, Meta(ge=1, description="that run batches, of one kind")] = 1
    bins_max: Annotated[int, Meta(ge=1, le=64, description="most bins that are tried")] = 32
    latency_target_s: Annotated[
        Positive | None, Meta(description="the most throughput within this mean latency, instead of the least latency")
    ] = None
    seed: Annotated[int, Meta(ge=0, description="of every random draw")] = 0

    def check(self) -> tuple[str, float]:
        """The lengths and the arrival rate. Raises ConfigError without them, and on settings that contradict."""
        if self.lengths is None:
            raise ConfigError(
                "lengths is needed: a file of output lengths, or a distribution such as lognormal:5.2,0.8"
            )
        if self.arrival_rate is None:
            raise ConfigError("arrival_rate is needed: how many requests come a second")
        if not math.isfinite(self.arrival_rate):
            raise ConfigError(f"arrival_rate: a finite number is needed, not {self.arrival_rate}")
        if self.profile is not None and self.step_s is not None:
            raise ConfigError("step_s cannot be given with profile, which decides it")
        return self.lengths, self.arrival_rate


class BinsRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a number of bins comes to, with optimal edges unless it says equal mass.

    edges                 interior edges, tokens, fitted to all lengths
    throughput_per_s      of all engines at saturation, requests a second; gain: over one bin, 0 for none
    forming_s             mean wait until the batch is full
    forming_s_rarest      the same in the bin that fewest requests fall into
    batch_s               mean time of a batch
    latency_s             mean, of Lemma 5.1: when no batch waits for an engine
    utilisation           share of their time that engines are busy; from 1 on they do not keep up
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
    """What was found, as --json prints it.

    rows                  of 1, 2, ... bins
    bins, edges, reason   recommended, and why
    throughput_per_s_max  of all engines without any padding, however many bins
    window                requests among which --release window looks for neighbours by length; its gain over one bin
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
    """The answer and the lengths it rests on. Raises ConfigError on a question that makes no sense."""
    text, rate_per_s = question.check()
    rng = np.random.default_rng(question.seed)
    lengths = rng.permutation(_lengths(text, rng))
    if lengths.size < 2:
        raise ConfigError(f"lengths {text!r}: at least two are needed, to fit edges to some and judge them by others")
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
    """A file's lengths, each once; else as many as are drawn from a distribution."""
    if is_file(text):
        return workload.read_lengths(text.removeprefix("file:"))
    return workload.draw_lengths(text, DRAWN, rng)


def is_file(text: str) -> bool:
    """Whether it names a file, if only one that is not there; else it describes a distribution."""
    name, colon, _ = text.partition(":")
    like_a_path = "*" not in name and ("." in name or "/" in name)  # 0.5*uniform is none
    return name == "file" or not colon or like_a_path or Path(name).is_file()


def _times(question: Question) -> tuple[float, float]:
    """(step_s, prefill_s) of a full batch."""
    if question.profile is None:
        return (STEP_S if question.step_s is None else question.step_s), 0.0
    try:
        profile = resolve(question.profile)
    except ValueError as error:
        raise ConfigError(f"profile: {error}") from error
    if profile.slots_max is not None and question.batch_size > profile.slots_max:
        raise ConfigError(f"profile {profile.name} is of {profile.slots_max} sequences, not {question.batch_size}")
    return float(profile.step_s.at(question.batch_size)), profile.prefill_s


def _rows(question: Question, lengths: workload.Lengths, rate_per_s: float, times: StepTimes) -> list[BinsRow]:
    """Of 1, 2, ..., bins_max bins, or as many as the lengths can be cut into."""
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
    """Tokens of a batch with edges that are fitted to each half of the lengths and judged by the other."""
    first, second = _halves(lengths)
    pairs = (first, second), (second, first)
    return sum([each.size * batch_time(each, fit(other, bins), batch_size) for each, other in pairs]) / lengths.size


def _judged_window(lengths: workload.Lengths, window: int, batch_size: int, rng: np.random.Generator) -> float:
    """Tokens of a batch from a window, of each half of the lengths: what bins are judged by, or gains would differ."""
    windows = max(1, WINDOW_DRAWS // (2 * window))
    tokens = 0.0
    for half in _halves(lengths):
        tokens += half.size * batch_time_window(half, window, batch_size, rng, windows=windows)
    return tokens / lengths.size


def _halves(lengths: workload.Lengths) -> tuple[workload.Lengths, workload.Lengths]:
    return lengths[::2], lengths[1::2]


# ---- the recommendation -------------------------------------------------------------------------------------------


def recommend(rows: Sequence[BinsRow], question: Question, rate_per_s: float) -> tuple[BinsRow, str]:
    """One of the rows, and why. rows : of 1, 2, ... bins.

    Throughput that arrivals do not need is of no use: of those that keep up with room to spare, the least latency, or
    with a target the most throughput within it. Where none does, the fewest bins of all but the most throughput.
    """
    roomy = [row for row in rows if row.utilisation <= HEADROOM]
    if not roomy:
        return _most(rows, question, rate_per_s)
    fastest = min(roomy, key=lambda row: row.latency_s)
    those = f"of those that keep up with {rate_per_s:.4g} requests/s and leave engines {1 - HEADROOM:.0%} idle"
    target_s = question.latency_target_s
    if target_s is None:
        return fastest, f"{those}, the least latency, {fastest.latency_s:.3g} s; more throughput is not needed"
    within = [row for row in roomy if row.latency_s <= target_s]
    if not within:
        return (
            fastest,
            f"{those}, none has a latency within {target_s:g} s; this is the least, {fastest.latency_s:.3g} s",
        )
    return max(within, key=_throughput), f"{those}, the most throughput with a latency within {target_s:g} s"


def _most(rows: Sequence[BinsRow], question: Question, rate_per_s: float) -> tuple[BinsRow, str]:
    """Where engines are too busy whatever the bins."""
    enough = ENOUGH * max(map(_throughput, rows))
    found = next(row for row in rows if row.throughput_per_s >= enough)
    state = f"no number of bins keeps up with {rate_per_s:.4g} requests/s"
    if found.utilisation < 1:
        state += f" and leaves engines {1 - HEADROOM:.0%} idle"
    if question.latency_target_s is not None:
        state += f", as a latency within {question.latency_target_s:g} s would need"
    needed = math.ceil(found.utilisation * question.engines / HEADROOM)
    return found, f"{state}, so the most throughput, {found.throughput_per_s:.3g} requests/s; {needed} engines would do"


def _throughput(row: BinsRow) -> float:
    return row.throughput_per_s


# ---- the command --------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, Question, "question")
    output = parser.add_argument_group("output")
    output.add_argument("--plot", type=Path, metavar="FILE.png", help="draw edges, throughput and latency")
    output.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def main(args: argparse.Namespace) -> int:
    from llmserve import advise_report

    need_plot(args.plot)
    given = vars(args)
    question = convert(Question, {name: given[name] for name in Question.__struct_fields__ if name in given})
    answer, lengths = advise(question)
    if args.json:
        print(msgspec.json.encode(answer).decode())
    else:
        advise_report.print_answer(question, answer, Console())
    if args.plot is not None:  # last: what was found is told even if it cannot be drawn
        advise_report.plot(answer, lengths, args.plot)
    return 0
