"""How long `llmserve plan` takes for a large cluster: 10,000,000 streams of 10,000 models on 10,000 GPUs in 850 groups.

    python scripts/lab herd.large --seeds 3 --output docs/results/herd-large.json

Models, streams and SLOs are drawn as in run.py: the average load needs 70 % of the GPUs ("usual") or 90 %
("tight"), all models need 85 % (95 %) of the memory of the groups. A group has at most 128 GPUs, because the model
with the largest load of 10,000 lognormal ones needs 50 to 90 GPUs, and a model has one group.

The command runs as a user runs it: it reads the instance's file of 0.8 GB, plans with its default time limit, and
writes the plan. "Command" is all of that, from the start of the process to its end. Prints a Markdown table.

    python scripts/lab herd.large --growth --output docs/results/herd-growth.json

How the plan's own time grows, in processor time, with 10 streams a model and no limit.
"Cells" divides the models between cells of 1,000 GPUs, each planned alone, in the order of their needs: what a cluster
too large for one plan can do.
"""

from __future__ import annotations

import heapq
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from kit.arguments import add_results, numbers, parser_of
from kit.progress import log
from kit.rows import Row, group, median, read_rows, save_rows, values
from kit.tables import markdown
from msgspec.structs import replace

from llmserve.planning import Instance, Plan, StreamColumns, needs_of, plan, streams_of
from llmserve.planning.instance import Floats
from llmserve.planning.relaxation import Relaxation
from llmserve.planning.task import by_model, task_of
from questions.herd.run import STREAMS_A_MODEL, drawn_instance

T = TypeVar("T")
KINDS = {"usual": (0.7, 0.85), "tight": (0.9, 0.95)}  # load, memory
GPUS_MAX = 128
CASE = ("kind", "models", "groups_max", "seed")
KIB = 1024
GROWTH_SIZES, GROWTH_STREAMS, CELL_GPUS = (1_000, 2_000, 5_000), 10, 1_000
NO_LIMIT_S = 600.0
GPUS_A_GROUP = 10_000 / 850


def main() -> None:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of the processes that solve
    parser = parser_of(__doc__)
    parser.add_argument("--models", type=int, default=10_000, help="and GPUs")
    parser.add_argument("--groups", type=int, default=850)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--growth", action="store_true", help="measure how the time grows instead")
    parser.add_argument("--growth-sizes", type=numbers, default=GROWTH_SIZES, metavar="N,N,...", help="models and GPUs")
    parser.add_argument("--results", type=Path, metavar="FILE", help="show an earlier --output; run nothing")
    add_results(parser)
    args = parser.parse_args()
    if args.growth:
        grown = [grow(size) for size in args.growth_sizes]
        print(growth_table(grown))
        save_rows(args.output, grown)
        return
    rows = read_rows(args.results, CASE) if args.results else list(measure(args.models, args.groups, args.seeds))
    print(table(rows))
    save_rows(args.output, rows)


def measure(models: int, groups: int, seeds: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        for kind, (load, memory) in KINDS.items():
            for seed in range(seeds):
                instance, planned = Path(folder) / "instance.json", Path(folder) / "plan.json"
                drawn = drawn_instance(models, seed, load=load, memory=memory, groups=groups, gpus_max=GPUS_MAX)
                drawn.save(instance)
                del drawn
                row = Row(dict(zip(CASE, (kind, models, groups, seed), strict=True)), run(instance, planned))
                log(f"{kind}, seed {seed}: {row.numbers}")
                yield row


def run(instance: Path, planned: Path) -> dict[str, float | None]:
    command = (sys.executable, "-m", "llmserve", "plan", "--instance", str(instance), "--output", str(planned))
    began_s = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    command_s = time.perf_counter() - began_s
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed with {process.returncode}")
    plan = Plan.load(planned)
    return {
        "command_s": round(command_s, 2),
        "processor_s": round(used.ru_utime + used.ru_stime, 2),
        "memory_gib": round(used.ru_maxrss / KIB**2, 2),
        "plan_s": round(plan.solve_s, 2),
        "burst_tolerance": plan.burst_tolerance,
        "gap": plan.gap,
        "groups": len(plan.groups),
        "load_max": round(max(of.load for of in plan.groups), 4),
    }


# ---- how the time grows -------------------------------------------------------------------------------------------


def grow(size: int) -> Row:
    load, memory = KINDS["usual"]
    limits: dict[str, Any] = {"load": load, "memory": memory, "gpus_max": GPUS_MAX, "streams_a_model": GROWTH_STREAMS}
    instance = drawn_instance(size, 0, groups=round(size / GPUS_A_GROUP), **limits)
    streams = streams_of(instance)
    need = by_model(instance, streams, needs_of(instance, streams))
    task, _ = task_of(instance, need, as_printed=False)
    _, relaxation_s = timed(lambda: Relaxation.of(task, 1.0))
    whole, plan_s = timed(lambda: plan(instance, time_limit_s=NO_LIMIT_S))
    cells, cells_s = timed(lambda: [plan(cell, time_limit_s=NO_LIMIT_S) for cell in cells_of(instance, need)])
    least = min(cell.burst_tolerance for cell in cells if cell.burst_tolerance is not None)
    assert whole.bound is not None
    numbers = {
        "relaxation_s": round(relaxation_s, 3),
        "plan_s": round(plan_s, 2),
        "gap": whole.gap,
        "cells": len(cells),
        "cells_plan_s": round(cells_s, 2),
        "cells_gap": whole.bound / least - 1,
    }
    log(f"{size} models: {numbers}")
    return Row({"models": size}, numbers)


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """(the result, seconds of processor time)."""
    began_s = time.process_time()
    return work(), time.process_time() - began_s


def cells_of(instance: Instance, need: Floats) -> list[Instance]:
    """Deal the models, the largest need first, to cells of about CELL_GPUS GPUs, each time to the least loaded cell."""
    count = max(1, instance.gpus // CELL_GPUS)
    cell = np.zeros(need.size, dtype=np.int64)
    loads = [(0.0, number) for number in range(count)]
    for model in np.argsort(-need, kind="stable").tolist():
        load, number = heapq.heappop(loads)
        cell[model] = number
        heapq.heappush(loads, (load + float(need[model]), number))
    cells = []
    for number in range(count):
        members = [instance.models[k] for k in np.flatnonzero(cell == number).tolist()]
        needs = need[cell == number]
        names = [model.name for model in members]
        part = replace(instance, streams=StreamColumns(names, names, gpus_needed=needs), models=tuple(members))
        cells.append(replace(part, gpus=instance.gpus // count, groups=instance.groups // count))
    return cells


def growth_table(rows: Sequence[Row]) -> str:
    head = [
        "models, GPUs",
        "a relaxation (s)",
        "plan (s)",
        "gap",
        "cells",
        "plans of the cells (s)",
        "gap of the cells",
    ]
    return markdown(
        head,
        [
            [
                *(f"{row['models']:,}", f"{row['relaxation_s']:.2f}", f"{row['plan_s']:.1f}", f"{row['gap']:.2%}"),
                *(str(row["cells"]), f"{row['cells_plan_s']:.1f}", f"{row['cells_gap']:.2%}"),
            ]
            for row in rows
        ],
    )


def table(rows: Sequence[Row]) -> str:
    """Medians over the seeds, but the longest command, the largest memory, gap and load."""
    head = ["streams", "models, GPUs", "groups at most", "case", "command (s)", "longest (s)", "plan (s)", "gap"]
    head += ["most loaded group", "memory (GiB)"]
    lines = []
    for (kind, models, groups), same in group(rows, "kind", "models", "groups_max").items():
        gap = max(values(same, "gap"))
        lines.append(
            [
                *(f"{models * STREAMS_A_MODEL:,}", f"{models:,}", str(groups), kind),
                *(f"{median(same, 'command_s'):.0f}", f"{max(values(same, 'command_s')):.0f}"),
                *(f"{median(same, 'plan_s'):.0f}", "0" if gap == 0 else f"{gap:.2%}"),
                *(f"{max(values(same, 'load_max')):.0%}", f"{max(values(same, 'memory_gib')):.1f}"),
            ]
        )
    return markdown(head, lines)
