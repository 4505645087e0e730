"""The KV cache that running requests will need."""

import random

import pytest

from llmserve.scheduling.engines import OVERDUE_SHARE, peak_tokens, remaining_tokens


def test_requests_that_end_together_need_the_sum_of_their_totals() -> None:
    assert peak_tokens([(10, 1, 50), (30, 1, 50)]) == 140


def test_memory_of_early_ends_is_freed_before_the_others_have_grown() -> None:
    assert peak_tokens([(100, 1, 1), (0, 1, 100)]) == 102  # not 201: the first ends long before the second


def test_choices_grow_side_by_side() -> None:
    assert peak_tokens([(20, 3, 10)]) == 50


def test_no_requests_need_no_memory() -> None:
    assert peak_tokens([]) == 0


def test_the_peak_is_that_of_a_step_by_step_count() -> None:
    rng = random.Random(4)
    for _ in range(200):
        requests = [
            (rng.randrange(50), rng.choice([1, 1, 2]), rng.randrange(1, 40)) for _ in range(rng.randrange(1, 9))
        ]
        account = [
            sum(held_tokens + choices * step for held_tokens, choices, steps in requests if steps >= step)
            for step in range(1, 1 + max(steps for *_, steps in requests))
        ]
        assert peak_tokens(requests) == max(account)


def test_an_answer_is_expected_to_become_as_long_as_the_quantiles_beyond_it() -> None:
    assert remaining_tokens((), 100.0, 30.0) == 70
    assert remaining_tokens((10.0, 100.0, 300.0), 136.0, 50.0) == 150  # the mean of the quantiles beyond 50, less 50
    assert remaining_tokens((10.0, 20.0), 15.0, 40.0) == pytest.approx(40 * OVERDUE_SHARE)
