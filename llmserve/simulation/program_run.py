"""One run of a world of programs: the scheduler, its engines, and sessions that wait for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from llmserve.errors import ConfigError
from llmserve.live.journal import Header, Journal
from llmserve.scheduling.programs.programs import Programs
from llmserve.settings.policies import PLANNED, SchedulingConfig
from llmserve.simulation import workload
from llmserve.simulation.cluster import SimulatedCluster
from llmserve.simulation.collector import collector_paused
from llmserve.simulation.programs import Outcome, ProgramLoop, World, read_sessions
from llmserve.simulation.scenario import Scenario, engines, prepare


def run_programs(
    scenario: Scenario,
    scheduling: SchedulingConfig,
    *,
    straight: bool = False,
    named: bool = True,
    programs: Programs | None = None,
    mistakes: Callable[[World], None] | None = None,
    journal_path: Path | None = None,
) -> Outcome:
    """Run the programs of scenario.programs to their ends. scheduling : resolved.

    straight  the scheduler sends each request to an engine at once, and requests wait there
    named     the requests say of which program they are
    programs  decides on programs instead of the scheduler's own
    mistakes  changes which programs the requests say they are of

    Raises ConfigError on settings that contradict each other, LLMServeError when a program cannot go on.
    """
    assert scenario.programs is not None
    if scheduling.release in PLANNED:
        raise ConfigError(f"release {scheduling.release} follows plans, which are not made for programs")
    scenario = scenario.with_defaults
    world = World(read_sessions(scenario.programs or ""))
    if mistakes is not None:
        mistakes(world)
    work = prepare(scenario, scheduling, world=world)
    header = Header(scheduling, work.scores, work.lengths)
    scheduler = header.scheduler()
    if programs is not None:
        scheduler.group.programs = programs
    lengths, texts = work.trace.output_tokens.tolist(), work.trace.texts
    requests = [request for _, request in workload.requests(work.trace, work.predictions)]
    loop = ProgramLoop(world, requests, named=named and not straight)
    streaming = range(len(requests))
    timed_engines = engines(
        scenario,
        scheduling,
        lengths,
        streaming,
        texts,
        wants_first_token=None if scheduler.preempts else scheduler.wants_first_token,
        tools=[asked.tools for asked in world.asked],
        straight=straight,
        on_first_token=loop.note_first_token,
    )
    journal = Journal(header, path=journal_path) if journal_path is not None else None  # after all checks
    cluster = SimulatedCluster(scheduler, list(timed_engines), journal=journal, on_step=loop)
    try:
        with collector_paused():
            cluster.begin()
            loop.begin(cluster.arrive_later)
            cluster.advance(math.inf)
    finally:
        if journal is not None:
            journal.close()
    return loop.outcome()
