"""Programs: whole turns are admitted by memory, keep their tokens over tool calls, and go by what they still need."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from scheduling.checked_step import step

from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import (
    Action,
    BatchEnded,
    EngineLost,
    EngineReady,
    FailRequest,
    PreemptBatch,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    StartBatch,
    TimerFired,
)
from llmserve.scheduling.programs.kinds import SHRINK, Kinds
from llmserve.scheduling.programs.ledger import Ledger
from llmserve.scheduling.programs.programs import Programs
from llmserve.scheduling.programs.tools import CALLS_LEAST, SLACK, UNKNOWN_S, WORTH, Tools
from llmserve.scheduling.programs.turn import PATIENCE, Pace, Turn
from llmserve.scheduling.scheduler import Scheduler
from llmserve.settings.policies import SchedulingConfig

BLOCK = 100  # tokens
POOL = 10_000
ANSWER = 84.0  # tokens, with the block that an answer wastes 100


def blocks(name: int, count: int, *, shared: int = 0) -> tuple[int, ...]:
    """Hashes of a prompt. shared : blocks of the prompt that all have"""
    return (*range(1, shared + 1), *(1_000_000 * name + place for place in range(shared, count)))


# ---- the ledger ----


def test_what_several_programs_share_is_in_the_ledger_once() -> None:
    ledger = Ledger()
    for name in (1, 2, 3):
        assert ledger.need(name, blocks(name, 10, shared=8), BLOCK, 50) == (1050 if name == 1 else 250)
        ledger.run(name, blocks(name, 10, shared=8), BLOCK, 50)
    assert ledger.tokens == 8 * BLOCK + 3 * (2 * BLOCK + 50)
    ledger.drop(1)
    ledger.drop(2)
    assert ledger.tokens == 1050
    ledger.drop(3)
    assert ledger.tokens == 0


def test_a_next_step_needs_what_the_context_has_grown_by() -> None:
    ledger = Ledger()
    ledger.run(1, blocks(1, 10), BLOCK, 50)
    ledger.keep(1, 20, ended_s=3.0, over_s=5.0)
    assert ledger.tokens == 1020
    assert ledger.need(1, blocks(1, 12), BLOCK, 50) == 230
    ledger.run(1, blocks(1, 12), BLOCK, 50)
    assert ledger.tokens == 1250
    ledger.run(1, blocks(9, 3), BLOCK, 50)  # the context was compacted
    assert ledger.tokens == 350


def test_a_block_has_the_tokens_that_its_first_holder_says() -> None:
    ledger = Ledger()
    ledger.run(1, blocks(1, 10, shared=8), 100, 0)
    assert ledger.need(2, blocks(2, 10, shared=8), 120, 0) == 240
    ledger.run(2, blocks(2, 10, shared=8), 120, 0)
    assert ledger.tokens == 1240
    ledger.drop(1)
    assert ledger.tokens == 8 * 100 + 240
    ledger.drop(2)
    assert ledger.tokens == 0


def test_ledgers_return_to_zero_whatever_comes() -> None:
    rng, ledger = random.Random(1), Ledger()
    for moment in range(2000):
        holder, count = rng.randrange(1, 20), rng.randrange(0, 12)
        act = rng.randrange(3)
        if act == 0:
            more, block = rng.randrange(100), BLOCK + rng.randrange(3)
            grown = ledger.need(holder, blocks(holder, count, shared=min(count, 4)), block, more)
            before, fresh = ledger.tokens, holder not in ledger
            ledger.run(holder, blocks(holder, count, shared=min(count, 4)), block, more)
            assert ledger.tokens == before + grown or not fresh
        elif act == 1:
            ledger.keep(holder, rng.randrange(100), float(moment), moment + rng.uniform(0.0, 9.0))
        else:
            ledger.drop(holder)
    for holder in range(20):
        ledger.drop(holder)
    assert (ledger.tokens, len(ledger)) == (0, 0)


def test_whose_time_is_over_is_as_a_walk_of_all_holdings_finds_it() -> None:
    rng, ledger = random.Random(2), Ledger()
    for moment in range(2000):
        holder, act = rng.randrange(1, 12), rng.randrange(6)
        if act < 2:
            ledger.run(holder, blocks(holder, 2), BLOCK, 0)
        elif act < 5:
            over_s = rng.choice([moment, moment + rng.randrange(9), math.inf])
            ledger.keep(holder, 0, float(moment), over_s)
        else:
            ledger.drop(holder)
        ends = sorted([(holding.over_s, holder) for holder, holding in ledger])
        assert ledger.over(moment) == [holder for over_s, holder in ends if over_s <= moment]
        assert ledger.next_over_s(moment) == min([s for s, _ in ends if moment < s < math.inf], default=None)


# ---- what is learnt ----


def test_the_steps_that_remain_are_learnt_by_kind_and_step() -> None:
    kinds = Kinds()
    for steps in (1, 3, 8) * 300:
        kinds.turn_ended(7, steps)
    assert kinds.further(7, 1).steps == pytest.approx(3.0, rel=0.1)  # of 0, 2 and 7
    assert kinds.further(7, 2).steps == pytest.approx(3.5, rel=0.1)  # of 1 and 6
    assert kinds.further(7, 4).steps == pytest.approx(10 / 3, rel=0.1)  # at steps 3 and 4: 0, 5 and 4 are left
    assert kinds.further(7, 8).steps == pytest.approx(1.5, rel=0.1)


def test_a_kind_that_was_seen_once_is_mostly_as_all_kinds_are() -> None:
    kinds = Kinds()
    for _ in range(100):
        kinds.turn_ended(1, 1)
    kinds.turn_ended(2, 11)
    mean = kinds.further(99, 1).steps
    assert mean == pytest.approx(10.0 / 101.0, rel=0.15)
    assert kinds.further(2, 1).steps == pytest.approx((10.0 + SHRINK * mean) / (1.0 + SHRINK))


def test_memory_is_kept_as_long_as_a_return_is_worth_the_room() -> None:
    tools = Tools()
    for place in range(CALLS_LEAST):
        assert tools.keep_s(("edit",), 20.0) == UNKNOWN_S
        tools.returned(("edit",), 0.5 if place % 2 else 300.0)
    assert tools.keep_s(("edit",), 20.0) == pytest.approx(
        SLACK * 0.5
    )  # half are back, and 3 x 20 s x 0.5 is less than the mean of the others
    assert tools.keep_s(("edit",), 200.0) == pytest.approx(SLACK * 300.0)
    for _ in range(CALLS_LEAST):
        tools.returned(("sleep",), 1000.0)
    assert WORTH * 20.0 < 1000.0
    assert tools.keep_s(("sleep",), 20.0) == 0.0


def test_a_wait_of_patience_times_the_mean_wait_counts_as_a_factor_e_of_work() -> None:
    pace = Pace()
    pace.waited(10.0)
    pace.arrived(2.0)
    old = Turn(pace, 0.0, None, is_first=True)
    late = Turn(pace, PATIENCE * 10.0, None, is_first=True)
    assert old.key_s(2.0 * math.e) == pytest.approx(late.key_s(2.0))


# ---- the scheduler ----


class Agents:
    """A scheduler with one engine of a small cache, and programs that step through their turns."""

    def __init__(self, *engines: EngineInfo, busy: bool = True, **settings: Any) -> None:
        config = SchedulingConfig(**{"order": "boost", **settings}).resolved(barrier=False)
        self.scheduler: Scheduler = config.scheduler()
        self.now_s = 0.0
        self.refused, self.stopped = list[int](), list[int]()
        self._next = 0
        for engine in engines or (EngineInfo("e", 64, False, tokens_max=POOL),):
            self._step(EngineReady(engine))
        self._warm()
        if busy:
            self.ask(0, 0)  # an engine that runs nothing takes any request

    def _warm(self) -> None:
        """Show that requests of programs come."""
        for number, tools in ((1, ("edit",)), (2, ())):
            self.ask(99, 1, number)
            (run,) = [queued.run for queued in self.scheduler.requests.values() if queued.run is not None]
            self.end(self.last, *tools, engine=run.engine)

    @property
    def programs(self) -> Programs:
        return self.scheduler.group.programs

    def kept(self, engine: str = "e") -> int:
        return self.programs._ledgers[engine].tokens

    def _step(self, event: object) -> list[int]:
        actions = step(self.scheduler, event, self.now_s)  # type: ignore[arg-type]
        self.refused += [action.request_id for action in actions if isinstance(action, FailRequest)]
        self.stopped += [
            number for action in actions if isinstance(action, PreemptBatch) for number in action.request_ids
        ]
        return started(actions)

    def ask(
        self,
        program: int,
        count: int,
        number: int = 1,
        *,
        shared: int = 0,
        kind: int = 5,
        share: str = "",
        **fields: Any,
    ) -> list[int]:
        """A request of `count` blocks. program : 0: none.  Returns the ids that start; `last` is its own"""
        self._next += 1
        request = Request(
            self._next,
            ANSWER,
            prompt_tokens=float(count * BLOCK),
            blocks=blocks(program or 10_000 + self._next, count, shared=shared),
            block_tokens=float(BLOCK),
            program=program,
            kind=kind if program else 0,
            step=number if program else 0,
            share=share,
            **fields,
        )
        return self._step(RequestArrived(request))

    def item(self, count: int) -> list[int]:
        """An item of a batch job, of `count` blocks."""
        self._next += 1
        prompt = {"prompt_tokens": float(count * BLOCK), "blocks": blocks(self._next, count), "block_tokens": BLOCK}
        return self._step(RequestArrived(Request(self._next, ANSWER, background=True, share="job", **prompt)))  # type: ignore[arg-type]

    @property
    def last(self) -> int:
        return self._next

    def end(self, request_id: int, *tools: str, engine: str = "e") -> list[int]:
        return self._step(RequestEnded(engine, request_id, "completed", ANSWER, tools=tools))

    def pass_s(self, seconds: float) -> list[int]:
        """Time passes; timers fire. Returns the ids that start."""
        until_s, ids = self.now_s + seconds, []
        while (at_s := self.scheduler.wake_at_s) is not None and at_s <= until_s:
            self.now_s = max(self.now_s, at_s)
            ids += self._step(TimerFired())
        self.now_s = until_s
        return ids

    def event(self, event: object) -> list[int]:
        return self._step(event)


def started(actions: list[Action]) -> list[int]:
    return [request.id for action in actions if isinstance(action, StartBatch) for request in action.batch.requests]


def test_a_turn_keeps_its_tokens_over_a_tool_call_and_goes_on_at_once() -> None:
    agents = Agents()
    (first,) = agents.ask(1, 50)
    assert agents.ask(2, 50) == []  # 51 + 51 blocks are more than nine tenths of 100
    waits = agents.last
    assert agents.end(first, "edit") == []
    (second,) = agents.ask(1, 52, 2)
    assert agents.end(second) == [waits], "the turn has ended"
    assert agents.kept() == 51 * BLOCK + 100


def test_tokens_that_were_kept_for_long_enough_make_room_for_others() -> None:
    agents = Agents()
    agents.end(agents.ask(1, 50)[0], "edit")
    assert agents.ask(2, 50) == []
    waits = agents.last
    assert agents.pass_s(UNKNOWN_S - 0.1) == []
    assert agents.pass_s(0.2) == [waits]
    assert agents.ask(1, 52, 2) == [], "the program has to wait now"
    returned = agents.last
    assert agents.end(waits) == [returned]


def test_a_small_request_passes_one_that_waits_for_room_and_a_larger_one_does_not() -> None:
    agents = Agents()
    running = agents.ask(1, 60)[0]
    assert agents.ask(2, 50) == []
    large = agents.last
    assert agents.ask(3, 20) == [], "there is room for this one, but it came later"
    medium = agents.last
    assert agents.ask(0, 0) == [agents.last]
    assert sorted(agents.end(running)) == sorted([large, medium])


def test_programs_of_one_kind_need_room_for_their_system_prompt_once() -> None:
    agents = Agents()
    for program in range(1, 8):
        assert agents.ask(program, 50, shared=45) == [agents.last]
    assert agents.kept() == 45 * BLOCK + 7 * 6 * BLOCK + 100
    assert agents.ask(8, 50, shared=0) == []


def test_where_all_fits_nothing_is_held_back() -> None:
    agents = Agents(EngineInfo("e", 64, False, tokens_max=100 * POOL))
    ids = [agents.ask(program, 50) for program in range(1, 40)]
    assert all(len(each) == 1 for each in ids)
    for (request_id,) in ids:
        assert agents.end(request_id, "edit") == []
    assert [agents.ask(program, 52, 2) for program in range(1, 40)] == [[request_id + 39] for (request_id,) in ids]


def test_an_engine_that_runs_nothing_takes_any_request() -> None:
    agents = Agents(busy=False)
    agents.end(agents.ask(1, 80)[0], "edit")
    assert agents.ask(2, 95) == [agents.last]


def test_of_several_engines_a_program_goes_on_where_its_tokens_are_kept() -> None:
    agents = Agents(*(EngineInfo(name, 4, False, tokens_max=POOL) for name in ("e", "f")))
    (first,) = agents.ask(1, 50)
    run = agents.scheduler.requests[first].run
    assert run is not None
    home = run.engine
    agents.end(first, "edit", engine=home)
    for _ in range(3):
        agents.ask(0, 0)
    agents.ask(1, 52, 2)
    queued = agents.scheduler.requests[agents.last]
    assert queued.run is not None
    assert queued.run.engine == home


def test_a_program_that_began_on_a_barrier_engine_is_alone_again_when_its_batch_has_ended() -> None:
    scheduler = SchedulingConfig(order="fffs", batch_size=1).resolved(barrier=True).scheduler()
    scheduler.handle(EngineReady(EngineInfo("e", 1, True)), 0.0)
    for number in (1, 2, 3):
        actions = scheduler.handle(RequestArrived(Request(number, ANSWER, program=7, kind=5, step=number)), number)
        [start] = [action for action in actions if isinstance(action, StartBatch)]
        scheduler.handle(BatchEnded("e", start.batch.id, {number: ANSWER}), number + 0.5)
    assert scheduler.group.programs._programs[7].present == 0


def test_requests_without_programs_are_not_touched() -> None:
    scheduler = SchedulingConfig(order="boost").resolved(barrier=False).scheduler()
    step(scheduler, EngineReady(EngineInfo("e", 4, False, tokens_max=POOL)))
    step(scheduler, RequestArrived(Request(1, 10.0, blocks=blocks(1, 3), block_tokens=100.0)))
    assert scheduler.requests[1].turn is None
    assert not scheduler.group.programs._ledgers


@pytest.mark.parametrize("end", ["cancelled", "failed", "lost", "cancelled while waiting"])
def test_whatever_ends_a_program_leaves_nothing_in_the_ledger(end: str) -> None:
    agents = Agents()
    (first,) = agents.ask(1, 50)
    if end == "cancelled":
        agents.event(RequestCancelled(first))
        agents.event(RequestEnded("e", first, "cancelled"))
    elif end == "failed":
        agents.event(RequestEnded("e", first, "failed"))
    elif end == "lost":
        agents.event(EngineLost("e", (first,)))
    else:
        agents.end(first, "edit")
        agents.ask(0, 35)
        agents.ask(1, 80, 2)
        agents.event(RequestCancelled(agents.last))
        agents.end(agents.last - 1)
    assert agents.kept() == (0 if end == "lost" else 100)


def test_programs_that_never_come_back_hold_nobody_up_for_ever() -> None:
    agents = Agents()
    for program in range(1, 7):
        agents.ask(program, 12)
        agents.end(agents.last, "edit")
    assert agents.kept() > 0.75 * POOL
    assert agents.ask(20, 80) == []
    assert agents.pass_s(UNKNOWN_S + 0.1) == [agents.last]
    assert agents.kept() <= 0.9 * POOL


def test_a_short_turn_goes_before_a_long_one_and_an_old_one_before_both() -> None:
    agents = Agents()
    for program in range(100, 140):  # kind 1 has one step; kind 2 has eight
        kind, steps = (1, 1) if program % 2 else (2, 8)
        for number in range(1, steps + 1):
            (request_id,) = agents.ask(program, 10 + number, number, kind=kind)
            agents.now_s += 1.0
            agents.end(request_id, *(("edit",) if number < steps else ()))
    (running,) = agents.ask(1, 85)
    agents.now_s += 10.0
    agents.ask(50, 50)  # makes turns wait
    agents.now_s += 10.0
    agents.end(running)
    agents.end(agents.last)
    (running,) = agents.ask(2, 85)
    agents.ask(3, 40, kind=2)
    long_ = agents.last
    agents.now_s += 0.1
    agents.ask(4, 40, kind=1)
    short = agents.last
    agents.now_s += 2.0
    order = agents.end(running)
    assert order[:2] == [short, long_]


# ---- beside shares, deadlines and cancellations ----


@pytest.mark.parametrize("weight", [1.0, 2.0])
def test_a_key_with_many_programs_takes_no_more_of_the_memory_than_one_with_few(weight: float) -> None:
    """Each program takes the cache for itself; of ten turns each key gets its weight's part."""
    agents = Agents()
    (running,) = agents.ask(1, 60, share="flood")
    owner = {running: "flood"}
    for program in range(2, 12):
        agents.ask(program, 60, share="flood")
        owner[agents.last] = "flood"
    for program in range(20, 30):
        agents.ask(program, 60, share="few", weight=weight)
        owner[agents.last] = "few"
    served = []
    for _ in range(12):
        (running,) = agents.end(running)
        served.append(owner[running])
    assert served.count("few") == pytest.approx(12 * weight / (1 + weight), abs=1)


@pytest.mark.parametrize(("steps", "first"), [(1, 0), (40, 2)])
def test_a_program_counts_for_its_key_with_all_of_its_steps(steps: int, first: int) -> None:
    """One key has had a turn of so many steps; then so many turns of the other key come first."""
    agents = Agents()
    (running,) = agents.ask(1, 60, share="long")
    agents.ask(2, 60, share="long")
    later = agents.last
    for program in range(20, 26):
        agents.ask(program, 60, share="short")
    for number in range(2, 1 + steps):
        agents.end(running, "edit")
        agents.now_s += 0.1
        (running,) = agents.ask(1, 60 + number // 2, number, share="long")
    order = []
    for _ in range(7):
        (running,) = agents.end(running)
        order.append(running)
    assert order.index(later) == first


def test_a_program_whose_deadline_comes_before_its_room_is_refused_and_leaves_the_order_to_others() -> None:
    agents = Agents(order="edf")
    (running,) = agents.ask(1, 60)
    agents.ask(2, 60, deadline_s=5.0)
    hurried = agents.last
    agents.ask(3, 60, deadline_s=50.0)
    patient = agents.last
    agents.pass_s(10.0)
    assert agents.end(running) == [patient]
    assert agents.refused == [hurried]


# ---- what is told to those that wait ----


def test_the_expected_start_of_a_waiting_program_follows_from_the_ends_of_turns_not_of_steps() -> None:
    """Each turn takes the whole cache for five seconds, a step a second."""
    agents = Agents()
    for program in range(1, 9):
        agents.ask(program, 50)
    running = agents.last - 7
    for program in range(1, 5):
        for number in range(2, 6):
            agents.now_s += 0.5
            agents.end(running, "edit")
            agents.now_s += 0.5
            (running,) = agents.ask(program, 50 + number, number)
        agents.now_s += 1.0
        (running,) = agents.end(running)
    assert agents.scheduler.group.drain_time_s(0.0, 2) == pytest.approx(10.0)


def test_a_full_queue_refuses_new_programs_and_no_step_of_one_that_has_begun() -> None:
    agents = Agents(queue_requests_max=1)
    (running,) = agents.ask(1, 60)
    agents.ask(2, 60)
    waits = agents.last
    agents.end(running, "edit")
    assert agents.ask(3, 60) == []
    assert agents.refused == [agents.last]
    assert agents.ask(1, 62, 2) == [agents.last]
    assert agents.end(agents.last) == [waits]


# ---- items of batch jobs ----


def test_an_item_starts_beside_what_is_kept_for_a_program_and_waits_until_the_hold_is_over() -> None:
    agents = Agents(busy=False)
    agents.end(agents.ask(1, 60)[0], "edit")
    assert agents.item(35) == [], "nothing runs, but what is kept would have to go"
    large = agents.last
    assert agents.item(20) == [agents.last]
    assert agents.kept() == (60 + 21) * BLOCK + ANSWER
    assert agents.pass_s(UNKNOWN_S - 0.1) == []
    assert agents.pass_s(0.2) == [large]
    assert agents.kept() == (21 + 36) * BLOCK


def test_the_last_item_is_stopped_for_a_step_that_needs_the_room() -> None:
    agents = Agents(busy=False)
    items = []
    for _ in range(3):
        agents.now_s += 1.0
        items += agents.item(20)
    assert agents.ask(1, 40) == []
    step_ = agents.last
    assert agents.stopped == [items[2]], "its tokens are enough"
    assert agents.event(RequestEnded("e", items[2], "cancelled")) == [step_]
    assert agents.end(step_) == [items[2]]
    assert agents.kept() == 3 * 21 * BLOCK


def test_no_item_is_stopped_for_a_step_that_would_still_lack_room() -> None:
    agents = Agents(busy=False)
    (running,) = agents.ask(1, 50)
    (item,) = agents.item(10)
    assert agents.ask(2, 60) == []
    waits = agents.last
    assert agents.stopped == []
    assert agents.end(running) == [waits]
    assert item in agents.scheduler.requests
    assert agents.stopped == []
