"""Replay a server's journal under other orders, and say which one would have served its requests best.

    llmserve serve --engine URL --journal FILE      the server writes the journal
    llmserve tune --journal FILE --minutes 30       afterwards

The replay drives the server's own scheduler with the journal's arrivals, forecasts and real lengths, on simulated
engines that are as fast as the journal shows. A candidate must keep the p99 latency within 1.10 of first come first
served, with a probability of 0.9 for as many requests to come, by resamples of the trace's own blocks; of those
candidates, the best for the goal is named.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from bins.profile import PROFILES, resolve
from llmserve.errors import ConfigError
from llmserve.live import journal
from llmserve.runtime.extras import need_plot
from llmserve.simulation.twin.choice import GOALS, P99_BOUND, Choice, choose
from llmserve.simulation.twin.past import Past
from llmserve.simulation.twin.replay import Twin

LEAST = 50  # answers for a replay that means anything


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--journal", type=Path, metavar="FILE", required=True, help="journal of `llmserve serve`")
    parser.add_argument(
        "--minutes", type=_positive, metavar="N", help="replay the last N minutes of the journal (default: all)"
    )
    parser.add_argument(
        "--for",
        dest="goal",
        choices=GOALS,
        default="mean",
        help="what is to be small: the mean latency, its p99, the share of late requests, or the energy per token "
        "(default mean)",
    )
    parser.add_argument(
        "--profile", metavar="NAME", help=f"power of the engines: {', '.join(PROFILES)}, or a file; for --for energy"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw every candidate's mean against its p99")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError("must be more than 0")
    return value


def main(args: argparse.Namespace) -> int:
    need_plot(args.plot)
    try:
        profile = None if args.profile is None else resolve(args.profile)
    except ValueError as error:
        raise ConfigError(f"profile: {error}") from error
    header, steps = journal.read(args.journal)
    recording = Past(header).read(steps).recording(args.minutes)
    if recording.ended < LEAST:
        raise ConfigError(f"{args.journal} has {recording.ended} answers in that time; a replay needs {LEAST}")
    twin = Twin(recording, profile)
    choice = choose(twin, args.goal, twin.candidates(), left_out=recording.left_out)
    if args.json:
        print(msgspec.json.encode(choice).decode())
    else:
        print_choice(choice, Console())
    if args.plot is not None:
        plot(choice, args.plot)
    return 0


def print_choice(choice: Choice, console: Console) -> None:
    title = f"{choice.requests:,} requests, replayed; latencies beside first come first served"
    table = Table(title=title, title_justify="left")
    table.add_column("candidate", no_wrap=True)
    for column in (
        "mean",
        "p99",
        "sure",
        "mean (s)",
        "p99 (s)",
        *([] if choice.goal in ("mean", "p99") else [choice.goal]),
    ):
        table.add_column(column, justify="right")
    table.add_column("")
    for index, row in enumerate(choice.rows):
        goal = [] if choice.goal in ("mean", "p99") else [f"{row.goal:.3f}"]
        cells = (f"{row.mean:.2f}", f"{row.p99:.2f}", f"{row.sure:.0%}", f"{row.mean_s:.3g}", f"{row.p99_s:.3g}", *goal)
        table.add_row(row.name, *cells, _note(choice, index))
    console.print(table)
    for line in _notes(choice):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _note(choice: Choice, index: int) -> str:
    notes = ["in force"] if index == choice.present else []
    if not choice.rows[index].allowed:
        notes.append(f"p99 above {P99_BOUND:.2f}" if choice.rows[index].p99 > P99_BOUND else "answers fewer")
    elif not choice.rows[index].is_safe:
        notes.append("too close to the bound")
    if index == choice.best:
        notes.append(f"best for {choice.goal}")
    return ", ".join(notes)


def _notes(choice: Choice) -> list[str]:
    """What the replay would take and why, and how far it can be relied on."""
    taken = choice.rows[choice.take]
    verb = "It would take" if choice.changes else "It would keep"
    flags = " ".join([f"--{name.replace('_', '-')} {value}" for name, value in taken.settings.items()])
    lines = [f"{verb} {taken.name}: {choice.reason}.", f"To set it: llmserve serve {flags}"]
    lines.append(
        f"The journal's own mean latency was {choice.observed_mean_s:.3g} s; replayed under the settings in force at "
        f"its end: {choice.replayed_mean_s:.3g} s."
    )
    if choice.recorded < choice.requests:
        lines.append(f"The {choice.recorded:,} requests of the journal were repeated, in blocks of changed places.")
    if choice.forecast:
        lines.append(f"{choice.forecast:,} requests have no real length yet; one of their forecasts' lengths was used.")
    if choice.left_out:
        reasons = ", ".join([f"{count:,} {reason}" for reason, count in sorted(choice.left_out.items())])
        lines.append(f"Left out, for their lengths are unknown: {reasons}.")
    return lines


def plot(choice: Choice, path: Path) -> None:
    """Draw the frontier. Raises ConfigError when the file cannot be written."""
    from llmserve.simulation.figures import frontier_figure, save

    points = [(row.name, row.p99, row.mean) for row in choice.rows]
    title = f"{choice.requests:,} requests under {len(points)} candidates"
    save(frontier_figure(points, P99_BOUND, title, chosen=choice.take), path)
