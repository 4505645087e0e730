"""What a server has learnt survives a restart (`--state DIR`): real servers over fake engines."""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from front import Front, until

from llmserve.cluster import journal
from llmserve.engines.fake import FakeEngine
from llmserve.policies import SchedulingConfig
from llmserve.serve import serving
from llmserve.settings import Config, EngineConfig, LiveConfig, ServerConfig
from predictor.forecaster import Forecaster
from predictor.prompt import Prompt


def forecaster_of(front: Front) -> Forecaster:
    forecaster = front.cluster._lengths._forecaster
    assert isinstance(forecaster, Forecaster)
    return forecaster


class Servers:
    """Servers in this process, one after the other or at once."""

    def __init__(self, engine: FakeEngine, folder: Path) -> None:
        self.engine = engine
        self.folder = folder

    async def start(self, stack: AsyncExitStack, *, slots: int | None = 8, **scheduling: Any) -> Front:
        config = Config(
            server=ServerConfig(port=0, state=str(self.folder / "kept"), journal=str(self.folder / "journal")),
            engines=EngineConfig(engine=(self.engine.url,), slots=slots, look_ahead=0),
            scheduling=SchedulingConfig(**scheduling),
            live=LiveConfig(probe_every_s=0.05),
        )
        session = await stack.enter_async_context(aiohttp.ClientSession())
        cluster, url = await stack.enter_async_context(serving(config))
        front = Front(cluster, url, session)
        await until(lambda: all(cluster.engines_ready.values()))
        return front


def text_of(kind: int) -> str:
    return f"template number {kind}, with more than thirty-two characters"


async def ask(front: Front, engine: FakeEngine, kind: int, tokens: int = 16) -> float | None:
    """Ask for an answer of a template, `tokens` long; returns its predicted length."""
    engine._output_tokens = tokens
    async with front.post(messages=[{"role": "user", "content": text_of(kind)}]) as response:
        assert response.status == 200
        await response.read()
        predicted = response.headers.get("x-llmserve-predicted-tokens")
    return None if predicted is None else float(predicted)


async def teach(front: Front, engine: FakeEngine) -> None:
    for _ in range(12):
        for kind in range(4):
            await ask(front, engine, kind, 10 * (kind + 1))


async def test_forecasts_after_a_restart_are_those_before(tmp_path: Path) -> None:
    async with FakeEngine(step_s=0.0) as engine:
        servers = Servers(engine, tmp_path)
        async with AsyncExitStack() as stack:
            first = await servers.start(stack)
            await teach(first, engine)
            prompts = [Prompt(text_of(kind), "fake") for kind in range(5)]
            before = [(await forecaster_of(first).forecast(prompt)).lengths for prompt in prompts]
        async with AsyncExitStack() as stack:
            second = await servers.start(stack)
            assert [(await forecaster_of(second).forecast(prompt)).lengths for prompt in prompts] == before
            predicted = [await ask(second, engine, kind) for kind in range(4)]
    assert predicted == pytest.approx([10, 20, 30, 40], abs=1), "the first server had learnt something"
