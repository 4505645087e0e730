#!/usr/bin/env python
"""Measure what a GPU can show, the most valuable first, in the minutes that there are.

    python scripts/lab/gpu/campaign.py --minutes 8 --output docs/results/gpu
    python scripts/lab/gpu/campaign.py --plan --minutes 8
    python scripts/lab/gpu/campaign.py --tiny --output /tmp/rehearsal

    profile    what a step, a prefill and a batch cost in seconds and joules; bins and energy need it
    bins       throughput of batches that run to their end, with bins and windows, beside the simulator's forecast
    refill     a burst before an engine whose slots refill, in order of arrival and under `boost`
    energy     joules for each token at low load, by release, beside the forecast
    predictor  an exported length predictor on the GPU

The steps of all parts have one order, by what they are worth. Each result is written to DIR/DEVICE/PART.json at once,
DEVICE being the GPU's short name, such as h100. The same command again goes on where the last run stopped; --earlier
DIR goes on from the results in another folder. A step that fails or hangs gives way to the next. --plan measures
nothing: it prints the order, the estimated times and what is done.

--tiny rehearses all parts on a CPU within three minutes: a very small model, no graphs, and a pretended GPU. --pace 40
rehearses with a clock that runs 40 times too fast. scripts/lab/gpu/README: on a machine without network.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kit import ROOT
from kit.arguments import exit_on, parser_of, positive
from kit.progress import log
from rich.console import Console
from rich.table import Table

from gpu import bins_part, energy_part, predictor_part, profile_part, refill_part
from gpu.device import PretendedNvml
from gpu.machine import Machine, machine
from gpu.plans import FULL, TINY, CampaignPlan, changed
from gpu.steps import BadOutput, CampaignStep, Clock, Results, in_order, planned, run_steps

PARTS: Mapping[str, Any] = {
    part.PART: part for part in (profile_part, bins_part, refill_part, energy_part, predictor_part)
}
MINUTES = 8.0


def main() -> None:
    args = _arguments()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a burst of requests is as many connections, twice
    plan = changed(TINY if args.tiny else FULL, vars(args))
    with exit_on(BadOutput, LookupError):
        if args.plan:
            show_plan(args, plan)
            return
        failed = asyncio.run(_run(args, plan))
    sys.stderr.flush()
    os._exit(1 if failed else 0)  # a step that gave way may have left a thread that never ends


async def _run(args: argparse.Namespace, plan: CampaignPlan) -> bool:
    """Whether a step failed, now or before, and was not made good."""
    clock = Clock(args.minutes, args.pace)
    async with machine("cpu" if args.tiny else "cuda", PretendedNvml() if args.tiny else None) as gpu:
        results = results_of(args.output / gpu.device.key, plan, str(gpu.device))
        if args.earlier is not None:
            go_on(results, args.earlier / gpu.device.key)
        steps = steps_of(args.parts, plan, gpu, results, args.predictor)
        for part in {step.part for step in in_order(steps, results)}:
            results[part].begin(command_of(args), **gpu.facts)
        await run_steps(steps, results, clock, gpu)
    missing = in_order(steps, results)
    failed = [step for step in missing if step.name in results[step.part].failed]
    for step in missing:
        log(f"    left: {step.title}" if step not in failed else f"    failed: {step.title}")
    log(f"{len(steps) - len(missing)} of {len(steps)} steps are done: {args.output / gpu.device.key}")
    return bool(failed)


def command_of(args: argparse.Namespace) -> str:
    """The command that measures the same anywhere: without the folders of this machine."""
    words = ["python", "scripts/lab/gpu/campaign.py", "--minutes", f"{args.minutes:g}"]
    words += ["--parts", ",".join(args.parts)] if args.parts != tuple(PARTS) else []
    words += ["--tiny"] if args.tiny else []
    for name in ("lengths", "shape", "predictor"):
        words += [f"--{name}", str(value)] if (value := getattr(args, name)) is not None else []
    return shlex.join(words)


def results_of(folder: Path, plan: CampaignPlan, device: str) -> dict[str, Results]:
    """The results of each part. Raises BadOutput for results of other settings."""
    return {name: Results(folder, name, plan.setting(*part.SETTING), device) for name, part in PARTS.items()}


def go_on(results: Mapping[str, Results], folder: Path) -> None:
    """Go on from the results of each part in the folder, as far as they have the same settings."""
    for of in results.values():
        try:
            of.go_on_from(folder)
        except BadOutput as error:
            log(f"not gone on from: {error}")


def steps_of(
    parts: Sequence[str],
    plan: CampaignPlan,
    gpu: Machine | None,
    results: Mapping[str, Results],
    predictor: Path | None,
) -> list[CampaignStep]:
    """All steps of these parts. gpu : None: for a plan only"""
    on: Any = gpu
    costs = results[profile_part.PART]
    steps = [
        *profile_part.steps(plan, on),
        *bins_part.steps(plan, on, costs),
        *refill_part.steps(plan, on),
        *energy_part.steps(plan, on, costs, results[energy_part.PART]),
        *predictor_part.steps(plan, on, predictor),
    ]
    return [step for step in steps if step.part in parts]


def show_plan(args: argparse.Namespace, plan: CampaignPlan) -> None:
    """Print, for the device of --device, or for each that has results, what is done and what fits into the time."""
    folders = [args.output / args.device] if args.device else sorted(args.output.glob("*/"))
    for folder in folders or [args.output / "no device yet"]:
        results = results_of(folder, plan, "")
        steps = steps_of(args.parts, plan, None, results, args.predictor)
        order = in_order(steps, results)
        table = Table(
            "step", "about", "by then", f"in {args.minutes:g} minutes", title=folder.name, title_justify="left"
        )
        for step in steps:
            if step not in order:
                table.add_row(step.title, "", "", "done")
        total_s = 0.0
        for step, takes_s, fits in planned(order, 60 * args.minutes):
            total_s += takes_s if fits else 0.0
            again = ", failed before" if step.name in results[step.part].failed else ""
            by_then = f"{total_s / 60:.1f} min" if fits else ""
            name = f"{step.title}{again}"
            table.add_row(name, f"{takes_s:.0f} s", by_then, "measured" if fits else "left")
        Console(width=None if sys.stdout.isatty() else 120).print(table)


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--parts", type=_parts, default=tuple(PARTS), metavar="PART,...", help="(default: all)")
    add("--minutes", type=positive, default=MINUTES, help="that this run may take (%(default)g)")
    add("--output", type=Path, metavar="DIR", help="(default: docs/results/gpu)")
    add("--earlier", type=Path, metavar="DIR", help="results to go on from (default: those of --output)")
    add("--plan", action="store_true", help="print what would be measured, and measure nothing")
    add("--device", help="short name of the GPU for --plan (default: each with results)")
    add("--tiny", action="store_true", help="rehearse on a CPU")
    add("--pace", type=positive, default=1.0, help="of the clock, for rehearsals (%(default)g)")
    add("--lengths", help="of answers, as llmserve simulate takes them (default: a lognormal distribution)")
    add("--shape", help="of the model for bins, refill and energy")
    add("--predictor", type=Path, metavar="FOLDER", help="an exported predictor (default: the demo's)")
    args = parser.parse_args()
    if args.output is None and args.tiny and not args.plan:
        parser.error("a rehearsal's results are none: give --output DIR")
    args.output = args.output or ROOT / "docs/results/gpu"
    return args


def _parts(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(PARTS)}")
    return names


if __name__ == "__main__":
    main()
