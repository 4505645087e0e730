"""Which bodies the whole server keeps: those that a handler reads, and for a right key only."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from front import Front, StartFront
from raw_site import Client

from llmserve.engines.timed.server import FakeEngine
from llmserve.settings.tree import ApiConfig, ServerConfig

KEYS = {"alice": "sk-1", "bob": "sk-2"}


@pytest.fixture
async def front(start_front: StartFront, tmp_path: Path) -> AsyncIterator[Front]:
    """A server with keys, a store and 64 KiB of buffers."""
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{name}: {key}\n" for name, key in KEYS.items()))
    keys.chmod(0o600)
    server = ServerConfig(port=0, api_key_file=str(keys), admin_key_file=str(keys), state=str(tmp_path / "state"))
    limits = ApiConfig(body_bytes_max=60_000, buffers_bytes_max=64 << 10)
    async with FakeEngine(slots=2, step_s=0.0) as engine:
        yield await start_front(engine, server=server, limits=limits)


async def client_of(front: Front) -> Client:
    host, _, port = front.url.removeprefix("http://").rpartition(":")
    return Client(*await asyncio.open_connection(host, int(port)))


async def buffered_bytes(front: Front) -> float:
    async with front.session.get(f"{front.url}/metrics", headers={"authorization": "Bearer sk-1"}) as answer:
        found = re.search(r"^llmserve_buffered_bytes (\S+)", await answer.text(), re.M)
    assert found is not None
    return float(found[1])


@pytest.mark.parametrize(
    "request_line",
    [
        *("POST /v1/chat/completions", "POST /v1/batches", "POST /v1/files", "POST /admin/peers"),
        *("POST /v1/responses/resp_1/cancel", "DELETE /v1/responses/resp_1"),
    ],
)
async def test_without_a_key_a_body_is_refused_at_its_head(front: Front, request_line: str) -> None:
    client = await client_of(front)
    await client.send(f"{request_line} HTTP/1.1\r\nhost: h\r\ncontent-length: 50000\r\n\r\n".encode())
    assert (await client.answer())[0] == 401


@pytest.mark.parametrize("key", ["", "authorization: Bearer sk-1\r\n"])
@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        *(("GET /health", 200), ("POST /health", 405), ("DELETE /v1/chat/completions", 405)),
        *(("PUT /v1/files", 405), ("GET /", 200), ("POST /admin/engines/x/drain", 0), ("GET /v1/models", 0)),
    ],
)
async def test_where_no_handler_reads_a_body_none_is_kept(
    front: Front, request_line: str, status: int, key: str
) -> None:
    client = await client_of(front)
    head = f"{request_line} HTTP/1.1\r\nhost: h\r\n{key}content-length: 50000\r\n\r\n".encode()
    await client.send(head + b"a" * 49_999)
    for _ in range(3):
        assert await buffered_bytes(front) == 0
    await client.send(b"a")
    assert (await client.answer())[0] in ((status,) if status else (200, 401, 404))
    await client.send(head.replace(b"50000", b"70000"))
    assert (await client.answer())[0] == 413


async def test_the_body_for_a_path_that_there_is_not_is_refused_at_its_head(front: Front) -> None:
    client = await client_of(front)
    await client.send(b"POST /nothing HTTP/1.1\r\nhost: h\r\ncontent-length: 50000\r\n\r\n")
    assert (await client.answer())[0] == 404


async def test_a_key_that_fills_its_share_of_the_buffers_stops_nobody_else(front: Front) -> None:
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\nauthorization: Bearer sk-1\r\ncontent-length: 20000\r\n\r\n"
    )
    greedy = [await client_of(front) for _ in range(4)]
    for client in greedy:
        await client.send(head + b" " * 15_000)
    refused = 0
    for client in greedy[2:]:
        status, body = await client.answer()
        refused += (status, b"buffers_full" in body) == (503, True)
    assert refused == 2
    assert await buffered_bytes(front) == 30_000
    async with front.post(headers={"authorization": "Bearer sk-2"}, max_tokens=1) as answer:
        assert answer.status == 200
    for client in greedy:
        client.writer.close()
    async with asyncio.timeout(20):
        while await buffered_bytes(front):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
