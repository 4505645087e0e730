"""How long running requests still take, by what has streamed: Retry-After and the times of drains."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
from calls import a_call
from front import Front, StartFront, until
from reader import Reader

from llmserve.calls.in_flight import InFlightCall, Receipt
from llmserve.engines.timed.server import FakeEngine
from llmserve.estimates.estimator import remaining_s
from llmserve.gateway.parse import PREDICTED_HEADER
from llmserve.request import Request
from llmserve.scheduling.engines import OVERDUE_SHARE
from llmserve.scheduling.rates import ServiceTime
from llmserve.wire.event_stream import UsageFilter
from predictor.prompt import Prompt

EVENT = b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n'
SERVICE = ServiceTime(seconds_per_token=0.5, tokens_mean=80.0)


async def left_s(quantiles: tuple[float, ...], *, streamed: int | None, ran_s: float, choices: int = 1) -> float:
    """streamed : tokens of a stream so far; None: the body comes whole. The call has waited for 3 s before."""
    call = a_call("/v1/completions", b"", Prompt("", "fake"), stream=streamed is not None, choices=choices)
    in_flight = InFlightCall(call, 1, Reader())
    median = quantiles[len(quantiles) // 2] if quantiles else None
    in_flight.request = Request(1, median, quantiles=quantiles, choices=choices)
    in_flight.arrived_at_s = 10.0
    in_flight.receipt = Receipt(1, 0, 1, "e", 3_000.0, median)
    if streamed is not None:
        in_flight.measured.usage = UsageFilter(strip=False, choices=choices)
        in_flight.measured.usage.feed(EVENT * streamed)
    return remaining_s(in_flight, SERVICE, 13.0 + ran_s)


async def test_tokens_that_have_streamed_rule_out_the_shorter_lengths() -> None:
    lengths = (10.0, 20.0, 60.0, 100.0)
    assert await left_s(lengths, streamed=0, ran_s=1.0) == 0.5 * 47.5  # nothing has come: the mean of all
    assert await left_s(lengths, streamed=30, ran_s=3.0) == pytest.approx(0.1 * 50)  # at its own speed
    assert await left_s(lengths, streamed=90, ran_s=9.0, choices=3) == pytest.approx(0.3 * 50)


async def test_an_answer_longer_than_its_forecast_has_a_share_of_itself_left() -> None:
    for tokens in (200, 400):
        assert await left_s((10.0, 100.0), streamed=tokens, ran_s=20.0) == pytest.approx(20.0 * OVERDUE_SHARE)


async def test_a_body_that_comes_whole_goes_by_the_time() -> None:
    assert await left_s((10.0, 60.0), streamed=None, ran_s=10.0) == pytest.approx(0.5 * 40)
    assert await left_s((), streamed=None, ran_s=10.0) == pytest.approx(0.5 * 60)


# ---- real servers ---------------------------------------------------------------------------------------------------


async def refused(front: Front, **fields: Any) -> tuple[int, int]:
    """(status, Retry-After in seconds) of a request that is refused."""
    async with front.post(**fields) as response:
        return response.status, int(response.headers["retry-after"])


async def stream(front: Front, stack: AsyncExitStack, tokens: int) -> InFlightCall:
    """Start a stream whose length the client predicts; returns its call."""
    headers = {PREDICTED_HEADER: str(tokens)}
    await stack.enter_async_context(front.post(stream=True, max_tokens=tokens, headers=headers))
    (handle,) = front.cluster.fleet.handles.values()
    (in_flight,) = handle.running.values()
    return in_flight


async def test_retry_after_of_a_cold_server_follows_the_stream(start_front: StartFront) -> None:
    """Before: one second, until two answers had ended."""
    async with FakeEngine(step_s=0.02) as engine, AsyncExitStack() as stack:
        front = await start_front(engine, slots=1, scheduling={"queue_requests_max": 1})
        running = await stream(front, stack, 400)
        waiting = asyncio.ensure_future(front.post().__aenter__())
        await until(lambda: front.cluster.scheduler.waiting == 1)
        await until(lambda: running.measured.streamed_tokens >= 10)
        status, first_s = await refused(front)
        assert status == 429
        assert first_s >= 6  # some 390 tokens of 0.02 s, or more on a slow machine
        await until(lambda: running.measured.streamed_tokens >= 200)
        _, later_s = await refused(front)
        assert later_s < first_s
        waiting.cancel()


async def test_a_server_that_drains_says_when_its_last_stream_ends(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0.02) as engine, AsyncExitStack() as stack:
        front = await start_front(engine, slots=1)
        running = await stream(front, stack, 400)
        await until(lambda: running.measured.streamed_tokens >= 10)
        draining = asyncio.ensure_future(front.cluster.drain(5.0))
        await asyncio.sleep(0)
        status, after_s = await refused(front)
        assert (status, after_s) == (503, 5)  # the stream has some 8 s left, the drain has 5
        draining.cancel()
