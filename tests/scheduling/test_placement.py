"""On which engine a request starts, and when a long prompt does: by the seconds that prompts are known to take."""

from __future__ import annotations

import random

import pytest
from test_engines import engine, placed
from test_scheduler import arrive, new_scheduler, step

from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import AnswerBegan, EngineLost, RequestCancelled, RequestEnded, TimerFired
from llmserve.scheduling.rates import ServiceTime
from llmserve.scheduling.scheduler import Scheduler

PER_TOKEN_S = 0.0001  # of a prompt
LONG = 50_000.0  # tokens of a prompt that takes five seconds


def experienced(*engines: EngineInfo, order: str = "fffs") -> Scheduler:
    """A scheduler that has seen answers of 100 tokens in 2 seconds to prompts of 1,000 tokens, and few long prompts."""
    scheduler, rng = new_scheduler(*engines, batch_size=1, order=order, release="greedy"), random.Random(1)
    queues = scheduler.queues("")
    for number in range(512):
        prompt, tokens = (20_000.0 if number % 50 == 0 else rng.uniform(500.0, 1_500.0)), rng.uniform(50.0, 150.0)
        queues.prompts.observe(0.018 * tokens + PER_TOKEN_S * prompt, tokens, prompt)
    queues.service = ServiceTime(seconds_per_token=0.02, tokens_mean=100.0, answers=64.0)
    assert queues.prompts.prefill_s(LONG) == pytest.approx(5.0, rel=0.01)
    return scheduler


def begins(number: int, *blocks: int) -> Request:
    """A request whose prompt is these blocks of 1,000 tokens."""
    return Request(number, 100.0, prompt_tokens=1_000.0 * len(blocks), blocks=blocks, block_tokens=1_000.0)


def chat(number: int) -> Request:
    return Request(number, 100.0, prompt_tokens=1_000.0)


def long(number: int) -> Request:
    return Request(number, 100.0, prompt_tokens=LONG)


# ---- which engine ----


def test_a_conversation_goes_on_where_its_prompt_is() -> None:
    scheduler = experienced(engine("a", 8), engine("b", 8))
    assert placed(arrive(scheduler, begins(0, 1, 2, 3, 4, 5, 6, 7, 8), begins(1, 11))) == [(0, "a"), (1, "b")]
    assert placed(step(scheduler, RequestEnded("b", 1, "completed", 100.0), 1.0)) == []
    assert placed(arrive(scheduler, begins(2, 1, 2, 3, 4, 5, 6, 7, 8, 9), now_s=1.0)) == [(2, "a")]


def test_a_few_answers_where_a_prompt_is_do_not_drive_it_away_and_many_do() -> None:
    """Half a second of the prompt is common, a tenth each request's own. The answers, of two seconds, hardly slow each
    other; what is computed holds all of them up.
    """
    scheduler = experienced(engine("a", 8), engine("b", 8))
    arrive(scheduler, begins(0, 1, 2, 3, 4, 5))
    step(scheduler, AnswerBegan(0), 0.6)
    starts = placed(
        arrive(scheduler, *[begins(number, 1, 2, 3, 4, 5, 10 + number) for number in range(1, 6)], now_s=0.6)
    )
    assert [name for _, name in starts] == ["a", "a", "a", "b", "b"]


def test_a_short_prefix_is_computed_again_rather_than_waited_for() -> None:
    """A block takes a tenth of a second; a third answer beside two makes each of them slower than that."""
    scheduler = experienced(engine("a", 4), engine("b", 4))
    arrive(scheduler, begins(0, 1), begins(1, 1), begins(2, 1, 2))
    assert placed(arrive(scheduler, begins(3, 1, 3))) == [(3, "b")]


@pytest.mark.parametrize("engines", [2, 4, 8])
def test_a_prompt_that_all_share_is_soon_on_all_engines(engines: int) -> None:
    names = [f"e{number}" for number in range(engines)]
    scheduler = experienced(*[engine(name, 8) for name in names])
    shared = tuple(range(1, 11))  # a second
    starts = placed(arrive(scheduler, *[begins(number, *shared, 100 + number) for number in range(8 * engines)]))
    assert len(starts) == 8 * engines, "no slot stays empty"
    half = [name for _, name in starts[: 4 * engines]]
    assert set(half) == set(names)
    assert max(half.count(name) for name in names) <= 8


def test_chats_avoid_an_engine_that_computes_a_long_prompt() -> None:
    scheduler = experienced(engine("a", 8), engine("b", 8))
    arrive(scheduler, long(0))
    assert [name for _, name in placed(arrive(scheduler, *map(chat, range(1, 5))))] == ["b"] * 4
    assert placed(arrive(scheduler, chat(5), now_s=5.1)) == [(5, "a")], "by now the prompt is probably computed"


# ---- waiting for a busy engine ----

HERE, THERE = tuple(range(1, 51)), tuple(range(101, 151))  # prompts of five seconds


def warm(order: str = "fffs") -> Scheduler:
    """Engine a has the prompt HERE, and its one slot is taken by a chat; b is free."""
    scheduler = experienced(engine("a", 1), engine("b", 1), order=order)
    assert placed(arrive(scheduler, begins(0, *HERE))) == [(0, "a")]
    step(scheduler, AnswerBegan(0), 5.0)
    step(scheduler, RequestEnded("a", 0, "completed", 100.0), 7.0)
    assert placed(arrive(scheduler, chat(1), now_s=7.0)) == [(1, "a")]
    return scheduler


@pytest.mark.parametrize("order", ["fffs", "boost"])
def test_a_request_waits_for_a_busy_engine_that_has_its_prompt_rather_than_have_it_computed_again(order: str) -> None:
    scheduler = warm(order)
    assert placed(arrive(scheduler, begins(2, *HERE, 51), now_s=7.0)) == []
    assert placed(arrive(scheduler, chat(3), now_s=7.1)) == [(3, "b")], "others take the free slot meanwhile"
    assert placed(step(scheduler, RequestEnded("b", 3, "completed", 100.0), 8.0)) == []
    assert placed(step(scheduler, RequestEnded("a", 1, "completed", 100.0), 9.0)) == [(2, "a")]


def test_nobody_waits_for_a_busy_engine_that_has_little_of_the_prompt() -> None:
    scheduler = warm()
    assert placed(arrive(scheduler, begins(2, *HERE[:2], 51), now_s=7.0)) == [(2, "b")]


def test_nobody_waits_for_a_busy_engine_for_longer_than_the_prompt_would_take_elsewhere() -> None:
    """Five seconds that count twice, as the prompt displaces as much of the cache of b."""
    scheduler = warm()
    assert placed(arrive(scheduler, begins(2, *HERE, 51), now_s=7.0)) == []
    assert scheduler.wake_at_s == pytest.approx(17.0, abs=0.3)
    assert placed(step(scheduler, TimerFired(), 16.0)) == []
    assert placed(step(scheduler, TimerFired(), scheduler.wake_at_s)) == [(2, "b")]


def test_a_request_waits_no_more_once_the_engine_that_had_its_prompt_is_lost() -> None:
    scheduler = warm()
    assert placed(arrive(scheduler, begins(2, *HERE, 51), now_s=7.0)) == []
    assert (2, "b") in placed(step(scheduler, EngineLost("a", (1,)), 8.0))


def test_those_who_wait_for_one_engine_do_not_hold_up_those_who_wait_for_another() -> None:
    scheduler = experienced(engine("a", 1), engine("b", 1), engine("c", 1))
    assert placed(arrive(scheduler, begins(0, *HERE), begins(1, *THERE))) == [(0, "a"), (1, "b")]
    for number in (0, 1):
        step(scheduler, AnswerBegan(number), 5.0)
    for number, name in ((0, "a"), (1, "b")):
        step(scheduler, RequestEnded(name, number, "completed", 100.0), 7.0)
    assert placed(arrive(scheduler, chat(2), chat(3), now_s=7.0)) == [(2, "a"), (3, "b")]
    assert placed(arrive(scheduler, begins(4, *HERE, 51), begins(5, *THERE, 51), now_s=7.0)) == []
    assert placed(step(scheduler, RequestEnded("b", 3, "completed", 100.0), 8.0)) == [(5, "b")]
    assert placed(step(scheduler, RequestEnded("a", 2, "completed", 100.0), 9.0)) == [(4, "a")]


# ---- long prompts ----


@pytest.mark.parametrize("order", ["fffs", "shortest", "boost", "edf", "clockwork"])
def test_an_engine_computes_one_long_prompt_at_a_time_and_chats_pass_the_next(order: str) -> None:
    scheduler = experienced(engine("a", 8), order=order)
    assert placed(arrive(scheduler, long(0), long(1), chat(2), long(3), chat(4))) == [(0, "a"), (2, "a"), (4, "a")]
    assert scheduler.wants_first_token(0)
    assert not scheduler.wants_first_token(2)
    assert placed(step(scheduler, AnswerBegan(2), 1.0)) == []
    assert placed(step(scheduler, AnswerBegan(0), 6.0)) == [(1, "a")]
    assert placed(step(scheduler, RequestEnded("a", 0, "completed", 100.0), 8.0)) == []
    assert placed(step(scheduler, RequestCancelled(1), 9.0)) == []
    assert placed(step(scheduler, RequestEnded("a", 1, "cancelled"), 9.1)) == [(3, "a")]


def test_a_prompt_that_is_mostly_in_the_cache_is_not_long() -> None:
    scheduler, blocks = experienced(engine("a", 8)), tuple(range(1, 51))
    arrive(scheduler, begins(0, *blocks))
    step(scheduler, AnswerBegan(0), 6.0)
    assert placed(arrive(scheduler, long(1), begins(2, *blocks, 51), now_s=6.0)) == [(1, "a"), (2, "a")]


def test_without_news_of_first_tokens_a_long_prompt_counts_as_computed_after_twice_its_time() -> None:
    scheduler = experienced(engine("a", 8))
    arrive(scheduler, long(0), long(1))
    assert scheduler.wake_at_s == pytest.approx(10.0, rel=0.01)
    assert placed(step(scheduler, TimerFired(), 9.0)) == []
    assert placed(step(scheduler, TimerFired(), scheduler.wake_at_s)) == [(1, "a")]


@pytest.mark.parametrize("order", ["fffs", "boost"])
def test_those_who_waited_while_a_long_prompt_was_computed_start_before_the_next(order: str) -> None:
    """Those who come later do not: a long prompt waits for as many starts as waited at the first free slot."""
    scheduler = experienced(engine("a", 2), order=order)
    arrive(scheduler, long(0), long(1), *map(chat, range(2, 6)))  # the other slot has a chat, and three wait
    assert placed(step(scheduler, AnswerBegan(0), 6.0)) == []
    now_s, started = 6.0, []
    while 1 not in started:
        now_s += 1.0
        (running,) = [number for number in scheduler.engines["a"].running if number != 0]
        arrive(scheduler, chat(10 * round(now_s)), now_s=now_s)  # one comes whenever one starts
        (start,) = placed(step(scheduler, RequestEnded("a", running, "completed", 100.0), now_s))
        started.append(start[0])
    assert started[:3] == [3, 4, 5]
    assert len(started) <= 6, "the long prompt itself, and another that came before the first slot, count as waiting"


def test_a_long_prompt_starts_at_once_where_no_other_request_can() -> None:
    scheduler = experienced(engine("a", 8))
    arrive(scheduler, long(0), long(1), long(2))
    assert placed(step(scheduler, AnswerBegan(0), 6.0)) == [(1, "a")]
    assert placed(step(scheduler, AnswerBegan(1), 12.0)) == [(2, "a")]


def test_long_prompts_go_to_engines_that_compute_none() -> None:
    scheduler = experienced(engine("a", 8), engine("b", 8))
    assert placed(arrive(scheduler, long(0), long(1), long(2))) == [(0, "a"), (1, "b")]
    assert placed(step(scheduler, EngineLost("a", (0,)), 1.0)) == []
    assert placed(step(scheduler, AnswerBegan(1), 6.0)) == [(2, "b")]


def test_nothing_is_long_before_answers_prove_what_prompts_take() -> None:
    scheduler = new_scheduler(engine("a", 8), batch_size=1, order="fffs", release="greedy")
    assert placed(arrive(scheduler, long(0), long(1), long(2))) == [(0, "a"), (1, "a"), (2, "a")]
