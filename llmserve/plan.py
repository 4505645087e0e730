"""Plan: which models share which GPUs, so that all streams can bear as large bursts as possible (HERD).

Reads an instance: streams with their models, rates and SLOs; models with their memory and batch times; GPUs. Prints the
groups, each with its GPUs, models, load, memory and burst tolerance, the least of which is as large as can be; --output
writes the plan for `llmserve serve --plan`. --previous keeps models where another plan has them, as far as that is as
good.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from rich.console import Console
from rich.status import Status
from rich.table import Table

from llmserve.errors import ConfigError
from llmserve.extras import need, need_plot
from llmserve.herd import TIME_LIMIT_S, HerdGroup, Instance, Plan, plan

NAMES_SHOWN = 4  # models of a group, in the table
LINE_EVERY_S = 2.0  # of progress, without a terminal
FULL, OVERLOADED, LOADED, SPARE = 1.0 + 1e-5, "#d55e00", "#0072b2", "#d0dce6"


# ---- how far it has come ------------------------------------------------------------------------------------------


class SearchProgress:
    """Shows on stderr what a search has found, while the block lasts: one line that changes, or lines now and then."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._began_s = self._told_s = time.perf_counter()
        self._status = Status("planning", console=console) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def __call__(self, found: float | None, bound: float) -> None:
        now_s = time.perf_counter()
        best = "no plan yet" if found is None else f"least burst tolerance {found:.6g}"
        line = f"{best}, at most {bound:.6g}, after {now_s - self._began_s:.1f} s"
        if self._status is not None:
            self._status.update(line)
        elif now_s - self._told_s > LINE_EVERY_S:
            print(line, file=sys.stderr)
            self._told_s = now_s


# ---- what a person sees -------------------------------------------------------------------------------------------


def _print(instance: Instance, found: Plan, console: Console) -> None:
    console.print(_title(instance, found), highlight=False, soft_wrap=True)
    console.print(_table(instance, found))
    for line in _notes(instance, found):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _title(instance: Instance, found: Plan) -> str:
    streams = sum(model.streams for model in found.models)
    form = ", as printed: without regard to groups' loads" if found.as_printed else ""
    return (
        f"{_count(streams, 'stream')} of {_count(len(instance.models), 'model')} on {_count(instance.gpus, 'GPU')} of "
        f"{instance.gpu_memory_gb:g} GB, at most {_count(instance.groups, 'group')} of "
        f"{instance.group_gpus_max:,}{form}"
    )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _table(instance: Instance, found: Plan) -> Table:
    table = Table("group")
    for heading in ("GPUs", "load", "memory\n(GB)", "burst\ntolerance"):
        table.add_column(heading, justify="right")
    table.add_column("models")
    for group in found.groups:
        over = group.load > FULL
        table.add_row(
            group.name,
            f"{group.gpus:,}",
            f"{group.load:.0%}" + (" !" if over else ""),
            f"{group.memory_gb:.4g}",
            _tolerance(group.burst_tolerance),
            _names(group),
            style="bold red" if over else None,
        )
    return table


def _names(group: HerdGroup) -> str:
    more = len(group.models) - NAMES_SHOWN
    return ", ".join(group.models[:NAMES_SHOWN]) + (f" and {more:,} more" if more > 0 else "")


def _tolerance(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _notes(instance: Instance, found: Plan) -> list[str]:
    notes = []
    if found.burst_tolerance is not None:
        how = "the optimum" if found.gap == 0 else f"within {found.gap:.2%} of the most there can be"
        notes.append(
            f"Each model can bear {found.burst_tolerance:.4g} times its average load alone: {how}. "
            f"Planned in {found.solve_s:.2f} s."
        )
    if spare := instance.gpus - sum(group.gpus for group in found.groups):
        notes.append(f"{_count(spare, 'GPU')} {'is' if spare == 1 else 'are'} of no use: no group may have more.")
    if over := [group for group in found.groups if group.load > FULL]:
        worst = max(over, key=lambda group: group.load)
        notes.append(
            f"Overloaded (!): {len(over)} of {len(found.groups)} groups, {worst.name} to {worst.load:.2f} times its "
            "capacity. Without --as-printed no group is."
        )
    if found.moves is not None:
        notes.append(f"Models that move to another group: {found.moves:,}.")
    return notes


def plot(instance: Instance, found: Plan, path: Path) -> None:
    """Groups as bars: their GPUs, how many of them the load fills, what exceeds them; below, burst tolerances.

    Raises ConfigError on a path that cannot be written or is of no kind of picture.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.4, 0.45 * len(found.groups) + 2), 6.4), layout="constrained")
    gpus, tolerances = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_gpus(gpus, found)
    _draw_tolerances(tolerances, found)
    gpus.set_title(_title(instance, found).replace(", at most", "\nat most"), fontsize=9)
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"--plot: cannot write {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"--plot: cannot draw {path}: {error}") from error


def _draw_gpus(axis: Any, found: Plan) -> None:
    places = range(len(found.groups))
    sizes = [group.gpus for group in found.groups]
    loads = [group.load * group.gpus for group in found.groups]
    within = [min(load, size) for load, size in zip(loads, sizes, strict=True)]
    beyond = [max(load - size, 0.0) for load, size in zip(loads, sizes, strict=True)]
    axis.bar(places, sizes, color=SPARE, label="GPUs")
    axis.bar(places, within, color=LOADED, label="GPUs that the average load needs")
    if any(group.load > FULL for group in found.groups):
        axis.bar(places, beyond, bottom=sizes, color=OVERLOADED, hatch="//", label="load without GPUs")
    for place, group in zip(places, found.groups, strict=True):
        at = max(sizes[place], loads[place])
        axis.annotate(f"{group.load:.0%}", (place, at), ha="center", va="bottom", fontsize=8)
    axis.set_ylabel("GPUs")
    axis.set_ylim(top=1.3 * max(*sizes, *loads))  # the legend stands above the bars
    axis.yaxis.get_major_locator().set_params(integer=True)
    axis.legend(fontsize=8)


def _draw_tolerances(axis: Any, found: Plan) -> None:
    known = [(place, group.burst_tolerance) for place, group in enumerate(found.groups) if group.burst_tolerance]
    if known:
        axis.bar([place for place, _ in known], [value for _, value in known], color="0.6")
    if found.burst_tolerance is not None:
        axis.set_ylim(top=1.3 * max(value for _, value in known))
        axis.axhline(found.burst_tolerance, color="0.2", linewidth=1, label=f"least: {found.burst_tolerance:.4g}")
        axis.legend(fontsize=8, loc="upper right")
    axis.set_ylabel("burst tolerance")
    axis.set_xticks(range(len(found.groups)), [group.name for group in found.groups], rotation=45, ha="right")


# ---- the command --------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--instance", required=True, metavar="FILE.json", help="streams, models and GPUs")
    parser.add_argument(
        "--as-printed", action="store_true", help="the paper's programme: groups may have more load than GPUs"
    )
    parser.add_argument(
        "--previous", metavar="PLAN.json", help="a plan whose groups go on, with few models in other groups than there"
    )
    parser.add_argument(
        "--time-limit-s",
        type=float,
        default=TIME_LIMIT_S,
        metavar="X",
        help=f"for the search; what it has found by then is told with its gap (default {TIME_LIMIT_S:g})",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--output", type=Path, metavar="PLAN.json", help="write the plan")
    output.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the groups, their loads and tolerances")
    output.add_argument("--json", action="store_true", help="print the plan as one JSON object instead of the table")


def main(args: argparse.Namespace) -> int:
    if not args.time_limit_s > 0:
        raise ConfigError(f"--time-limit-s must be above 0, not {args.time_limit_s:g}")
    need("plan", "scipy", why="planning")
    need_plot(args.plot)
    instance = Instance.load(args.instance)
    previous = None if args.previous is None else Plan.load(args.previous)
    with SearchProgress() as progress:
        found = plan(
            instance, as_printed=args.as_printed, time_limit_s=args.time_limit_s, previous=previous, on_found=progress
        )
    if args.json:
        print(msgspec.json.encode(found).decode())
    else:
        _print(instance, found, Console())
    if args.output is not None:
        found.save(args.output)
    if args.plot is not None:  # last: what was found is told even if it cannot be drawn
        plot(instance, found, args.plot)
    return 0
