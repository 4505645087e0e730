"""The number of an engine's slots, learnt from its answers and from what it tells."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from llmserve.engines.dialects import Told
from llmserve.engines.slots import SLOTS_MAX, SlotsLearner


class Engine:
    """An engine of `slots` in virtual time, kept as full as a learner allows.

    tokens : of the next answer.  The first token comes after `first_s`, each after `step_s`.  streams : answers stream.
    way_s : from the learner to the engine.  choices : of the next request

    load_s : the next request is of a model that takes so long to load, during which all stands still
    prompt_s : the next request has a prompt that takes so long to read, during which no other stream begins
    """

    def __init__(
        self,
        slots: int,
        learner: SlotsLearner,
        *,
        step_s: float = 0.02,
        first_s: float = 0.1,
        streams: bool = True,
        tokens: Callable[[], int] = lambda: 100,
        way_s: float = 0.0,
        choices: Callable[[], int] = lambda: 1,
    ) -> None:
        self.slots, self.learner = slots, learner
        self.now_s = self.load_s = self.prompt_s = self._read_s = 0.0
        self._step_s, self._first_s, self._streams, self._tokens = step_s, first_s, streams, tokens
        self._way_s, self._choices = way_s, choices
        self._waiting: deque[tuple[int, int]] = deque()  # (request, choices)
        self._running: dict[int, int] = {}  # choices
        self._events: list[tuple[float, int, Callable[[int], bool]]] = []
        self._sent: dict[int, int] = {}  # choices
        self._prompts_s: dict[int, float] = {}
        self._last_id = 0

    @property
    def in_flight(self) -> int:
        return len(self._sent)

    def send(self) -> None:
        self._last_id += 1
        self._sent[self._last_id] = self._choices()
        self.learner.sent(self._last_id, self.now_s, self._sent[self._last_id], loads=self.load_s > 0)
        self._events = [(at_s + self.load_s, *event) for at_s, *event in self._events]
        self._later(self._way_s + self.load_s, self._last_id, self._arrive)
        self._prompts_s[self._last_id] = self.prompt_s
        self.load_s = self.prompt_s = 0.0

    def fill(self) -> None:
        while self.in_flight < self.learner.slots + self.learner.look_ahead:
            self.send()

    def step(self) -> bool:
        """Let what is next happen. Returns whether an answer has ended."""
        self.now_s, request_id, happen = heapq.heappop(self._events)
        return happen(request_id)

    def answer(self, count: int) -> None:
        """Keep the engine full until so many answers have ended."""
        self.fill()
        while count:
            count -= self.step()
            self.fill()

    def until(self, at_s: float) -> None:
        """Let happen what comes before."""
        while self._events and self._events[0][0] < at_s:
            self.step()
        self.now_s = at_s

    def _later(self, seconds: float, request_id: int, happen: Callable[[int], bool]) -> None:
        heapq.heappush(self._events, (self.now_s + seconds, request_id, happen))

    def _arrive(self, request_id: int) -> bool:
        self._waiting.append((request_id, self._sent[request_id]))
        self._start()
        return False

    def _start(self) -> None:
        while self._waiting and sum(self._running.values()) + self._waiting[0][1] <= self.slots:
            request_id, choices = self._waiting.popleft()
            self._running[request_id] = choices
            self._read_s = max(self.now_s, self._read_s) + self._prompts_s.pop(request_id, 0.0)
            self._later(self._read_s - self.now_s + self._first_s, request_id, self._begin)

    def _begin(self, request_id: int) -> bool:
        if self._streams:
            self.learner.began(request_id, self.now_s)
        tokens = self._tokens()
        self._later(tokens * self._step_s, request_id, lambda _: self._end(request_id, tokens))
        return False

    def _end(self, request_id: int, tokens: int) -> bool:
        choices = self._running.pop(request_id)
        del self._sent[request_id]
        self._start()
        self.learner.ended(request_id, self.now_s, tokens * choices)
        return True

    def restart(self, slots: int) -> None:
        """Lose all requests, and come back with other slots."""
        self.slots = slots
        self._waiting.clear()
        self._running.clear()
        self._sent.clear()
        self._events.clear()
        self.learner.restarted()


def lengths(seed: int = 1) -> Callable[[], int]:
    rng = random.Random(seed)
    return lambda: max(1, round(rng.lognormvariate(4.5, 0.5)))


# ---- streams ----


@pytest.mark.parametrize("slots", [1, 2, 4, 8, 20, 100, 512])
def test_the_slots_of_an_engine_that_streams_are_found(slots: int) -> None:
    learner = SlotsLearner()
    Engine(slots, learner, tokens=lengths()).answer(20 if slots <= 8 else 100)
    assert learner.slots == pytest.approx(slots, abs=0.1 * slots)
    if slots <= 8:
        assert learner.found


def test_of_a_first_burst_to_an_engine_with_one_slot_one_request_waits_there() -> None:
    engine = Engine(1, SlotsLearner())
    for _ in range(8):
        if engine.in_flight < engine.learner.slots:
            engine.send()
    assert engine.in_flight == 2
    while not engine.step():
        engine.fill()
    engine.fill()  # the second answer has not begun: that only one runs is not known yet
    while not engine.step():
        pass
    assert (engine.learner.slots, engine.learner.look_ahead, engine.learner.found) == (1, 0, True)


@pytest.mark.parametrize(("end_s", "slots"), [(1.004, 4), (1.2, 5)])
def test_a_stream_more_than_the_slots_is_one_more_slot_unless_an_end_came_late(end_s: float, slots: int) -> None:
    learner = SlotsLearner()
    learner.restore({"slots": 4, "limit_reached": True})
    for request_id in range(4):
        learner.sent(request_id, 0.0)
        learner.began(request_id, 0.1)
    learner.sent(4, 0.9)
    learner.began(4, 1.0)
    learner.ended(0, end_s, 100)
    assert learner.slots == slots


def test_a_second_burst_finds_one_slot_in_use() -> None:
    engine = Engine(1, SlotsLearner())
    engine.answer(9)
    engine.fill()
    assert engine.in_flight == 1


def test_few_requests_in_flight_prove_no_limit() -> None:
    engine = Engine(100, SlotsLearner())
    for _ in range(50):
        while engine.in_flight < min(3, engine.learner.slots):
            engine.send()
        engine.step()
    assert not engine.learner.found


@pytest.mark.parametrize("slots", [8, 16])
def test_a_try_finds_no_slots_where_a_wait_would_be_shorter_than_a_first_token(slots: int) -> None:
    """Answers of 0.06 s end so soon after each other that one request more hardly waits for 0.02 s."""
    for seed in range(10):
        rng = random.Random(seed)
        learner = SlotsLearner()
        learner.restore({"slots": slots, "limit_reached": True})
        engine = Engine(slots, learner, step_s=0.004, first_s=0.02, tokens=lambda rng=rng: rng.randint(5, 25))  # type: ignore[misc]
        engine.answer(200)
        assert slots <= learner.slots <= 1.1 * slots


@pytest.mark.parametrize("slots", [8, 16])
def test_streams_that_a_long_prompt_holds_up_are_no_sign_of_few_slots(slots: int) -> None:
    """Answers of 0.4 s, six a second: 2.4 slots are in use."""
    for seed in range(20):
        rng = random.Random(seed)
        engine = Engine(slots, SlotsLearner(), first_s=0.04, tokens=lambda rng=rng: round(rng.uniform(10, 30)))  # type: ignore[misc]
        for number in range(300):
            engine.until(engine.now_s + rng.expovariate(6.0))
            while engine.in_flight >= engine.learner.slots + engine.learner.look_ahead:
                engine.step()
            engine.prompt_s = 1.0 if number % 50 == 9 else 0.0
            engine.send()
            assert not engine.learner.found or engine.learner.slots > 5


@pytest.mark.parametrize(("before", "after"), [(8, 1), (8, 4), (1, 8), (4, 8)])
def test_the_number_follows_a_restart_with_other_slots(before: int, after: int) -> None:
    engine = Engine(before, SlotsLearner(), tokens=lengths())
    engine.answer(100)
    engine.restart(after)
    engine.answer(20)
    assert engine.learner.slots == after


@pytest.mark.parametrize(("before", "after"), [(8, 1), (64, 8), (8, 64), (1, 4)])
def test_the_number_follows_an_engine_that_changes_unseen(before: int, after: int) -> None:
    engine = Engine(before, SlotsLearner(), tokens=lengths())
    engine.answer(100)
    engine.slots = after
    engine.answer(600)
    assert engine.learner.slots == pytest.approx(after, rel=0.2)


def test_more_slots_are_tried_ever_more_seldom() -> None:
    engine, tries = Engine(1, SlotsLearner()), []
    for answers in range(1, 700):
        before = engine.learner.look_ahead
        engine.answer(1)
        if engine.learner.look_ahead > before:
            tries.append(answers)
    gaps = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert len(gaps) >= 3
    assert gaps == sorted(gaps)
    assert gaps[-1] > 2 * gaps[0]


# ---- whole answers ----


@pytest.mark.parametrize("slots", [1, 2, 4, 8, 20, 100])
def test_the_slots_of_an_engine_that_answers_whole_are_found(slots: int) -> None:
    engine = Engine(slots, SlotsLearner(), streams=False, tokens=lengths())
    engine.answer(20 if slots <= 8 else 6 * slots)
    assert engine.learner.slots == pytest.approx(slots, abs=0.1 * slots)
    assert engine.learner.found


@pytest.mark.parametrize(("before", "after"), [(8, 1), (8, 4), (1, 8), (4, 8)])
def test_whole_answers_tell_the_slots_after_a_restart(before: int, after: int) -> None:
    engine = Engine(before, SlotsLearner(), streams=False, tokens=lengths())
    engine.answer(100)
    engine.restart(after)
    engine.answer(20)
    assert engine.learner.slots == after


@pytest.mark.parametrize(("before", "after"), [(8, 1), (8, 16), (1, 4)])
def test_whole_answers_show_that_the_slots_have_changed_unseen(before: int, after: int) -> None:
    engine = Engine(before, SlotsLearner(), streams=False, tokens=lengths())
    engine.answer(100)
    engine.slots = after
    engine.answer(600)
    assert engine.learner.slots == pytest.approx(after, rel=0.2)


def test_an_engine_that_answers_whole_is_full_after_few_rounds() -> None:
    engine = Engine(512, SlotsLearner(), streams=False, tokens=lengths())
    engine.answer(2_000)
    assert engine.learner.slots >= 0.95 * 512


def test_few_whole_answers_at_once_prove_no_limit() -> None:
    engine = Engine(100, SlotsLearner(), streams=False, tokens=lengths())
    for _ in range(80):
        while engine.in_flight < min(3, engine.learner.slots):
            engine.send()
        engine.step()
    assert not engine.learner.found


# ---- choices, and loads of models ----


@pytest.mark.parametrize("streams", [True, False])
def test_requests_of_two_choices_take_two_slots_each(streams: bool) -> None:
    engine = Engine(8, SlotsLearner(), streams=streams, tokens=lengths(), choices=lambda: 2)
    engine.answer(100)
    assert engine.learner.slots == 4


def test_requests_of_one_choice_find_all_slots_again_after_some_of_several() -> None:
    choices = itertools.chain([3] * 30, itertools.repeat(1))
    engine = Engine(8, SlotsLearner(), tokens=lengths(), choices=lambda: next(choices))
    engine.answer(200)
    assert engine.learner.slots == 8


@pytest.mark.parametrize("streams", [True, False])
def test_a_load_of_a_model_says_nothing_of_the_slots(streams: bool) -> None:
    engine = Engine(4, SlotsLearner(), streams=streams, tokens=lengths())
    engine.answer(40)
    for _ in range(40):
        engine.load_s = 20.0
        for _ in range(6):
            engine.answer(1)
            assert engine.learner.slots == 4


# ---- the way to the engine ----


def look_ahead_least(engine: Engine) -> int:
    """Without tries, which are over now and then."""
    engine.answer(200)
    seen = []
    for _ in range(100):
        engine.answer(1)
        seen.append(engine.learner.look_ahead)
    return min(seen)


@pytest.mark.parametrize(("way_s", "look_ahead"), [(0.0, 0), (0.02, 0), (0.25, 1), (0.5, 2)])
def test_the_look_ahead_is_what_the_way_costs(way_s: float, look_ahead: int) -> None:
    """Answers take 2 s: of 8 slots, 8 * way_s / 2 wait for a request, less the fiftieth that is spared."""
    engine = Engine(8, SlotsLearner(8, fixed=True), way_s=way_s)
    assert look_ahead_least(engine) == look_ahead


def test_a_known_number_stays_and_the_look_ahead_is_as_told() -> None:
    learner = SlotsLearner(4, fixed=True, look_ahead=3)
    Engine(1, learner).answer(50)
    assert (learner.slots, learner.look_ahead, learner.found) == (4, 3, True)


# ---- what the engine tells ----


def tell(learner: SlotsLearner, slots: int) -> None:
    """A reading while the engine is as full as the learner allows."""
    in_flight = learner.slots + learner.look_ahead
    learner.told(Told(running=min(in_flight, slots), waiting=max(0, in_flight - slots)))


def test_an_engine_that_always_claims_to_be_full_does_not_grow_without_end() -> None:
    learner = SlotsLearner(8)
    for _ in range(2_000):
        learner.told(Told(running=1 << 31, waiting=0))
    assert learner.slots == SLOTS_MAX


def test_the_number_told_is_found_from_above_and_from_below() -> None:
    """An engine of unknown size is kept as full as the guess allows; probes come from time to time."""
    rng = random.Random(2)
    for slots, guess in ((8, 256), (1_000, 256), (1_000, 8), (4, 8), (256, 256), (1, 64)):
        learner = SlotsLearner(guess)
        for _ in range(60):
            tell(learner, slots)
            if rng.random() < 0.3:  # an idle engine teaches nothing
                learner.told(Told(running=0, waiting=0))
        assert slots <= learner.slots <= 1.3 * slots + 1


def test_few_slots_double_until_something_waits() -> None:
    learner = SlotsLearner(8)
    estimates = []
    for _ in range(8):
        tell(learner, 100)
        estimates.append(learner.slots)
    assert estimates[:4] == [17, 35, 71, 143]
    assert (estimates[5:], learner.found) == ([100] * 3, True)


def test_slots_found_before_are_where_the_search_continues() -> None:
    """Also when the engine now has fewer or more."""
    before = SlotsLearner(8)
    for _ in range(8):
        tell(before, 100)
    for slots in (100, 40, 300):
        learner = SlotsLearner(8)
        learner.restore(before.state())
        assert (learner.slots, learner.found) == (100, True)
        for _ in range(30):
            tell(learner, slots)
        assert slots <= learner.slots <= slots + 1


def test_a_probe_between_arrival_and_first_step_changes_nothing() -> None:
    learner = SlotsLearner(64)
    learner.told(Told(running=10, waiting=30))
    learner.told(Told(running=40, waiting=0))
    assert learner.slots == 64


def test_a_number_of_slots_that_is_told_is_a_fact() -> None:
    learner = SlotsLearner()
    learner.told(Told(slots=6))
    assert (learner.slots, learner.found) == (6, True)


@pytest.mark.parametrize("streams", [True, False])
def test_answers_do_not_move_a_number_that_is_told(streams: bool) -> None:
    engine = Engine(4, SlotsLearner(), streams=streams, tokens=lengths())
    engine.answer(30)  # perhaps in the middle of a try
    engine.learner.told(Told(slots=8))
    for _ in range(300):
        engine.answer(1)
        assert engine.learner.slots == 8
    engine.restart(2)
    engine.answer(20)
    assert engine.learner.slots == 2


def test_a_process_that_has_started_later_is_searched_anew() -> None:
    """The engine was idle when it restarted: no request was lost. Its requests since then run on."""
    engine = Engine(8, SlotsLearner(), tokens=lengths())
    engine.answer(100)
    engine.learner.told(Told(running=8, waiting=0, started_s=100.0))
    assert engine.learner.found
    while engine.in_flight:
        engine.step()
    engine.slots = 2
    engine.fill()
    engine.learner.told(Told(running=2, waiting=6, started_s=200.0))
    assert not engine.learner.found
    engine.answer(20)
    assert (engine.learner.slots, engine.learner.found) == (2, True)


def test_an_earlier_start_is_of_another_process_behind_the_same_url() -> None:
    learner = SlotsLearner(8)
    learner.restore({"slots": 8, "limit_reached": True})
    for started_s in (200.0, 100.0, 200.0, 100.0):
        learner.told(Told(running=0, waiting=0, started_s=started_s))
        assert (learner.slots, learner.found) == (8, True)


@pytest.mark.parametrize(("before", "first"), [(1, 2), (8, 2), (64, 8), (512, 22)])
def test_a_search_after_a_restart_begins_at_the_root_of_the_last_number(before: int, first: int) -> None:
    learner = SlotsLearner(before)
    learner.restarted()
    assert (learner.slots, learner.found) == (first, False)


@pytest.mark.parametrize("state", [{}, {"slots": 0, "limit_reached": True}, {"slots": "8", "limit_reached": True}])
def test_a_state_of_something_else_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no state of an engine's slots"):
        SlotsLearner().restore(state)
