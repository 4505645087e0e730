"""Simulate: the same scheduler as the server's, under a virtual clock, with timed engines.

Prints a table of throughput, latency, waiting, batch fill and engine utilisation, or one JSON object.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from rich.console import Console
from rich.progress import Progress

from llmserve.cluster.journal import Header, Journal
from llmserve.cluster.simulated import SimulatedCluster
from llmserve.config import add_flags, convert
from llmserve.errors import ConfigError
from llmserve.request import EngineInfo
from llmserve.scheduling.messages import Action, Event, RequestArrived
from llmserve.scheduling.policies import SchedulingConfig
from llmserve.simulation import workload
from llmserve.simulation.engine_model import TimedEngine
from llmserve.simulation.report import Recorder, Summary, elapsed, print_table, summarise

PROGRESS_EVERY = 1_000  # arrivals between updates of the progress bar
PLAIN_PROGRESS_EVERY = 250_000  # arrivals between lines when there is no terminal
DEFAULTS: dict[str, Any] = {"release": "full"}  # the papers' rule


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """What fixes a simulated run besides the scheduling; the same scenario gives the same journal, byte for byte.

    arrival_rate  requests a second.  A barrier batch takes prefill_s + step_s * its longest length.
    """

    requests: Annotated[int, Meta(ge=1, description="how many arrive")] = 10_000
    arrival_rate: Annotated[float, Meta(gt=0, description="Poisson arrivals a second; inf: all at once")] = 5.0
    lengths: Annotated[str, Meta(description=f"output tokens: {workload.LENGTHS_HELP}")] = "lognormal:5.2,0.8"
    predictions: Annotated[str, Meta(description=f"what is predicted of them: {workload.PREDICTIONS_HELP}")] = "oracle"
    step_s: Annotated[float, Meta(ge=0, description="seconds a token")] = 0.01
    prefill_s: Annotated[float, Meta(ge=0, description="seconds before the first token")] = 0.0
    engines: Annotated[int, Meta(ge=1, description="engines of one kind")] = 1
    barrier: Annotated[bool, Meta(description="engines run a batch to its end; else slots refill one by one")] = False
    slots: Annotated[int, Meta(ge=1, description="of a refill engine")] = 8
    look_ahead: Annotated[int, Meta(ge=0, description="requests that a refill engine may hold beyond its slots")] = 0
    last_batch: Annotated[
        Literal["flush", "drop"], Meta(description="partial batches left after the last arrival run, or are dropped")
    ] = "flush"
    seed: Annotated[int, Meta(ge=0, description="of every random draw")] = 0


def simulate(
    scenario: Scenario,
    scheduling: SchedulingConfig,
    *,
    journal_path: Path | None = None,
    on_arrival: Callable[[int], None] | None = None,
) -> Summary:
    """Run a scenario. on_arrival, when given, is called with the number of arrivals so far, now and then.

    Lengths, arrivals and predictions have random streams of their own, so that changing one leaves the others.
    The first edges come from a sample of the same length distribution, as a trained predictor would bring.
    Raises ConfigError on a scenario that makes no sense.
    """
    streams = [np.random.default_rng(child) for child in np.random.SeedSequence(scenario.seed).spawn(4)]
    lengths = workload.draw_lengths(scenario.lengths, scenario.requests, streams[0])
    sample = workload.draw_lengths(scenario.lengths, 4_000, streams[1])
    arrivals_s = workload.poisson_arrivals(scenario.arrival_rate, scenario.requests, streams[2])
    predictions = workload.predict(scenario.predictions, lengths, streams[3])
    scheduling = scheduling.resolved(scenario.barrier)
    header = Header(scheduling, tuple(sample.tolist()))
    engines = _engines(scenario, scheduling.full_batch, lengths.tolist())
    recorder = Recorder(scenario.requests)
    journal = Journal(header, path=journal_path) if journal_path is not None else None
    cluster = SimulatedCluster(
        header.scheduler(), list(engines), journal=journal, on_step=_listener(recorder, on_arrival)
    )
    try:
        cluster.run(workload.requests(arrivals_s, predictions), flush=scenario.last_batch == "flush")
    finally:
        if journal is not None:
            journal.close()
    elapsed_s = elapsed(recorder)
    shares = [engine.utilisation(elapsed_s) for engine in engines]
    services_s = scenario.prefill_s + scenario.step_s * lengths
    return summarise(recorder, lengths, services_s, scheduling.full_batch, shares)


def _engines(scenario: Scenario, batch_size: int, lengths: list[float]) -> list[TimedEngine]:
    slots, look_ahead = (batch_size, 0) if scenario.barrier else (scenario.slots, scenario.look_ahead)
    return [
        TimedEngine(
            EngineInfo(f"engine{index}", slots, scenario.barrier, look_ahead),
            lengths,
            step_s=scenario.step_s,
            prefill_s=scenario.prefill_s,
        )
        for index in range(scenario.engines)
    ]


def _listener(
    recorder: Recorder, on_arrival: Callable[[int], None] | None
) -> Callable[[float, Event, list[Action]], None]:
    if on_arrival is None:
        return recorder

    def listen(now_s: float, event: Event, actions: list[Action]) -> None:
        recorder(now_s, event, actions)
        if type(event) is RequestArrived and (event.request.id + 1) % PROGRESS_EVERY == 0:
            on_arrival(event.request.id + 1)

    return listen


# ---- the command ------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, Scenario, "scenario")
    add_flags(parser, SchedulingConfig, "scheduling", **DEFAULTS)
    output = parser.add_argument_group("output")
    output.add_argument("--journal", type=Path, metavar="FILE", help="write every scheduling step, as JSON lines")
    output.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def main(args: argparse.Namespace) -> int:
    given = vars(args)
    scenario = convert(
        Scenario, {name: given[name] for name in Scenario.__struct_fields__ if name in given}, "scenario"
    )
    names = SchedulingConfig.__struct_fields__
    values = {
        **DEFAULTS,
        "queue_requests_max": scenario.requests,
        **{name: given[name] for name in names if name in given},
    }
    scheduling = convert(SchedulingConfig, values, "scheduling").resolved(scenario.barrier)
    try:
        summary = _simulate_with_progress(scenario, scheduling, args.journal)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if args.json:
        print(msgspec.json.encode(summary).decode())
    else:
        print_table(summary, _title(scenario, scheduling), Console())
    return 0


def _title(scenario: Scenario, scheduling: SchedulingConfig) -> str:
    kind = "barrier" if scenario.barrier else "refill"
    engines = f"{scenario.engines} {kind} engine{'s' if scenario.engines > 1 else ''}"
    bins = f"{scheduling.bins} bins, batches of {scheduling.batch_size}, {scheduling.order}"
    return f"{scenario.requests:,} requests, {bins}, {engines}"


def _simulate_with_progress(scenario: Scenario, scheduling: SchedulingConfig, journal: Path | None) -> Summary:
    if not sys.stderr.isatty():
        return simulate(scenario, scheduling, journal_path=journal, on_arrival=_say_plainly)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("simulating", total=scenario.requests)
        return simulate(
            scenario,
            scheduling,
            journal_path=journal,
            on_arrival=lambda count: progress.update(task, completed=count),
        )


def _say_plainly(count: int) -> None:
    if count % PLAIN_PROGRESS_EVERY == 0:
        print(f"{count:,} requests have arrived", file=sys.stderr)
