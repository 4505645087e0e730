"""Fixtures that several folders of tests share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from front import Front, StartFront, until

from llmserve.cluster.live import LiveConfig
from llmserve.config import Config, EngineConfig, ServerConfig
from llmserve.engines.fake import FakeEngine
from llmserve.scheduling.policies import SchedulingConfig
from llmserve.serve import serving


@pytest.fixture
async def start_front() -> AsyncIterator[StartFront]:
    """`await start_front(engine, ..., scheduling={...}, config={...})` starts a server; it ends with the test."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())

        async def start(
            *engines: FakeEngine | str,
            slots: int | None = 8,
            barrier: bool = False,
            look_ahead: int = 0,
            scheduling: dict[str, Any] | None = None,
            engine_idle_s: float = 30.0,
            wait: bool = True,
            **sections: Any,
        ) -> Front:
            urls = tuple(engine if isinstance(engine, str) else engine.url for engine in engines)
            config = Config(
                **{
                    "server": ServerConfig(port=0),
                    "engines": EngineConfig(
                        engine=urls, slots=slots, barrier=barrier, look_ahead=look_ahead, engine_idle_s=engine_idle_s
                    ),
                    "scheduling": SchedulingConfig(**(scheduling or {})),
                    "live": LiveConfig(probe_every_s=0.05),
                    **sections,
                }
            )
            cluster, url = await stack.enter_async_context(serving(config))
            front = Front(cluster, url, session)
            if wait:
                await until(lambda: all(cluster.engines_ready.values()))
            return front

        yield start
