#!/usr/bin/env python
"""Measure all that a GPU can show.

    python scripts/lab/gpu/campaign.py --output docs/results/h200
    python scripts/lab/gpu/campaign.py --parts bins,energy --minutes 9 --lengths file:lengths.csv:output_tokens \\
        --output docs/results/h200
    python scripts/lab/gpu/campaign.py --tiny --output /tmp/rehearsal

    profile    what a step and a batch cost in seconds and joules; other parts need it
    bins       throughput of batches that run to their end, with bins and windows, beside the simulator's forecast
    energy     joules for each token at low load, by release
    predictor  an exported length predictor on the GPU

Each part writes DIR/PART.json after each step and DIR/PART.png at its end. The same command again runs the steps that
have no result yet, as many as fit into --minutes, and says which steps are left. A step that fails does not stop the
others.

--tiny rehearses all parts on a CPU within three minutes: a very small model, no captured graphs, and a pretended
counter of energy. scripts/lab/gpu/run prepares a machine without network, from the wheels that scripts/lab/gpu/wheels
fetches.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import shlex
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.arguments import exit_on, parser_of, positive
from bench.progress import log

from gpu import bins_part, energy_part, predictor_part, profile_part
from gpu.machine import Machine, machine
from gpu.plans import FULL, TINY, CampaignPlan, changed
from gpu.steps import BadOutput, CampaignStep, Clock, Results, left, run_steps

PARTS = {"profile": profile_part, "bins": bins_part, "energy": energy_part, "predictor": predictor_part}
MINUTES = 9.0


def main() -> None:
    args = _arguments()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a burst of requests is as many connections, twice
    plan = changed(TINY if args.tiny else FULL, vars(args))
    args.output.mkdir(parents=True, exist_ok=True)
    with exit_on(BadOutput):
        results = {name: Results(args.output, name, plan.setting(*part.SETTING)) for name, part in PARTS.items()}
    failed = asyncio.run(_run(args, plan, results))
    sys.exit(1 if failed else 0)


async def _run(args: argparse.Namespace, plan: CampaignPlan, results: dict[str, Results]) -> bool:
    """Whether a step failed, now or before, and was not made good."""
    clock = Clock.of(args.minutes)
    counts = []
    async with machine("cpu" if args.tiny else "cuda") as gpu:
        for name in args.parts:
            steps = _steps(name, plan, gpu, results, args.predictor)
            if any(left(steps, results[name])):
                results[name].begin(shlex.join(["python", *sys.argv]), gpu.name)
            await run_steps(steps, results[name], clock)
            await gpu.stop_engine()
            _draw(name, plan, results[name])
            missing = list(left(steps, results[name]))
            counts.append(f"{name}: {len(steps) - len(missing)} of {len(steps)} steps are done")
            counts += [f"    left: {step}" for step in missing]
    for line in counts:
        log(line)
    return any(results[name].failed for name in args.parts)


def _steps(
    name: str, plan: CampaignPlan, gpu: Machine, results: dict[str, Results], predictor: Path | None
) -> list[CampaignStep]:
    makers: dict[str, Callable[[], list[CampaignStep]]] = {
        "profile": lambda: profile_part.steps(plan, gpu),
        "bins": lambda: bins_part.steps(plan, gpu, results["profile"]),
        "energy": lambda: energy_part.steps(plan, gpu, results["profile"], results["energy"]),
        "predictor": lambda: predictor_part.steps(plan, gpu, predictor),
    }
    return makers[name]()


def _draw(name: str, plan: CampaignPlan, results: Results) -> None:
    try:
        PARTS[name].draw(results, results.path.with_suffix(".png"), plan)
    except Exception:  # the numbers are what must come home
        traceback.print_exc(file=sys.stderr)
        log(f"{name}: its figure could not be drawn")


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--parts", type=_parts, default=tuple(PARTS), metavar="PART,...", help="(default: all)")
    add("--minutes", type=positive, default=MINUTES, help="that this run may take (%(default)g)")
    add("--output", type=Path, required=True, metavar="DIR")
    add("--tiny", action="store_true", help="rehearse on a CPU")
    add("--lengths", help="of answers, as llmserve simulate takes them (default: a lognormal distribution)")
    add("--shape", help="of the model for bins and energy")
    add("--predictor", type=Path, metavar="FOLDER", help="an exported predictor (default: the demo's)")
    return parser.parse_args()


def _parts(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(PARTS)}")
    return names


if __name__ == "__main__":
    main()
