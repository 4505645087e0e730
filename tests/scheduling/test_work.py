"""The work of a request: what of its time on a slot the prompt takes, and what is in a cache already."""

from __future__ import annotations

import random

import numpy as np
import pytest
from test_orders import one_by_one, run_dry
from test_scheduler import arrive, step

from llmserve.request import Request
from llmserve.scheduling.messages import RequestEnded
from llmserve.scheduling.moments import FIT_EVERY, Moments, least_squares
from llmserve.scheduling.work import PromptTime


@pytest.mark.parametrize(("per_token_s", "noise_s"), [(0.0, 1.0), (0.0005, 0.0), (0.0005, 0.5), (0.01, 5.0)])
def test_the_time_of_prompts_is_learnt_and_chance_gives_them_none(per_token_s: float, noise_s: float) -> None:
    rng, prompts = np.random.default_rng(5), PromptTime()
    for _ in range(4_000):
        tokens, prompt_tokens = rng.lognormal(5.0, 0.8), rng.lognormal(6.0, 1.0)
        prompts.observe(
            0.3 + 0.02 * tokens + per_token_s * prompt_tokens + rng.normal(0.0, noise_s), tokens, prompt_tokens
        )
    assert 0.7 * per_token_s <= prompts.per_token_s <= 1.02 * per_token_s


def test_what_was_proven_of_prompts_is_remembered_while_a_busy_machine_proves_nothing() -> None:
    rng, prompts = np.random.default_rng(7), PromptTime()
    for noise_s in (0.0, 50.0):
        assert prompts.per_token_s == prompts.proven_s
        for _ in range(400):
            tokens, prompt_tokens = rng.uniform(1.0, 100.0), rng.uniform(0.0, 2_000.0)
            seconds = 0.02 * tokens + 0.001 * prompt_tokens + noise_s * rng.random()
            prompts.observe(seconds, tokens, prompt_tokens)
    assert prompts.per_token_s == 0.0
    assert 0.0005 <= prompts.proven_s <= 0.002


def test_prompts_of_one_size_get_no_time() -> None:
    """Nothing tells their time from an overhead, and a later prompt may be a thousand times as long."""
    prompts = PromptTime()
    for number in range(200):
        prompts.observe(5.0 + number % 7, float(number % 7 + 1), 100.0)
    assert prompts.per_token_s == 0.0


def test_a_long_prompt_makes_a_long_request() -> None:
    """After answers that took 1 s for 1,000 tokens of prompt, equal forecasts go by the length of their prompts."""
    scheduler, rng, now_s = one_by_one("boost"), random.Random(6), 0.0
    for number in range(200):
        tokens, prompt_tokens = rng.uniform(50.0, 150.0), rng.uniform(0.0, 2_000.0)
        arrive(scheduler, Request(number, tokens, prompt_tokens=prompt_tokens), now_s=now_s)
        now_s += 0.01 * tokens + 0.001 * prompt_tokens
        step(scheduler, RequestEnded("gpu0", number, "completed", tokens), now_s)
    sizes = {number: 100.0 * ((7 * number) % 20) for number in range(201, 221)}
    requests = [Request(number, 100.0, prompt_tokens=size) for number, size in sizes.items()]
    arrive(scheduler, Request(200, 100.0), *requests, now_s=now_s)
    assert run_dry(scheduler, 200, now_s)[1:] == sorted(sizes, key=lambda number: sizes[number])


@pytest.mark.parametrize("prompt_tokens", [200.0, None])
def test_equal_answers_give_prompts_no_time_whatever_rounding_makes_of_their_spread(
    prompt_tokens: float | None,
) -> None:
    rng = np.random.default_rng(1)
    for tokens in (5.0, 20.0, 37.3, 100.0) * 3:
        prompts = PromptTime()
        for _ in range(10 * FIT_EVERY):
            prompt = prompt_tokens or 1e4 * rng.random()
            prompts.observe(0.01 * tokens + 1e-9 * rng.random(), tokens, prompt)
        assert prompts.prefill_s(1e4) <= 1e-9


def test_tokens_in_the_cache_take_no_time() -> None:
    rng, prompts = np.random.default_rng(2), PromptTime()
    for _ in range(400):
        tokens, prompt_tokens = rng.lognormal(5.0, 0.8), rng.lognormal(7.0, 1.0)
        cached = prompt_tokens * rng.random()
        seconds = 0.3 + 0.02 * tokens + 0.001 * (prompt_tokens - cached)
        prompts.observe(seconds, tokens, prompt_tokens, cached)
    assert prompts.prefill_s(10_000.0, 8_000.0) == pytest.approx(2.0, rel=0.01)
    work = prompts.work(100.0, 10_000.0, 10_500.0, seconds=0.03, tokens_mean=200.0)
    assert work.prompt_s == 0.0
    assert work.seconds == work.answer_s == 100.0 * (0.03 - prompts.mean_s / 200.0)


@pytest.mark.parametrize("noise_s", [0.0, 0.5])
def test_late_positions_of_a_prompt_cost_more_where_the_answers_prove_it(noise_s: float) -> None:
    rng, prompts = np.random.default_rng(3), PromptTime()

    def prefill_s(prompt: float, cached: float) -> float:
        return 30e-6 * (prompt - cached) + 1e-9 * (prompt**2 - cached**2) / 2

    for _ in range(2_000):
        tokens, prompt = rng.lognormal(5.0, 0.8), min(120_000.0, rng.lognormal(10.0, 1.0))
        cached = prompt * rng.choice([0.0, 0.9])
        prompts.observe(0.01 * tokens + prefill_s(prompt, cached) + rng.normal(0.0, noise_s), tokens, prompt, cached)
    for prompt, cached in [(100_000.0, 0.0), (100_000.0, 90_000.0), (60_000.0, 0.0)]:
        assert 0.7 * prefill_s(prompt, cached) <= prompts.prefill_s(prompt, cached) <= 1.05 * prefill_s(prompt, cached)


def test_of_streams_the_first_tokens_tell_what_prompts_take_however_much_the_answers_differ() -> None:
    rng, streams, whole = np.random.default_rng(4), PromptTime(), PromptTime()
    for _ in range(1_000):
        tokens, prompt_tokens = rng.lognormal(5.0, 1.0), rng.lognormal(6.0, 1.0)
        first_s = 0.1 + 0.0001 * prompt_tokens + rng.exponential(0.05)
        streams.observe(first_s, 1.0, prompt_tokens)
        whole.observe(first_s + tokens * rng.uniform(0.01, 0.1), tokens, prompt_tokens)
    assert 0.00008 <= streams.per_token_s <= 0.0001
    assert whole.per_token_s < streams.per_token_s


def test_the_scheduler_learns_from_the_first_token_of_a_stream() -> None:
    scheduler, rng, now_s = one_by_one("fffs"), random.Random(7), 0.0
    for number in range(4 * FIT_EVERY):
        prompt_tokens, decode_s = rng.uniform(0.0, 2_000.0), rng.expovariate(0.1)
        arrive(scheduler, Request(number, 100.0, prompt_tokens=prompt_tokens), now_s=now_s)
        now_s += 0.5 + 0.001 * prompt_tokens + decode_s
        step(scheduler, RequestEnded("gpu0", number, "completed", 100.0, decode_s=decode_s), now_s)
    assert scheduler.models[""].prompts.prefill_s(1_000.0) == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("causes", [(0,), (0, 2), (3, 0, 2)])
def test_slopes_and_errors_are_those_of_a_regression_over_all_answers(causes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    answers = rng.lognormal(1.0, 0.7, (4 * FIT_EVERY, 5))
    answers[:, 4] += answers[:, :4] @ [1.0, 0.0, 2.0, 0.5]
    moments = Moments(10**12)
    for answer in answers:
        moments.observe(*answer.tolist())
    design = np.column_stack([np.ones(len(answers)), answers[:, causes]])
    solution, residual, *_ = np.linalg.lstsq(design, answers[:, 4], rcond=None)
    errors = np.sqrt(residual / (len(answers) - design.shape[1]) * np.diag(np.linalg.inv(design.T @ design)))
    fitted = least_squares(moments, causes, 4)
    assert fitted is not None
    assert fitted[0] == pytest.approx(solution[1:], rel=1e-6)
    assert fitted[1] == pytest.approx(errors[1:], rel=1e-6)


def test_causes_that_do_not_differ_independently_have_no_slopes() -> None:
    moments = Moments(1024)
    for number in range(FIT_EVERY):
        moments.observe(float(number), 2.0 * number, 0.0, float(number % 5))
    assert least_squares(moments, (0, 1), 3) is None
    assert least_squares(moments, (2,), 3) is None
