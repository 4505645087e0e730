"""The regression from words to lengths, against the solution in closed form."""

import numpy as np
import pytest

from predictor.answer_block import BLOCK, ERROR_MAX, Example
from predictor.ridge import RIDGES, WEIGHTS, Ridge
from predictor.senders import Sender
from predictor.text_features import Features

FEATURES, ANSWERS = 40, 5 * BLOCK


def answers(seed: int, noise: float = 0.1):
    """Features of 8 words each, and targets that depend on them."""
    rng = np.random.default_rng(seed)
    effects = rng.normal(0, 0.3, FEATURES)
    for _ in range(ANSWERS):
        indices = rng.permutation(FEATURES)[:8]
        values = rng.uniform(0.5, 1.5, 8).astype(np.float32)
        yield Features(indices, values, 0), float(effects[indices] @ values + rng.normal(0, noise))


def taught(seed: int, rounds: int = 1, **of):
    ridge, sender, matrix, targets = Ridge(), Sender(), [], []
    for features, target in answers(seed, **of):
        ridge.learn(Example(target, False, sender, None), features, ridge.product(features))
        row = np.zeros(FEATURES)
        row[features.indices] = features.values
        matrix.append(row)
        targets.append(target)
    for _ in range(rounds):
        for block in ridge._blocks:
            block.visit(ridge.weights, RIDGES[0])
    return ridge, np.array(matrix), np.array(targets)


def best(matrix, targets):
    """The weights of the ridge regression."""
    return matrix.T @ np.linalg.solve(matrix @ matrix.T + RIDGES[0] * np.eye(len(targets)), targets)


@pytest.mark.parametrize("seed", range(5))
def test_visits_lead_to_the_weights_of_the_regression_over_all_answers(seed):
    ridge, matrix, targets = taught(seed, rounds=300)
    assert ridge.weights[:FEATURES] == pytest.approx(best(matrix, targets), abs=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_the_visits_with_the_answers_come_near_the_regression(seed):
    ridge, matrix, targets = taught(seed)
    solution = best(matrix, targets)
    assert np.linalg.norm(ridge.weights[:FEATURES] - solution) < 0.15 * np.linalg.norm(solution)


def test_a_ridge_that_changes_keeps_what_the_answers_teach_until_they_are_visited():
    ridge, _, _ = taught(0)
    block, before = ridge._blocks[0], ridge.weights[:FEATURES].copy()
    duals = ridge.weights[block.indices[-BLOCK:]] / block.roots
    block._reweigh(ridge.weights, [5.0] * BLOCK)
    assert (ridge.weights[:FEATURES] == before).all()
    assert ridge.weights[block.indices[-BLOCK:]] / block.roots == pytest.approx(duals, rel=1e-5)


def test_capped_answers_never_lower_weights_and_absurd_ones_are_bounded():
    ridge, sender = Ridge(), Sender()
    for number, (features, target) in enumerate(answers(0)):
        absurd, capped = number % 5 == 0, number % 3 == 0
        ridge.learn(Example(100.0 if absurd else target, capped, sender, None), features, ridge.product(features))
    for block in list(ridge._blocks) * 20:
        block.visit(ridge.weights, RIDGES[0])
    for block in ridge._blocks:
        duals = ridge.weights[block.indices[-BLOCK:]] / block.roots
        assert np.abs(duals).max() <= ERROR_MAX / RIDGES[0] * 1.001
        assert min(dual for dual, example in zip(duals, block.examples, strict=True) if example.capped) >= -1e-6


def test_an_answer_of_a_sender_of_small_weight_teaches_little():
    (features, _), *_ = answers(0)
    forecasts = []
    for weight in (1.0, 0.02):
        ridge, sender = Ridge(), Sender()
        sender.weight = weight
        for _ in range(BLOCK):
            ridge.learn(Example(1.0, False, sender, None), features, ridge.product(features))
        forecasts.append(ridge.product(features))
    assert forecasts[0] > 0.9
    assert forecasts[1] < 0.7


def test_the_number_of_weights_is_bounded_whatever_comes():
    ridge, sender = Ridge(), Sender()
    for number in range(3_000):
        features = Features(np.arange(number % 7, 300 + number % 7), np.ones(300, dtype=np.float32), 0)
        ridge.learn(Example(1.0, False, sender, None), features, ridge.product(features))
    assert ridge.weights.shape == (WEIGHTS,)
    assert sum(len(block.examples) for block in ridge._blocks) <= 2_000
    assert ridge.product(features) == pytest.approx(1.0, abs=0.01)
