"""Simulate: the same scheduler as the server's, under a virtual clock, with timed engines.

Prints a table of throughput, latency, waiting, batches, engine utilisation and, with a profile, energy; or one JSON
object. Steps take a constant time (--step-s) or what they take on a measured engine (--profile); requests come at
random (--arrival-rate or --load, --lengths) or as they were recorded (--trace).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from rich.console import Console
from rich.progress import Progress

from bins.dispatch import DispatchSolver
from bins.profile import PROFILES, resolve
from llmserve.cluster.journal import Header, Journal
from llmserve.cluster.simulated import SimulatedCluster
from llmserve.config import add_flags, convert
from llmserve.errors import ConfigError
from llmserve.request import EngineInfo
from llmserve.scheduling.messages import Action, Event, RequestArrived
from llmserve.scheduling.policies import DispatchConfig, SchedulingConfig
from llmserve.simulation import workload
from llmserve.simulation.engine_model import ProfileEngine, TimedEngine
from llmserve.simulation.report import Recorder, Summary, elapsed, print_table, summarise

PROGRESS_EVERY = 1_000  # arrivals between updates of the progress bar
PLAIN_PROGRESS_EVERY = 250_000  # arrivals between lines when there is no terminal
QUEUE_REQUESTS_MAX = 10**9  # a queue that refuses nobody
RELEASE_HELP = "full with --barrier, as in the papers; greedy without"
EDGES_SAMPLE = 4_000  # lengths that the first edges are made of
LOAD_SAMPLE = 40_000  # lengths that an engine's capacity is computed from
EXCLUDED = {  # what each of these leaves no room for
    "profile": ("step_s", "prefill_s"),
    "load": ("arrival_rate",),
    "trace": ("lengths", "arrival_rate", "load"),
}
REQUESTS, ARRIVAL_RATE, LENGTHS, STEP_S = 10_000, 5.0, "lognormal:5.2,0.8", 0.01  # where nothing is said

T = TypeVar("T")
Rate = Annotated[float, Meta(gt=0)]
Seconds = Annotated[float, Meta(ge=0)]


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """What fixes a simulated run besides the scheduling; the same scenario gives the same journal, byte for byte.

    None where a default or another field decides.  arrival_rate  requests a second.  A barrier batch takes prefill_s +
    step_s * its longest length, or what its profile says.
    """

    requests: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description=f"how many arrive (default {REQUESTS}); of a trace: at most (default: all)"),
    ] = None
    arrival_rate: Annotated[
        Rate | None, Meta(description=f"Poisson arrivals a second; inf: all at once (default {ARRIVAL_RATE})")
    ] = None
    load: Annotated[
        Rate | None,
        Meta(
            description="instead of arrival-rate: Poisson arrivals at this share of what the engines serve in full "
            "batches of one bin, all as long as their longest (refill: of as many as there are slots); 1 is all that "
            "one bin can serve, and more bins serve more",
        ),
    ] = None
    lengths: Annotated[str | None, Meta(description=f"output tokens: {workload.LENGTHS_HELP} (default {LENGTHS})")] = (
        None
    )
    trace: Annotated[
        str | None,
        Meta(
            description=f"CSV file (.gz: compressed) of arrivals and lengths, by its columns "
            f"{', '.join(workload.TRACE_COLUMNS)}; instead of arrival-rate, load and lengths"
        ),
    ] = None
    trace_speed: Annotated[Rate | None, Meta(description="times as fast as the trace was recorded (default 1)")] = None
    predictions: Annotated[str, Meta(description=f"what is predicted of them: {workload.PREDICTIONS_HELP}")] = "oracle"
    profile: Annotated[
        str | None,
        Meta(
            description=f"what steps cost: {', '.join(PROFILES)}, or a file; instead of step-s and prefill-s, and "
            "energy is reported"
        ),
    ] = None
    step_s: Annotated[Seconds | None, Meta(description=f"seconds a token (default {STEP_S})")] = None
    prefill_s: Annotated[Seconds | None, Meta(description="seconds before the first token (default 0)")] = None
    engines: Annotated[int, Meta(ge=1, description="engines of one kind")] = 1
    barrier: Annotated[bool, Meta(description="engines run a batch to its end; else slots refill one by one")] = False
    slots: Annotated[int, Meta(ge=1, description="of a refill engine")] = 8
    look_ahead: Annotated[int, Meta(ge=0, description="requests that a refill engine may hold beyond its slots")] = 0
    last_batch: Annotated[
        Literal["flush", "drop"], Meta(description="partial batches left after the last arrival run, or are dropped")
    ] = "flush"
    seed: Annotated[int, Meta(ge=0, description="of every random draw")] = 0

    def check(self) -> None:
        """Raises ConfigError on settings that contradict each other."""
        for name, others in EXCLUDED.items():
            for other in others:
                if getattr(self, name) is not None and getattr(self, other) is not None:
                    raise ConfigError(f"{other} cannot be given with {name}, which decides it")
        if self.trace_speed is not None and self.trace is None:
            raise ConfigError("trace_speed: there is no trace to speed up")

    def sequences_max(self, scheduling: SchedulingConfig) -> int:
        """That run on one engine at once."""
        return scheduling.full_batch if self.barrier else self.slots


@dataclass(frozen=True, slots=True)
class Workload:
    """What a run serves; request ids count from 0 in order of arrival.

    predictions         None: nothing predicts
    scores, lengths     of a sample of requests like these: what bins go by, and how long their answers are
    arrival_rate_per_s  asked for, or the trace's mean; inf when all come at once
    """

    trace: workload.Trace
    predictions: workload.Predictions | None
    scores: tuple[float, ...]
    lengths: tuple[float, ...]
    arrival_rate_per_s: float

    def __len__(self) -> int:
        return len(self.trace)


def simulate(
    scenario: Scenario,
    scheduling: SchedulingConfig,
    *,
    journal_path: Path | None = None,
    on_arrival: Callable[[int], None] | None = None,
    dispatch: DispatchConfig | None = None,
) -> Summary:
    """Run a scenario. on_arrival, when given, is called with the number of arrivals so far, now and then.

    Raises ConfigError on a scenario that makes no sense.
    """
    scheduling = scheduling.resolved(scenario.barrier)
    work = prepare(scenario, scheduling)
    return run(scenario, scheduling, work, journal_path=journal_path, on_arrival=on_arrival, dispatch=dispatch)


# ---- what arrives -----------------------------------------------------------------------------------------------


def prepare(scenario: Scenario, scheduling: SchedulingConfig) -> Workload:
    """What the scenario serves. scheduling : resolved.

    Lengths, arrivals and predictions have random streams of their own, so that changing one leaves the others.
    The first edges come from a sample of the same length distribution, as a trained predictor would bring.
    Raises ConfigError on a scenario that makes no sense.
    """
    scenario.check()
    streams = [np.random.default_rng(child) for child in np.random.SeedSequence(scenario.seed).spawn(5)]
    if scenario.trace is not None:
        trace = workload.read_trace(scenario.trace, scenario.requests)
        if scenario.trace_speed is not None:
            trace = workload.replay_faster(trace, scenario.trace_speed)
        rate_per_s = trace.rate_per_s
        sample = streams[1].permutation(trace.output_tokens)[:EDGES_SAMPLE]
    else:
        rate_per_s = _arrival_rate_per_s(scenario, scheduling, streams[4])
        trace = _draw(scenario, rate_per_s, streams[0], streams[2])
        sample = workload.draw_lengths(_or(scenario.lengths, LENGTHS), EDGES_SAMPLE, streams[1])
    predictions = workload.predict(scenario.predictions, trace.output_tokens, streams[3])
    scores = _scores(scenario, scheduling, sample, streams[1])
    return Workload(trace, predictions, scores, tuple(sample.tolist()), rate_per_s)


def _draw(
    scenario: Scenario, rate_per_s: float, lengths_rng: np.random.Generator, arrivals_rng: np.random.Generator
) -> workload.Trace:
    count = _or(scenario.requests, REQUESTS)
    lengths = workload.draw_lengths(_or(scenario.lengths, LENGTHS), count, lengths_rng)
    return workload.Trace(workload.poisson_arrivals(rate_per_s, count, arrivals_rng), lengths, np.zeros(count))


def _arrival_rate_per_s(scenario: Scenario, scheduling: SchedulingConfig, rng: np.random.Generator) -> float:
    if scenario.load is None:
        return _or(scenario.arrival_rate, ARRIVAL_RATE)
    sample = workload.draw_lengths(_or(scenario.lengths, LENGTHS), LOAD_SAMPLE, rng)
    return scenario.load * _capacity_per_s(scenario, scheduling, sample)


def _capacity_per_s(scenario: Scenario, scheduling: SchedulingConfig, sample: workload.Lengths) -> float:
    """Requests a second that the engines serve in full batches of one bin: the rate at which the load is 1."""
    size = scenario.sequences_max(scheduling)
    engines = _engines(scenario, scheduling, [])
    batch_s = engines[0].costs.batch_s(np.sort(sample).tolist(), size)
    if batch_s <= 0:
        raise ConfigError("load: engines whose steps take no time have no capacity")
    return len(engines) * size / batch_s


def _scores(
    scenario: Scenario, scheduling: SchedulingConfig, sample: workload.Lengths, rng: np.random.Generator
) -> tuple[float, ...]:
    """What bins go by, of a sample of lengths: the risk of what is predicted of them, or the lengths themselves."""
    predictions = workload.predict(scenario.predictions, sample, rng)
    if predictions is None or not predictions.quantiles:
        return tuple(sample.tolist())
    return scheduling.scores(predictions.quantiles_of(median) for median in predictions.medians.tolist())


# ---- the run ----------------------------------------------------------------------------------------------------


def run(
    scenario: Scenario,
    scheduling: SchedulingConfig,
    work: Workload,
    *,
    journal_path: Path | None = None,
    on_arrival: Callable[[int], None] | None = None,
    dispatch: DispatchConfig | None = None,
) -> Summary:
    """Serve a prepared workload. scheduling : resolved. See simulate."""
    lengths = work.trace.output_tokens
    header = Header(scheduling, work.scores, work.lengths)
    engines = _engines(scenario, scheduling, lengths.tolist())
    recorder = Recorder(len(work))
    scheduler, solver = header.scheduler(), _solver(scenario, scheduling, dispatch or DispatchConfig())
    journal = Journal(header, path=journal_path) if journal_path is not None else None  # once nothing is wrong
    cluster = SimulatedCluster(
        scheduler,
        list(engines),
        solver=solver,
        journal=journal,
        on_step=_listener(recorder, on_arrival),
    )
    try:
        cluster.run(workload.requests(work.trace, work.predictions), flush=scenario.last_batch == "flush")
    finally:
        if journal is not None:
            journal.close()
    elapsed_s = elapsed(recorder)
    joules = [energy_j for engine in engines if (energy_j := engine.energy_j(elapsed_s)) is not None]
    return summarise(
        recorder,
        lengths,
        engines[0].costs.alone_s(lengths),
        scheduling.full_batch,
        [engine.utilisation(elapsed_s) for engine in engines],
        sum(joules) if joules else None,
    )


def _solver(scenario: Scenario, scheduling: SchedulingConfig, dispatch: DispatchConfig) -> DispatchSolver | None:
    """Who makes plans: it knows the engines' own profile unless another is given."""
    if dispatch.profile is None and scenario.profile is not None:
        dispatch = msgspec.structs.replace(dispatch, profile=scenario.profile)
    return dispatch.solver(scheduling, barrier=scenario.barrier)


def _engines(
    scenario: Scenario, scheduling: SchedulingConfig, lengths: list[float]
) -> Sequence[TimedEngine | ProfileEngine]:
    """lengths : output tokens by request id."""
    slots = scenario.sequences_max(scheduling)
    look_ahead = 0 if scenario.barrier else scenario.look_ahead
    infos = [EngineInfo(f"engine{index}", slots, scenario.barrier, look_ahead) for index in range(scenario.engines)]
    if scenario.profile is None:
        step_s, prefill_s = _or(scenario.step_s, STEP_S), _or(scenario.prefill_s, 0.0)
        return [TimedEngine(info, lengths, step_s=step_s, prefill_s=prefill_s) for info in infos]
    try:
        profile = resolve(scenario.profile)
        return [ProfileEngine(info, lengths, profile) for info in infos]
    except ValueError as error:
        raise ConfigError(f"profile: {error}") from error


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


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
    add_flags(parser, SchedulingConfig, "scheduling", release=RELEASE_HELP, queue_requests_max=QUEUE_REQUESTS_MAX)
    add_flags(parser, DispatchConfig, "dispatching", skip={"profile"})  # the scenario's serves for both
    output = parser.add_argument_group("output")
    output.add_argument("--journal", type=Path, metavar="FILE", help="write every scheduling step, as JSON lines")
    output.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def main(args: argparse.Namespace) -> int:
    scenario = convert(Scenario, _given(args, Scenario), "scenario")
    defaults = {"release": "full" if scenario.barrier else "greedy", "queue_requests_max": QUEUE_REQUESTS_MAX}
    asked = convert(SchedulingConfig, {**defaults, **_given(args, SchedulingConfig)}, "scheduling")
    scheduling = asked.resolved(scenario.barrier)
    dispatch = convert(DispatchConfig, _given(args, DispatchConfig), "dispatch")  # its profile is the scenario's
    try:
        work = prepare(scenario, scheduling)
        summary = _run_with_progress(scenario, scheduling, dispatch, work, args.journal)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if args.json:
        print(msgspec.json.encode(summary).decode())
    else:
        print_table(summary, _title(scenario, scheduling, work), Console())
    return 0


def _given(args: argparse.Namespace, struct: type[msgspec.Struct]) -> dict[str, Any]:
    """The struct's fields that stand on the command line."""
    return {name: value for name, value in vars(args).items() if name in struct.__struct_fields__}


def _title(scenario: Scenario, scheduling: SchedulingConfig, work: Workload) -> str:
    kind = "barrier" if scenario.barrier else "refill"
    engines = f"{scenario.engines} {kind} engine{'s' if scenario.engines > 1 else ''}"
    bins = f"{scheduling.bins} bins, batches of {scheduling.batch_size}"
    policies = f"release {scheduling.release}, order {scheduling.order}"
    rate_per_s = work.arrival_rate_per_s
    arrive = "at once" if math.isinf(rate_per_s) else f"at {rate_per_s:.4g}/s"
    return f"{len(work):,} requests {arrive}, {bins}, {policies}, {engines}"


def _run_with_progress(
    scenario: Scenario, scheduling: SchedulingConfig, dispatch: DispatchConfig, work: Workload, journal: Path | None
) -> Summary:
    if not sys.stderr.isatty():
        return run(scenario, scheduling, work, journal_path=journal, on_arrival=_say_plainly, dispatch=dispatch)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("simulating", total=len(work))
        return run(
            scenario,
            scheduling,
            work,
            journal_path=journal,
            on_arrival=lambda count: progress.update(task, completed=count),
            dispatch=dispatch,
        )


def _say_plainly(count: int) -> None:
    if count % PLAIN_PROGRESS_EVERY == 0:
        print(f"{count:,} requests have arrived", file=sys.stderr)
