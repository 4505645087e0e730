"""`llmserve simulate`: the same scheduler under a virtual clock."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import Progress

from llmserve.cluster.journal import Header, Journal
from llmserve.cluster.simulated import SimulatedCluster
from llmserve.errors import ConfigError
from llmserve.request import EngineInfo
from llmserve.scheduling.messages import Action, Event, RequestArrived
from llmserve.scheduling.policies import SchedulingConfig
from llmserve.simulation import workload
from llmserve.simulation.engine_model import TimedEngine
from llmserve.simulation.report import Recorder, Summary, elapsed, print_table, summarise

PROGRESS_EVERY = 1_000  # arrivals between updates of the progress bar
PLAIN_PROGRESS_EVERY = 250_000  # arrivals between lines when there is no terminal


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that fixes a simulated run; the same scenario gives the same journal, byte for byte.

    arrival_rate_per_s  Poisson arrivals; inf: all at once
    lengths             output tokens, one of workload.LENGTHS_HELP
    predictions         what the scheduler is told of them, one of workload.PREDICTIONS_HELP
    step_s, prefill_s   a barrier batch takes prefill_s + step_s * its longest length
    slots               requests that a refill engine runs at once (default: the batch size)
    flush               partial batches left after the last arrival run; otherwise they are dropped
    """

    scheduling: SchedulingConfig
    requests: int = 10_000
    arrival_rate_per_s: float = 5.0
    lengths: str = "lognormal:5.2,0.8"
    predictions: str = "oracle"
    step_s: float = 0.01
    prefill_s: float = 0.0
    engines: int = 1
    barrier: bool = False
    slots: int | None = None
    flush: bool = True
    seed: int = 0


def simulate(
    scenario: Scenario,
    *,
    journal_path: Path | None = None,
    on_arrival: Callable[[int], None] | None = None,
) -> Summary:
    """Run a scenario. on_arrival, when given, is called with the number of arrivals so far, now and then.

    Lengths, arrivals and predictions have random streams of their own, so that changing one leaves the others.
    The first edges come from a sample of the same length distribution, as a trained predictor would bring.
    Raises ConfigError on a scenario that makes no sense.
    """
    _validate(scenario)
    streams = [np.random.default_rng(child) for child in np.random.SeedSequence(scenario.seed).spawn(4)]
    lengths = workload.draw_lengths(scenario.lengths, scenario.requests, streams[0])
    sample = workload.draw_lengths(scenario.lengths, 4_000, streams[1])
    arrivals_s = workload.poisson_arrivals(scenario.arrival_rate_per_s, scenario.requests, streams[2])
    predictions = workload.predict(scenario.predictions, lengths, streams[3])
    header = Header(scenario.scheduling, tuple(sample.tolist()))
    engines = _engines(scenario, lengths.tolist())
    recorder = Recorder(scenario.requests)
    journal = Journal(header, path=journal_path) if journal_path is not None else None
    cluster = SimulatedCluster(
        header.scheduler(), list(engines), journal=journal, on_step=_listener(recorder, on_arrival)
    )
    try:
        cluster.run(workload.requests(arrivals_s, predictions), flush=scenario.flush)
    finally:
        if journal is not None:
            journal.close()
    elapsed_s = elapsed(recorder)
    shares = [engine.utilisation(elapsed_s) for engine in engines]
    return summarise(recorder, lengths, scenario.scheduling.batch_size, shares)


def _validate(scenario: Scenario) -> None:
    for name, least in (("requests", 1), ("engines", 1), ("step_s", 0.0), ("prefill_s", 0.0)):
        if not getattr(scenario, name) >= least:
            raise ConfigError(f"{name} must be at least {least}, not {getattr(scenario, name)}")
    if scenario.slots is not None and scenario.slots < 1:
        raise ConfigError(f"slots must be at least 1, not {scenario.slots}")


def _engines(scenario: Scenario, lengths: list[float]) -> list[TimedEngine]:
    batch_size = scenario.scheduling.batch_size
    slots = batch_size if scenario.barrier or scenario.slots is None else scenario.slots
    return [
        TimedEngine(
            EngineInfo(f"engine{index}", slots, scenario.barrier),
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
    scheduling = SchedulingConfig()
    add = parser.add_argument
    add("--requests", type=int, default=10_000, help="how many arrive (default %(default)s)")
    add(
        "--arrival-rate",
        type=float,
        default=5.0,
        metavar="PER_S",
        help="Poisson arrivals a second; inf: all at once (default %(default)s)",
    )
    add("--lengths", default="lognormal:5.2,0.8", help=f"output tokens: {workload.LENGTHS_HELP} (default %(default)s)")
    add("--predictions", default="oracle", help=f"{workload.PREDICTIONS_HELP} (default %(default)s)")
    add("--bins", type=int, default=scheduling.bins, help="equal-mass length bins (default %(default)s)")
    add("--batch-size", type=int, default=scheduling.batch_size, help="requests in a full batch (default %(default)s)")
    add(
        "--release",
        choices=("full", "timeout", "greedy"),
        default="full",
        help="when a bin lets a batch go (default %(default)s)",
    )
    add(
        "--batch-wait-s",
        type=float,
        default=scheduling.batch_wait_s,
        help="for --release timeout (default %(default)s)",
    )
    add("--order", choices=("fffs",), default="fffs", help="which formed batch runs next (default %(default)s)")
    add("--engines", type=int, default=1, help="(default %(default)s)")
    add("--barrier", action="store_true", help="engines run a batch to its end; otherwise slots refill one by one")
    add("--slots", type=int, default=None, help="of a refill engine (default: the batch size)")
    add("--step-s", type=float, default=0.01, help="seconds a token (default %(default)s)")
    add("--prefill-s", type=float, default=0.0, help="seconds before the first token (default %(default)s)")
    add(
        "--last-batch",
        choices=("flush", "drop"),
        default="flush",
        help="partial batches at the end (default %(default)s)",
    )
    add("--seed", type=int, default=0, help="(default %(default)s)")
    add("--journal", type=Path, default=None, metavar="FILE", help="write every step as JSON lines")
    add("--json", action="store_true", help="print one JSON object instead of the table")


def scenario_from(args: argparse.Namespace) -> Scenario:
    try:
        scheduling = msgspec.convert(
            {
                "bins": args.bins,
                "batch_size": args.batch_size,
                "release": args.release,
                "batch_wait_s": args.batch_wait_s,
                "order": args.order,
                "queue_requests_max": args.requests,
            },
            SchedulingConfig,
        )
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from None
    return Scenario(
        scheduling=scheduling,
        requests=args.requests,
        arrival_rate_per_s=args.arrival_rate,
        lengths=args.lengths,
        predictions=args.predictions,
        step_s=args.step_s,
        prefill_s=args.prefill_s,
        engines=args.engines,
        barrier=args.barrier,
        slots=args.slots,
        flush=args.last_batch == "flush",
        seed=args.seed,
    )


def main(args: argparse.Namespace) -> int:
    scenario = scenario_from(args)
    console = Console(stderr=True)
    if sys.stderr.isatty():
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("simulating", total=scenario.requests)
            summary = simulate(
                scenario,
                journal_path=args.journal,
                on_arrival=lambda count: progress.update(task, completed=count),
            )
    else:
        summary = simulate(scenario, journal_path=args.journal, on_arrival=_say_plainly)
    if args.json:
        print(msgspec.json.encode(summary).decode())
    else:
        kind = "barrier" if scenario.barrier else "refill"
        title = f"{scenario.requests:,} requests, {args.bins} bins, batches of {args.batch_size}, {args.engines} {kind}"
        print_table(summary, f"{title} engine{'s' if args.engines > 1 else ''}", Console())
    return 0


def _say_plainly(count: int) -> None:
    if count % PLAIN_PROGRESS_EVERY == 0:
        print(f"{count:,} requests have arrived", file=sys.stderr)
