"""Simulate: the same scheduler as the server's, under a virtual clock, with timed engines.

Prints a table of throughput, latency, waiting, batches, engine utilisation and, with a profile, energy; or JSON. Steps
take a constant time (--step-s) or what they take on measured engines (--profile, --engine); requests come at random
(--arrivals, --lengths), are those of a file of prompts (--prompts), or come as they were recorded (--trace). Several
seeds (--seeds) give confidence intervals, several settings (--sweep) a comparison, and --plot draws it.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from rich.console import Console

from bins.dispatch import DispatchSolver
from llmserve.cluster.journal import Header, Journal
from llmserve.cluster.simulated import SimulatedCluster
from llmserve.config import add_flags, convert
from llmserve.dispatch_config import DispatchConfig
from llmserve.errors import ConfigError
from llmserve.policies import PLANNED, SchedulingConfig
from llmserve.scheduling.messages import Action, Event, RequestArrived
from llmserve.simulation import figures, workload
from llmserve.simulation.estimates import Repeated, print_comparison, print_intervals
from llmserve.simulation.many import in_processes
from llmserve.simulation.predictions import TRAINED
from llmserve.simulation.progress import RunsProgress
from llmserve.simulation.report import BatchRecorder, Recorder, Summary, elapsed, print_table, summarise
from llmserve.simulation.scenario import Answers, Scenario, Workload, engine_kinds, engines, prepare
from llmserve.spelling import nearest

__all__ = ["Scenario", "Summary", "simulate"]  # for scripts: docs/guide/as-a-library.md

PROGRESS_EVERY = 1_000  # arrivals between updates of the progress bar
QUEUE_REQUESTS_MAX = 10**9  # a queue that refuses nobody
SECTIONS = (Scenario, SchedulingConfig, DispatchConfig)
SWEPT_MAX = 2  # fields; figures give the second one a line for each of its values
INTERRUPTED = 130  # exit status, as shells have it

ReadAnswers = Callable[[str, str | None], Answers]
"""(file of prompts, folder of a trained predictor or None) -> what was asked. Raises ConfigError."""


def simulate(
    scenario: Scenario,
    scheduling: SchedulingConfig,
    *,
    answers: Answers | None = None,
    journal_path: Path | None = None,
    on_arrival: Callable[[int], None] | None = None,
    dispatch: DispatchConfig | None = None,
) -> Summary:
    """Run a scenario. answers : those of scenario.prompts, where there are prompts.  on_arrival, when given, is called
    with the number of arrivals so far, now and then.

    Raises ConfigError on a scenario that makes no sense.
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
    """Serve a prepared workload. scheduling : resolved.  recorder : listens (default: a fresh one). See simulate."""
    lengths = work.trace.output_tokens
    header = Header(scheduling, work.scores, work.lengths)
    recorder = Recorder(len(work)) if recorder is None else recorder
    scheduler, solver = header.scheduler(), _solver(scenario, scheduling, dispatch or DispatchConfig())
    # As the live body does: only a scheduler that preempts is told when answers begin.
    made = engines(scenario, scheduling, lengths.tolist(), work.streaming if scheduler.preempts else ())
    journal = Journal(header, path=journal_path) if journal_path is not None else None  # once nothing is wrong
    cluster = SimulatedCluster(
        scheduler,
        list(made),
        solver=solver,
        journal=journal,
        on_step=_listener(recorder, on_arrival),
    )
    try:
        asked = workload.requests(work.trace, work.predictions, work.deadlines_s)
        with _collector_paused():
            cluster.run(asked, flush=scenario.last_batch == "flush")
    finally:
        if journal is not None:
            journal.close()
    elapsed_s = elapsed(recorder)
    joules = [energy_j for engine in made if (energy_j := engine.energy_j(elapsed_s)) is not None]
    return summarise(
        recorder,
        lengths,
        np.min([engine.costs.alone_s(lengths, work.trace.input_tokens) for engine in made], axis=0),
        scheduling.full_batch,
        [engine.utilisation(elapsed_s) for engine in made],
        sum(joules) if len(joules) == len(made) else None,
        work.deadlines_s,
    )


@contextmanager
def _collector_paused() -> Generator[None, None, None]:
    """A run leaves no cycles, but the garbage collector looks for them among all that waits, again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _solver(scenario: Scenario, scheduling: SchedulingConfig, dispatch: DispatchConfig) -> DispatchSolver | None:
    """Who makes plans: it knows the engines' own profile unless another is given."""
    kinds = engine_kinds(scenario, scheduling)
    if scheduling.release in PLANNED and len({(kind.profile, kind.slots) for kind in kinds}) > 1:
        raise ConfigError(f"release {scheduling.release} plans for engines of one kind, and there are several")
    if not dispatch.profile:
        dispatch = msgspec.structs.replace(dispatch, profile=(kinds[0].name,) if kinds[0].name else ())
    return dispatch.solver(scheduling, barrier=scenario.barrier)


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


# ---- several runs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """All that a run depends on. scheduling : resolved.  settings : what sets it apart from others, field -> text."""

    scenario: Scenario
    scheduling: SchedulingConfig
    dispatch: DispatchConfig
    answers: Answers | None = None
    settings: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Mapping[str, Any], settings: dict[str, str]) -> Case:
        """given : fields of SECTIONS, as texts or of their types; settings come before them. Raises ConfigError."""
        values = {**given, **settings}
        scenario = convert(Scenario, _fields(Scenario, values))
        defaults = {"queue_requests_max": QUEUE_REQUESTS_MAX}
        asked = convert(SchedulingConfig, {**defaults, **_fields(SchedulingConfig, values)})
        wanted = {name: value for name, value in _fields(DispatchConfig, values).items() if name != "profile"}
        dispatch = convert(DispatchConfig, wanted)  # its profile is the scenario's
        return cls(scenario, asked.resolved(scenario.barrier), dispatch, settings=settings)

    def seeded(self, seed: int) -> Case:
        return replace(self, scenario=msgspec.structs.replace(self.scenario, seed=seed))

    def prepare(self) -> Workload:
        """Raises ConfigError."""
        try:
            return prepare(self.scenario, self.scheduling, self.answers)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def run(self, work: Workload, **options: Any) -> Summary:
        """options : those of `run`. Raises ConfigError."""
        try:
            return run(self.scenario, self.scheduling, work, dispatch=self.dispatch, **options)
        except ValueError as error:
            raise ConfigError(str(error)) from error


def _fields(struct: type[msgspec.Struct], values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in struct.__struct_fields__}


def run_cases(cases: Sequence[Case], seeds: int, jobs: int, progress: RunsProgress) -> list[Repeated]:
    """Each case under its own seed and the next ones, `seeds` in all. jobs : processes; 1: none but this one.

    Raises ConfigError on a case that makes no sense.
    """
    tasks = [case.seeded(case.scenario.seed + number) for case in cases for number in range(seeds)]
    found: dict[int, Summary] = {}
    with closing(in_processes(_run_alone, tasks, jobs) if jobs > 1 else _one_by_one(tasks, progress)) as ran:
        for index, summary in ran:
            found[index] = summary
            progress.ended()
    results = []
    for case, first in zip(cases, range(0, len(tasks), seeds), strict=True):
        mine = range(first, first + seeds)
        seeds_of = [tasks[index].scenario.seed for index in mine]
        results.append(Repeated.of(seeds_of, [found[index] for index in mine], case.settings))
    return results


def _run_alone(case: Case) -> Summary:
    return case.run(case.prepare())


def _one_by_one(tasks: Sequence[Case], progress: RunsProgress) -> Generator[tuple[int, Summary], None, None]:
    for index, case in enumerate(tasks):
        work = case.prepare()
        yield index, case.run(work, on_arrival=_counts(progress, work))


def _counts(progress: RunsProgress, work: Workload) -> Callable[[int], None]:
    return lambda count: progress.arrived(count, len(work))


def swept(texts: Sequence[str]) -> list[dict[str, str]]:
    """Every combination of FIELD=VALUE,VALUE,...: the settings of each case. No text: one case with none.

    Values with commas in them are separated by semicolons. Raises ConfigError.
    """
    known = [name for struct in SECTIONS for name in struct.__struct_fields__]
    sides = []
    for text in texts:
        name, _, values = text.partition("=")
        name = name.strip().replace("-", "_")
        if name not in known:
            raise ConfigError(f"sweep {text!r}: there is nothing called {name}{nearest(name, known)}")
        parts = [value.strip() for value in values.split(";" if ";" in values else ",") if value.strip()]
        if not parts:
            raise ConfigError(f"sweep {text!r}: FIELD=VALUE,VALUE,... is needed")
        sides.append([(name, value) for value in parts])
    if len(sides) > SWEPT_MAX or len({side[0][0] for side in sides}) < len(sides):
        raise ConfigError(f"sweep: {SWEPT_MAX} different fields at most")
    return [dict(combination) for combination in product(*sides)]


# ---- the command ------------------------------------------------------------------------------------------------


class Repetition(msgspec.Struct, frozen=True, kw_only=True):
    """How many runs there are, and who does them."""

    seeds: Annotated[
        int, Meta(ge=1, description="run with so many seeds, --seed and the next ones: means and 95 % intervals")
    ] = 1
    sweep: Annotated[
        tuple[str, ...],
        Meta(
            description="compare values of any flag above, such as load=0.2,0.4,0.8; repeat it to combine two flags",
            extra={"metavar": "FLAG=VALUE,VALUE,..."},
        ),
    ] = ()
    jobs: Annotated[int, Meta(ge=1, description="processes that share the runs")] = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, Scenario, "scenario")
    add_flags(parser, SchedulingConfig, "scheduling", queue_requests_max=QUEUE_REQUESTS_MAX)
    add_flags(parser, DispatchConfig, "dispatching", skip={"profile"})  # the scenario's serves for both
    add_flags(parser, Repetition, "several runs")
    output = parser.add_argument_group("output")
    output.add_argument("--journal", type=Path, metavar="FILE", help="write every scheduling step, as JSON lines")
    output.add_argument("--json", action="store_true", help="print JSON instead of the table")
    output.add_argument(
        "--plot",
        type=Path,
        metavar="FOLDER",
        help="draw latencies, waiting by bin and the batches on their engines, or what --sweep compares, as PNG files",
    )


def main(args: argparse.Namespace, read_answers: ReadAnswers | None = None) -> int:
    """read_answers : how a file of prompts is read; None: it is not."""
    given = {name: value for struct in SECTIONS for name, value in _fields(struct, vars(args)).items()}
    repetition = convert(Repetition, _fields(Repetition, vars(args)))
    cases = [Case.of(given, settings) for settings in swept(repetition.sweep)]
    several = bool(repetition.sweep) or repetition.seeds > 1
    if args.journal is not None and several:
        raise ConfigError("journal: of one run only, but --sweep or --seeds asks for several")
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


def _with_answers(cases: Sequence[Case], read_answers: ReadAnswers | None) -> list[Case]:
    """With the rows of their prompts, each file and predictor read once."""
    read: dict[tuple[str, str | None], Answers] = {}
    filled = []
    for case in cases:
        prompts, predictions = case.scenario.prompts, case.scenario.predictions
        case.scenario.check()
        if prompts is None or read_answers is None:
            filled.append(case)
            continue
        key = prompts, predictions.removeprefix(TRAINED) if predictions.startswith(TRAINED) else None
        if key not in read:
            read[key] = read_answers(*key)
        filled.append(replace(case, answers=read[key]))
    return filled


def _run_one(case: Case, args: argparse.Namespace) -> None:
    work = case.prepare()
    recorder = Recorder(len(work)) if args.plot is None else BatchRecorder(len(work))
    with RunsProgress(1) as progress:
        summary = case.run(work, recorder=recorder, journal_path=args.journal, on_arrival=_counts(progress, work))
    if args.json:
        print(msgspec.json.encode(summary).decode())
    else:
        print_table(summary, _title(case, work), Console())
    if isinstance(recorder, BatchRecorder):
        _draw_run(case, work, recorder, args.plot)


def _run_several(cases: Sequence[Case], repetition: Repetition, args: argparse.Namespace) -> None:
    with RunsProgress(len(cases) * repetition.seeds) as progress:
        found = run_cases(cases, repetition.seeds, repetition.jobs, progress)
    compared = bool(repetition.sweep)
    if args.json:
        print(msgspec.json.encode(found if compared else found[0]).decode())
    elif compared:
        print_comparison(found, _compared_title(cases, repetition), Console())
    else:
        print_intervals(found[0], _title(cases[0], cases[0].prepare(), repetition.seeds), Console())
    if args.plot is not None and compared:
        _tell_drawn(figures.draw_comparison(args.plot, found))
    elif args.plot is not None:
        work = cases[0].prepare()
        recorder = BatchRecorder(len(work))
        cases[0].run(work, recorder=recorder)
        _draw_run(cases[0], work, recorder, args.plot)


def _draw_run(case: Case, work: Workload, recorder: BatchRecorder, folder: Path) -> None:
    """Pictures of a run; of batches that wait for their longest, beside those of the same requests in one bin."""
    made = engines(case.scenario, case.scheduling, [])
    asked = case.scheduling
    stories = [figures.Story(_groups(asked), recorder, work.trace, made)]
    if case.scenario.barrier and (asked.bins_count > 1 or asked.release == "window"):
        release = "greedy" if asked.release == "window" else asked.release
        one_bin = msgspec.structs.replace(asked, bins=1, edges=None, release=release, window=None)
        mixed = BatchRecorder(len(work))
        replace(case, scheduling=one_bin).run(work, recorder=mixed)
        stories.insert(0, figures.Story(_groups(one_bin), mixed, work.trace, made))
    _tell_drawn(figures.draw_run(folder, stories))


def _tell_drawn(paths: Sequence[Path]) -> None:
    for path in paths:
        print(f"drew {path}", file=sys.stderr)


def _groups(scheduling: SchedulingConfig) -> str:
    """What batches are made of."""
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
    """What all cases have in common."""
    case = cases[0]
    seeds = f"{repetition.seeds} seeds: means and 95 % confidence intervals" if repetition.seeds > 1 else ""
    engines_ = "" if {"engine", "engines", "barrier"} & set(case.settings) else _engines(case)
    return ", ".join(part for part in (_policies(*cases), engines_, seeds) if part)


def _policies(*cases: Case) -> str:
    """Those that all cases share."""
    said = []
    for scheduling in (case.scheduling for case in cases):
        sizes = (_groups(scheduling), f"batches of {scheduling.batch_size}")
        said.append((*sizes, f"release {scheduling.release}", f"order {scheduling.order}"))
    return ", ".join(texts[0] for texts in zip(*said, strict=True) if len(set(texts)) == 1)


def _engines(case: Case) -> str:
    kind, count = "barrier" if case.scenario.barrier else "refill", case.scenario.engines
    if not case.scenario.engine:
        return f"{count} {kind} engine{'s' if count > 1 else ''}"
    return f"{kind} engines {' + '.join(case.scenario.engine)}"
