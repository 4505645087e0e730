"""The client of engines: connections that are kept, closed, cut, slow and not to be had."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines.lying import LyingEngine, chunked, dripping, http
from front import StartFront, until

from llmserve.engines.engine import EngineError
from llmserve.engines.openai import OpenAIEngine
from llmserve.engines.timed.server import FakeEngine
from llmserve.http import client as http_client
from llmserve.http.client import BUFFER_BYTES_MAX, COPIED_BYTES_MAX, HttpClient
from llmserve.http.connecting import HttpError, printable
from llmserve.request import EngineInfo
from llmserve.scheduling.messages import EngineLost, RequestEnded


@contextlib.asynccontextmanager
async def client_of(url: str, **times: float) -> AsyncIterator[HttpClient]:
    client = HttpClient(url, **{"connect_s": 2.0, "idle_s": 30.0, "answer_s": 30.0, **times})
    try:
        yield client
    finally:
        await client.close()


async def post(client: HttpClient, *, fresh: bool = False, bytes_max: int = 1 << 20) -> tuple[int, bytes]:
    response = await client.request(client.opening("POST", "/x", {"a": "b"}), b"body", fresh=fresh)
    try:
        return response.status, await response.read(bytes_max)
    finally:
        response.close()


# ---- connections that are kept ----


async def test_a_connection_is_used_again() -> None:
    async with LyingEngine(http(b"one")) as engine, client_of(engine.url) as client:
        assert [await post(client) for _ in range(5)] == [(200, b"one")] * 5
        assert engine.connections == 1
        assert engine.requests == [b"body"] * 5


@pytest.mark.parametrize("length", [0, COPIED_BYTES_MAX - 1, COPIED_BYTES_MAX, 1 << 20])
async def test_a_body_of_any_length_is_sent_behind_its_head(length: int) -> None:
    body = os.urandom(length)
    async with LyingEngine(http(b"one")) as engine, client_of(engine.url) as client:
        answers = [await client.answer("POST", "/x", {"a": "b"}, body) for _ in range(2)]
        assert [answer.body for answer in answers] == [b"one"] * 2
        assert engine.requests == [body] * 2


async def test_parts_go_to_whoever_asks_for_them_and_wait_if_not_taken() -> None:
    more = [asyncio.Event(), asyncio.Event()]
    parts: list[bytes] = []

    def take(part: bytes) -> bool:
        parts.append(part)
        more[1].set()
        return part != b"rare"

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(chunked(end=False))
        for event, part in zip(more, (b"usual", b"rare"), strict=True):
            await event.wait()
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))
        writer.write(b"0\r\n\r\n")

    async with LyingEngine(answer) as engine, client_of(engine.url) as client:
        response = await client.request(client.opening("POST", "/x", {}), b"body")
        response.on_part = take
        more[0].set()
        assert await response.read(1 << 20) == b"rare"  # taken parts are gone
        assert parts[0] == b"usual"


@pytest.mark.parametrize(
    "answer",
    [
        http(b"one", "connection: close"),
        b"HTTP/1.0 200 OK\r\ncontent-length: 3\r\n\r\none",
        http(b"one") + http(b"two"),
        http(b"one") + b"junk",
    ],
    ids=["closed", "HTTP/1.0", "a second answer", "surplus"],
)
async def test_a_connection_that_cannot_be_trusted_is_not_used_again(answer: bytes) -> None:
    async with LyingEngine(answer) as engine, client_of(engine.url) as client:
        assert [await post(client) for _ in range(3)] == [(200, b"one")] * 3
        assert engine.connections == 3
        await until(lambda: not client.connections)


async def test_bytes_on_an_idle_connection_are_nobodys_answer() -> None:
    async def answer_twice(writer: asyncio.StreamWriter) -> None:
        writer.write(http(b"one"))
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write(http(b"two"))

    async with LyingEngine(answer_twice) as engine, client_of(engine.url) as client:
        assert await post(client) == (200, b"one")
        await until(lambda: not client.connections)
        assert await post(client) == (200, b"one")


async def test_an_idle_connection_is_closed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "KEPT_S", 0.05)
    async with LyingEngine(http(b"one")) as engine, client_of(engine.url) as client:
        await post(client)
        assert client.connections
        await until(lambda: not client.connections)


async def test_who_wants_to_know_hears_of_an_idle_connection_that_the_server_closes_and_of_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    idle_s: list[float] = []
    async with LyingEngine(http(b"one")) as engine, client_of(engine.url) as client:
        client.on_hangup = idle_s.append
        await asyncio.gather(*[post(client) for _ in range(3)])
        monkeypatch.setattr(http_client, "KEPT_S", 0.05)
        await asyncio.gather(*[post(client) for _ in range(3)])
        await until(lambda: not client.connections)
        assert idle_s == []
        monkeypatch.undo()
        engine.closes = True
        await post(client)
        await until(lambda: not client.connections)
        engine.closes = False
        await post(client)
    assert len(idle_s) == 1
    assert 0.0 <= idle_s[0] < 30.0


async def test_of_many_idle_connections_only_the_youngest_may_be_kept() -> None:
    async with LyingEngine(http(b"one")) as engine, client_of(engine.url, idle_most=1) as client:
        await asyncio.gather(*[post(client) for _ in range(4)])
        await until(lambda: len(client.connections) == 1)
        await post(client)
        assert engine.connections == 4


async def test_a_kept_connection_that_the_server_has_closed_costs_no_request() -> None:
    """The server closes when the second request arrives: only then does the client learn it."""
    answers = [http(b"one"), b"", http(b"two")]

    async def next_answer(writer: asyncio.StreamWriter) -> None:
        answer = answers.pop(0)
        writer.write(answer)
        if not answer:
            writer.close()

    async with LyingEngine(next_answer) as engine, client_of(engine.url) as client:
        assert [await post(client), await post(client)] == [(200, b"one"), (200, b"two")]
        assert engine.connections == 2


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 "], ids=["none", "a byte"])
async def test_a_request_is_sent_once_if_its_connection_is_new_or_a_byte_came(answer: bytes) -> None:
    async with LyingEngine(answer, closes=True) as engine, client_of(engine.url) as client:
        with pytest.raises(HttpError, match="the connection was closed"):
            await post(client)
        assert len(engine.requests) == 1
        engine.closes, engine.answer = False, http(b"one")
        await post(client)
        engine.closes, engine.answer = True, answer or b"H"
        with pytest.raises(HttpError, match="the connection was closed"):
            await post(client)
        assert len(engine.requests) == 3


async def test_a_server_that_dies_over_a_request_does_not_get_it_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "STALE_S", 0.05)

    async def die(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.2)
        writer.transport.abort()

    async with LyingEngine(http(b"one")) as engine, client_of(engine.url) as client:
        await post(client)
        engine.answer = die
        with pytest.raises(HttpError, match="the connection was"):
            await post(client)
        assert len(engine.requests) == 2


# ---- limits ----


async def test_silence_and_the_whole_answer_have_limits() -> None:
    async with LyingEngine(dripping(http(b"one")[:-1], b"", 1.0)) as engine:
        async with client_of(engine.url, idle_s=0.1) as client:
            with pytest.raises(HttpError, match=r"nothing arrived for 0\.1 s"):
                await post(client)
        engine.answer = dripping(b"HTTP/1.1 200 OK\r\n\r\n", b"x", 0.01)
        async with client_of(engine.url, idle_s=0.2, answer_s=0.4) as client:
            with pytest.raises(HttpError, match=r"no end of the answer within 0\.4 s"):
                await post(client)


async def test_the_silence_of_a_server_that_is_not_read_is_no_silence() -> None:
    async with LyingEngine(http(b"x" * (8 << 20))) as engine, client_of(engine.url, idle_s=0.2) as client:
        response = await client.request(client.opening("POST", "/x", {}), b"")
        await asyncio.sleep(0.5)
        assert len(await response.read(16 << 20)) == 8 << 20


async def test_a_body_that_nobody_reads_is_not_taken_in() -> None:
    async with LyingEngine(http(b"x" * (32 << 20))) as engine, client_of(engine.url) as client:
        response = await client.request(client.opening("POST", "/x", {}), b"")
        await asyncio.sleep(0.2)
        assert len(response.take()) <= 2 * BUFFER_BYTES_MAX
        response.close()
        await until(lambda: not client.connections)


@pytest.mark.parametrize("answer", [http(b"x" * 101), chunked(b"x" * 60, b"x" * 41)], ids=["announced", "chunked"])
async def test_a_body_over_its_limit_is_refused_and_its_connection_closed(answer: bytes) -> None:
    async with LyingEngine(answer) as engine, client_of(engine.url) as client:
        assert len((await post(client, bytes_max=101))[1]) == 101
        with pytest.raises(HttpError, match="more than 100 bytes"):
            await post(client, bytes_max=100)


async def test_a_cancelled_request_closes_its_connection() -> None:
    async with LyingEngine(b"") as engine, client_of(engine.url) as client:
        request = asyncio.ensure_future(post(client))
        await until(lambda: bool(engine.requests))
        request.cancel()
        await asyncio.wait([request])
        await until(lambda: not client.connections)


# ---- connecting ----


async def test_a_refused_connection_is_told_from_others(unused_tcp_port: int) -> None:
    for host in ("127.0.0.1", "localhost"):
        async with client_of(f"http://{host}:{unused_tcp_port}") as client:
            with pytest.raises(HttpError) as caught:
                await post(client)
            assert (caught.value.refused, caught.value.local) == (True, False)
    async with client_of("http://no-such-host.invalid") as client:
        with pytest.raises(HttpError) as caught:
            await post(client)
        assert (caught.value.refused, caught.value.local) == (False, False)


async def test_the_path_of_the_url_comes_before_the_path_of_the_request() -> None:
    async with LyingEngine(http(b"")) as engine, client_of(engine.url + "/pre fix/") as client:
        await post(client)
        assert engine.heads[0].startswith(b"POST /pre%20fix/x HTTP/1.1\r\nhost: 127.0.0.1:")


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A folder with the files `key` and `certificate`, for localhost."""
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    subprocess.run(
        [*make.split(), "-keyout", "key", "-out", "certificate"], cwd=tmp_path, check=True, capture_output=True
    )
    return tmp_path


async def test_tls_is_spoken_and_certificates_are_checked(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "certificate", certificate / "key")
    async with LyingEngine(http(b"one"), tls=context) as engine:
        url = engine.url.replace("http://127.0.0.1", "https://localhost")
        async with client_of(url) as client:
            with pytest.raises(HttpError, match="certificate verify failed"):
                await post(client)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate / "certificate"))
        async with client_of(url) as client:
            assert [await post(client), await post(client)] == [(200, b"one")] * 2
            assert len(client.connections) == 1
        async with client_of(url.replace("localhost", "127.0.0.1")) as client:
            with pytest.raises(HttpError, match="certificate verify failed"):
                await post(client)


def test_a_url_of_another_kind_is_refused() -> None:
    for url in ("ftp://x", "http://", "x"):
        with pytest.raises(ValueError, match="is not a URL"):
            HttpClient(url, connect_s=1, idle_s=1, answer_s=1)


def test_text_from_outside_is_made_printable_and_short() -> None:
    assert printable("good") == "good"
    assert printable("a\x1b[31m\nINFO forged") == r"a\x1b[31m\nINFO forged"
    assert len(printable("\n" * 1_000)) <= 700


# ---- no sockets left ----


@contextlib.contextmanager
def without_descriptors() -> Iterator[Any]:
    """Inside the block no file or socket can be opened, until the yielded function is called."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.dup(0))

    def free() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        while taken:
            os.close(taken.pop())

    try:
        yield free
    finally:
        free()


async def test_a_request_waits_a_moment_for_a_socket() -> None:
    async with LyingEngine(http(b"one")) as engine, client_of(engine.url) as client:
        with without_descriptors() as free:
            asyncio.get_running_loop().call_later(0.2, free)
            assert await post(client) == (200, b"one")


async def test_without_sockets_a_request_uses_the_connection_that_becomes_free() -> None:
    async with LyingEngine(http(b"one")) as engine, client_of(engine.url) as client:
        response = await client.request(client.opening("POST", "/x", {}), b"")
        engine.answer = dripping(http(b"two"), b"", 60.0)
        assert await response.read(100) == b"one"
        assert client.connections
        with without_descriptors():
            assert await post(client) == (200, b"two")


async def test_a_probe_without_a_socket_says_so_at_once() -> None:
    async with LyingEngine(http(b"one")) as engine:
        probed = OpenAIEngine(EngineInfo("e", 1, False), engine.url)
        with without_descriptors(), pytest.raises(EngineError, match="no socket left") as caught:
            await probed.probe()
        assert caught.value.local
        await probed.close()


async def test_a_lack_of_sockets_is_no_fault_of_an_engine(
    start_front: StartFront, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeEngine(step_s=0.001) as engine:
        front = await start_front(engine)
        (handle,) = front.cluster.fleet.handles.values()
        client = handle.engine._client  # type: ignore[attr-defined]
        client._connector.connect_s = 0.3
        async with front.session.get(front.url + "/health") as response:  # the test's own connection to the server
            await response.read()
        with without_descriptors():
            for _ in range(2):
                async with front.post(max_tokens=3) as response:
                    assert response.status == 503
                    assert response.headers["retry-after"] == "1"
                    assert (await response.json())["error"]["code"] == "no_socket"
            assert any("no socket left" in record.getMessage() for record in caplog.records)
        async with front.post(max_tokens=3) as response:
            assert response.status == 200
        assert handle.probes_failed == 0
        events = [step.event for step in front.cluster.journal.steps]
        assert not any(isinstance(event, EngineLost) for event in events)
        assert not any(isinstance(event, RequestEnded) and event.fault for event in events)
        assert not front.cluster.scheduler.requests
        async with front.session.get(front.url + "/metrics") as response:
            counts = await response.text()
        for line in (
            'llmserve_requests_total{outcome="failed"} 2.0',
            'llmserve_rejections_total{reason="no_socket"} 2.0',
            'llmserve_requests_total{outcome="completed"} 1.0',
        ):
            assert f"{line}\n" in counts
        assert 'llmserve_requests_total{outcome="cancelled"}' not in counts
