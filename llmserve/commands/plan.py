"""Choose which models share which GPUs, so that every stream tolerates the largest possible bursts (HERD).

Reads an instance: streams with their models, rates and SLOs; models with their memory and batch times; GPUs. Prints the
groups, each with its GPUs, models, load, memory and burst tolerance. The plan maximises the least burst tolerance.
--output writes the plan for `llmserve up --plan`. --previous prefers, among equally good plans, one with few changes
from an earlier plan.
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
from llmserve.planning import TIME_LIMIT_S, HerdGroup, Instance, Plan, plan
from llmserve.runtime.extras import need, need_plot

NAMES_SHOWN = 4  # models of a group, in the table
LINE_EVERY_S = 2.0  # interval between progress lines, without a terminal
FULL, OVERLOADED, LOADED, SPARE = 1.0 + 1e-5, "#d55e00", "#0072b2", "#d0dce6"


# ---- progress -----------------------------------------------------------------------------------------------------


class SearchProgress:
    """Shows the progress of a search on stderr inside the block: a status line on a terminal, else a line at times."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._began_s = self._printed_s = time.perf_counter()
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

    def __call__(self, tolerance: float | None, bound: float) -> None:
        now_s = time.perf_counter()
        best = "no plan yet" if tolerance is None else f"least burst tolerance {tolerance:.6g}"
        line = f"{best}, at most {bound:.6g}, after {now_s - self._began_s:.1f} s"
        if self._status is not None:
            self._status.update(line)
        elif now_s - self._printed_s > LINE_EVERY_S:
            print(line, file=sys.stderr)
            self._printed_s = now_s


# ---- output -------------------------------------------------------------------------------------------------------


def _print(instance: Instance, best_plan: Plan, console: Console) -> None:
    console.print(_title(instance, best_plan), highlight=False, soft_wrap=True)
    console.print(_table(instance, best_plan))
    for line in _notes(instance, best_plan):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _title(instance: Instance, best_plan: Plan) -> str:
    streams = sum(model.streams for model in best_plan.models)
    form = ", as printed: without regard to groups' loads" if best_plan.as_printed else ""
    return (
        f"{_count(streams, 'stream')} of {_count(len(instance.models), 'model')} on {_count(instance.gpus, 'GPU')} of "
        f"{instance.gpu_memory_gb:g} GB, at most {_count(instance.groups, 'group')} of "
        f"{instance.group_gpus_max:,}{form}"
    )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _table(instance: Instance, best_plan: Plan) -> Table:
    table = Table("group")
    for heading in ("GPUs", "load", "memory\n(GB)", "burst\ntolerance"):
        table.add_column(heading, justify="right")
    table.add_column("models")
    for group in best_plan.groups:
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


def _notes(instance: Instance, best_plan: Plan) -> list[str]:
    notes = []
    if best_plan.burst_tolerance is not None:
        quality = "the optimum" if best_plan.gap == 0 else f"within {best_plan.gap:.2%} of the upper bound"
        notes.append(
            f"Each model can bear {best_plan.burst_tolerance:.4g} times its average load alone: {quality}. "
            f"Planned in {best_plan.solve_s:.2f} s."
        )
    if spare := instance.gpus - sum(group.gpus for group in best_plan.groups):
        notes.append(f"{_count(spare, 'GPU')} {'is' if spare == 1 else 'are'} unused: no group may have more GPUs.")
    if over := [group for group in best_plan.groups if group.load > FULL]:
        worst = max(over, key=lambda group: group.load)
        notes.append(
            f"Overloaded (!): {len(over)} of {len(best_plan.groups)} groups, {worst.name} to {worst.load:.2f} times "
            "its capacity. Without --as-printed no group is."
        )
    if best_plan.moves is not None:
        notes.append(f"Models that move to another group: {best_plan.moves:,}.")
    return notes


def plot(instance: Instance, best_plan: Plan, path: Path) -> None:
    """Draw a bar per group: its GPUs, the GPUs that its load needs, and the excess; below, burst tolerances.

    Raises ConfigError on a path that cannot be written or has no known picture format.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.4, 0.45 * len(best_plan.groups) + 2), 6.4), layout="constrained")
    gpus, tolerances = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_gpus(gpus, best_plan)
    _draw_tolerances(tolerances, best_plan)
    gpus.set_title(_title(instance, best_plan).replace(", at most", "\nat most"), fontsize=9)
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"--plot: cannot write {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"--plot: cannot draw {path}: {error}") from error


def _draw_gpus(axis: Any, best_plan: Plan) -> None:
    places = range(len(best_plan.groups))
    sizes = [group.gpus for group in best_plan.groups]
    loads = [group.load * group.gpus for group in best_plan.groups]
    within = [min(load, size) for load, size in zip(loads, sizes, strict=True)]
    beyond = [max(load - size, 0.0) for load, size in zip(loads, sizes, strict=True)]
    axis.bar(places, sizes, color=SPARE, label="GPUs")
    axis.bar(places, within, color=LOADED, label="GPUs that the average load needs")
    if any(group.load > FULL for group in best_plan.groups):
        axis.bar(places, beyond, bottom=sizes, color=OVERLOADED, hatch="//", label="load without GPUs")
    for place, group in zip(places, best_plan.groups, strict=True):
        at = max(sizes[place], loads[place])
        axis.annotate(f"{group.load:.0%}", (place, at), ha="center", va="bottom", fontsize=8)
    axis.set_ylabel("GPUs")
    axis.set_ylim(top=1.3 * max(*sizes, *loads))  # space for the legend above the bars
    axis.yaxis.get_major_locator().set_params(integer=True)
    axis.legend(fontsize=8)


def _draw_tolerances(axis: Any, best_plan: Plan) -> None:
    bars = [(place, group.burst_tolerance) for place, group in enumerate(best_plan.groups) if group.burst_tolerance]
    if bars:
        axis.bar([place for place, _ in bars], [value for _, value in bars], color="0.6")
    if best_plan.burst_tolerance is not None:
        axis.set_ylim(top=1.3 * max(value for _, value in bars))
        axis.axhline(
            best_plan.burst_tolerance, color="0.2", linewidth=1, label=f"least: {best_plan.burst_tolerance:.4g}"
        )
        axis.legend(fontsize=8, loc="upper right")
    axis.set_ylabel("burst tolerance")
    axis.set_xticks(range(len(best_plan.groups)), [group.name for group in best_plan.groups], rotation=45, ha="right")


# ---- the command --------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--instance", required=True, metavar="FILE.json", help="streams, models and GPUs")
    parser.add_argument(
        "--as-printed", action="store_true", help="the paper's programme: groups may have more load than GPUs"
    )
    parser.add_argument(
        "--previous", metavar="PLAN.json", help="an earlier plan: keep its groups, and move few models between groups"
    )
    parser.add_argument(
        "--time-limit-s",
        type=float,
        default=TIME_LIMIT_S,
        metavar="X",
        help=f"time limit of the search, which then returns its best plan and the gap (default {TIME_LIMIT_S:g})",
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
        best_plan = plan(
            instance, as_printed=args.as_printed, time_limit_s=args.time_limit_s, previous=previous, on_found=progress
        )
    if args.json:
        print(msgspec.json.encode(best_plan).decode())
    else:
        _print(instance, best_plan, Console())
    if args.output is not None:
        best_plan.save(args.output)
    if args.plot is not None:  # last, so that the plan is printed even if drawing fails
        plot(instance, best_plan, args.plot)
    return 0
