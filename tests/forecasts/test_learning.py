"""Learning from answers in a bounded share of the event loop's time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from calls import a_call
from reader import Reader

from llmserve.calls.in_flight import InFlightCall
from llmserve.forecasts.lengths import Taught
from llmserve.forecasts.loops import LEARN_SLICE_S, WAITING_MAX, LearningLoop
from llmserve.forecasts.sample import TEMPLATES_SHARE, WORDS_SHARE, Sample
from predictor.prompt import Prompt


def sampled(gap_s: float, cost_s: float, answers: int, sizes: int = 1) -> list[int]:
    """Which answers teach their words, when batches of `sizes` end every `gap_s` seconds an answer."""
    sample, learnt = Sample(WORDS_SHARE), []
    for number in range(answers):
        if sample.includes(gap_s * (number - number % sizes)):
            sample.took(cost_s)
            learnt.append(number)
    return learnt


class Clock:
    """Each answer takes `words_s` with its words, and `templates_s` without."""

    def __init__(self, words_s: float, templates_s: float = 0.0) -> None:
        self.now_s, self.seconds = 0.0, {"words": words_s, "templates": templates_s, "nothing": 0.0}
        self.learnt: list[tuple[Any, Taught, float]] = []

    def __call__(self) -> float:
        return self.now_s

    def learn(self, in_flight: Any, output_tokens: float, taught: Taught) -> bool:
        self.learnt.append((in_flight, taught, output_tokens))
        self.now_s += self.seconds[taught]
        return True


def learning(clock: Clock, learnt: Callable[[], None] = lambda: None) -> LearningLoop:
    return LearningLoop(clock.learn, learnt, clock, clock)


def test_every_answer_teaches_its_words_while_there_is_time() -> None:
    assert sampled(gap_s=0.01, cost_s=0.0001, answers=3_000) == list(range(3_000))


@pytest.mark.parametrize("sizes", [1, 32])
def test_under_load_words_take_their_share_of_the_time(sizes: int) -> None:
    learnt = [number for number in sampled(0.0002, 0.0001, 20_000, sizes) if number >= 10_000]
    assert len(learnt) * 0.0001 == pytest.approx(WORDS_SHARE * 10_000 * 0.0002, rel=0.15)


def test_of_batches_that_end_in_order_of_length_each_place_is_learnt_as_often() -> None:
    places = Counter(number % 32 // 8 for number in sampled(0.0004, 0.0001, 40_000, sizes=32) if number >= 8_000)
    assert max(places.values()) < 1.2 * min(places[quarter] for quarter in range(4))


def test_after_a_silence_a_burst_is_learnt_as_a_whole() -> None:
    sample = Sample(WORDS_SHARE)
    for number in range(5_000):
        if sample.includes(0.0002 * number):
            sample.took(0.0001)
    for silence in range(1_000):
        sample.includes(10.0 + silence)
    assert all(sample.includes(2_000.0) for _ in range(100))


async def test_where_others_use_the_processor_every_answer_still_teaches_its_words() -> None:
    """Each answer takes a tenth of a millisecond of the processor, and a hundred times as long to pass."""
    clock, processor = Clock(words_s=0.01), Clock(words_s=100e-6)

    def learn(in_flight: Any, output_tokens: float, taught: Taught) -> bool:
        processor.learn(in_flight, output_tokens, taught)
        return clock.learn(in_flight, output_tokens, taught)

    learns = LearningLoop(learn, lambda: None, clock, processor)
    for _ in range(300):
        clock.now_s += 0.01
        learns.answered(SimpleNamespace(), 1.0)  # type: ignore[arg-type]
        learns.close()
    assert Counter(taught for _, taught, _ in clock.learnt) == {"words": 300}


@pytest.mark.parametrize("gap_s", [0.01, 0.0002])
async def test_templates_and_words_take_their_shares_of_the_time(gap_s: float) -> None:
    clock = Clock(words_s=100e-6, templates_s=20e-6)
    learns = learning(clock)
    for number in range(30_000):
        clock.now_s = max(clock.now_s, number * gap_s)
        learns.answered(SimpleNamespace(), 1.0)  # type: ignore[arg-type]
        learns.close()
    taught = Counter(taught for _, taught, _ in clock.learnt[15_000:])
    if gap_s == 0.01:
        assert taught == {"words": 15_000}
        return
    took_s = 15_000 * gap_s
    assert taught["templates"] * 20e-6 == pytest.approx(TEMPLATES_SHARE * took_s, rel=0.6)
    assert taught["words"] * 100e-6 == pytest.approx(WORDS_SHARE * took_s, rel=0.2)
    assert taught["nothing"] > 5_000


async def test_answers_are_learnt_after_what_was_ready_and_in_slices() -> None:
    clock, order = Clock(words_s=LEARN_SLICE_S / 2), []
    learns = learning(clock)
    for number in range(6):
        learns.answered(SimpleNamespace(number=number), 1.0)  # type: ignore[arg-type]
    asyncio.get_running_loop().call_soon(lambda: order.append(len(clock.learnt)))
    assert clock.learnt == []
    await asyncio.sleep(0)
    assert order == [2]  # one slice, then others
    for _ in range(2):
        await asyncio.sleep(0)
    assert [in_flight.number for in_flight, *_ in clock.learnt] == list(range(6))


async def test_closing_learns_the_rest_and_few_answers_wait() -> None:
    clock = Clock(words_s=0.0)
    learns = learning(clock)
    for _ in range(WAITING_MAX + 5):
        learns.answered(SimpleNamespace(), 1.0)  # type: ignore[arg-type]
    assert len(clock.learnt) == 5
    learns.close()
    assert len(clock.learnt) == WAITING_MAX + 5


async def test_an_answer_that_cannot_be_learnt_stops_nothing() -> None:
    clock, learnt = Clock(words_s=0.0), []

    def learn(in_flight: Any, output_tokens: float, taught: Taught) -> bool:
        if output_tokens < 0:
            raise RuntimeError("no length")
        return True

    learns = LearningLoop(learn, lambda: learnt.append(1), clock, clock)
    in_flight = InFlightCall(a_call("/v1/completions", b"{}", Prompt("hello"), stream=False), 1, Reader())
    for tokens in (1.0, -1.0, 2.0):
        learns.answered(in_flight, tokens)
    learns.close()
    assert learnt == [1, 1]
