"""The trained predictor with a time limit, and forecasts from earlier answers instead."""

import asyncio
import time

import pytest

from predictor.forecaster import Forecaster, ForecasterByModel
from predictor.online import LEVELS, OnlineLearner
from predictor.prediction import Prediction
from predictor.prompt import Prompt


class Predictor:
    """Returns the given answer after a delay; an exception is raised instead."""

    def __init__(self, answer: tuple[float, ...] | Exception, after_s: float = 0.0) -> None:
        self.answer, self.after_s = answer, after_s

    async def predict(self, prompt: Prompt) -> Prediction:
        await asyncio.sleep(self.after_s)
        if isinstance(self.answer, Exception):
            raise self.answer
        return Prediction(self.answer)


def new_forecaster(predictor: Predictor | None, budget_s: float = 5.0) -> Forecaster:
    return Forecaster(predictor, OnlineLearner(), budget_s=budget_s)


async def test_a_forecast_is_the_predictors_before_any_answer() -> None:
    forecast = await new_forecaster(Predictor((10.0, 20.0, 70.0))).forecast(Prompt("hello"))
    assert forecast.source == "predictor"
    assert len(forecast.lengths) == LEVELS
    assert forecast.median == pytest.approx(20.0)


async def test_a_request_bounds_its_forecast_from_both_sides() -> None:
    forecast = await new_forecaster(Predictor((10.0, 20.0, 70.0))).forecast(Prompt("hello"), least=15, most=30)
    assert min(forecast.lengths) == 15
    assert max(forecast.lengths) == 30


async def test_a_slow_predictor_costs_its_budget_and_is_counted() -> None:
    forecaster = new_forecaster(Predictor((10.0,), after_s=60), budget_s=0.05)
    began_s = time.monotonic()
    assert (await forecaster.forecast(Prompt("hello"))).lengths == ()
    assert time.monotonic() - began_s < 5
    assert dict(forecaster.fallbacks) == {"slow": 1}


async def test_a_failing_predictor_leaves_forecasts_from_earlier_answers(caplog: pytest.LogCaptureFixture) -> None:
    forecaster = new_forecaster(Predictor(RuntimeError("out of order")))
    for _ in range(10):
        forecaster.observe(await forecaster.forecast(Prompt("hello")), 33.0)
    assert (await forecaster.forecast(Prompt("hello"))).median == pytest.approx(33.0, rel=0.05)
    assert forecaster.fallbacks["failed"] == 11
    assert caplog.text.count("out of order") == 1, "logged once"


async def test_without_a_predictor_templates_are_learnt_from_their_answers() -> None:
    forecaster = new_forecaster(None)
    for i in range(60):
        for system, length in (("be brief", 10.0), ("write essays", 500.0)):
            forecaster.observe(await forecaster.forecast(Prompt(f"question {i}", "m", system)), length)
    medians = [
        (await forecaster.forecast(Prompt("new", "m", system))).median for system in ("be brief", "write essays")
    ]
    assert medians == pytest.approx([10.0, 500.0], rel=0.2)
    assert not forecaster.fallbacks


async def test_a_client_that_leaves_while_its_length_is_predicted_is_not_counted_as_a_failure() -> None:
    forecaster = new_forecaster(Predictor((10.0,), after_s=60))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await forecaster.forecast(Prompt("hello"))
    assert not forecaster.fallbacks


async def test_models_with_their_own_forecaster_learn_only_from_their_own_answers() -> None:
    by_model = ForecasterByModel(
        {"large": new_forecaster(Predictor((500.0,)))}, others=new_forecaster(Predictor(RuntimeError("out of order")))
    )
    large, small, tiny = Prompt("hello", "large"), Prompt("hello", "small"), Prompt("hello", "tiny")
    assert (await by_model.forecast(large)).median == pytest.approx(500.0)
    assert (await by_model.forecast(large, most=100)).median == 100
    assert (await by_model.forecast(small)).lengths == ()
    for _ in range(10):
        by_model.observe(await by_model.forecast(small), 33.0)
    assert (await by_model.forecast(small)).median == pytest.approx(33.0, rel=0.05)
    assert (await by_model.forecast(large)).median == pytest.approx(500.0)
    assert (await by_model.forecast(tiny)).source == "learner"  # from the answers of small, not of large
    assert by_model.fallbacks == {"failed": 13}
