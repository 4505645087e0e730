"""Snapshots of a live cluster, one each second, for the page in a browser.

Nothing is counted while no browser watches. A snapshot has sums, and as many single requests as a picture shows, so the
size of a snapshot does not grow with the queue.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from llmserve.calls.in_flight import InFlightCall
from llmserve.live.cluster import LiveCluster
from llmserve.live.handle import EngineHandle
from llmserve.live.journal import Step
from llmserve.observe.programs_seen import ProgramsSeen, programs_seen
from llmserve.scheduling.messages import FailRequest, RequestArrived, RequestEnded
from llmserve.settings.policies import order_settings

ENGINES_MAX = 100  # of a snapshot
NAMES_MAX = 50  # of models, and of shares
RUNNING_MAX = 200
PROGRAMS_MAX = 200
ENDED_MAX = 200
LATENCIES_MAX = 4_096  # of a second, for its quantiles


class EngineSeen(msgspec.Struct, frozen=True):
    """An engine of a snapshot.

    kind     "" before it was up
    circuit  whether the circuit breaker is closed
    prompt_tokens, cached_tokens  of the answers since the snapshot before, as far as the engine tells both
    tokens_max     that its cache holds; None: unknown
    ledger_tokens  of it that requests and programs in a tool call have
    """

    name: str
    kind: str
    state: str
    circuit: bool
    running: int
    slots: int
    models: list[str]
    prompt_tokens: int
    cached_tokens: int
    tokens_max: int | None
    ledger_tokens: int


class SourceSeen(msgspec.Struct, frozen=True):
    """A source of engines. trouble : "": it tells of these engines"""

    name: str
    engines: int
    trouble: str


class Waiting(msgspec.Struct, frozen=True):
    """Requests that wait, of a model or of a share; see Request.share."""

    name: str
    requests: int


class RequestSeen(msgspec.Struct, frozen=True):
    """A request that runs or has ended. Times are seconds of the cluster's clock.

    ended_s : None while it runs.  predicted, tokens : output tokens; predicted None without a forecast
    """

    id: int
    engine: str
    model: str
    bin: int
    arrived_s: float
    started_s: float
    ended_s: float | None
    outcome: str
    predicted: float | None
    tokens: float


class JobsSeen(msgspec.Struct, frozen=True):
    """Batch jobs, of all keys.

    batches : by status, of all servers of the store; None: it did not answer
    lines_waiting, lines_in_flight : of the batches that this server works on
    tokens_waiting : forecast output tokens of the lines that wait
    """

    batches: dict[str, int] | None
    lines_waiting: int
    lines_in_flight: int
    tokens_waiting: float


class Snapshot(msgspec.Struct, frozen=True):
    """The state at now_s, and what has ended since the snapshot before.

    arrived, ended, tokens  since the snapshot before
    refused        since then, by reason
    latency_s      median and 99th percentile of those that ended, from arrival to end; None: none ended
    queue_s        the same from arrival to start
    joules         of all engines since the start; None: unknown
    engines_in_all, running  how many there are; the lists may have fewer
    sources        where engines are found while the server runs
    models, shares who waits, the most first
    requests       the ended ones first
    programs       those that are present
    jobs           None: the server has no place for batches
    """

    now_s: float
    since_s: float
    draining: bool
    order: str
    waiting: int
    running: int
    slots: int
    arrived: int
    ended: int
    tokens: float
    refused: dict[str, int]
    latency_s: tuple[float, float] | None
    queue_s: tuple[float, float] | None
    joules: float | None
    engines_in_all: int
    engines: list[EngineSeen]
    sources: list[SourceSeen]
    models: list[Waiting]
    shares: list[Waiting]
    requests: list[RequestSeen]
    programs: ProgramsSeen
    jobs: JobsSeen | None


class Meter(Protocol):
    """Measures the energy of all engines; see energy.EnergyMeter."""

    def joules(self, now_s: float) -> float: ...


class Watch:
    """Counts for the next snapshot, between `begin` and `stop`, which may nest. meter : of all engines; None: none"""

    def __init__(self, cluster: LiveCluster, meter: Meter | None = None) -> None:
        self._cluster = cluster
        self._meter = meter
        self._watchers = 0
        self._clear()

    def begin(self) -> None:
        self._watchers += 1
        if self._watchers == 1:
            self._clear()
            self._cluster.journal.listen(self._observe)

    def stop(self) -> None:
        self._watchers -= 1
        if self._watchers == 0:
            self._cluster.journal.unlisten(self._observe)

    def _clear(self) -> None:
        self._since_s = self._cluster.now_s()
        self._arrived = self._ended = 0
        self._tokens = 0.0
        self._refused: Counter[str] = Counter()
        self._prompt_tokens: Counter[str] = Counter()  # by engine
        self._cached_tokens: Counter[str] = Counter()
        self._latencies_s: list[float] = []
        self._queues_s: list[float] = []
        self._requests: list[RequestSeen] = []

    def _observe(self, step: Step) -> None:
        event = step.event
        if type(event) is RequestArrived:
            self._arrived += 1
        elif type(event) is RequestEnded:
            self._note_end(event, step.now_s)
        for action in step.actions:
            if type(action) is FailRequest:
                self._refused[action.reason] += 1

    def _note_end(self, event: RequestEnded, now_s: float) -> None:
        call = self._cluster.calls.get(event.request_id)
        if call is None or call.receipt is None or event.outcome != "completed":
            return
        self._ended += 1
        tokens = event.output_tokens * call.request.choices
        self._tokens += tokens
        counts = call.measured.counts
        if counts is not None and counts.prompt_tokens is not None and counts.cached_tokens is not None:
            self._prompt_tokens[event.engine] += counts.prompt_tokens
            self._cached_tokens[event.engine] += counts.cached_tokens
        started_s = call.arrived_at_s + call.receipt.queue_ms / 1e3
        if len(self._latencies_s) < LATENCIES_MAX:
            self._latencies_s.append(now_s - call.arrived_at_s)
            self._queues_s.append(started_s - call.arrived_at_s)
        if len(self._requests) < ENDED_MAX:
            seen = _seen(self._cluster, event.request_id, event.engine, event.output_tokens, now_s)
            self._requests += [] if seen is None else [seen]

    def snapshot(self, jobs: JobsSeen | None = None) -> Snapshot:
        """The state now; counting begins anew. O(engines + models x shares)."""
        cluster, now_s = self._cluster, self._cluster.now_s()
        handles = [handle for _, handle in sorted(cluster.fleet.handles.items())]
        models, shares = self._waiting()
        running = [
            seen
            for handle in handles
            for request_id, call in list(handle.running.items())[:RUNNING_MAX]
            if (seen := _seen(cluster, request_id, handle.name, _streamed(call), None))
        ]
        snapshot = Snapshot(
            now_s=now_s,
            since_s=self._since_s,
            draining=cluster.draining,
            order=str(order_settings(cluster.journal.header.scheduling)["order"]),
            waiting=cluster.scheduler.waiting,
            running=sum([len(handle.running) for handle in handles]),
            slots=sum([handle.info.slots for handle in handles if handle.ready]),
            arrived=self._arrived,
            ended=self._ended,
            tokens=self._tokens,
            refused=dict(self._refused),
            latency_s=_quantiles(self._latencies_s),
            queue_s=_quantiles(self._queues_s),
            joules=None if self._meter is None else self._meter.joules(now_s),
            engines_in_all=len(handles),
            engines=[self._engine(handle) for handle in handles[:ENGINES_MAX]],
            sources=[
                SourceSeen(text, len(looked.engines), looked.trouble)
                for text, looked in sorted(cluster.membership.looked.items())
            ],
            models=models,
            shares=shares,
            requests=[*self._requests, *running[:RUNNING_MAX]],
            programs=programs_seen(cluster, PROGRAMS_MAX),
            jobs=jobs,
        )
        self._clear()
        return snapshot

    def _engine(self, handle: EngineHandle) -> EngineSeen:
        state = self._cluster.scheduler.engines.get(handle.name)
        closed = state is None or state.circuit.closed
        kind = str(handle.probed.program) if handle.state.seen else ""
        name = handle.name
        return EngineSeen(
            name,
            kind,
            handle.word,
            closed,
            len(handle.running),
            handle.info.slots,
            list(handle.models)[:10],
            self._prompt_tokens[name],
            self._cached_tokens[name],
            handle.info.tokens_max,
            self._cluster.scheduler.group.programs.kept(name)[1],
        )

    def _waiting(self) -> tuple[list[Waiting], list[Waiting]]:
        """Who waits, by model and by share, the most first."""
        models, shares = Counter[str](), Counter[str]()
        waiting = self._cluster.scheduler.group.tally.queues
        for model, queues in waiting.items():
            models[model] += queues.waiting
        for fair in {queues.fair for queues in waiting.values()}:
            for share in fair:
                shares[share.name] += share.waiting
        return _most(models), _most(shares)


def _streamed(call: InFlightCall) -> float:
    """Tokens of each of the call's answers so far."""
    return call.measured.streamed_tokens / call.request.choices


def _most(counts: Counter[str]) -> list[Waiting]:
    return [Waiting(name, count) for name, count in counts.most_common(NAMES_MAX) if count]


def _seen(
    cluster: LiveCluster, request_id: int, engine: str, tokens: float, ended_s: float | None
) -> RequestSeen | None:
    call = cluster.calls.get(request_id)
    if call is None or call.receipt is None:
        return None
    started_s = call.arrived_at_s + call.receipt.queue_ms / 1e3
    predicted = call.request.predicted_tokens
    outcome = "runs" if ended_s is None else "completed"
    return RequestSeen(
        request_id,
        engine,
        call.request.model,
        call.receipt.bin,
        call.arrived_at_s,
        started_s,
        ended_s,
        outcome,
        predicted,
        tokens,
    )


def _quantiles(seconds: Sequence[float]) -> tuple[float, float] | None:
    if not seconds:
        return None
    median, high = np.percentile(seconds, (50, 99)).tolist()
    return (median, high) if math.isfinite(high) else None
