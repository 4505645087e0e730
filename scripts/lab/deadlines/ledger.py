"""What became of each request: by its client, and by the server's journal."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from deadlines.traffic import Asked
from llmserve.cluster.journal import Step
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

IN_TIME, LATE, REFUSED = "in time", "late", "504"
ENDS = (IN_TIME, LATE, REFUSED)
WARM_UP = "warm-up"  # a stream without deadlines


@dataclass(frozen=True)
class Answer:
    """latency_s : since it was due, whole answer.  batch : the last that it ran in, as the server says; "": in none."""

    asked: Asked
    status: int
    latency_s: float
    batch: str

    @property
    def end(self) -> str:
        """One of ENDS. Raises AssertionError on any other answer."""
        if self.status == 200:
            return IN_TIME if self.latency_s <= self.asked.stream.slo_s else LATE
        assert self.status == 504, f"an answer with status {self.status}"
        return REFUSED


@dataclass
class Ran:
    """A batch on an engine. Times in seconds of the journal.  stopped : for others.  open : requests that still run."""

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
class Course:
    """What the journal tells of a request. ends : how it ended, once if all is well.  preempted : times that it was
    told to stop for others.  batch : the last that it ran in; None: it never ran.
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
    """Requests with deadlines, by id; batches in the order of their beginnings. Nothing of the warm-up."""

    courses: dict[int, Course]
    batches: list[Ran]


def ledger_of(steps: Sequence[Step]) -> Ledger:
    book = _Book()
    for step in steps:
        book.see(step)
    dated = {id_: course for id_, course in book.courses.items() if course.request.deadline_s is not None}
    return Ledger(dated, [ran for ran in book.batches if ran.stream != WARM_UP])


class _Book:
    def __init__(self) -> None:
        self.courses: dict[int, Course] = {}
        self.batches: list[Ran] = []
        self._worker: dict[str, str] = {}  # of each engine
        self._runs: dict[int, Ran] = {}  # by request

    def see(self, step: Step) -> None:
        event, now_s = step.event, step.now_s
        if isinstance(event, EngineReady):
            self._worker[event.engine.name] = event.engine.worker or event.engine.name
        elif isinstance(event, RequestArrived):
            self.courses[event.request.id] = Course(event.request, now_s)
        elif isinstance(event, RequestCancelled):
            self.courses[event.request_id].ends.append("left")
        elif isinstance(event, RequestEnded):
            self._end(event, now_s)
        for action in step.actions:
            if isinstance(action, StartBatch):
                self._start(action.engine, action.batch, now_s)
            elif isinstance(action, PreemptBatch):
                for request_id in action.request_ids:
                    self.courses[request_id].preempted += 1
                    self._runs[request_id].stopped = True
            elif isinstance(action, FailRequest):
                late = action.reason == "deadline_exceeded"
                self.courses[action.request_id].ends.append(REFUSED if late else action.reason)

    def _start(self, engine: str, batch: Batch, now_s: float) -> None:
        stream = batch.requests[0].stream
        ids = {request.id for request in batch.requests}
        ran = Ran(batch.id, self._worker[engine], stream, len(ids), now_s, open=ids)
        self.batches.append(ran)
        for request_id in ids:
            self._runs[request_id] = ran
            self.courses[request_id].batch = batch.id

    def _end(self, event: RequestEnded, now_s: float) -> None:
        ran, course = self._runs.pop(event.request_id), self.courses[event.request_id]
        ran.open.discard(event.request_id)
        ran.ended_s = now_s
        if event.outcome == "completed":
            deadline_s = course.request.deadline_s
            course.ends.append(LATE if deadline_s is not None and now_s > deadline_s else IN_TIME)
            ran.in_time += course.end == IN_TIME


def check(answers: Sequence[Answer], ledger: Ledger) -> None:
    """Raises AssertionError where a request did not end exactly once, where client and journal differ, or where a
    worker ran two batches at a time.
    """
    wrong = {id_: course.ends for id_, course in ledger.courses.items() if len(course.ends) != 1}
    assert not wrong, f"requests that did not end exactly once, and how they ended: {wrong}"
    ours = Counter((answer.asked.stream.name, answer.status, answer.batch) for answer in answers)
    theirs = Counter(
        (
            course.request.stream,
            504 if course.end == REFUSED else 200,
            "" if course.batch is None else str(course.batch),
        )
        for course in ledger.courses.values()
        if course.end in ENDS
    )
    assert ours == theirs, f"client: {ours - theirs}, journal: {theirs - ours}"
    last_s: dict[str, float] = defaultdict(float)
    for ran in ledger.batches:
        assert not ran.open, f"batch {ran.id} never ended"
        assert ran.began_s >= last_s[ran.worker], f"{ran.worker} ran two batches at {ran.began_s} s"
        last_s[ran.worker] = ran.ended_s
