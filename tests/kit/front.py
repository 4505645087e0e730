"""The real server in this process, in front of fake engines, for several tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from llmserve.live.cluster import LiveCluster


class Front:
    """A running server and a client session for it."""

    def __init__(self, cluster: LiveCluster, url: str, session: aiohttp.ClientSession) -> None:
        self.cluster = cluster
        self.url = url
        self.session = session

    def post(self, path: str = "/v1/chat/completions", headers: dict[str, str] | None = None, **fields: Any) -> Any:
        """A request with a default message unless `fields` has another."""
        body = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], **fields}
        return self.session.post(self.url + path, json=body, headers=headers)


StartFront = Callable[..., Awaitable[Front]]

through_relays_too = pytest.mark.parametrize("relays", [0, 2], ids=["one process", "relays"])
"""A test whose servers are run both ways: see the fixture `relays`."""


async def until(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    """Let the event loop run until the condition holds; fail the test after `within_s` seconds."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)
