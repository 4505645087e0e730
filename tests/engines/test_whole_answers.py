"""How well a number of slots explains whole answers: worked by hand."""

from __future__ import annotations

import itertools
import math

import pytest

from llmserve.engines.whole_answers import Explained, Pace, WholeAnswers, candidates

ENGINE_TOKENS = (100, 40, 80, 120, 60, 100)


def explained(ends_s: list[float], tokens: tuple[int, ...] = ENGINE_TOKENS, pace: Pace | None = None) -> Explained:
    """All requests are sent at 0; the k-th ends at the k-th time."""
    answers = WholeAnswers(1)
    for place, (end_s, count) in enumerate(zip(ends_s, tokens, strict=True), 1):
        answers.add(place, 0.0, end_s, count)
    return answers.explain(1, len(ends_s), sorted(ends_s), 0, pace)


def in_turn(tokens: tuple[int, ...] = ENGINE_TOKENS) -> list[float]:
    """Ends where one runs at a time, at a hundredth of a second for each token."""
    return [0.01 * sum(tokens[: count + 1]) for count in range(len(tokens))]


def at_once(tokens: tuple[int, ...] = ENGINE_TOKENS) -> list[float]:
    return [0.01 * count for count in tokens]


def test_answers_that_came_in_turn_are_explained_by_one_slot() -> None:
    slots = explained(in_turn())
    assert slots.numbers[slots.best()] == 1
    assert slots.odds(0, slots.numbers > 1) > 3
    assert slots.pace(0).token_s == pytest.approx(0.01)


def test_answers_that_ran_at_once_are_explained_by_as_many_slots_as_requests() -> None:
    slots = explained(at_once())
    assert slots.numbers[slots.best()] == 6


def test_an_answer_that_overtakes_rules_out_the_numbers_under_which_it_had_not_begun() -> None:
    slots = explained([1.0, 0.4], (100, 40))
    assert slots.log_likelihoods[1] - slots.log_likelihoods[0] > 3


def test_an_answer_that_something_else_held_up_is_no_sign_of_few_slots() -> None:
    ends_s = at_once()
    ends_s[3] += 1.7  # the others have ended long before
    slots = explained(ends_s)
    assert slots.numbers[slots.best()] == 6
    assert slots.pace(5).token_s == pytest.approx(0.01, rel=0.02)


def test_two_requests_that_run_at_once_are_not_faster_than_one() -> None:
    """Two answers as long as one another: at 1 s and 2 s. With two slots, the second would have half the pace."""
    alone = explained([1.0, 2.0], (100, 100), Pace(0.01, 1.0))
    shared = explained([2.0, 2.0], (100, 100), Pace(0.01, 1.0))
    assert alone.numbers[alone.best()] == 1
    assert shared.numbers[shared.best()] == 2


def test_numbers_that_no_answer_tells_apart_are_equally_likely() -> None:
    answers = WholeAnswers(1)
    for place, end_s in ((1, 1.0), (2, 2.0), (3, 3.0)):  # each is sent when the one before has ended
        answers.add(place, end_s - 1.0, end_s, 100)
    slots = answers.explain(1, 4, [1.0, 2.0, 3.0], 0, None)
    assert slots.log_likelihoods == pytest.approx([slots.log_likelihoods[0]] * 4)


def test_many_numbers_are_compared_as_a_geometric_series() -> None:
    assert candidates(4, 8).tolist() == [4, 5, 6, 7, 8]
    numbers = candidates(64, 1024)
    assert (numbers[0], numbers[-1]) == (64, 1024)
    assert len(numbers) <= 24
    assert max(math.log(later / earlier) for earlier, later in itertools.pairwise(numbers)) < 0.15
