"""Engines that lose single requests while they go on with others: found, cancelled there, and run again or told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from front import Front, StartFront, until

from llmserve.engines.timed.server import FakeEngine, Fault
from llmserve.live.journal import replay
from llmserve.live.silence import ANSWERS_MIN, Patience, Run
from llmserve.scheduling.messages import EngineLost, RequestEnded

FLOOR_S = 0.5
TOKENS = 20
PATIENCE_S = 300  # on a busy machine long silences are normal, and lost requests are found late


class PausingEngine(FakeEngine):
    """A timed engine whose answers all stand still while `going` is not set; its probes are answered."""

    def __init__(self, **known: Any) -> None:
        super().__init__(**known)
        self.going = asyncio.Event()
        self.going.set()

    async def _steps(self, *arguments: Any, **named: Any) -> AsyncIterator[int | None]:
        async for due in super()._steps(*arguments, **named):
            await self.going.wait()
            yield due


class LosingEngine(FakeEngine):
    """A timed engine that loses one request of eight, after some tokens, until it has lost four."""

    def __init__(self, after_tokens: int, **known: Any) -> None:
        super().__init__(**known)
        self.asked = self.lost = 0
        self._after_tokens = after_tokens

    def _answer(self, *arguments: Any) -> Any:
        self.asked += 1
        loses = self.asked % 8 == 0 and self.lost < 4
        self.lost += loses
        self.fault = Fault("hang", after_tokens=self._after_tokens) if loses else Fault()
        return super()._answer(*arguments)


class ForgettingEngine(LosingEngine):
    """A losing engine that does not count the requests that it has lost. It counts in its metrics, as vLLM does."""

    async def _metrics(self, request: web.BaseRequest) -> web.Response:
        counts = {"running": max(0, self.running - self.lost), "waiting": self.waiting}
        return web.Response(text="".join(f"vllm:num_requests_{name} {count}.0\n" for name, count in counts.items()))


async def known(start_front: StartFront, *engines: FakeEngine, alone_s: float = 60.0, **more: Any) -> Front:
    """A server that has seen enough answers of its engines, and whose patience is short."""
    front = await start_front(*engines, **more)
    now_s = asyncio.get_running_loop().time()
    for handle in front.cluster.fleet.handles.values():
        handle.watchdog.silences.patience = Patience(floor_s=FLOOR_S, alone_s=alone_s)
        runs = [Run("fake") for _ in range(ANSWERS_MIN)]
        for run in runs:
            run.heard_s, run.tokens, run.complete = now_s, float(TOKENS), True
        for seconds in range(3):
            handle.watchdog.silences.look(now_s + 1e-3 * seconds, runs, told=len(runs))
        handle.watchdog.silences.look(now_s + 3e-3, [], runs)
    return front


async def ask(front: Front) -> str:
    """The end of a stream: "done", or the code of its error, with the number of tokens before."""
    async with front.post(stream=True, max_tokens=TOKENS) as response:
        body = (await response.read()).decode()
    assert response.status == 200
    events = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    tokens, last = body.count('"tok "'), json.loads(events[-2])
    if "error" in last:
        assert "newer answers" in last["error"]["message"], "it says why"
        return f"{last['error']['code']} after {tokens}"
    return "done" if tokens == TOKENS else f"{tokens} tokens"


@asynccontextmanager
async def traffic(front: Front) -> AsyncIterator[None]:
    """Seven clients that ask again and again, meanwhile."""
    over = asyncio.Event()

    async def keep_asking() -> None:
        while not over.is_set():
            await ask(front)

    clients = [asyncio.create_task(keep_asking()) for _ in range(7)]
    try:
        yield
    finally:
        over.set()
        await asyncio.gather(*clients)


def ends(front: Front) -> list[RequestEnded]:
    return [step.event for step in front.cluster.journal.steps if isinstance(step.event, RequestEnded)]


async def test_a_request_of_eight_that_an_engine_loses_before_its_first_token_runs_again(
    start_front: StartFront, caplog: pytest.LogCaptureFixture
) -> None:
    async with LosingEngine(0, slots=16, step_s=0.002) as engine, FakeEngine(slots=16, step_s=0.002) as other:
        front = await known(start_front, engine, other, slots=16)
        async with asyncio.timeout(PATIENCE_S), traffic(front):
            answers = [await ask(front)]
            while engine.lost < 4 or sum(end.lost for end in ends(front)) < 4:
                answers.append(await ask(front))
        assert set(answers) == {"done"}
        await until(lambda: not front.cluster.scheduler.requests)
        assert [(end.outcome, end.fault, end.retryable) for end in ends(front) if end.lost] == [
            ("failed", True, True)
        ] * 4
        assert {end.outcome for end in ends(front)} == {"completed", "failed"}
        assert sum(end.outcome == "failed" for end in ends(front)) == 4
        await until(lambda: engine.running == 0)  # it was told, for the slots of lost requests are free again
        assert caplog.text.count("newer answers") == 4
        metrics = await (await front.session.get(front.url + "/metrics")).text()
        name = engine.url.removeprefix("http://")
        line = f'llmserve_engine_requests_total{{engine="{name}",model="fake",outcome="lost"}} 4.0'
        assert line in metrics
        steps = list(front.cluster.journal.steps)
        assert replay(front.cluster.journal.header, steps) == steps
        assert not any(isinstance(step.event, EngineLost) for step in steps)


async def test_a_stream_that_stops_in_the_middle_ends_with_an_error_and_runs_nowhere_else(
    start_front: StartFront,
) -> None:
    async with LosingEngine(5, slots=16, step_s=0.002) as engine:
        front = await known(start_front, engine, slots=16)
        answers: list[str] = []

        async def keep_asking() -> None:
            while sum(answer != "done" for answer in answers) < 4:
                answers.append(await ask(front))

        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(keep_asking() for _ in range(8)))
        assert [answer for answer in answers if answer != "done"] == ["engine_lost after 5"] * 4
        assert [end.retryable for end in ends(front) if end.lost] == [False] * 4
        assert len(ends(front)) == engine.asked, "nothing ran twice"


async def test_a_pause_of_all_answers_ends_none(start_front: StartFront) -> None:
    async with PausingEngine(slots=8, step_s=0.002) as engine:
        front = await known(start_front, engine, slots=8, alone_s=FLOOR_S)
        async with asyncio.timeout(PATIENCE_S), traffic(front):
            for _ in range(3):
                await ask(front)
            engine.going.clear()
            (handle,) = front.cluster.fleet.handles.values()
            looks = asyncio.get_running_loop().time() + 3 * FLOOR_S
            await until(lambda: asyncio.get_running_loop().time() > looks)
            assert len(handle.running) == 7
            engine.going.set()
            assert await ask(front) == "done"
        assert {end.outcome for end in ends(front)} == {"completed"}


async def test_a_lost_request_runs_again_on_its_only_engine(start_front: StartFront) -> None:
    async with LosingEngine(0, slots=16, step_s=0.002) as engine:
        front = await known(start_front, engine, slots=16)
        async with asyncio.timeout(PATIENCE_S), traffic(front):
            while engine.lost < 4 or sum(end.lost for end in ends(front)) < 4:
                assert await ask(front) == "done"
        assert {end.outcome for end in ends(front) if not end.lost} == {"completed"}


async def test_an_answer_that_is_not_streamed_and_is_all_that_an_engine_has_lost_runs_again(
    start_front: StartFront,
) -> None:
    async with ForgettingEngine(0, slots=16, step_s=0.002) as engine:
        front = await known(start_front, engine, slots=16, alone_s=2 * FLOOR_S)
        engine.asked = 7  # the next one is lost
        async with asyncio.timeout(PATIENCE_S), front.post(max_tokens=TOKENS) as response:
            assert response.status == 200
        (lost,) = [end for end in ends(front) if end.lost]
        assert (lost.outcome, lost.retryable) == ("failed", True)
