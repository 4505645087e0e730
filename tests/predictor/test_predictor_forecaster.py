"""The trained predictor under a limit of time, and what earlier answers say instead."""

import asyncio
import time

import pytest

from predictor.forecaster import Forecaster, ForecasterByModel
from predictor.online import LEVELS, OnlineLearner
from predictor.prompt import Prompt


class Predictor:
    """Says what it is told to, after a while; an exception is raised."""

    def __init__(self, says: tuple[float, ...] | Exception, after_s: float = 0.0) -> None:
        self.says, self.after_s = says, after_s

    async def predict(self, prompt: Prompt) -> tuple[float, ...]:
        await asyncio.sleep(self.after_s)
        if isinstance(self.says, Exception):
            raise self.says
        return self.says


def forecaster(predictor: Predictor | None, budget_s: float = 5.0) -> Forecaster:
    return Forecaster(predictor, OnlineLearner(), budget_s=budget_s)


async def test_a_forecast_is_the_predictors_while_nothing_else_is_known() -> None:
    forecast = await forecaster(Predictor((10.0, 20.0, 70.0))).forecast(Prompt("hello"))
    assert forecast.source == "predictor"
    assert len(forecast.lengths) == LEVELS
    assert forecast.median == pytest.approx(20.0)


async def test_a_request_bounds_its_forecast_from_both_sides() -> None:
    forecast = await forecaster(Predictor((10.0, 20.0, 70.0))).forecast(Prompt("hello"), least=15, most=30)
    assert min(forecast.lengths) == 15
    assert max(forecast.lengths) == 30


async def test_a_slow_predictor_costs_its_budget_and_is_counted() -> None:
    made = forecaster(Predictor((10.0,), after_s=60), budget_s=0.05)
    began_s = time.monotonic()
    assert (await made.forecast(Prompt("hello"))).lengths == ()
    assert time.monotonic() - began_s < 5
    assert dict(made.fallbacks) == {"slow": 1}


async def test_a_failing_predictor_leaves_what_was_seen(caplog: pytest.LogCaptureFixture) -> None:
    made = forecaster(Predictor(RuntimeError("out of order")))
    for _ in range(10):
        made.observe(await made.forecast(Prompt("hello")), 33.0)
    assert (await made.forecast(Prompt("hello"))).median == pytest.approx(33.0, rel=0.05)
    assert made.fallbacks["failed"] == 11
    assert caplog.text.count("out of order") == 1, "said once"


async def test_without_a_predictor_templates_are_learnt_from_their_answers() -> None:
    made = forecaster(None)
    for i in range(60):
        for system, length in (("be brief", 10.0), ("write essays", 500.0)):
            made.observe(await made.forecast(Prompt(f"question {i}", "m", system)), length)
    medians = [(await made.forecast(Prompt("new", "m", system))).median for system in ("be brief", "write essays")]
    assert medians == pytest.approx([10.0, 500.0], rel=0.2)
    assert not made.fallbacks


async def test_a_client_that_leaves_while_its_length_is_predicted_is_no_failure() -> None:
    made = forecaster(Predictor((10.0,), after_s=60))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await made.forecast(Prompt("hello"))
    assert not made.fallbacks


async def test_models_with_a_forecaster_of_their_own_learn_from_their_own_answers_alone() -> None:
    both = ForecasterByModel(
        {"large": forecaster(Predictor((500.0,)))}, others=forecaster(Predictor(RuntimeError("out of order")))
    )
    large, small, tiny = Prompt("hello", "large"), Prompt("hello", "small"), Prompt("hello", "tiny")
    assert (await both.forecast(large)).median == pytest.approx(500.0)
    assert (await both.forecast(large, most=100)).median == 100
    assert (await both.forecast(small)).lengths == ()
    for _ in range(10):
        both.observe(await both.forecast(small), 33.0)
    assert (await both.forecast(small)).median == pytest.approx(33.0, rel=0.05)
    assert (await both.forecast(large)).median == pytest.approx(500.0)
    assert (await both.forecast(tiny)).lengths == ()
    assert both.fallbacks == {"failed": 13}
