"""How each request ended: by its client, and by the server's journal."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from llmserve.live.journal import Step
from llmserve.request import Batch, Request
from llmserve.scheduling.messages import (
    EngineReady,
    FailRequest,
    PreemptBatch,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    StartBatch,
)
from questions.deadlines.traffic import Arrival

IN_TIME, LATE, REFUSED = "in time", "late", "504"
ENDS = (IN_TIME, LATE, REFUSED)
WARM_UP = "warm-up"  # a stream without deadlines


@dataclass(frozen=True)
class Answer:
    """The answer as the client saw it.

    latency_s  from the due time to the end of the answer
    batch      last batch of the request, as the server reports it; "": none
    """

    arrival: Arrival
    status: int
    latency_s: float
    batch: str

    @property
    def end(self) -> str:
        """One of ENDS. Raises AssertionError when the status is neither 200 nor 504."""
        if self.status == 200:
            return IN_TIME if self.latency_s <= self.arrival.stream.slo_s else LATE
        assert self.status == 504, f"an answer with status {self.status}"
        return REFUSED


@dataclass
class BatchRun:
    """A batch on an engine. Times are seconds of the journal.

    stopped  the scheduler preempted the batch
    in_time  number of answers in time
    open     ids of the requests that still run
    """

    id: int
    worker: str
    stream: str
    size: int
    began_s: float
    ended_s: float = 0.0
    stopped: bool = False
    in_time: int = 0
    open: set[int] = field(default_factory=set)


@dataclass
class History:
    """A request in the journal.

    ends       how the request ended; exactly one entry unless there is a bug
    preempted  number of preemptions
    batch      last batch of the request; None: the request never ran
    """

    request: Request
    arrived_s: float
    ends: list[str] = field(default_factory=list)
    preempted: int = 0
    batch: int | None = None

    @property
    def end(self) -> str:
        return self.ends[0]


@dataclass(frozen=True)
class Ledger:
    """Requests with deadlines, by id, and batches in the order of their starts, both without the warm-up."""

    histories: dict[int, History]
    batches: list[BatchRun]


def ledger_of(steps: Sequence[Step]) -> Ledger:
    replay = _Replay()
    for step in steps:
        replay.apply(step)
    histories = {id_: history for id_, history in replay.histories.items() if history.request.deadline_s is not None}
    return Ledger(histories, [batch for batch in replay.batches if batch.stream != WARM_UP])


class _Replay:
    def __init__(self) -> None:
        self.histories: dict[int, History] = {}
        self.batches: list[BatchRun] = []
        self._worker: dict[str, str] = {}  # by engine
        self._runs: dict[int, BatchRun] = {}  # by id of a request that runs

    def apply(self, step: Step) -> None:
        event, now_s = step.event, step.now_s
        if isinstance(event, EngineReady):
            self._worker[event.engine.name] = event.engine.worker or event.engine.name
        elif isinstance(event, RequestArrived):
            self.histories[event.request.id] = History(event.request, now_s)
        elif isinstance(event, RequestCancelled):
            self.histories[event.request_id].ends.append("left")
        elif isinstance(event, RequestEnded):
            self._end(event, now_s)
        for action in step.actions:
            if isinstance(action, StartBatch):
                self._start(action.engine, action.batch, now_s)
            elif isinstance(action, PreemptBatch):
                for request_id in action.request_ids:
                    self.histories[request_id].preempted += 1
                    self._runs[request_id].stopped = True
            elif isinstance(action, FailRequest):
                late = action.reason == "deadline_exceeded"
                self.histories[action.request_id].ends.append(REFUSED if late else action.reason)

    def _start(self, engine: str, batch: Batch, now_s: float) -> None:
        stream = batch.requests[0].stream
        ids = {request.id for request in batch.requests}
        run = BatchRun(batch.id, self._worker[engine], stream, len(ids), now_s, open=ids)
        self.batches.append(run)
        for request_id in ids:
            self._runs[request_id] = run
            self.histories[request_id].batch = batch.id

    def _end(self, event: RequestEnded, now_s: float) -> None:
        run, history = self._runs.pop(event.request_id), self.histories[event.request_id]
        run.open.discard(event.request_id)
        run.ended_s = now_s
        if event.outcome == "completed":
            deadline_s = history.request.deadline_s
            history.ends.append(LATE if deadline_s is not None and now_s > deadline_s else IN_TIME)
            run.in_time += history.end == IN_TIME


def check(answers: Sequence[Answer], ledger: Ledger) -> None:
    """Raises AssertionError if a request did not end exactly once, if clients and journal differ, or if a worker ran
    two batches at a time.
    """
    wrong = {id_: history.ends for id_, history in ledger.histories.items() if len(history.ends) != 1}
    assert not wrong, f"requests that did not end exactly once, and how they ended: {wrong}"
    by_clients = Counter((answer.arrival.stream.name, answer.status, answer.batch) for answer in answers)
    by_journal = Counter(
        (
            history.request.stream,
            504 if history.end == REFUSED else 200,
            "" if history.batch is None else str(history.batch),
        )
        for history in ledger.histories.values()
        if history.end in ENDS
    )
    assert by_clients == by_journal, f"client: {by_clients - by_journal}, journal: {by_journal - by_clients}"
    last_s: dict[str, float] = defaultdict(float)
    for batch in ledger.batches:
        assert not batch.open, f"batch {batch.id} never ended"
        assert batch.began_s >= last_s[batch.worker], f"{batch.worker} ran two batches at {batch.began_s} s"
        last_s[batch.worker] = batch.ended_s
