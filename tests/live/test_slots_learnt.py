"""Slots of an engine that tells nothing of itself: learnt from its answers, by a server without a flag."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest
from aiohttp import web
from front import Front, StartFront, until

from llmserve.engines.slots import SlotsLearner
from llmserve.engines.timed.server import FakeEngine
from llmserve.http import client
from llmserve.live import journal
from llmserve.scheduling.messages import EngineReady
from llmserve.settings.tree import LiveConfig, ServerConfig

LONG, SHORT = 40, 2


class Silent(FakeEngine):
    """An engine without metrics."""

    async def _metrics(self, request: web.BaseRequest) -> web.Response:
        return web.Response(status=404)


async def ended(front: Front, tokens: int, ends: list[int]) -> None:
    async with front.post(
        stream=True, max_tokens=tokens, headers={"x-llmserve-predicted-tokens": str(tokens)}
    ) as answer:
        await answer.read()
    ends.append(tokens)


async def burst(front: Front, engine: FakeEngine) -> list[int]:
    """Tokens of the answers by their ends: eight long requests, and a short one that comes as the first one runs."""
    ends: list[int] = []
    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(ended(front, LONG, ends))
        await until(lambda: len(front.cluster.scheduler.requests) == 8 and engine.running == 1)
        group.create_task(ended(front, SHORT, ends))
    return ends


async def test_a_short_request_waits_for_two_long_ones_in_the_first_burst_and_then_for_one(
    start_front: StartFront, tmp_path: Path
) -> None:
    server = ServerConfig(port=0, journal=str(tmp_path / "journal"))
    async with Silent(slots=1, step_s=0.003) as engine:
        front = await start_front(engine, slots=None, server=server)
        places = [(await burst(front, engine)).index(SHORT) for _ in range(2)]
        assert places[0] <= 2
        assert places[1] <= 1
        assert front.cluster.scheduler.engines[next(iter(front.cluster.fleet.handles))].info.slots == 1
    header, steps = journal.read(tmp_path / "journal")
    assert journal.replay(header, steps) == steps
    told = [step.event.engine.slots for step in steps if isinstance(step.event, EngineReady)]
    assert [slots for slots, _ in itertools.groupby(told)][:2] == [2, 1]


async def test_an_engine_of_many_slots_is_full_within_its_first_answers(start_front: StartFront) -> None:
    async with Silent(slots=32, step_s=0.02) as engine:
        front = await start_front(engine, slots=None)
        ends: list[int] = []
        async with asyncio.TaskGroup() as group:
            for _ in range(64):
                group.create_task(ended(front, LONG, ends))
            await until(lambda: engine.running == 32)
            assert len(ends) < 32


async def whole_answers(front: Front, engine: FakeEngine, slots: int) -> int:
    """Number of whole answers of many lengths, a dozen requests at once, after which so many slots are known."""
    ends: list[int] = []

    async def answered(tokens: int) -> None:
        async with front.post(max_tokens=tokens) as answer:
            await answer.read()
        ends.append(tokens)

    lengths = itertools.cycle([20, 35, 12, 28, 16, 40, 24, 10, 32])
    learner = next(iter(front.cluster.fleet.handles.values())).engine.slots
    assert learner is not None
    while (learner.slots, learner.found) != (slots, True) and len(ends) < 100:
        async with asyncio.TaskGroup() as group:
            for _ in range(12):
                group.create_task(answered(next(lengths)))
    return len(ends)


@pytest.mark.parametrize("slots", [1, 4])
async def test_whole_answers_tell_the_slots(start_front: StartFront, slots: int) -> None:
    async with Silent(slots=slots, step_s=0.01) as engine:
        front = await start_front(engine, slots=None)
        assert await whole_answers(front, engine, slots) <= 60


async def test_whole_answers_tell_the_slots_of_an_engine_that_comes_back_with_fewer(start_front: StartFront) -> None:
    async with Silent(slots=4, step_s=0.01) as before:
        front = await start_front(before, slots=None)
        await whole_answers(front, before, 4)
        port = int(before.url.rsplit(":", 1)[1])
    handle = next(iter(front.cluster.fleet.handles.values()))
    await until(lambda: not handle.up)
    async with Silent(slots=1, step_s=0.01, port=port) as after:
        await until(lambda: handle.up)
        assert await whole_answers(front, after, 1) <= 60


async def test_an_idle_engine_that_comes_back_between_two_probes_is_searched_anew(
    start_front: StartFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "KEPT_S", 60.0)  # the connection of the last probe
    async with Silent(slots=1, step_s=0.003) as before:
        front = await start_front(before, slots=None, live=LiveConfig(probe_every_s=3600))
        handle = next(iter(front.cluster.fleet.handles.values()))
        learner = handle.engine.slots
        assert learner is not None
        while not learner.found:
            await burst(front, before)
        assert learner.slots == 1
        port = int(before.url.rsplit(":", 1)[1])
    await until(lambda: not handle.up)
    async with Silent(slots=1, step_s=0.003, port=port):
        await until(lambda: handle.up)
        assert (learner.slots, learner.found) == (2, False)


class Heard(SlotsLearner):
    """held_up : of each request, whether the others wait until it begins, however many slots are free."""

    def __init__(self) -> None:
        super().__init__(slots=8)
        self.held_up: list[bool] = []

    def sent(self, request_id: int, now_s: float, sequences: int = 1, *, loads: bool = False) -> None:
        self.held_up.append(loads)
        super().sent(request_id, now_s, sequences, loads=loads)


async def test_what_waits_behind_a_long_prompt_says_nothing_of_the_slots(start_front: StartFront) -> None:
    async with Silent(slots=8, step_s=0) as engine:
        front = await start_front(engine, slots=None)
        handle = next(iter(front.cluster.fleet.handles.values()))
        handle.engine.slots = heard = Heard()
        prompts = front.cluster.scheduler.queues("fake").prompts
        for tokens, prompt_tokens in itertools.product(range(1, 20), range(10, 200, 10)):
            prompts.observe(0.01 * tokens + 0.001 * prompt_tokens, tokens, prompt_tokens)
        for content in ("hello", "hello " * 8_000, "hello"):
            async with front.post(stream=True, messages=[{"role": "user", "content": content}]) as answer:
                await answer.read()
    assert heard.held_up == [False, True, False]
