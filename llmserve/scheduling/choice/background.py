"""Lines of jobs: they take what online requests leave.

A line waits here, apart from the queues of its model, until one of these:

    it starts      a slot is free, no request waits that the slot's engine serves, and more slots are free than the
                   reserve (reserve.py). Lines start by the ends of their windows. What nobody else wanted costs their
                   share nothing. Lines that end more slowly than their windows ask for use the reserve, too: that costs
                   online requests less than lines that are due later.
    it is due      its latest start has come by the forecasts. From now on it is an online request of its share.
    it is late     its window has closed.

The latest start of a line is the end of its window less the time that it takes alone, if it is as long as its forecast
allows. And lines are due, in order, while all up to one of them, and the rest of its job, would end after its window on
the slots that its share would get if all shares that wait now went on waiting.

An online request that finds no slot stops the line that has begun last, for that has least to lose (--line-stops). The
line waits here again, as the first of its window.

A barrier engine gets lines of like lengths in a batch, the longest first: of many that wait, few end much earlier than
their batch, and a job does not end with its longest answers.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from typing import NamedTuple, Protocol

import msgspec

from llmserve.request import Request
from llmserve.scheduling.engines import EngineState
from llmserve.scheduling.fair import FairShares
from llmserve.scheduling.group import Forming, Group
from llmserve.scheduling.groups import Groups, RequestBook
from llmserve.scheduling.memory import is_giant
from llmserve.scheduling.messages import FailReason, PreemptBatch, ReportDue
from llmserve.scheduling.queues.model_queues import ModelQueues, aside, count_lines
from llmserve.scheduling.queues.waiting import FormedBatch, QueuedRequest, Run
from llmserve.scheduling.reserve import Reserve

PASSED_MOST = 8  # lines that a later one may pass because they do not fit an engine's memory
LOOK_S, LOOKS_LEAST = 1.0, 16.0  # lines that have arrived are looked at within so long, or this part of their windows
NO_ENGINE_S = 1.0  # how often to look whether an engine works again
KNOWN_SHARE = 0.25  # of what is left of a window: the rate of lines must be known for so long
LINE_S_LEAST = 1e-3  # a line's time counts as this at least

Row = list[tuple[float, int, Request]]  # (end of the window, number of the arrival, line), ascending


class Starter(Protocol):
    """Starts batches (scheduling/choice/dispatch.py)."""

    forming: Forming

    def start_aside(
        self, group: Group, engine: EngineState, queues: ModelQueues, batch: FormedBatch, now_s: float
    ) -> None: ...


class Door(Protocol):
    """Lets online requests wait (scheduling/admission.py). reserves : by the shares that compete for the engines"""

    @property
    def reserves(self) -> Mapping[FairShares, Reserve]: ...

    def refusal(self, request: Request, group: Group, waiting: int) -> FailReason | None: ...

    def enter(self, request: Request, group: Group) -> None: ...

    def held(self, group: Group, queues: ModelQueues) -> tuple[int, int]: ...


class Start(NamedTuple):
    engine: EngineState
    queues: ModelQueues
    lines: list[QueuedRequest]


class Background:
    """The lines that wait.

    waiting   by id
    wake_at_s when to look again if no event comes before; None: never
    """

    def __init__(
        self,
        groups: Groups,
        book: RequestBook,
        dispatch: Starter,
        admission: Door,
    ) -> None:
        self.waiting: dict[int, tuple[float, int, Request]] = {}
        self.wake_at_s: float | None = None
        self._groups, self._book, self._dispatch, self._admission = groups, book, dispatch, admission
        self._rows: dict[str, Row] = {}  # by model
        self._pressed: set[str] = set()  # models whose lines need more than they get
        self._stops = LineStops(book)
        self._free = FairShares().of("", 1.0)  # what surplus time is charged to
        self._arrivals, self._look_at_s = 0, math.inf

    # ---- lines that come and go ----

    def arrive(self, request: Request) -> None:
        """Let a line wait that was not refused."""
        self._arrivals += 1
        self._wait(request, self._arrivals)

    def _wait(self, request: Request, turn: int) -> None:
        """turn : among the lines of the same window, ascending"""
        entry = math.inf if request.deadline_s is None else request.deadline_s, turn, request
        self.waiting[request.id] = entry
        insort(self._rows.setdefault(request.model, []), entry, key=_turn)
        now_s = self._book.now_s
        self._look_at_s = min(self._look_at_s, now_s + min(LOOK_S, (entry[0] - now_s) / LOOKS_LEAST))
        self._touch()

    def wait_again(self, queued: QueuedRequest) -> None:
        """Let a line wait that was stopped."""
        self._book.forget([queued])
        if self._dispatch.forming.draining:
            self._book.report_failed(queued.request.id, "draining", self._groups.own(queued.request))
            return
        self._arrivals += 1
        self._wait(queued.request, -self._arrivals)

    def _touch(self) -> None:
        for group in self._groups:
            if group.pool.free:
                self._book.touch(group)

    def remove(self, request_id: int) -> Request | None:
        """Take a line out; None: it does not wait here."""
        entry = self.waiting.pop(request_id, None)
        if entry is None:
            return None
        row = self._rows[entry[2].model]
        del row[bisect_left(row, entry[:2], key=_turn)]
        if not row:
            self._empty(entry[2].model)
        return entry[2]

    def _empty(self, model: str) -> None:
        """No line of the model waits any more."""
        del self._rows[model]
        self._pressed.discard(model)
        if (queues := self._groups.queues_of(model)) is not None:
            queues.line_rate.note(self._book.now_s, 0.0, busy=False)

    def revise(self, changes: Mapping[int, Callable[[Request], Request]]) -> None:
        """Give lines new forecasts."""
        for request_id in changes.keys() & self.waiting.keys():
            deadline_s, number, request = self.waiting[request_id]
            entry = deadline_s, number, changes[request_id](request)
            row = self._rows[request.model]
            self.waiting[request_id] = row[bisect_left(row, entry[:2], key=_turn)] = entry

    def fail(self, reason: FailReason) -> None:
        """Fail all lines."""
        for request_id in list(self.waiting):
            self._fail(request_id, reason)

    def _fail(self, request_id: int, reason: FailReason) -> None:
        request = self.remove(request_id)
        assert request is not None, f"line {request_id} does not wait"
        self._book.report_failed(request_id, reason, self._groups.own(request))

    # ---- lines whose time has come ----

    def hurry(self) -> None:
        """Fail lines whose window has closed, and let those wait as online requests whose latest start has come."""
        now_s = self._book.now_s
        for row in list(self._rows.values()):
            while row and row[0][0] <= now_s:
                self._fail(row[0][2].id, "deadline_exceeded")
        if now_s >= self._look_at_s:
            self._look_at_s = min([self._hurry(model) for model in list(self._rows)], default=math.inf)

    def _hurry(self, model: str) -> float:
        """Hurry the lines of a model that are due. Returns when to look again."""
        row, now_s = self._rows[model], self._book.now_s
        queues = self._groups.queues_of(model)
        if queues is None or queues.no_engine_since_s is not None:
            return now_s + NO_ENGINE_S  # a line does not give up, as an online request would
        per_token_s = queues.service.seconds_per_token
        tokens = [_tokens(queues, request) for *_, request in row]
        shared_s = [per_token_s / _slots_of(queues, request) for *_, request in row]
        before = [0.0, *accumulate(tokens)]
        self._press(
            model, queues, [tokens + entry[2].after_tokens for tokens, entry in zip(before[1:], row, strict=True)]
        )
        starts_s = [  # of all up to each line, and of what follows it
            deadline_s - shared * (before[place + 1] + request.after_tokens)
            for place, ((deadline_s, _, request), shared) in enumerate(zip(row, shared_s, strict=True))
        ]
        first_s = list(accumulate(reversed(starts_s), min))[::-1]  # the least from each place on
        place = 0
        while place < len(starts_s) and (due_s := first_s[place] + shared_s[place] * before[place]) <= now_s:
            if not self._count_as_online(row[0][2]):
                return now_s + LINE_S_LEAST + per_token_s * tokens[place]  # the queue is full: ask again
            place += 1
        alone_s = [deadline_s - per_token_s * _most(queues, request) for deadline_s, _, request in row]
        for request in [entry[2] for entry, at_s in zip(list(row), alone_s, strict=True) if at_s <= now_s]:
            self._count_as_online(request)
        later_s = [at_s for at_s in (*alone_s, *[due_s for due_s in (due_s,) if place < len(starts_s)]) if at_s > now_s]
        left_s = min(later_s, default=math.inf) - now_s
        look_s = max(LOOK_S, (row[0][0] - now_s) / LOOKS_LEAST) if row else math.inf  # how fast lines end
        return now_s + min(max(0.5 * left_s, min(left_s, per_token_s), LINE_S_LEAST), look_s)

    def _press(self, model: str, queues: ModelQueues, tokens: Sequence[float]) -> None:
        """Note whether the lines of a model need more than they get. tokens : up to the end of each line's job"""
        now_s = self._book.now_s
        queues.line_rate.note(now_s, 0.0, busy=True)
        rate = queues.line_rate.tokens_per_s
        lefts_s = [(count, entry[0] - now_s) for count, entry in zip(tokens, self._rows[model], strict=True)]
        known_s = queues.line_rate.seconds / KNOWN_SHARE
        if rate is not None and any(count > rate * left_s and left_s <= known_s for count, left_s in lefts_s):
            self._pressed.add(model)
            self._touch()
        else:
            self._pressed.discard(model)

    def _count_as_online(self, line: Request) -> bool:
        """Let a line wait as an online request. False: its queue has no room."""
        group = self._groups.group_for(line)
        if self._admission.refusal(line, group, group.tally.waiting) is not None:
            return False
        request = msgspec.structs.replace(line, background=False)
        self.remove(line.id)
        self._book.actions.append(ReportDue(line.id))
        self._admission.enter(request, group)
        self._book.touch(group)
        return True

    # ---- lines that start ----

    def settle(self, group: Group) -> None:
        """Stop lines for online requests that wait, and start lines in the slots of a group that others leave."""
        if group.tally.lines and self._dispatch.forming.line_stops:
            self._stops.make_room(group)
        if self.waiting:
            self._fill(group)

    def _fill(self, group: Group) -> None:
        """Start lines in the slots of a group that others leave."""
        while (start := self._next(group)) is not None:
            engine, queues, lines = start
            for queued in lines:
                self.remove(queued.request.id)
                self._book.by_id[queued.request.id] = queued
                group.enter(queues)
            count_lines(queues, len(lines))
            batch = self._dispatch.forming.form(queues, max([q.bin for q in lines]), lines, self._book.now_s)
            self._dispatch.start_aside(group, engine, queues, batch, self._book.now_s)

    def _next(self, group: Group) -> Start | None:
        """The lines that start next; None: none can."""
        if any(engine.worker.reserved is not None for engine in group.pool.engines.values()):
            return None  # requests wait for an engine that makes room
        waited_for = group.tally.queues  # their engines are left to them
        free = [
            engine
            for engine in group.pool.free.values()
            if engine.room > 0 and not any(engine.serves(model) for model in waited_for)
        ]
        rows = sorted(self._rows.items(), key=lambda item: _turn(item[1][0])) if free else ()
        for model, row in rows:
            engines = [engine for engine in free if engine.open_to(model)]
            if engines:
                queues = group.queues_of(model, self._book.now_s)
                beyond = self._beyond_reserve(group, queues, engines)
                if beyond and (start := self._start(group, queues, beyond, row)) is not None:
                    return start
        return None

    def _beyond_reserve(
        self, group: Group, queues: ModelQueues, engines: Sequence[EngineState]
    ) -> Sequence[EngineState]:
        """Engines on which a line may start. A barrier engine gives all its slots at once."""
        reserve = self._admission.reserves.get(queues.fair)
        if reserve is None or queues.model in self._pressed:
            return engines
        online, lines = self._admission.held(group, queues)
        most = reserve.lines_most(self._book.now_s, online, queues.all_slots, self._line_s(queues))
        return [engine for engine in engines if lines + (engine.info.slots if engine.info.barrier else 1) <= most]

    def _line_s(self, queues: ModelQueues) -> float:
        """Mean seconds that a line takes: of those that have ended; before the first, of those that wait."""
        service = queues.line_service
        if service.answers:
            return max(LINE_S_LEAST, service.tokens_mean * service.seconds_per_token)
        row = self._rows[queues.model]
        tokens = sum([_tokens(queues, request) for *_, request in row]) / len(row)
        return max(LINE_S_LEAST, tokens * queues.service.seconds_per_token)

    def _start(self, group: Group, queues: ModelQueues, engines: Sequence[EngineState], row: Row) -> Start | None:
        """A start of the model's next lines on one of these engines; None: they fit none."""
        now_s = self._book.now_s
        barrier = [engine for engine in engines if engine.info.barrier]
        for request in islice(self._members(group, row), PASSED_MOST):
            queued = aside(queues, request, self._free, now_s)
            batch = FormedBatch(0, queued.bin, now_s, [queued])
            willing = [
                engine for engine in engines if engine.circuit.closed or not engine.circuit.refuses(batch, now_s)
            ]
            fitting = [engine for engine in willing if _fits(engine, queued, queues, now_s)]
            if not fitting:
                continue
            if queues.release.plans:  # as for other requests: idle engines may save energy
                fitting = [engine for engine in fitting if engine.running] or fitting
            engine = group.pool.preferred(fitting, request.prefixes)
            if engine not in barrier:
                return Start(engine, queues, [queued])
            most = min(engine.room_at_once, self._dispatch.forming.batch_size)
            return Start(engine, queues, self._alike(group, queues, row, most))
        return None

    def _members(self, group: Group, row: Row) -> Iterator[Request]:
        """The lines that would wait in this group if they were online, by the ends of their windows."""
        only = self._groups.only is not None
        return (request for *_, request in row if only or self._groups.group_for(request) is group)

    def _alike(self, group: Group, queues: ModelQueues, row: Row, most: int) -> list[QueuedRequest]:
        """Lines of like lengths for one batch: the longest of those with the first end of a window, then the next."""
        lines = list(self._members(group, row))
        first_s = lines[0].deadline_s
        same = [line for line in lines if line.deadline_s == first_s]
        chosen = sorted(same, key=lambda line: (-_tokens(queues, line), line.id))[:most]
        chosen += lines[len(same) : len(same) + most - len(chosen)]
        return [aside(queues, line, self._free, self._book.now_s) for line in chosen]

    # ---- time ----

    def tokens_per_s(self, request: Request) -> float:
        """Tokens a second that the share of this line would get if each share that waits now went on waiting: for the
        forecast of a job's end (llmserve/jobs/run/feeding.py). 0 without an engine.
        """
        queues = self._groups.queues_of(request.model)
        if queues is None or not queues.all_slots:
            return 0.0
        return _slots_of(queues, request) / queues.service.seconds_per_token

    def next_wake_s(self, group_times_s: float | None) -> float | None:
        """The earliest of the caller's time and the times at which lines may start, be due, or be late."""
        times_s = [self._look_at_s, *[row[0][0] for row in self._rows.values()]]
        for group in self._groups:
            times_s += [until_s for e in group.pool.paused.values() if (until_s := e.circuit.open_until_s) is not None]
            times_s += group.pool.rests_end_s(self._book.now_s)
        for model in self._rows:
            queues = self._groups.queues_of(model)
            if queues is not None and (reserve := self._admission.reserves.get(queues.fair)) is not None:
                times_s.append(reserve.silent_from_s(self._line_s(queues)))
        times_s = [at_s for at_s in times_s if self._book.now_s < at_s < math.inf]
        if group_times_s is not None:
            times_s.append(group_times_s)
        return min(times_s, default=None)


class LineStops:
    """Stops lines for online requests that wait for a slot, in the queues or on an engine."""

    def __init__(self, book: RequestBook) -> None:
        self._book = book

    def make_room(self, group: Group) -> None:
        """Stop as many lines as requests wait, the youngest first."""
        full = [
            engine
            for engine in group.pool.engines.values()
            if engine.room <= 0 and not engine.info.barrier and engine.takes_for_group and engine.circuit.closed
        ]
        soon = {e.info.name: e.room + sum([run.stopping for run in e.running.values()]) for e in full}
        for engine in full:
            self._stop([engine], -soon[engine.info.name])
        for queues in group.tally.queues.values():
            serving = [engine for engine in full if engine.serves(queues.model)]
            wanted = queues.waiting
            for engine in serving:
                taken = min(wanted, max(0, soon[engine.info.name]))
                soon[engine.info.name] -= taken
                wanted -= taken
            self._stop(serving, wanted)

    def _stop(self, engines: Sequence[EngineState], count: int) -> None:
        """Stop lines on these engines, those that have begun last first."""
        runs = [run for engine in engines for run in engine.running.values()] if count > 0 else []
        lines = [run for run in runs if run.queued.request.background and self._may_stop(run)]
        for run in sorted(lines, key=lambda run: (-run.started_at_s, run.queued.request.id))[: max(0, count)]:
            run.stopping = True
            self._book.actions.append(PreemptBatch(run.engine, run.batch_id, (run.queued.request.id,)))

    def _may_stop(self, run: Run) -> bool:
        """A line that would end after its window if it began anew goes on."""
        request, queues = run.queued.request, self._book.queues_of(run.queued)
        if run.stopping or run.began or run.queued.cancelled:
            return False
        alone_s = _most(queues, request) * queues.service.seconds_per_token
        return request.deadline_s is None or self._book.now_s + alone_s < request.deadline_s


def _turn(entry: tuple[float, int, Request]) -> tuple[float, int]:
    return entry[:2]


def _tokens(queues: ModelQueues, request: Request) -> float:
    """Forecast output tokens of a line."""
    return queues.forecast(request) or queues.service.tokens_mean


def _most(queues: ModelQueues, request: Request) -> float:
    """Tokens that the line takes at most, as far as its forecast tells."""
    tokens = _tokens(queues, request)
    return max(tokens, request.quantiles[-1]) if request.quantiles and queues.trust.trusted else tokens


def _slots_of(queues: ModelQueues, line: Request) -> float:
    """Slots that the line's share would get if each share that waits now waited on."""
    others = sum([share.weight for share in queues.fair if share.name != line.share])
    return queues.all_slots * line.weight / (line.weight + others)


def _fits(engine: EngineState, queued: QueuedRequest, queues: ModelQueues, now_s: float) -> bool:
    """Whether the engine's memory holds the line, and is not another request's turn."""
    if not engine.fits(queued, now_s, queues.service.seconds_per_token):
        return False
    return not engine.running or not is_giant(queued, engine.info) or engine.turn.is_open_to(queued, now_s)
