"""Which silences of an engine's answers are normal, and which answers the engine has lost; with a given clock."""

from __future__ import annotations

import math

import pytest

from llmserve.live.silence import ANSWERS_MIN, COUNTS_TRUSTED, FACTOR, KEPT, NEWER, Patience, Run, Silences, Worst

TOKEN_S = 0.1


class Engine:
    """An engine's answers over time, which are looked at each second."""

    def __init__(self, patience: Patience | None = None) -> None:
        self.silences = Silences(patience)
        self.now_s = 0.0
        self.running: list[Run] = []
        self._ended: list[Run] = []
        self._speaking: set[int] = set()

    def ask(self, *, queue: str = "m", speaks: bool = True, stream: bool = True, **known: float) -> Run:
        run = Run(queue, is_stream=stream, **known)
        run.heard_s = self.now_s
        self.running.append(run)
        if speaks:
            self.speak(run)
        return run

    def speak(self, run: Run) -> None:
        self._speaking.add(id(run))

    def fall_silent(self, *runs: Run) -> None:
        self._speaking -= {id(run) for run in runs}

    def end(self, run: Run, tokens: float = 20.0) -> None:
        self.running.remove(run)
        self.fall_silent(run)
        run.complete, run.tokens = True, tokens
        self._ended.append(run)

    def second(self, *, works: bool = True, probed: bool = True, told: int | None = None) -> list[Run]:
        """A second passes. works : whether the answers that speak are heard.  told : requests that the engine counts"""
        self.now_s += 1.0
        for run in self.running:
            if works and id(run) in self._speaking:
                run.heard_s, run.began, run.tokens = self.now_s, True, run.tokens + 1.0 / TOKEN_S
        lost = self.silences.look(self.now_s, self.running, self._ended, probed=probed, told=told)
        self._ended = []
        return lost

    def seconds(self, number: int, *, works: bool = True, probed: bool = True) -> list[Run]:
        return [run for _ in range(number) for run in self.second(works=works, probed=probed)]

    def answer(self, number: int, *, silent_s: int = 0, queue: str = "m", stream: bool = True, **known: float) -> None:
        """So many short answers one after the other, each silent for so long before its content."""
        for _ in range(number):
            run = self.ask(queue=queue, speaks=False, stream=stream, **known)
            assert not self.seconds(silent_s)
            if stream:
                self.speak(run)
            assert not self.seconds(2)
            self.end(run)
        assert not self.second()


def found_after(engine: Engine, lost: Run, *, newer: bool = True, most: int = 2000) -> int:
    """The seconds until a run is found to be lost, while the engine begins newer answers or not; `most`: it is not."""
    while_newer: list[Run] = []
    for passed in range(1, most):
        for one in while_newer:
            engine.end(one)
        while_newer = [engine.ask()] if newer and not while_newer else []
        if found := engine.second():
            assert found == [lost]
            return passed
    return most


def known_engine() -> Engine:
    engine = Engine()
    engine.answer(ANSWERS_MIN)
    return engine


def test_a_stream_that_stops_while_newer_answers_begin_is_found_after_the_floor() -> None:
    engine = known_engine()
    run = engine.ask()
    engine.seconds(5)
    engine.fall_silent(run)
    assert 20 < found_after(engine, run) < 30


def test_a_request_that_never_begins_is_found_as_soon() -> None:
    engine = known_engine()
    assert 20 < found_after(engine, engine.ask(speaks=False)) < 30


def test_without_newer_answers_it_takes_longer_for_the_engine_may_be_short_of_memory() -> None:
    engine = known_engine()
    other, run = engine.ask(), engine.ask()
    engine.seconds(2)
    engine.fall_silent(run)
    assert 120 < found_after(engine, run, newer=False) < 130
    assert other in engine.running


def test_where_all_stand_still_none_is_lost_however_long() -> None:
    engine = known_engine()
    runs = [engine.ask() for _ in range(3)]
    engine.seconds(5)
    assert engine.seconds(10_000, works=False) == []
    assert engine.seconds(5) == []
    assert [run.silent_s < 2.0 for run in runs] == [True] * 3


@pytest.mark.parametrize(("probed", "found"), [(True, True), (False, False)])
def test_the_only_answer_is_silent_while_probes_are_answered(probed: bool, found: bool) -> None:
    engine = known_engine()
    engine.ask(speaks=False)
    assert bool(engine.seconds(130, probed=probed)) is found


def test_nothing_is_judged_before_enough_answers_are_known() -> None:
    engine = Engine()
    engine.answer(ANSWERS_MIN // 2)
    run = engine.ask(speaks=False)
    assert found_after(engine, run, most=40) == 40


def test_comments_that_are_no_sign_do_not_keep_an_answer_and_a_sign_begins_anew() -> None:
    engine = known_engine()
    run = engine.ask(speaks=False)
    assert found_after(engine, run, most=15) == 15
    assert run.overtaken > 0
    run.heard_s = engine.now_s + 0.5  # a sign, such as the role of the answer
    engine.second()
    assert (run.overtaken, run.silent_s < 2.0) == (0, True)


def test_what_is_normal_for_the_engine_is_learnt() -> None:
    engine = Engine()
    engine.answer(ANSWERS_MIN, silent_s=30)
    run = engine.ask(speaks=False)
    assert FACTOR * 29 < found_after(engine, run) < FACTOR * 33


def test_one_outlier_is_ignored_and_old_silences_are_forgotten() -> None:
    worst = Worst()
    assert worst.value == 0.0
    for value in (1.0, 500.0, 2.0):
        worst.note(value)
    assert worst.value == 2.0
    for _ in range(2 * KEPT):
        worst.note(0.5)
    assert worst.value == 0.5


def test_a_long_prompt_has_the_time_that_long_prompts_take() -> None:
    engine = known_engine()
    unknown = engine.silences.of("m")
    assert unknown is not None
    long = Run("m", prompt_tokens=100_000.0)
    assert unknown.silence_s(long) > 1000.0, "as on a CPU"
    engine.answer(4, silent_s=10, prompt_tokens=10_000.0)
    assert 100.0 < unknown.silence_s(long) < 130.0
    assert unknown.silence_s(Run("m", prompt_tokens=100.0)) < 15.0


def test_a_long_forecast_has_more_time_for_the_engine_may_write_the_answer_as_a_whole() -> None:
    """As some do with the call of a tool."""
    engine = known_engine()
    normal = engine.silences.of("m")
    assert normal is not None
    short, long = (normal.silence_s(Run("m", likely=tokens)) for tokens in (10.0, 1000.0))
    assert 990 * normal.token_s == pytest.approx(long - short)
    bounded = normal.silence_s(Run("m", likely=1000.0, bound=10.0))
    assert bounded == pytest.approx(short)


def test_of_an_answer_that_is_not_streamed_only_a_bound_says_when_it_is_late() -> None:
    engine = Engine()
    engine.answer(ANSWERS_MIN, stream=False)
    bounded, free = (engine.ask(stream=False, speaks=False, bound=bound) for bound in (20.0, math.inf))
    for _ in range(NEWER):
        engine.answer(1, stream=False)
    engine.silences.look(engine.now_s, engine.running)
    assert bounded.overtaken >= NEWER
    assert math.isfinite(engine.silences.allows(bounded))
    assert engine.silences.allows(free) == math.inf


def test_a_request_of_another_model_may_wait_for_the_model() -> None:
    engine = known_engine()
    engine.answer(ANSWERS_MIN, queue="other")
    run = engine.ask(queue="m", speaks=False)
    assert engine.silences.allows(run) == math.inf, "the engine has worked for the other model since"
    engine.answer(1, queue="m")
    assert math.isfinite(engine.silences.allows(run))


def test_answers_of_other_models_overtake_nothing() -> None:
    engine = known_engine()
    run = engine.ask(speaks=False)
    engine.answer(30, queue="other")
    assert run.overtaken == 0


def test_where_an_engine_goes_by_priority_an_earlier_turn_overtakes_nothing() -> None:
    engine = known_engine()
    run = engine.ask(speaks=False, turn=5.0)
    engine.answer(NEWER // 2, turn=4.0)
    assert run.overtaken == 0
    engine.answer(NEWER // 2, turn=5.0)
    assert run.overtaken == NEWER // 2


def test_a_pause_of_this_program_is_no_silence_of_the_engine() -> None:
    engine = known_engine()
    run = engine.ask(speaks=False)
    engine.second()
    engine.now_s += 3600.0
    assert not engine.second()
    assert run.silent_s < 15.0


def test_the_queues_that_are_remembered_have_a_limit() -> None:
    engine = Engine()
    for number in range(1000):
        engine.answer(1, queue=f"m{number}")
    kept = [number for number in range(1000) if engine.silences.of(f"m{number}") is not None]
    assert kept == list(range(1000 - len(kept), 1000))
    assert len(kept) < 100


def test_an_engine_may_be_busy_with_whole_answers_for_as_long_as_such_take() -> None:
    engine = Engine()
    unknown = engine.ask(stream=False, speaks=False)
    assert not engine.silences.may_be_busy(engine.now_s, [unknown])
    engine.end(unknown)
    engine.answer(3, stream=False, silent_s=20)
    run = engine.ask(stream=False, speaks=False)
    assert engine.silences.may_be_busy(engine.now_s + 60.0, [run])
    assert not engine.silences.may_be_busy(engine.now_s + 130.0, [run])
    stream = engine.ask()
    assert not engine.silences.may_be_busy(engine.now_s + 60.0, [stream])


# ---- the engine's own counts ----


def counted(engine: Engine, seconds: int, told: int) -> list[Run]:
    """The runs that are found to be lost while the engine tells that it has so many requests."""
    return [run for _ in range(seconds) for run in engine.second(told=told)]


@pytest.fixture
def counting() -> Engine:
    """An engine whose counts have included enough answers."""
    engine = Engine()
    for _ in range(COUNTS_TRUSTED):
        run = engine.ask(speaks=False, stream=False)
        assert not counted(engine, 4, told=1)
        engine.end(run)
    engine.second(told=0)
    return engine


@pytest.mark.parametrize("stream", [True, False])
def test_requests_that_an_engine_no_longer_counts_are_lost_though_it_does_nothing_else(
    counting: Engine, stream: bool
) -> None:
    lost = [counting.ask(speaks=False, stream=stream) for _ in range(2)]
    alone_s = int(counting.silences.patience.alone_s)
    assert not counted(counting, alone_s - 3, told=0)
    assert counted(counting, 6, told=0)[:2] == lost


def test_beside_answers_that_go_on_the_silent_ones_are_lost_if_no_more_are_counted(counting: Engine) -> None:
    speaking, lost = counting.ask(), counting.ask(speaks=False, stream=False)
    assert set(counted(counting, 30, told=1)) == {lost}
    assert speaking in counting.running


def test_where_one_of_two_silent_requests_is_counted_neither_is_given_up(counting: Engine) -> None:
    for _ in range(2):
        counting.ask(speaks=False, stream=False)
    assert not counted(counting, 300, told=1)


def test_a_count_that_includes_the_request_once_in_a_while_ends_nothing(counting: Engine) -> None:
    counting.ask(speaks=False, stream=False)
    for _ in range(10):
        assert not counted(counting, 15, told=0)
        assert not counted(counting, 1, told=1)


def test_an_engine_that_has_left_out_a_request_that_went_on_is_not_believed(counting: Engine) -> None:
    left_out = counting.ask(speaks=False, stream=False)
    assert not counted(counting, 5, told=0)
    counting.end(left_out)
    counting.second(told=0)
    counting.ask(speaks=False, stream=False)
    assert not counted(counting, 100, told=0)


def test_a_request_that_the_engine_does_not_count_yet_is_not_lost(counting: Engine) -> None:
    for _ in range(30):  # one after the other: each is on its way in when the engine counts
        run = counting.ask(speaks=False)
        assert not counting.second(told=0)
        counting.end(run)
    assert not counting.second(told=0)
