"""Requests that wait get later forecasts: in the live and in the simulated cluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
from calls import a_call
from front import until
from reader import Reader, submitted

from llmserve.calls.in_flight import InFlightCall
from llmserve.engines.openai import OpenAIEngine
from llmserve.engines.timed.server import FakeEngine
from llmserve.forecasts.lengths import Forecasts
from llmserve.forecasts.revisions import Revisions
from llmserve.live.cluster import LiveCluster
from llmserve.live.fleet import Fleet
from llmserve.live.journal import Header, Journal, replay
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import BatchEnded, Event, ForecastsRevised, RequestEnded, StartBatch
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.cluster import SimulatedCluster
from llmserve.simulation.engine_model import Costs, StepEngine
from predictor.forecaster import Forecaster
from predictor.online import OnlineLearner
from predictor.prompt import Prompt

LENGTHS = {1: 5, 2: 90, 3: 30, 4: 60, 5: 10, 6: 40}  # output tokens of each prompt


@dataclass
class Guess:
    """median : None: nothing is known"""

    prompt: str
    median: float | None

    @property
    def source(self) -> str:
        return "" if self.median is None else "oracle"

    @property
    def lengths(self) -> tuple[float, ...]:
        return () if self.median is None else (self.median,)


class Oracle:
    """Knows nothing until its first answer, and everything from then on."""

    fallbacks: Mapping[str, int] = MappingProxyType({})
    secrets: Mapping[str, bytes] = MappingProxyType({})
    learnt = 0

    def forecast_now(self, prompt: Prompt, *, least: float | None, most: float | None, features: Any) -> Guess | None:
        return self._guess(prompt.text)

    async def forecast(self, prompt: Prompt, *, least: float | None, most: float | None, features: Any) -> Guess:
        return self._guess(prompt.text)

    def revise(self, forecast: Guess, *, least: float | None, most: float | None) -> Guess:
        return self._guess(forecast.prompt)

    def observe(self, forecast: Guess, output_tokens: float, *, capped: bool, words: bool) -> None:
        self.learnt += 1

    def _guess(self, prompt: str) -> Guess:
        return Guess(prompt, float(prompt) if self.learnt else None)


class Fixed(Oracle):
    """Cannot forecast again."""

    revise = None  # type: ignore[assignment]


class Broken(Oracle):
    def revise(self, forecast: Guess, *, least: float | None, most: float | None) -> Guess:
        raise RuntimeError("the learner is broken")


@asynccontextmanager
async def cluster_of(forecaster: Any, engine: FakeEngine, **settings: Any) -> AsyncIterator[LiveCluster]:
    header = Header(SchedulingConfig(**settings).resolved(barrier=False))
    engines = [OpenAIEngine(EngineInfo("gpu", 1, False), engine.url)]
    cluster = LiveCluster(header.scheduler(), Fleet(engines), Journal(header), forecasts=Forecasts(forecaster))
    cluster.start()
    await until(lambda: all(cluster.engines_ready.values()))
    try:
        yield cluster
    finally:
        await cluster.close()


def submit(cluster: LiveCluster, tokens: int, **fields: Any) -> tuple[InFlightCall, Reader]:
    body = json.dumps({"model": "fake", "messages": [], "max_tokens": tokens}).encode()
    call = a_call("/v1/chat/completions", body, Prompt(str(tokens), "fake"), stream=False, **fields)
    return submitted(cluster, call)


async def burst(cluster: LiveCluster) -> list[InFlightCall]:
    """All lengths at once, served to the end."""
    calls = [submit(cluster, tokens) for tokens in LENGTHS.values()]
    await asyncio.gather(*[reader.head() for _, reader in calls])
    await until(lambda: not cluster.scheduler.requests)
    return [in_flight for in_flight, _ in calls]


def started(steps: Any) -> list[int]:
    """Request ids in the order of their starts."""
    actions = [action for step in steps for action in step.actions]
    return [request.id for action in actions if isinstance(action, StartBatch) for request in action.batch.requests]


async def test_a_burst_on_a_cold_server_is_reordered_when_its_first_answer_ends() -> None:
    async with FakeEngine(step_s=0.002) as engine, cluster_of(Oracle(), engine) as cluster:
        calls = await burst(cluster)
        steps = list(cluster.journal.steps)
        replayed = replay(cluster.journal.header, steps)
    order = started(steps)
    assert order[:2] == [1, 2]  # the second started when the first ended
    assert order[2:] == sorted(order[2:], key=LENGTHS.__getitem__)
    assert [call.receipt.predicted_tokens for call in calls if call.receipt] == [None, None, 30, 60, 10, 40]
    assert sum(isinstance(step.event, ForecastsRevised) for step in steps) == 1
    assert replayed == steps


async def test_templates_that_are_learnt_while_requests_wait_reorder_them() -> None:
    """The server's own forecaster: two applications, of long and of short answers."""
    forecaster = Forecaster(None, OnlineLearner(), budget_s=1.0)
    async with FakeEngine(step_s=0.0005) as engine, cluster_of(forecaster, engine) as cluster:
        calls = []
        for number in range(60):
            tokens = 60 if number % 2 else 6
            body = json.dumps({"model": "fake", "messages": [], "max_tokens": tokens}).encode()
            prompt = Prompt(f"text {number}", "fake", system="essays" if number % 2 else "brief")
            call = a_call("/v1/chat/completions", body, prompt, stream=False)
            calls.append(submitted(cluster, call))
        await asyncio.gather(*[reader.head() for _, reader in calls])
        order = started(cluster.journal.steps)
    short = [place for place, request_id in enumerate(order) if request_id % 2]
    assert sum(short) / len(short) < 25  # in order of arrival 29


async def test_a_forecaster_that_cannot_forecast_again_leaves_the_order() -> None:
    async with FakeEngine(step_s=0.001) as engine, cluster_of(Fixed(), engine) as cluster:
        await burst(cluster)
        assert started(cluster.journal.steps) == list(LENGTHS)
        assert not any(isinstance(step.event, ForecastsRevised) for step in cluster.journal.steps)


async def test_a_forecaster_that_fails_stops_no_request(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeEngine(step_s=0.001) as engine, cluster_of(Broken(), engine) as cluster:
        await burst(cluster)
        assert started(cluster.journal.steps) == list(LENGTHS)
    assert "the forecasts of waiting requests were not revised" in caplog.text


async def test_a_clients_own_prediction_is_never_revised() -> None:
    async with FakeEngine(step_s=0.002) as engine, cluster_of(Oracle(), engine) as cluster:
        others = [submit(cluster, tokens) for tokens in (20, 30, 40)]
        own, own_reader = submit(cluster, 10, predicted_tokens=300.0)
        await asyncio.gather(*[reader.head() for reader in (*[reader for _, reader in others], own_reader)])
        assert own.receipt is not None
        assert own.receipt.predicted_tokens == 300.0
        assert started(cluster.journal.steps) == [1, 2, 3, 4]


async def test_a_clients_prediction_is_capped_by_its_limit_and_by_the_models_context() -> None:
    context = 1 << 20
    async with FakeEngine(step_s=0) as engine, cluster_of(None, engine) as cluster:
        for limit, capped in ((None, context), (50, 50), (1 << 30, context)):
            call, reader = submit(cluster, 4, predicted_tokens=2.0**31, output_tokens_max=limit)
            await reader.head()
            assert call.receipt is not None
            assert call.receipt.predicted_tokens == capped


# ---- simulated ----


def simulated(*, revised: bool) -> tuple[list[int], Journal]:
    """A burst on one slot; after the first end, the length of every answer is known."""
    header = Header(SchedulingConfig().resolved(barrier=False))
    scheduler, journal = header.scheduler(), Journal(header)
    revisions = Revisions(scheduler.requests, lambda request_id: (float(LENGTHS[request_id]), ()))

    def revise(event: Event) -> Any:
        assert isinstance(event, RequestEnded | BatchEnded)
        revisions.learnt()
        return revisions.rest()

    engine = StepEngine(EngineInfo("gpu", 1, False), LENGTHS, Costs.constant(0.01, 0.0, 1))
    cluster = SimulatedCluster(scheduler, [engine], journal=journal, revise=revise if revised else None)
    cluster.run((0.0, Request(request_id)) for request_id in LENGTHS)
    return started(journal.steps), journal


def test_a_simulated_burst_is_reordered_when_its_first_answer_ends() -> None:
    assert simulated(revised=False)[0] == [1, 2, 3, 4, 5, 6]
    order, journal = simulated(revised=True)
    assert order == [1, 2, 5, 3, 6, 4]
    assert replay(journal.header, journal.steps) == list(journal.steps)


def test_a_simulated_round_larger_than_one_event_is_divided() -> None:
    count = 200
    lengths = {request_id: 1.0 + (count - request_id) for request_id in range(count)}
    scheduler = SchedulingConfig().resolved(barrier=False).scheduler()
    revisions = Revisions(scheduler.requests, lambda request_id: (lengths[request_id], ()))
    events: list[Event] = []

    def revise(event: Event) -> Any:
        revisions.learnt()
        return revisions.rest()

    engine = StepEngine(EngineInfo("gpu", 1, False), lengths, Costs.constant(0.01, 0.0, 1))
    cluster = SimulatedCluster(
        scheduler, [engine], on_step=lambda now_s, event, actions: events.append(event), revise=revise
    )
    cluster.run((0.0, Request(request_id)) for request_id in range(count))
    revised = [event for event in events if isinstance(event, ForecastsRevised)]
    assert sum(len(event.revisions) for event in revised) == count - 2
    ended = [event.request_id for event in events if isinstance(event, RequestEnded)]
    assert ended == [0, 1, *range(count - 1, 1, -1)]
