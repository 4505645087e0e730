"""Worlds that can fail: bugs planted into the scheduler are caught, by the account alone.

Its own `check` is switched off, so that what is caught is caught from outside.
"""

import itertools
from collections.abc import Callable

import pytest
from worlds.run import Violation, judge

from llmserve.request import Request
from llmserve.scheduling.circuit import Circuit
from llmserve.scheduling.engine_state import EngineState
from llmserve.scheduling.floor import Floor
from llmserve.scheduling.lane import Lane
from llmserve.scheduling.messages import Action, Event, RequestCancelled, RequestEnded, StartBatch
from llmserve.scheduling.planner import Planner
from llmserve.scheduling.queues import FormedBatch, FormedQueue, Place, Ticket
from llmserve.scheduling.scheduler import Scheduler

SEEDS = 100  # within so many worlds each bug must be found

Patch = pytest.MonkeyPatch


def a_request_that_comes_back_is_dropped(patch: Patch) -> None:
    run_again = Scheduler._run_again

    def drop_the_last(self: Scheduler, tickets: list[Ticket], reason: str, avoid: str) -> None:
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

    def forget(self: Scheduler, tickets: list[Ticket], reason: str, avoid: str) -> None:
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
        return None if self._helpless_since_s is not None else wake(self)  # type: ignore[no-any-return]

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

    def keep(self: EngineState, ticket: Ticket) -> None:
        let_go(self, ticket)
        self.total_tokens += len(self.running) == 1

    patch.setattr(EngineState, "let_go", keep)


def an_engine_that_fails_is_used_on(patch: Patch) -> None:
    patch.setattr(Circuit, "takes", lambda self, now_s: True)


def a_queue_takes_one_more_than_its_limit(patch: Patch) -> None:
    refusal = Scheduler._refusal

    def lenient(self: Scheduler, request: Request, lane: Lane) -> str | None:
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
