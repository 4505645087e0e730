"""HTTPS at relays: the handshake, a renewed certificate, and engines that want to see one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from certificates import Authority, Certificate
from server_process import Server
from tls_front import TlsFront

from llmserve.engines.timed.server import FakeEngine

BODY = {"model": "fake", "prompt": "hello", "max_tokens": 5, "stream": True}
SHAKES = 12  # connections, of which each relay gets some


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def copied(issued: Certificate, folder: Path) -> Certificate:
    folder.mkdir(exist_ok=True)
    files = Certificate(folder / "tls.pem", folder / "tls.key")
    shutil.copy(issued.certificate, files.certificate)
    shutil.copy(issued.key, files.key)
    return files


@asynccontextmanager
async def https(engine: str, own: Certificate, *flags: str) -> AsyncIterator[Server]:
    words = ("--workers", "2", "--engine", engine, "--tls-cert", str(own.certificate), "--tls-key", str(own.key))
    server = await asyncio.to_thread(Server, *words, *flags)
    try:
        yield server
        assert await asyncio.to_thread(server.stop) == 0
    finally:
        server.close()


async def until_all(is_so: Callable[[], Awaitable[bool]]) -> None:
    """Wait until so many connections in a row find it so: no relay differs."""
    found = 0
    async with asyncio.timeout(60):
        while found < SHAKES:
            found = found + 1 if await is_so() else 0


async def serial(url: str, authority: Authority) -> str:
    tls = ssl.create_default_context(cafile=str(authority.certificate))
    host, _, port = url.removeprefix("https://").partition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=tls)
    told: str = writer.get_extra_info("ssl_object").getpeercert()["serialNumber"]
    writer.close()
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        await writer.wait_closed()
    return told


async def test_relays_speak_http_1_1_over_tls_and_take_a_renewed_certificate(
    authority: Authority, tmp_path: Path
) -> None:
    own = copied(authority.issue("server"), tmp_path / "own")
    tls = ssl.create_default_context(cafile=str(authority.certificate))
    async with FakeEngine(step_s=0.001) as engine, https(engine.url, own) as server:
        words = ("openssl", "s_client", "-connect", server.url.removeprefix("https://"), "-alpn", "h2,http/1.1")
        done = await asyncio.to_thread(subprocess.run, words, input="", capture_output=True, text=True, timeout=60)
        assert "ALPN protocol: http/1.1" in done.stdout
        async with httpx.AsyncClient(verify=tls) as client:
            answer = await client.post(f"{server.url}/v1/completions", json=BODY)
            assert answer.text.endswith("data: [DONE]\n\n")
            assert (await client.get(f"{server.url}/v1/models")).json()["data"][0]["id"] == "fake"
            before = await serial(server.url, authority)
            copied(authority.issue("renewed"), tmp_path / "own")
            server.process.send_signal(signal.SIGHUP)

            async def is_renewed() -> bool:
                return await serial(server.url, authority) != before

            await until_all(is_renewed)
            answer = await client.post(f"{server.url}/v1/completions", json=BODY)
            assert answer.status_code == 200, "the connection from before goes on"


async def test_engines_see_the_certificate_of_relays_and_its_renewal(authority: Authority, tmp_path: Path) -> None:
    own = copied(authority.issue("server"), tmp_path / "own")
    shown = copied(authority.issue("client-1"), tmp_path / "client")
    flags = ("--engine-tls-ca", str(authority.certificate))
    flags += ("--engine-tls-cert", str(shown.certificate), "--engine-tls-key", str(shown.key))
    tls = ssl.create_default_context(cafile=str(authority.certificate))
    async with (
        FakeEngine(step_s=0.001) as engine,
        TlsFront(engine.url, authority.issue("engine"), authority.certificate) as front,
        https(front.url, own, *flags) as server,
    ):

        async def asked() -> str:
            async with httpx.AsyncClient(verify=tls) as client:
                text = (await client.post(f"{server.url}/v1/completions", content=json.dumps(BODY))).text
            assert text.endswith("data: [DONE]\n\n")
            return text

        await asked()
        assert front.seen == {"client-1"}
        copied(authority.issue("client-2"), tmp_path / "client")
        server.process.send_signal(signal.SIGHUP)

        async def is_renewed() -> bool:
            """Asked at the same time, for connections of before are kept."""
            front.seen.clear()
            await asyncio.gather(*[asked() for _ in range(8)])
            return front.seen <= {"client-2"}

        async with asyncio.timeout(60):
            while not await is_renewed() or "client-2" not in front.seen:
                pass
