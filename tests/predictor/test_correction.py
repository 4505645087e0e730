"""The correction of a trained predictor by its encoder's features."""

import math
import random

import numpy as np
import pytest
from scipy.stats import kendalltau

from predictor.correction import BLOCK, KEPT, RIDGE, Correction
from predictor.export import FEATURES_MAX, main_directions
from predictor.forecaster import Forecaster
from predictor.online import OnlineLearner
from predictor.prediction import FEATURE, Prediction
from predictor.prompt import Prompt

SIZE = 8
MARK = b"our own encoder."
EFFECTS = np.random.default_rng(7).normal(0, 0.3, SIZE)


def answers(count, seed=0):
    """Features, and what a prediction lacked: the sum of their effects, and noise."""
    draw = np.random.default_rng(seed)
    features = draw.normal(0, 3, (count, SIZE))
    return features, features @ EFFECTS + draw.normal(0, 0.2, count)


def taught(count, **of):
    correction = Correction(MARK, SIZE)
    for features, lacked in zip(*answers(count, **of), strict=True):
        correction.learn(features, lacked, 1.0)
    return correction


def test_the_weights_are_those_of_a_ridge_regression_whose_answers_fade():
    # far more features than steps, of very different spreads: only steps from the last weights come near the best ones
    count, size, draw = 100 * BLOCK, 200, np.random.default_rng(0)
    features = draw.normal(size=(count, size)) * np.geomspace(6, 0.1, size)
    lacked = features @ draw.normal(0, 0.1, size) + draw.normal(0, 0.5, count)
    correction = Correction(MARK, size)
    for own, target in zip(features, lacked, strict=True):
        correction.learn(own, target, 1.0)
    fades = KEPT ** (BLOCK * ((count - 1 - np.arange(count)) // BLOCK))
    products = features.T @ (features * fades[:, None]) + RIDGE * np.eye(size)
    best = np.linalg.solve(products, features.T @ (lacked * fades))
    assert np.linalg.norm(correction.weights - best) < 4e-3 * np.linalg.norm(best)


def test_an_answer_of_little_weight_teaches_little():
    correction, features = taught(100 * BLOCK), np.ones(SIZE)
    before = correction.of(features)
    for _ in range(10 * BLOCK):
        correction.learn(features, 100.0, 1e-4)
    assert correction.of(features) == pytest.approx(before, abs=0.05)


def test_a_correction_goes_on_from_its_state():
    first = taught(20 * BLOCK)
    second = Correction.restored(first.state())
    for features, lacked in zip(*answers(5 * BLOCK, seed=1), strict=True):
        assert second.of(features) == pytest.approx(first.of(features), abs=1e-3)
        first.learn(features, lacked, 1.0)
        second.learn(features, lacked, 1.0)


@pytest.mark.parametrize(
    "damage",
    [
        {"encoder": "no number"},
        {"weights": np.full(SIZE, math.nan)},
        {"products": np.eye(SIZE - 1)},
        {"targets": [0.0] * SIZE},
    ],
)
def test_a_damaged_state_is_refused(damage):
    with pytest.raises(ValueError, match=r"state|fromhex"):
        Correction.restored({**taught(BLOCK).state(), **damage})


# ---- in the learner ------------------------------------------------------------------------------------------------


class Traffic:
    """Prompts of a word of their own, whose lengths depend on the encoder's features, and not on the prediction."""

    def __init__(self, seed=0, size=SIZE, mark=MARK, sign=1):
        self._draw, self._size, self._mark, self._sign = np.random.default_rng(seed), size, mark, sign

    def ask(self, sender=""):
        features = self._draw.normal(0, 3, self._size)
        length = math.exp(4.5 + features[:SIZE] @ EFFECTS[: self._size] + self._draw.normal(0, 0.2))
        raw = [math.exp(4.0 + self._draw.normal(0, 1) + width) for width in (-0.5, 0.0, 0.5)]
        prompt = Prompt(f"word{self._draw.integers(10**9)}", "m", sender=sender)
        return prompt, Prediction(raw, self._mark + (self._sign * features).astype(FEATURE).tobytes()), length


def tau_of(learner, count=300, **of):
    """Kendall's tau over answers that are not learnt."""
    traffic = Traffic(seed=99, **of)
    asked = [traffic.ask() for _ in range(count)]
    medians = [learner.forecast(prompt, prediction).median for prompt, prediction, _ in asked]
    return float(kendalltau(medians, [length for _, _, length in asked]).statistic)


def served(count, learner=None, traffic=None, nonsense=0.0):
    """nonsense : share of the answers that one sender gets, with random lengths."""
    learner, traffic, rng = learner or OnlineLearner(keys_max=0), traffic or Traffic(), random.Random(3)
    for _ in range(count):
        bad = rng.random() < nonsense
        prompt, prediction, length = traffic.ask(sender="bad" if bad else f"good{rng.randrange(4)}")
        length = math.exp(rng.uniform(0, 8)) if bad else max(1.0, length)
        learner.observe(learner.forecast(prompt, prediction), length)
    return learner


def test_features_tell_lengths_that_neither_words_nor_predictions_tell():
    assert tau_of(OnlineLearner(keys_max=0)) == pytest.approx(0, abs=0.15)
    assert tau_of(served(1000)) > 0.6


def test_the_correction_survives_a_restart_and_nonsense_of_a_sender():
    learner, restored = served(1000, nonsense=0.5), OnlineLearner(keys_max=0)
    restored.restore(learner.state())
    assert tau_of(learner) > 0.5
    assert tau_of(restored) == pytest.approx(tau_of(learner), abs=0.02)


@pytest.mark.parametrize("capped", [True, False])
def test_a_capped_answer_that_may_be_as_long_as_predicted_teaches_nothing(capped):
    learner, traffic = served(600), Traffic(seed=1)
    before = learner.state()["text"]["correction"]["weights"]
    for _ in range(BLOCK):
        prompt, prediction, _ = traffic.ask()
        learner.observe(learner.forecast(prompt, prediction), 1.0, capped=capped)
    after = learner.state()["text"]["correction"]["weights"]
    assert np.array_equal(before, after) == capped


def test_a_predictor_of_other_features_is_learnt_anew():
    learner = served(600)
    other = Traffic(size=SIZE // 2)
    served(600, learner, other)
    assert len(learner.state()["text"]["correction"]["weights"]) == SIZE // 2
    served(1000, learner)
    assert tau_of(learner) > 0.6


def test_the_correction_of_another_predictor_does_not_hold():
    """A predictor that was trained anew has as many features, of other meaning."""
    learner = served(1000)
    assert tau_of(learner, mark=b"another encoder.", sign=-1) == pytest.approx(0, abs=0.2)
    served(1000, learner, Traffic(seed=5, mark=b"another encoder.", sign=-1))
    assert tau_of(learner, mark=b"another encoder.", sign=-1) > 0.6


def test_a_state_without_a_correction_is_taken():
    state, learner = served(100).state(), OnlineLearner(keys_max=0)
    del state["text"]["correction"]
    learner.restore(state)
    served(1000, learner)
    assert tau_of(learner) > 0.6


async def test_a_forecaster_gives_the_features_to_the_learner():
    class Predictor:
        async def predict(self, prompt: Prompt) -> Prediction:
            return next(predictions)

    traffic, learner = Traffic(), OnlineLearner(keys_max=0)
    asked = [traffic.ask() for _ in range(1000)]
    predictions = iter([prediction for _, prediction, _ in asked])
    forecaster = Forecaster(Predictor(), learner, budget_s=5.0)
    for prompt, _, length in asked:
        forecaster.observe(forecaster.revise(await forecaster.forecast(prompt)), max(1.0, length))
    assert tau_of(learner) > 0.6


# ---- in the export -------------------------------------------------------------------------------------------------


def test_features_are_the_directions_in_which_encodings_vary_most():
    draw = np.random.default_rng(0)
    encoded = (draw.normal(size=(500, FEATURES_MAX + 50)) * np.linspace(3, 0.1, FEATURES_MAX + 50) + 5).astype(
        np.float32
    )
    mean, directions = main_directions(encoded)
    features = (encoded - mean) @ directions
    assert features.shape == (500, FEATURES_MAX)
    assert np.square(features).mean() == pytest.approx(1, rel=1e-3)
    assert features.mean(axis=0) == pytest.approx(np.zeros(FEATURES_MAX), abs=1e-3)
    spread = features.std(axis=0)
    assert (np.diff(spread) < 1e-4).all()
    assert spread[0] > 2 * spread[-1]


def test_a_single_prompt_gives_features_too():
    mean, directions = main_directions(np.ones((1, 4), np.float32))
    assert ((np.ones((1, 4)) - mean) @ directions).tolist() == [[0.0]]
