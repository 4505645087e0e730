"""Asking OpenAI-compatible servers: the load of every benchmark."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp

from llmserve.headers import BATCH_HEADER

MODEL = "llmserve-demo"
BEGIN_S = 0.1  # before the first of several requests is due
JSON_HEADERS = {"content-type": "application/json"}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reply:
    """All that came back for a request. status : 0: nothing, or a broken connection.  body : bytes until then.
    error : name of what broke it.
    """

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    error: str = ""

    @property
    def answer(self) -> Any:
        """JSON of an answer. Raises AssertionError when it is anything else."""
        assert self.status == 200, f"{self.status} {self.error}{self.body.decode(errors='replace')}"
        return json.loads(self.body)

    @property
    def tokens(self) -> int:
        """Of a whole answer."""
        return int(self.answer["usage"]["completion_tokens"])

    @property
    def batch(self) -> str:
        """The last that it ran in, as llmserve says; "": in none."""
        return self.headers.get(BATCH_HEADER, "")


def session_of(timeout_s: float | None = None, *, connections_kept: bool = True) -> aiohttp.ClientSession:
    """As many connections as there are requests.

    connections_kept : False: one for each request, for a server may close one that has rested just when it is used
    """
    connector = aiohttp.TCPConnector(limit=0, force_close=not connections_kept)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=timeout_s))


def body_of(prompt: str, **more: Any) -> dict[str, Any]:
    """A greedy question to the demo model. more : further fields of the body, or others in their place."""
    return {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "temperature": 0, **more}


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    body: bytes | Mapping[str, Any],
    headers: Mapping[str, str] | None = None,
    *,
    on_chunk: Callable[[bytes], None] = lambda chunk: None,
) -> Reply:
    """A whole reply; a broken connection is one, too. on_chunk : called with each piece when it comes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    chunks: list[bytes] = []
    try:
        async with session.post(
            f"{url}/v1/chat/completions", data=data, headers={**JSON_HEADERS, **(headers or {})}
        ) as response:
            async for chunk in response.content.iter_any():
                on_chunk(chunk)
                chunks.append(chunk)
            return Reply(response.status, b"".join(chunks), response.headers)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return Reply(0, b"".join(chunks), error=type(error).__name__)


async def at_their_times(at_s: Sequence[float], do: Callable[[int, float], Awaitable[T]]) -> list[T]:
    """do(index, due_s) for each, not before it is due, in the order of at_s; due_s on the clock of perf_counter.

    Raises an ExceptionGroup when one raises; the others are then cancelled.
    """
    begin_s = time.perf_counter() + BEGIN_S

    async def in_time(index: int) -> T:
        due_s = begin_s + at_s[index]
        if (wait_s := due_s - time.perf_counter()) > 0:
            await asyncio.sleep(wait_s)
        return await do(index, due_s)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(in_time(index)) for index in range(len(at_s))]
    return [task.result() for task in tasks]


async def get_text(session: aiohttp.ClientSession, url: str) -> str:
    """What a page says; Prometheus's lines, say."""
    async with session.get(url) as response:
        return await response.text()
