"""Measure the duration and energy of an engine's batches by size, and write a profile (bins/profile.py).

    llmserve profile --engine http://127.0.0.1:8001 --sizes 1,2,4,8,16,32 --output-tokens 64 \\
        --rounds 3 --output profile.json --plot profile.png
    llmserve profile --journal journal.jsonl --busy-power-w 400 --output profile.json

The engine can be any OpenAI-compatible server without other work. The completions of a batch are sent at once. A batch
lasts from the first request to the end of the last answer. Each round runs each size with --output-tokens and with a
quarter of --output-tokens, in random order, to separate the prefill from the steps. Answers have a forced length if the
engine supports min_tokens and ignore_eos (as vLLM does); otherwise the actual lengths count. Leave out sizes beyond the
engine's slots: they would measure the engine's queue.

Energy is measured by NVML if the engine is on this machine and the GPU's driver and the package nvidia-ml-py are
installed. With several GPUs, name the engine's GPUs in CUDA_VISIBLE_DEVICES. A GPU's counter is updated about every 100
ms: choose enough tokens for the smallest batch to take a second or more. Without NVML, energy is --busy-power-w times
the duration. Without NVML and --busy-power-w, the profile has no energy.

--journal FILE fits the batches of barrier engines in a journal (`llmserve serve --barrier --journal`, or `llmserve
simulate`), with real requests, and measures nothing. --plot needs matplotlib.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from bins.fitting import Observation, fit
from bins.profile import Profile
from llmserve.engines.engine import EngineError
from llmserve.engines.measuring import MeasuringPlan, OnBatch, measure
from llmserve.engines.power import GpuEnergy
from llmserve.errors import CannotMeasure
from llmserve.http.connecting import HttpError
from llmserve.live import journal
from llmserve.runtime.extras import need_plot
from llmserve.simulation.observed import observations

IDLE_S = 3.0  # how long the idle power is measured
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


# ---- the profile --------------------------------------------------------------------------------------------------


def profile_of(
    batches: Sequence[Observation],
    *,
    name: str,
    origin: str,
    idle_w: float | None = None,
    busy_w: float | None = None,
) -> Profile:
    """Fit a profile. Its `source` names the origin of times, energy and idle power.

    origin : a sentence without its full stop.  idle_w, busy_w : None: unknown. If the batches have no joules and busy_w
    is None, the profile's energy is unknown. Measurement errors can make the idle power larger than the fitted least
    power while running; the idle power is then reduced to that power.
    Raises ValueError when the batches allow no fit.
    """
    profile = fit(batches, name=name, idle_w=0.0, source=f"{origin}. Energy is not known.", busy_w=busy_w)
    if not profile.energy_known:
        return profile
    measured = profile.energy_source == "measured"
    energy = "Energy measured by NVML." if measured else f"Energy modelled as {busy_w:g} W while running."
    least_w = profile.power_w_min
    if idle_w is None:
        idle = "Idle power unknown, taken as 0 W."
    elif idle_w <= least_w:
        idle = f"Idle power {idle_w:.4g} W."
    else:
        idle = f"Idle power {idle_w:.4g} W, taken as {least_w:.4g} W, the least while running."
    return replace(profile, idle_w=min(idle_w or 0.0, least_w), source=f"{origin}. {energy} {idle}")


def print_table(profile: Profile, console: Console) -> None:
    """Print the measured means and the fit for each measured size."""
    step, energy = profile.step_s, profile.step_j
    headings = ("sequences", "step (ms)", "fitted", "tokens/s", "step (J)", "fitted", "power (W)")
    title = (
        f"{profile.name}: step {1e3 * step.slope:.4g} b + {1e3 * step.intercept:.4g} ms (error {step.error:.1%}), "
        f"prefill {1e3 * profile.prefill_s:.4g} ms"
    )
    table = Table(title=title)
    for heading in headings if profile.energy_known else headings[:4]:
        table.add_column(heading, justify="right")
    joules = dict(zip(energy.sizes, energy.values, strict=True))
    for size, seconds in zip(step.sizes, step.values, strict=True):
        fitted_s, fitted_j = float(step.at(size)), float(energy.at(size))
        row = [f"{size:g}", f"{1e3 * seconds:.4g}", f"{1e3 * fitted_s:.4g}", f"{size / fitted_s:,.0f}"]
        if profile.energy_known:
            row += [f"{value:.4g}" for value in (joules.get(size, math.nan), fitted_j, fitted_j / fitted_s)]
        table.add_row(*row)
    console.print(table)
    console.print(profile.source)


def draw(profile: Profile, path: Path) -> None:
    """Draw the duration of a step and, if known, its energy by size: measured means and fit."""
    from matplotlib.figure import Figure

    panels = [(profile.step_s, 1e3, "step (ms)", "measured")]
    if profile.energy_known:
        panels.append((profile.step_j, 1.0, "step (J)", profile.energy_source))
    figure = Figure(figsize=(4.5 * len(panels), 3.8), layout="constrained", dpi=140)
    row = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (curve, scale, label, points) in zip(row, panels, strict=True):
        sizes, values = [1.0, *curve.sizes], [scale * value for value in curve.values]
        axes.plot(sizes, scale * curve.at(sizes), color="#3b7dd8", lw=2, label="fit")
        axes.plot(curve.sizes, values, "o", color="#222222", ms=5, label=points)
        axes.set(xlabel="sequences that run together", ylabel=label, ylim=(0, 1.15 * max(values)))
        axes.set_title(f"{scale * curve.slope:.4g} b + {scale * curve.intercept:.4g}, error {curve.error:.1%}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.suptitle(profile.name)
    figure.savefig(path)


# ---- the command --------------------------------------------------------------------------------------------------


def main(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit status. Raises LLMServeError."""
    need_plot(args.plot)
    try:
        profile = from_journal(args) if args.journal else from_engine(args)
        profile.save(args.output)
        if args.plot:
            draw(profile, args.plot)
    except (EngineError, ValueError, OSError, HttpError) as error:
        raise CannotMeasure(str(error) or type(error).__name__) from error
    print_table(profile, Console())
    if profile.misfit:
        print(f"llmserve profile: {profile.misfit}", file=sys.stderr)
    return 0


def from_journal(args: argparse.Namespace) -> Profile:
    check_powers(args, None)
    _, steps = journal.read(args.journal)
    batches = observations(steps)
    if not batches:
        raise CannotMeasure(f"{args.journal} has no complete batch of a barrier engine")
    origin = f"Fitted by llmserve profile to the {len(batches)} batches of a journal, {date.today()}"
    name = args.name or args.journal.stem
    return profile_of(batches, name=name, origin=origin, idle_w=args.idle_power_w, busy_w=args.busy_power_w)


def from_engine(args: argparse.Namespace) -> Profile:
    plan = MeasuringPlan(args.sizes, args.output_tokens, args.rounds, args.seed)
    energy = GpuEnergy.open() if urlsplit(args.engine).hostname in LOCAL_HOSTS else None
    check_powers(args, energy)
    idle_s = IDLE_S if args.idle_power_w is None else 0.0
    with progress() as on_batch:
        measured = asyncio.run(measure(args.engine, args.model, plan, energy, idle_s=idle_s, on_batch=on_batch))
    if energy is not None and all(batch.joules is None for batch in measured.batches):
        log_unmeasured(args, "the GPUs counted no joules")
    where = f" on {', '.join(energy.names)}" if energy is not None else ""
    origin = (
        f"Measured by llmserve profile, {date.today()}: {measured.model}{where}, batches of "
        f"{', '.join(map(str, plan.sizes))} sequences with {plan.lengths[0]} and {plan.lengths[1]} output tokens, "
        f"{plan.rounds} round{'s' if plan.rounds > 1 else ''}"
    )
    idle_w = measured.idle_w if args.idle_power_w is None else args.idle_power_w
    name = args.name or measured.model
    return profile_of(measured.batches, name=name, origin=origin, idle_w=idle_w, busy_w=args.busy_power_w)


def check_powers(args: argparse.Namespace, energy: GpuEnergy | None) -> None:
    """Log the source of the energy before any measurement. Raises CannotMeasure on contradictory watts.

    energy : None: no GPU is measured.
    """
    idle_w, busy_w = args.idle_power_w, args.busy_power_w
    if energy is not None:
        log_measured(args, energy.names)
    elif idle_w is not None and busy_w is None:
        raise CannotMeasure("--idle-power-w needs --busy-power-w when no GPU is measured")
    elif idle_w is not None and idle_w > busy_w:
        raise CannotMeasure(f"--idle-power-w is {idle_w:g}, above --busy-power-w, {busy_w:g}")
    else:
        log_unmeasured(args, "a journal holds no joules" if args.journal else "no GPU can be measured here")


def log_measured(args: argparse.Namespace, gpus: Sequence[str]) -> None:
    count = f"{len(gpus)} GPUs" if len(gpus) > 1 else "the GPU"
    log(args, f"energy is measured on {count} {', '.join(gpus)}")
    if len(gpus) > 1:
        log(args, "warning: all GPUs are counted; if the engine uses only some, name these in CUDA_VISIBLE_DEVICES")


def log_unmeasured(args: argparse.Namespace, reason: str) -> None:
    if args.busy_power_w is None:
        log(
            args,
            f"energy is not known: {reason}, and --busy-power-w is not given. The profile has times only; for joules, "
            "give the power while running, --busy-power-w W",
        )


def log(args: argparse.Namespace, text: str) -> None:
    print(f"{args.program}: {text}", file=sys.stderr, flush=True)


@contextmanager
def progress() -> Iterator[OnBatch]:
    """Show progress on stderr: a bar on a terminal, else plain lines."""
    if not sys.stderr.isatty():
        yield print_batch
        return
    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring", total=None)
        yield lambda number, count, batch: bar.update(task, completed=number, total=count)


def print_batch(number: int, count: int, batch: Observation) -> None:
    joules = "" if batch.joules is None else f", {batch.joules:.1f} J"
    figures = f"size {batch.size}, {batch.tokens:g} tokens, {batch.seconds:.3f} s{joules}"
    print(f"batch {number}/{count}: {figures}", file=sys.stderr, flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    of = parser.add_mutually_exclusive_group(required=True)
    of.add_argument("--engine", metavar="URL", help="an OpenAI-compatible server")
    of.add_argument("--journal", type=Path, metavar="FILE", help="fit the batches of a journal instead")
    add("--model", help="model to measure (default: the engine's first)")
    add("--name", help="name of the profile (default: the model's, or the journal's)")
    add("--sizes", type=sizes, default=(1, 2, 4, 8, 16, 32), help="batch sizes (1,2,4,8,16,32)")
    add("--output-tokens", type=whole(2), default=64, help="tokens of the longer answers (%(default)s)")
    add("--rounds", type=whole(1), default=3, help="number of measurements of each batch (%(default)s)")
    add("--idle-power-w", type=power, metavar="W", help="power of the idle engine (default: measured, else 0)")
    add("--busy-power-w", type=power, metavar="W", help="power while running, if no GPU can be measured")
    add("--seed", type=int, default=0, help="seed of the order and the prompts (%(default)s)")
    add("--output", type=Path, default=Path("profile.json"), metavar="FILE", help="the profile (%(default)s)")
    add("--plot", type=Path, metavar="FILE", help="a figure of the profile, as PNG; needs matplotlib")


def sizes(text: str) -> tuple[int, ...]:
    values = tuple(sorted({whole(1)(part) for part in text.split(",")}))
    if len(values) < 2:
        raise argparse.ArgumentTypeError(f"at least two different sizes are required, not {text!r}")
    return values


def whole(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not (text.isascii() and text.isdigit() and int(text) >= least):
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, not {text!r}")
        return int(text)

    return number


def power(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"must be a number of watts above 0, not {text!r}")
    return value
