"""Worlds that can fail: bugs planted into the scheduler are caught, by the account alone.

Its own `check` is switched off, so that what is caught is caught from outside.
"""

import itertools
from collections.abc import Callable

import pytest
from llmserve.scheduling.direct import Direct
from llmserve.scheduling.floor import Floor
from worlds.run import Violation, judge

from llmserve.request import Request
from llmserve.scheduling.batch_times import BatchTimes, Timetable
from llmserve.scheduling.circuit import Circuit
from llmserve.scheduling.engines import EngineState, Worker
from llmserve.scheduling.messages import Action, Event, RequestCancelled, RequestEnded, StartBatch
from llmserve.scheduling.model_queues import ModelQueues
from llmserve.scheduling.orders import Flex
from llmserve.scheduling.planner import Planner
from llmserve.scheduling.policies import DIRECT
from llmserve.scheduling.queues import FormedBatch, FormedQueue, Place, QueuedRequest
from llmserve.scheduling.scheduler import Scheduler

SEEDS = 200  # within so many worlds each bug must be found

Patch = pytest.MonkeyPatch


def a_request_that_comes_back_is_dropped(patch: Patch) -> None:
    run_again = Scheduler._run_again

    def drop_the_last(self: Scheduler, tickets: list[QueuedRequest], reason: str, avoid: str) -> None:
        run_again(self, tickets[:-1], reason, avoid)  # type: ignore[arg-type]

    patch.setattr(Scheduler, "_run_again", drop_the_last)


def a_batch_is_started_twice(patch: Patch) -> None:
    handle = Scheduler.handle

    def stutter(self: Scheduler, event: Event, now_s: float) -> list[Action]:
        actions = handle(self, event, now_s)
        starts = [action for action in actions if isinstance(action, StartBatch)]
        return [*actions, *starts[:1]]

    patch.setattr(Scheduler, "handle", stutter)


def clients_that_leave_the_queue_are_not_heard(patch: Patch) -> None:
    def deaf(self: Scheduler, event: RequestCancelled) -> None:
        ticket = self.requests.get(event.request_id)
        if ticket is not None and ticket.place is Place.RUNNING:
            cancelled(self, event)

    cancelled = Scheduler._on_request_cancelled
    patch.setattr(Scheduler, "_on_request_cancelled", deaf)


def engines_are_not_told_of_clients_that_leave(patch: Patch) -> None:
    def silent(self: Scheduler, event: RequestCancelled) -> None:
        ticket = self.requests.get(event.request_id)
        if ticket is not None and ticket.place is Place.RUNNING:
            ticket.cancelled = True
        else:
            cancelled(self, event)

    cancelled = Scheduler._on_request_cancelled
    patch.setattr(Scheduler, "_on_request_cancelled", silent)


def deadlines_are_forgotten(patch: Patch) -> None:
    patch.setattr(Scheduler, "_fail_late_requests", lambda self: None)


def deadlines_of_requests_that_come_back_are_forgotten(patch: Patch) -> None:
    run_again = Scheduler._run_again

    def forget(self: Scheduler, tickets: list[QueuedRequest], reason: str, avoid: str) -> None:
        before = list(self._deadlines)
        run_again(self, tickets, reason, avoid)  # type: ignore[arg-type]
        self._deadlines = before

    patch.setattr(Scheduler, "_run_again", forget)


def an_engine_has_one_slot_more(patch: Patch) -> None:
    room = EngineState.room.fget
    assert room is not None
    patch.setattr(EngineState, "room", property(lambda self: room(self) + 1))


def a_barrier_engine_takes_what_has_room(patch: Patch) -> None:
    patch.setattr(EngineState, "room", property(lambda self: self.info.slots - len(self.running)))


def a_gpu_runs_a_batch_on_each_of_its_engines(patch: Patch) -> None:
    def own_room(self: EngineState) -> int:
        return self.info.slots - len(self.running) if not self.info.barrier or not self.running else 0

    patch.setattr(EngineState, "room", property(own_room))


def an_engine_is_given_models_that_it_does_not_serve(patch: Patch) -> None:
    patch.setattr(EngineState, "serves", lambda self, model: True)


def all_models_have_one_lane(patch: Patch) -> None:
    lane = Scheduler.lane
    patch.setattr(Scheduler, "lane", lambda self, model: self.lanes.setdefault(model, lane(self, "")))


def who_made_room_is_forgotten(patch: Patch) -> None:
    def forget(self: Scheduler, ticket: QueuedRequest) -> None:
        del self.requests[ticket.request.id]

    patch.setattr(Scheduler, "_wait_again", forget)


def who_made_room_fails_though_it_could_be_in_time(patch: Patch) -> None:
    patch.setattr(Scheduler, "_wait_again", lambda self, ticket: self._fail(ticket, "deadline_exceeded"))


def who_has_seen_a_byte_makes_room(patch: Patch) -> None:
    patch.setattr(Scheduler, "_on_answer_began", lambda self, event: None)


def a_batch_makes_room_for_one_little_larger(patch: Patch) -> None:
    patch.setitem(DIRECT, "flex", lambda config: Flex(None if config.preemption == "off" else 1.01))


def room_is_made_although_nobody_wants_that(patch: Patch) -> None:
    patch.setitem(DIRECT, "flex", lambda config: Flex())


def an_engine_is_not_kept_for_whom_it_was_emptied_for(patch: Patch) -> None:
    patch.setattr(EngineState, "takes", lambda self, now_s: self.ready and self.circuit.takes(now_s) and self.room > 0)
    patch.setattr(Worker, "busy", property(lambda self: False))


def who_room_was_made_for_never_gets_it(patch: Patch) -> None:
    patch.setattr(Scheduler, "_start_reserved", lambda self, engine: None)


def batches_are_formed_as_printed(patch: Patch) -> None:
    patch.setitem(DIRECT, "flex", lambda config: Flex(None, printed=True))


def any_batch_is_thought_to_take_as_long_as_one_request(patch: Patch) -> None:
    of = Timetable.of

    def hopeful(self: Timetable, engine: EngineState, lane: ModelQueues, bin_index: int) -> BatchTimes:
        times = of(self, engine, lane, bin_index)
        sizes = len(times.expected)
        return BatchTimes(times.expected[:1] * sizes, times.least[:1] * sizes, times.empty)

    patch.setattr(Timetable, "of", hopeful)


def who_cannot_be_in_time_waits_on(patch: Patch) -> None:
    patch.setattr(Direct, "late_at_s", lambda self, ticket, lane: ticket.request.deadline_s)


def a_request_that_would_just_be_in_time_is_given_up(patch: Patch) -> None:
    late_at_s = Direct.late_at_s

    def hasty(self: Direct, ticket: QueuedRequest, lane: ModelQueues) -> float | None:
        at_s = late_at_s(self, ticket, lane)
        return None if at_s is None else at_s - 1e-3

    patch.setattr(Direct, "late_at_s", hasty)


def a_request_is_tried_once_more(patch: Patch) -> None:
    begin = Scheduler.__init__

    def generous(self: Scheduler, **values: int) -> None:
        begin(self, **{**values, "retries_max": values["retries_max"] + 1})  # type: ignore[arg-type]

    patch.setattr(Scheduler, "__init__", generous)


def the_last_formed_is_served_first(patch: Patch) -> None:
    push = FormedQueue.push

    def push_in_front(self: FormedQueue, batch: FormedBatch) -> None:
        self._key = lambda other: -other.id
        push(self, batch)

    patch.setattr(FormedQueue, "push", push_in_front)


def nobody_wakes_for_a_missing_engine(patch: Patch) -> None:
    wake = Scheduler.wake_at_s.fget
    assert wake is not None

    def sleep_on(self: Scheduler) -> float | None:
        helpless = any(lane.waiting and lane.helpless_since_s is not None for lane in self.lanes.values())
        return None if helpless else wake(self)  # type: ignore[no-any-return]

    patch.setattr(Scheduler, "wake_at_s", property(sleep_on))


def time_does_not_let_batches_go(patch: Patch) -> None:
    patch.setattr(Scheduler, "_earliest_due_s", lambda self, lane: None)


def stale_news_is_believed(patch: Patch) -> None:
    def believe(self: Scheduler, event: RequestEnded) -> None:
        ticket = self.requests.get(event.request_id)
        if ticket is not None and ticket.engine:
            event = RequestEnded(ticket.engine, event.request_id, event.outcome, event.output_tokens)
        ended(self, event)

    ended = Scheduler._on_request_ended
    patch.setattr(Scheduler, "_on_request_ended", believe)


def memory_stays_on_account(patch: Patch) -> None:
    let_go = EngineState.let_go

    def keep(self: EngineState, ticket: QueuedRequest) -> None:
        let_go(self, ticket)
        self.total_tokens += len(self.running) == 1

    patch.setattr(EngineState, "let_go", keep)


def an_engine_that_fails_is_used_on(patch: Patch) -> None:
    patch.setattr(Circuit, "takes", lambda self, now_s: True)


def a_queue_takes_one_more_than_its_limit(patch: Patch) -> None:
    refusal = Scheduler._refusal

    def lenient(self: Scheduler, request: Request, lane: ModelQueues) -> str | None:
        self._queue_requests_max += 1
        try:
            return refusal(self, request, lane)
        finally:
            self._queue_requests_max -= 1

    patch.setattr(Scheduler, "_refusal", lenient)


def a_free_engine_is_overlooked_after_a_loss(patch: Patch) -> None:
    ready = Scheduler._on_engine_ready

    def overlook(self: Scheduler, event: object) -> None:
        ready(self, event)  # type: ignore[arg-type]
        if self._now_s > 0:
            self._floor.free.clear()

    patch.setattr(Scheduler, "_on_engine_ready", overlook)


def decisions_hang_on_what_other_schedulers_did(patch: Patch) -> None:
    count = itertools.count()

    def whim(self: Floor, engines: list[EngineState], prefixes: tuple[int, ...]) -> EngineState:
        return engines[next(count) % len(engines)]

    patch.setattr(Floor, "preferred", whim)


def a_plan_is_asked_for_again_and_again(patch: Patch) -> None:
    wants = Planner.wants

    def impatient(self: Planner, *values: object, **named: object) -> object:
        self._waits = False
        return wants(self, *values, **named)  # type: ignore[arg-type]

    patch.setattr(Planner, "wants", impatient)


BUGS: list[Callable[[Patch], None]] = [
    a_request_that_comes_back_is_dropped,
    a_batch_is_started_twice,
    clients_that_leave_the_queue_are_not_heard,
    engines_are_not_told_of_clients_that_leave,
    deadlines_are_forgotten,
    deadlines_of_requests_that_come_back_are_forgotten,
    an_engine_has_one_slot_more,
    a_barrier_engine_takes_what_has_room,
    a_gpu_runs_a_batch_on_each_of_its_engines,
    an_engine_is_given_models_that_it_does_not_serve,
    all_models_have_one_lane,
    who_made_room_is_forgotten,
    who_made_room_fails_though_it_could_be_in_time,
    who_has_seen_a_byte_makes_room,
    a_batch_makes_room_for_one_little_larger,
    room_is_made_although_nobody_wants_that,
    an_engine_is_not_kept_for_whom_it_was_emptied_for,
    who_room_was_made_for_never_gets_it,
    batches_are_formed_as_printed,
    any_batch_is_thought_to_take_as_long_as_one_request,
    who_cannot_be_in_time_waits_on,
    a_request_that_would_just_be_in_time_is_given_up,
    a_request_is_tried_once_more,
    the_last_formed_is_served_first,
    nobody_wakes_for_a_missing_engine,
    time_does_not_let_batches_go,
    stale_news_is_believed,
    memory_stays_on_account,
    an_engine_that_fails_is_used_on,
    a_queue_takes_one_more_than_its_limit,
    a_free_engine_is_overlooked_after_a_loss,
    decisions_hang_on_what_other_schedulers_did,
    a_plan_is_asked_for_again_and_again,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found(bug: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "check", lambda self: None)
    bug(monkeypatch)
    for seed in range(SEEDS):
        try:
            judge(seed)
        except Violation:
            return
    pytest.fail(f"{SEEDS} worlds did not find it")
