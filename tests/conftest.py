"""What several tests stand on: the real server, in this process, in front of fake engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest

from llmserve.cluster.live import LiveCluster, LiveConfig
from llmserve.config import Config, EngineConfig, ServerConfig
from llmserve.engines.fake import FakeEngine
from llmserve.scheduling.policies import SchedulingConfig
from llmserve.serve import serving


class Front:
    """A running server and a client session for it."""

    def __init__(self, cluster: LiveCluster, url: str, session: aiohttp.ClientSession) -> None:
        self.cluster = cluster
        self.url = url
        self.session = session

    def post(self, path: str = "/v1/chat/completions", headers: dict[str, str] | None = None, **fields: Any) -> Any:
        """A request with a message of its own unless `fields` says otherwise."""
        body = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], **fields}
        return self.session.post(self.url + path, json=body, headers=headers)


StartFront = Callable[..., Awaitable[Front]]


@pytest.fixture
async def start_front() -> AsyncIterator[StartFront]:
    """`await start_front(engine, ..., scheduling={...}, config={...})` starts a server; it ends with the test."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())

        async def start(
            *engines: FakeEngine | str,
            slots: int = 8,
            barrier: bool = False,
            scheduling: dict[str, Any] | None = None,
            engine_idle_s: float = 30.0,
            wait: bool = True,
            **sections: Any,
        ) -> Front:
            urls = tuple(engine if isinstance(engine, str) else engine.url for engine in engines)
            config = Config(
                **{
                    "server": ServerConfig(port=0),
                    "engines": EngineConfig(engine=urls, slots=slots, barrier=barrier, engine_idle_s=engine_idle_s),
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


async def until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    """Let the loop run until the condition holds; fails the test when it never does."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)
