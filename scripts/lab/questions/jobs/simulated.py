"""The workload in simulated time: under the real scheduler, and on the engine driven directly, beside a rival."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import numpy as np

from llmserve.jobs.run.item_queue import ItemQueue, Shapes, arranged
from llmserve.request import Batch, EngineInfo, Request
from llmserve.scheduling.messages import (
    Action,
    AnswerBegan,
    BatchEnded,
    Event,
    FailRequest,
    RequestArrived,
    RequestEnded,
    StartBatch,
)
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.cluster import SimulatedCluster
from llmserve.simulation.engine_model import StepEngine
from questions.jobs.workload import BURST_S, CYCLES, IDLE_S, LINE, SLOTS, Workload, costs, counts, is_burst


@dataclass
class Outcome:
    """arrived_s, began_s : of online requests, by id.  ended_s : of all requests.  jobs_end_s : in order of windows

    stops : lines that were stopped.  lost_s, held_s : slot-seconds of lines that were stopped, and that ended
    """

    arrived_s: dict[int, float] = field(default_factory=dict)
    began_s: dict[int, float] = field(default_factory=dict)
    ended_s: dict[int, float] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    stops: int = 0
    lost_s: float = 0.0
    held_s: float = 0.0

    def ttft_s(self, *, burst: bool) -> list[float]:
        """Seconds to the first token, of online requests that arrived in measured bursts, or between them."""
        ids = [id_ for id_, at_s in self.arrived_s.items() if counts(at_s) and is_burst(at_s) == burst]
        return [self.began_s[id_] - self.arrived_s[id_] for id_ in ids]

    def line_tokens_per_s(self, workload: Workload) -> float:
        """Tokens a second of lines that ended in the measured cycles."""
        ended = [id_ for id_, at_s in self.ended_s.items() if id_ >= LINE and counts(at_s)]
        return sum([workload.lengths[id_] for id_ in ended]) / ((CYCLES - 1) * (BURST_S + IDLE_S))

    def jobs_end_s(self, workload: Workload) -> list[float]:
        return [max([self.ended_s[line.id] for line in lines]) for _, lines in workload.jobs]


def under_scheduler(
    workload: Workload, *, barrier: bool = False, settings: dict[str, object] | None = None, most: int | None = None
) -> Outcome:
    """Run the workload under the real scheduler, with the real feeder. most : lines in the queue; None: the default"""
    config = SchedulingConfig(**(settings or {})).resolved(barrier=barrier)  # type: ignore[arg-type]
    engine = StepEngine(EngineInfo("engine", SLOTS, barrier), workload.lengths, costs(), workload.online_ids)
    outcome = Outcome({request.id: at_s for at_s, request in workload.online})
    feeder = ItemQueue(slots=lambda model: SLOTS, **({} if most is None else {"lines_max": most}))
    by_id = {line.id: line for _, lines in workload.jobs for line in lines}
    for index, (window_s, lines) in enumerate(workload.jobs):
        tokens = np.array([line.expected_tokens or 0.0 for line in lines])
        shapes = Shapes(np.array([line.id for line in lines]), tokens, np.zeros(len(lines), np.uint64))
        feeder.add(str(index), window_s, arranged(shapes, barrier=barrier, slots=SLOTS))

    def feed(now_s: float) -> None:
        for handed in feeder.take(now_s):
            line = msgspec.structs.replace(by_id[handed.number], after_tokens=handed.after_tokens)
            cluster.notify(RequestArrived(line), now_s)

    lines_began_s: dict[int, float] = {}

    def note_lines(now_s: float, event: Event, actions: list[Action]) -> None:
        """Note how long lines hold their slots, and in vain."""
        if isinstance(event, RequestEnded) and event.request_id >= LINE:
            seconds = now_s - lines_began_s[event.request_id]
            if event.outcome == "completed":
                outcome.held_s += seconds
            else:
                outcome.lost_s += seconds
                outcome.stops += 1
        for action in actions:
            if isinstance(action, StartBatch):
                lines_began_s.update({request.id: now_s for request in action.batch.requests if request.id >= LINE})

    def on_step(now_s: float, event: Event, actions: list[Action]) -> None:
        note_lines(now_s, event, actions)
        if isinstance(event, AnswerBegan):
            outcome.began_s[event.request_id] = now_s
        lengths = event.output_tokens if isinstance(event, BatchEnded) else {}
        if isinstance(event, RequestEnded) and event.outcome == "completed":
            lengths = {event.request_id: event.output_tokens}
        failed = [action.request_id for action in actions if isinstance(action, FailRequest)]
        outcome.failed.update(failed)
        for request_id, tokens in [*lengths.items(), *[(id_, 0.0) for id_ in failed]]:
            outcome.ended_s[request_id] = now_s
            if request_id >= LINE:
                feeder.ended(str(request_id // LINE - 1), request_id, now_s, tokens)
        if any(request_id >= LINE for request_id in (*lengths, *failed)):
            feed(now_s)

    cluster = SimulatedCluster(config.scheduler(), [engine], on_step=on_step)
    feed(0.0)
    cluster.run(iter(workload.online), flush=False)
    return outcome


class Limit:
    """How many lines a feeder keeps on the engine. `answered` is told of each line that has ended."""

    def __init__(self, concurrency: float) -> None:
        self.concurrency = concurrency

    def answered(self, waiting: int, now_s: float) -> None:
        """waiting : requests that wait in the engine for a slot"""


class Aimd(Limit):
    """Additive increase, multiplicative decrease: llm-d-batch-gateway's way, with its engine's queue as the signal.

    step : added for each line that ends while nothing waits in the engine; 1 is the gateway's. every_s : least time
    between two halvings, a line's, as one burst is one signal
    """

    def __init__(self, step: Callable[[float], float], every_s: float, most: float = 4.0 * SLOTS) -> None:
        super().__init__(1.0)
        self._step, self._every_s, self._most = step, every_s, most
        self._halved_s = -every_s

    def answered(self, waiting: int, now_s: float) -> None:
        if waiting:
            if now_s >= self._halved_s + self._every_s:
                self.concurrency, self._halved_s = max(1.0, self.concurrency / 2.0), now_s
        else:
            self.concurrency = min(self._most, self.concurrency + self._step(self.concurrency))


def driven_directly(workload: Workload, limit: Limit) -> Outcome:
    """Online requests go to the engine at once, and wait there; lines beside them, `limit` at a time, by window."""
    engine = StepEngine(EngineInfo("engine", SLOTS, False), workload.lengths, costs(), workload.online_ids)
    outcome = Outcome({request.id: at_s for at_s, request in workload.online})
    arrivals = list(reversed(workload.online))
    lines = [line for _, members in reversed(workload.jobs) for line in reversed(members)]
    running = 0
    now_s = 0.0

    def start(request: Request) -> None:
        engine.start(Batch(request.id, 0, (request,), now_s, 1), now_s)

    while True:
        while lines and running < int(limit.concurrency):
            start(lines.pop())
            running += 1
        end_s = engine.next_end_s
        if arrivals and (end_s is None or arrivals[-1][0] < end_s):
            now_s, request = arrivals.pop()
            start(request)
            continue
        if end_s is None:
            return outcome
        now_s = end_s
        event = engine.end(now_s)
        if isinstance(event, AnswerBegan):
            outcome.began_s[event.request_id] = now_s
        elif isinstance(event, RequestEnded):
            outcome.ended_s[event.request_id] = now_s
            if event.request_id >= LINE:
                running -= 1
                limit.answered(len(engine._waiting), now_s)


def idle_tokens_per_s(workload: Workload, alone: Outcome) -> float:
    """Tokens a second that lines would get in the measured cycles if they ran in every slot that online requests leave,
    at the speed of a full engine, and slowed nobody down. alone : online requests without jobs
    """
    changes = [(alone.arrived_s[id_], 1) for id_ in alone.arrived_s] + [(at_s, -1) for at_s in alone.ended_s.values()]
    heapq.heapify(changes)
    times = sorted(changes)
    levels = np.cumsum([change for _, change in times])
    line_tokens = np.mean([workload.lengths[line.id] for _, lines in workload.jobs for line in lines])
    step_s = costs().step_s[SLOTS]
    rate = line_tokens / (line_tokens * step_s + costs().prefill_s)
    tokens = 0.0
    for (begins_s, ends_s), level in zip(pairwise([at_s for at_s, _ in times]), levels[:-1].tolist(), strict=True):
        begins_s, ends_s = max(begins_s, BURST_S + IDLE_S), min(ends_s, CYCLES * (BURST_S + IDLE_S))
        if ends_s > begins_s:
            tokens += (ends_s - begins_s) * max(0, SLOTS - level) * rate
    return float(tokens) / ((CYCLES - 1) * (BURST_S + IDLE_S))
