"""The programs that are present: which wait, which run, and for which an engine keeps tokens over a tool call."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import msgspec

from llmserve.estimates.waiting_rows import ProgramSeen
from llmserve.live.cluster import LiveCluster
from llmserve.scheduling.queues.waiting import QueuedRequest


class ProgramsSeen(msgspec.Struct, frozen=True):
    """counts : of all programs, by state.  programs : as many of them as were asked for"""

    counts: dict[str, int]
    programs: list[ProgramSeen]


def programs_seen(cluster: LiveCluster, most: int) -> ProgramsSeen:
    """The programs that are present, those with requests first, in order of arrival. O(requests + programs held)"""
    scheduler, now_s = cluster.scheduler, cluster.now_s()
    present: dict[int, QueuedRequest] = {}  # of several requests of a program, one that runs
    for queued in scheduler.requests.values():
        number = queued.request.program
        if number and (number not in present or queued.run is not None):
            present[number] = queued
    held = [entry for entry in scheduler.group.programs.held() if entry[0] not in present]
    counts = Counter(["waiting" if queued.run is None else "running" for queued in present.values()])
    if held:
        counts["held"] = len(held)
    programs = [_with_request(cluster, queued, now_s) for queued in islice(present.values(), most)]
    for number, program, holding in islice(held, most - len(programs)):
        programs.append(
            ProgramSeen(
                _name(number),
                "",
                program.step,
                "held",
                round(now_s - holding.ended_s, 3),
                program.engine,
                round(program.tokens),
                program.tools,
                over_s=round(holding.over_s - now_s, 3),
            )
        )
    return ProgramsSeen(dict(counts), programs)


def _with_request(cluster: LiveCluster, queued: QueuedRequest, now_s: float) -> ProgramSeen:
    request, run = queued.request, queued.run
    starts_s = None
    if run is None and (call := cluster.calls.get(request.id)) is not None:
        position = cluster.estimator.position_of(call)
        starts_s = position.wait_s if position is not None else None
    turn = queued.turn.program if queued.turn is not None else None
    return ProgramSeen(
        _name(request.program),
        _name(request.parent) if request.parent else "",
        request.step if turn is None else turn.step,
        "waiting" if run is None else "running",
        round(now_s - (queued.arrived_at_s if run is None else run.started_at_s), 3),
        "" if run is None else run.engine,
        round(request.prompt_tokens),
        starts_s=None if starts_s is None else round(starts_s, 1),
    )


def _name(program: int) -> str:
    return f"{program:012x}"
