"""Run the server's scheduler under a virtual clock, with simulated engines.

Prints a table of throughput, latency, waiting, batches, engine utilisation and, with a profile, energy; or JSON. Steps
take a constant time (--step-s) or the time of measured engines (--profile, --engine). Requests are random (--arrivals,
--lengths), from a file of prompts (--prompts), or from a recorded trace (--trace). Several seeds (--seeds) give
confidence intervals, several settings (--sweep) a comparison, and --plot draws the results.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np
from msgspec import Meta

from bins.dispatch import DispatchSolver
from llmserve.errors import ConfigError
from llmserve.live.journal import Header, Journal
from llmserve.request import Request
from llmserve.settings.dispatch import DispatchConfig
from llmserve.settings.load import add_flags, convert
from llmserve.settings.policies import PLANNED, SchedulingConfig
from llmserve.simulation import figures, workload
from llmserve.simulation.cluster import SimulatedCluster
from llmserve.simulation.collector import collector_paused
from llmserve.simulation.estimates import Repeated, print_comparison, print_intervals
from llmserve.simulation.kv_engine import KVEngine
from llmserve.simulation.learning import SimulatedLearning
from llmserve.simulation.predictions import TRAINED
from llmserve.simulation.program_run import run_programs
from llmserve.simulation.progress import RunsProgress
from llmserve.simulation.report import BatchRecorder, Recorder, Summary, elapsed, print_table, summarise
from llmserve.simulation.scenario import Answers, Scenario, Workload, engine_kinds, engines, prepare
from llmserve.spelling import nearest

__all__ = ["Scenario", "Summary", "simulate"]  # for scripts: docs/guide/as-a-library.md

PROGRESS_EVERY = 1_000  # arrivals between updates of the progress bar
QUEUE_REQUESTS_MAX = 10**9  # a practically unlimited queue
SECTIONS = (Scenario, SchedulingConfig, DispatchConfig)
SWEPT_MAX = 2  # largest number of swept fields; figures draw one line for each value of the second field
INTERRUPTED = 130  # exit status, as in shells


class ReadAnswers(Protocol):
    """Reads a file of prompts. folder : of a trained predictor.  learning : with the rows for a learner.

    Raises ConfigError.
    """

    def __call__(self, source: str, folder: str | None, *, learning: bool = False) -> Answers: ...


def simulate(
    scenario: Scenario,
    scheduling: SchedulingConfig,
    *,
    answers: Answers | None = None,
    journal_path: Path | None = None,
    on_arrival: Callable[[int], None] | None = None,
    dispatch: DispatchConfig | None = None,
) -> Summary:
    """Run a scenario. answers : answers to scenario.rows_file, if set.  on_arrival : called every PROGRESS_EVERY
    arrivals with the number of arrivals so far.

    Raises ConfigError on an invalid scenario.
    """
    scheduling = scheduling.resolved(scenario.barrier)
    work = prepare(scenario, scheduling, answers)
    return run(scenario, scheduling, work, journal_path=journal_path, on_arrival=on_arrival, dispatch=dispatch)


# ---- one run ----------------------------------------------------------------------------------------------------


def run(
    scenario: Scenario,
    scheduling: SchedulingConfig,
    work: Workload,
    *,
    journal_path: Path | None = None,
    on_arrival: Callable[[int], None] | None = None,
    dispatch: DispatchConfig | None = None,
    recorder: Recorder | None = None,
) -> Summary:
    """Serve a prepared workload. scheduling : resolved.  recorder : of the steps (default: new). See simulate."""
    lengths = work.trace.output_tokens
    header = Header(scheduling, work.scores, work.lengths)
    recorder = Recorder(len(work)) if recorder is None else recorder
    scheduler, solver = header.scheduler(), _solver(scenario, scheduling, dispatch or DispatchConfig())
    # As in the live cluster, only a scheduler that preempts gets an event when an answer begins.
    streaming = work.streaming if scheduler.preempts else ()
    timed_engines = engines(scenario, scheduling, lengths.tolist(), streaming, work.trace.texts)
    journal = Journal(header, path=journal_path) if journal_path is not None else None  # after all checks
    learning = None if work.online is None else SimulatedLearning(work.online, scheduler.requests)
    cluster = SimulatedCluster(
        scheduler,
        list(timed_engines),
        solver=solver,
        journal=journal,
        on_step=recorder,
        predict=None if learning is None else learning.predicted,
        revise=None if learning is None else learning.learn,
    )
    try:
        requests = workload.requests(work.trace, work.predictions, work.deadlines_s)
        if on_arrival is not None:
            requests = _counted(requests, on_arrival)
        with collector_paused():
            cluster.run(requests, flush=scenario.last_batch == "flush")
    finally:
        if journal is not None:
            journal.close()
    elapsed_s = elapsed(recorder)
    joules = [energy_j for engine in timed_engines if (energy_j := engine.energy_j(elapsed_s)) is not None]
    return summarise(
        recorder,
        lengths,
        np.min([engine.alone_s(lengths, work.trace.input_tokens) for engine in timed_engines], axis=0),
        scheduling.full_batch,
        [engine.utilisation(elapsed_s) for engine in timed_engines],
        sum(joules) if len(joules) == len(timed_engines) else None,
        work.deadlines_s,
        _cached_share([engine for engine in timed_engines if isinstance(engine, KVEngine)]),
    )


def _cached_share(engines: Sequence[KVEngine]) -> float | None:
    prompt_tokens = sum([engine.prompt_tokens for engine in engines])
    return sum([engine.cached_tokens for engine in engines]) / prompt_tokens if prompt_tokens else None


def _solver(scenario: Scenario, scheduling: SchedulingConfig, dispatch: DispatchConfig) -> DispatchSolver | None:
    """Return the solver of dispatch plans, with the engines' profile unless the settings give another profile."""
    kinds = engine_kinds(scenario, scheduling)
    if scheduling.release in PLANNED and len({(kind.profile, kind.slots) for kind in kinds}) > 1:
        raise ConfigError(f"release {scheduling.release} plans for engines of one kind, but the engines differ")
    if not dispatch.profile:
        dispatch = msgspec.structs.replace(dispatch, profile=(kinds[0].name,) if kinds[0].name else ())
    return dispatch.solver(scheduling, barrier=scenario.barrier)


def _counted(
    arrivals: Iterator[tuple[float, Request]], on_arrival: Callable[[int], None]
) -> Iterator[tuple[float, Request]]:
    """Tell the number of arrivals so far, every PROGRESS_EVERY of them."""
    for number, arrival in enumerate(arrivals, 1):
        yield arrival
        if number % PROGRESS_EVERY == 0:
            on_arrival(number)


# ---- several runs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """The inputs of a run. scheduling : resolved.  settings : the swept settings of this case, field -> text."""

    scenario: Scenario
    scheduling: SchedulingConfig
    dispatch: DispatchConfig
    answers: Answers | None = None
    settings: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, flags: Mapping[str, Any], settings: dict[str, str]) -> Case:
        """flags : fields of SECTIONS, as texts or of their types; `settings` override them. Raises ConfigError."""
        values = {**flags, **settings}
        scenario = convert(Scenario, _fields(Scenario, values))
        defaults = {"queue_requests_max": QUEUE_REQUESTS_MAX}
        scheduling = convert(SchedulingConfig, {**defaults, **_fields(SchedulingConfig, values)})
        fields = {name: value for name, value in _fields(DispatchConfig, values).items() if name != "profile"}
        dispatch = convert(DispatchConfig, fields)  # `profile` is a field of the scenario
        return cls(scenario, scheduling.resolved(scenario.barrier), dispatch, settings=settings)

    def seeded(self, seed: int) -> Case:
        return replace(self, scenario=msgspec.structs.replace(self.scenario, seed=seed))

    def prepare(self) -> Workload:
        """Prepare the workload. Raises ConfigError."""
        try:
            return prepare(self.scenario, self.scheduling, self.answers)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def run(self, work: Workload, **options: Any) -> Summary:
        """Run the case. options : of the function `run`. Raises ConfigError."""
        try:
            return run(self.scenario, self.scheduling, work, dispatch=self.dispatch, **options)
        except ValueError as error:
            raise ConfigError(str(error)) from error


def _fields(struct: type[msgspec.Struct], values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in struct.__struct_fields__}


def run_cases(cases: Sequence[Case], seeds: int, jobs: int, progress: RunsProgress) -> list[Repeated]:
    """Run each case with `seeds` consecutive seeds, from its own on. jobs : number of processes; 1: this process.

    Raises ConfigError on an invalid case.
    """
    tasks = [case.seeded(case.scenario.seed + number) for case in cases for number in range(seeds)]
    from llmserve.simulation.many import in_processes

    summaries: dict[int, Summary] = {}
    with closing(in_processes(_run_task, tasks, jobs) if jobs > 1 else _run_here(tasks, progress)) as finished:
        for index, summary in finished:
            summaries[index] = summary
            progress.ended()
    results = []
    for case, first in zip(cases, range(0, len(tasks), seeds), strict=True):
        indices = range(first, first + seeds)
        seeds_of = [tasks[index].scenario.seed for index in indices]
        results.append(Repeated.of(seeds_of, [summaries[index] for index in indices], case.settings))
    return results


def _run_task(case: Case) -> Summary:
    return case.run(case.prepare())


def _run_here(tasks: Sequence[Case], progress: RunsProgress) -> Generator[tuple[int, Summary], None, None]:
    for index, case in enumerate(tasks):
        work = case.prepare()
        yield index, case.run(work, on_arrival=_counts(progress, work))


def _counts(progress: RunsProgress, work: Workload) -> Callable[[int], None]:
    return lambda count: progress.arrived(count, len(work))


def swept(texts: Sequence[str]) -> list[dict[str, str]]:
    """Return the settings of each case: all combinations of FIELD=VALUE,VALUE,... Without a text: one empty case.

    Values that contain commas are separated by semicolons. Raises ConfigError.
    """
    fields = [name for struct in SECTIONS for name in struct.__struct_fields__]
    axes = []
    for text in texts:
        name, _, values = text.partition("=")
        name = name.strip().replace("-", "_")
        if name not in fields:
            raise ConfigError(f"sweep {text!r}: unknown setting {name}{nearest(name, fields)}")
        parts = [value.strip() for value in values.split(";" if ";" in values else ",") if value.strip()]
        if not parts:
            raise ConfigError(f"sweep {text!r} is not FIELD=VALUE,VALUE,...")
        axes.append([(name, value) for value in parts])
    if len(axes) > SWEPT_MAX or len({axis[0][0] for axis in axes}) < len(axes):
        raise ConfigError(f"sweep: at most {SWEPT_MAX} different fields")
    return [dict(combination) for combination in product(*axes)]


# ---- the command ------------------------------------------------------------------------------------------------


class Repetition(msgspec.Struct, frozen=True, kw_only=True):
    """The number of runs, and of processes."""

    seeds: Annotated[
        int, Meta(ge=1, description="number of seeds, from --seed on, for means and 95 % confidence intervals")
    ] = 1
    sweep: Annotated[
        tuple[str, ...],
        Meta(
            description="compare values of any flag above, such as load=0.2,0.4,0.8; repeat to combine two flags",
            extra={"metavar": "FLAG=VALUE,VALUE,..."},
        ),
    ] = ()
    jobs: Annotated[int, Meta(ge=1, description="processes that share the runs")] = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, Scenario, "scenario")
    add_flags(parser, SchedulingConfig, "scheduling", queue_requests_max=QUEUE_REQUESTS_MAX)
    add_flags(parser, DispatchConfig, "dispatching", skip={"profile"})  # --profile of the scenario is used instead
    add_flags(parser, Repetition, "several runs")
    programs = parser.add_argument_group("programs")
    programs.add_argument(
        "--no-programs",
        action="store_true",
        help="with --programs: each request goes straight to the engine and waits there, in order of arrival under "
        "--order fffs, else by the priority that the order gives",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--journal", type=Path, metavar="FILE", help="write every scheduling step, as JSON lines")
    output.add_argument("--json", action="store_true", help="print JSON instead of the table")
    output.add_argument(
        "--plot",
        type=Path,
        metavar="FOLDER",
        help="draw latencies, waiting by bin and the engines' batches, or the comparison of --sweep, as PNG files",
    )


def main(args: argparse.Namespace, read_answers: ReadAnswers | None = None) -> int:
    """Run the command. read_answers : reads a file of prompts; None: files of prompts are not read."""
    flags = {name: value for struct in SECTIONS for name, value in _fields(struct, vars(args)).items()}
    repetition = convert(Repetition, _fields(Repetition, vars(args)))
    cases = [Case.of(flags, settings) for settings in swept(repetition.sweep)]
    several = bool(repetition.sweep) or repetition.seeds > 1
    if cases[0].scenario.programs is not None:
        if several or args.plot is not None:
            raise ConfigError("programs: one run at a time, without --sweep, --seeds and --plot")
        return _run_programs(cases[0], args)
    if args.no_programs:
        raise ConfigError("no-programs: there are no programs")
    if args.journal is not None and several:
        raise ConfigError("journal: only for a single run, without --sweep and --seeds")
    if args.plot is not None:
        figures.check(args.plot)
    try:
        cases = _with_answers(cases, read_answers)
        if several:
            _run_several(cases, repetition, args)
        else:
            _run_one(cases[0], args)
    except KeyboardInterrupt:
        print("llmserve: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def _run_programs(case: Case, args: argparse.Namespace) -> int:
    outcome = run_programs(case.scenario, case.scheduling, straight=args.no_programs, journal_path=args.journal)
    if args.json:
        print(json.dumps(outcome.summary()))
    else:
        from rich.console import Console

        Console().print(outcome.table())
    return 0


def _with_answers(cases: Sequence[Case], read_answers: ReadAnswers | None) -> list[Case]:
    """Return the cases with the answers to their prompts. A file is read once for each way to predict its answers."""
    cache: dict[tuple[str, str | None, bool], Answers] = {}
    filled = []
    for case in cases:
        prompts, predictions = case.scenario.rows_file, case.scenario.predictions
        case.scenario.check()
        if prompts is None or read_answers is None:
            filled.append(case)
            continue
        folder = predictions.removeprefix(TRAINED) if predictions.startswith(TRAINED) else None
        key = prompts, folder, case.scenario.learns
        if key not in cache:
            cache[key] = read_answers(prompts, folder, learning=case.scenario.learns)
        filled.append(replace(case, answers=cache[key]))
    return filled


def _run_one(case: Case, args: argparse.Namespace) -> None:
    work = case.prepare()
    recorder = Recorder(len(work)) if args.plot is None else BatchRecorder(len(work))
    with RunsProgress(1) as progress:
        summary = case.run(work, recorder=recorder, journal_path=args.journal, on_arrival=_counts(progress, work))
    if args.json:
        print(msgspec.json.encode(summary).decode())
    else:
        from rich.console import Console

        print_table(summary, _title(case, work), Console())
    if isinstance(recorder, BatchRecorder):
        _draw_run(case, work, recorder, args.plot)


def _run_several(cases: Sequence[Case], repetition: Repetition, args: argparse.Namespace) -> None:
    from rich.console import Console

    with RunsProgress(len(cases) * repetition.seeds) as progress:
        results = run_cases(cases, repetition.seeds, repetition.jobs, progress)
    compared = bool(repetition.sweep)
    if args.json:
        print(msgspec.json.encode(results if compared else results[0]).decode())
    elif compared:
        print_comparison(results, _compared_title(cases, repetition), Console())
    else:
        print_intervals(results[0], _title(cases[0], cases[0].prepare(), repetition.seeds), Console())
    if args.plot is not None and compared:
        _print_drawn(figures.draw_comparison(args.plot, results))
    elif args.plot is not None:
        work = cases[0].prepare()
        recorder = BatchRecorder(len(work))
        cases[0].run(work, recorder=recorder)
        _draw_run(cases[0], work, recorder, args.plot)


def _draw_run(case: Case, work: Workload, recorder: BatchRecorder, folder: Path) -> None:
    """Draw pictures of a run. Barrier engines with several bins or windows: also draw the same requests in one bin."""
    timed_engines = engines(case.scenario, case.scheduling, [])
    scheduling = case.scheduling
    stories = [figures.Story(_groups(scheduling), recorder, work.trace, timed_engines)]
    if case.scenario.barrier and (scheduling.bins_count > 1 or scheduling.release == "window"):
        release = "greedy" if scheduling.release == "window" else scheduling.release
        one_bin = msgspec.structs.replace(scheduling, bins=1, edges=None, release=release, window=None)
        mixed = BatchRecorder(len(work))
        replace(case, scheduling=one_bin).run(work, recorder=mixed)
        stories.insert(0, figures.Story(_groups(one_bin), mixed, work.trace, timed_engines))
    _print_drawn(figures.draw_run(folder, stories))


def _print_drawn(paths: Sequence[Path]) -> None:
    for path in paths:
        print(f"drew {path}", file=sys.stderr)


def _groups(scheduling: SchedulingConfig) -> str:
    """Describe from what batches are formed: windows or bins."""
    count = scheduling.bins_count
    if scheduling.release == "window" and count == 1:
        return "windows"
    return f"{count} bin{'s' if count > 1 else ''}"


def _title(case: Case, work: Workload, seeds: int = 1) -> str:
    rate_per_s = work.arrival_rate_per_s
    arrive = "at once" if math.isinf(rate_per_s) else f"at {rate_per_s:.4g}/s"
    repeated = f", {seeds} seeds: means and 95 % confidence intervals" if seeds > 1 else ""
    return f"{len(work):,} requests {arrive}, {_policies(case)}, {_engines(case)}{repeated}"


def _compared_title(cases: Sequence[Case], repetition: Repetition) -> str:
    """Return the settings that all cases share."""
    case = cases[0]
    seeds = f"{repetition.seeds} seeds: means and 95 % confidence intervals" if repetition.seeds > 1 else ""
    engines_ = "" if {"engine", "engines", "barrier"} & set(case.settings) else _engines(case)
    return ", ".join(part for part in (_policies(*cases), engines_, seeds) if part)


def _policies(*cases: Case) -> str:
    """Describe the policies that all cases share."""
    descriptions = []
    for scheduling in (case.scheduling for case in cases):
        sizes = (_groups(scheduling), f"batches of {scheduling.batch_size}")
        descriptions.append((*sizes, f"release {scheduling.release}", f"order {scheduling.order}"))
    return ", ".join(texts[0] for texts in zip(*descriptions, strict=True) if len(set(texts)) == 1)


def _engines(case: Case) -> str:
    kind, count = "barrier" if case.scenario.barrier else "refill", case.scenario.engines
    if not case.scenario.engine:
        return f"{count} {kind} engine{'s' if count > 1 else ''}"
    return f"{kind} engines {' + '.join(case.scenario.engine)}"
