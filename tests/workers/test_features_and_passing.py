"""What passes through relays to the scheduler process, and features whose stages run in relays."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest
import refusing_server
from many_processes import WITHIN, asked, keys_in, running_engine, started
from server_process import Server

BOUNDARY = "limit"
TYPE = {"content-type": f"multipart/form-data; boundary={BOUNDARY}", "authorization": f"Bearer {'b' * 20}"}
PURPOSE = b'--limit\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FILE = b'--limit\r\ncontent-disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
END = b"\r\n--limit--\r\n"
PIECE = b"x" * (1 << 20)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    keys_in(folder)
    program = sys.executable, refusing_server.__file__
    flags = ("--slots", "8", "--state", str(folder / "state"))
    with running_engine() as (url, _), started(url, folder, *flags, program=program) as server:
        yield server


async def post(server: Server, body: bytes | AsyncIterator[bytes], **headers: str) -> tuple[int, Any]:
    headers = {**TYPE, **headers}
    async with (
        aiohttp.ClientSession(timeout=WITHIN) as session,
        session.post(f"{server.url}/v1/files", data=body, headers=headers) as answer,
    ):
        return answer.status, await answer.json()


async def test_a_large_file_passes_whole(server: Server) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield PURPOSE + FILE
        for _ in range(24):
            yield PIECE
        yield END

    status, file = await post(server, pieces())
    assert (status, file["bytes"]) == (200, 24 << 20)
    async with aiohttp.ClientSession(timeout=WITHIN) as session:
        path = f"{server.url}/v1/files/{file['id']}/content"
        async with session.get(path, headers={"authorization": TYPE["authorization"]}) as answer:
            content = await answer.read()
    assert content == PIECE * 24


async def test_an_upload_is_refused_before_it_has_come(server: Server) -> None:
    """The refusal comes although the body never ends."""
    go_on = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        yield b"no such form at all\r\n" * 1_000
        while not go_on.is_set():
            yield PIECE
            await asyncio.sleep(0.01)

    try:
        status, _ = await post(server, endless())
    except aiohttp.ClientError:  # the server closed before this client had read the answer
        status = 400
    assert status == 400
    go_on.set()
    assert (await post(server, PURPOSE + FILE + b"abc" + END))[0] == 200, "the server goes on"


async def test_a_wrong_key_is_refused_before_an_upload(server: Server) -> None:
    status, answer = await post(server, PURPOSE + FILE + PIECE + END, authorization="Bearer wrong")
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")


async def test_the_page_gets_its_events_as_they_happen(server: Server) -> None:
    headers = {"authorization": f"Bearer {'r' * 20}"}
    async with (
        aiohttp.ClientSession(timeout=WITHIN) as session,
        session.get(f"{server.url}/events", headers=headers) as events,
    ):
        assert events.headers["content-type"].startswith("text/event-stream")
        seen = [json.loads((await _event(events)).removeprefix(b"data: ")) for _ in range(2)]
    assert seen[1]["now_s"] > seen[0]["now_s"]


async def _event(response: aiohttp.ClientResponse) -> bytes:
    while True:
        line = await response.content.readline()
        assert line, "the events have ended"
        if line.startswith(b"data: "):
            return line


async def test_stages_of_a_feature_refuse_in_relays(server: Server) -> None:
    async with aiohttp.ClientSession() as session:
        async with asked(session, server, headers={"x-forbidden": "1"}) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (400, "forbidden_header")
        async with asked(session, server, messages=[{"role": "user", "content": "a forbidden word"}]) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (400, "forbidden_word")
        async with asked(session, server) as response:
            assert response.status == 200


async def test_what_a_stage_says_of_a_body_reaches_the_scheduler_process(server: Server) -> None:
    async with aiohttp.ClientSession() as session:
        async with asked(session, server, messages=[{"role": "user", "content": "speak as a robot"}]) as response:
            assert response.status == 200
        async with session.get(f"{server.url}/metrics", headers={"authorization": TYPE["authorization"]}) as response:
            assert 'stream="bob/robot"' in await response.text()
