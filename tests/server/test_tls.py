"""HTTPS for clients, and certificates for engines: with curl, OpenSSL and httpx."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from certificates import Authority, Certificate
from front import until
from server_process import Server
from tls_front import TlsFront

from llmserve.engines.timed.server import FakeEngine
from llmserve.errors import ConfigError
from llmserve.http import accepting
from llmserve.live.cluster import LiveCluster
from llmserve.server.reload import Reloader
from llmserve.server.serving import checked, serving
from llmserve.settings.tree import Config, EngineConfig, LiveConfig, ServerConfig

BODY = {"model": "fake", "prompt": "hello", "max_tokens": 5}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def own(authority: Authority, tmp_path: Path) -> Certificate:
    """The server's certificate, in files that a test may change."""
    return copied(authority.issue("server"), tmp_path)


def copied(issued: Certificate, folder: Path) -> Certificate:
    files = Certificate(folder / "tls.pem", folder / "tls.key")
    shutil.copy(issued.certificate, files.certificate)
    shutil.copy(issued.key, files.key)
    return files


@asynccontextmanager
async def https(
    engine: str, own: Certificate, **engine_fields: Any
) -> AsyncIterator[tuple[LiveCluster, str, Reloader]]:
    server = ServerConfig(port=0, tls_cert=str(own.certificate), tls_key=str(own.key))
    live = LiveConfig(probe_every_s=0.05)
    config = Config(server=server, engines=EngineConfig(engine=(engine,), **engine_fields), live=live)
    reloader = Reloader(config)
    async with serving(config, reloader) as (cluster, url):
        await until(lambda: all(cluster.engines_ready.values()))
        yield cluster, url, reloader


async def ran(*words: str | Path, text: str = "") -> str:
    """What a command prints."""
    done = await asyncio.to_thread(
        subprocess.run, [*map(str, words)], input=text, capture_output=True, text=True, timeout=120, check=False
    )
    return done.stdout + done.stderr


async def test_curl_openssl_and_httpx_are_served(authority: Authority, own: Certificate) -> None:
    async with FakeEngine(step_s=0.001) as engine, https(engine.url, own) as (_, url, _):
        assert url.startswith("https://")
        words = ("curl", "-sS", "--cacert", authority.certificate, "--http2", "-w", "%{http_version} %{http_code}")
        body = ("-H", "content-type: application/json", "-d", json.dumps(BODY))
        assert (await ran(*words, f"{url}/v1/completions", *body)).endswith("1.1 200")
        assert "certificate" in await ran("curl", "-sS", f"{url}/v1/models"), "curl does not trust the authority"
        address = url.removeprefix("https://")
        session = ("openssl", "s_client", "-connect", address, "-CAfile", authority.certificate)
        told = await ran(*session, "-alpn", "h2,http/1.1", "-tls1_2")
        assert "ALPN protocol: http/1.1" in told
        assert "Verify return code: 0 (ok)" in told
        assert "TLSv1.3" in await ran(*session)
        assert "ALPN protocol" not in await ran(*session, "-tls1_1"), "versions that are broken are refused"
        async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=str(authority.certificate))) as client:
            for _ in range(2):
                assert (await client.post(f"{url}/v1/completions", json=BODY)).status_code == 200
            long = {**BODY, "prompt": "word " * 100_000, "max_tokens": 400, "stream": True}
            async with client.stream("POST", f"{url}/v1/completions", json=long) as response:
                lines = [line async for line in response.aiter_lines()]
            assert lines[-2] == "data: [DONE]"


async def test_whoever_leaves_over_tls_frees_the_engine(authority: Authority, own: Certificate) -> None:
    tls = ssl.create_default_context(cafile=str(authority.certificate))
    async with FakeEngine(step_s=0.01) as engine, https(engine.url, own) as (_, url, _):
        async with httpx.AsyncClient(verify=tls) as client:
            endless = {**BODY, "max_tokens": 100_000, "stream": True}
            async with client.stream("POST", f"{url}/v1/completions", json=endless) as response:
                await anext(response.aiter_lines())
                assert engine.running == 1
        await until(lambda: engine.running == 0)


async def test_a_renewed_certificate_counts_for_new_connections_and_a_wrong_one_for_none(
    authority: Authority, own: Certificate
) -> None:
    tls = ssl.create_default_context(cafile=str(authority.certificate))

    async def serial(url: str) -> str:
        words = ("openssl", "s_client", "-connect", url.removeprefix("https://"), "-CAfile", authority.certificate)
        return await ran("openssl", "x509", "-noout", "-serial", text=await ran(*words))

    async with (
        FakeEngine(step_s=0.001) as engine,
        https(engine.url, own) as (_, url, reloader),
        httpx.AsyncClient(verify=tls) as client,
    ):
        assert (await client.get(f"{url}/health")).status_code == 200
        before = await serial(url)
        assert before.startswith("serial=")
        copied(authority.issue("renewed"), own.certificate.parent)
        await reloader.reload()
        renewed = await serial(url)
        assert renewed.startswith("serial=")
        assert renewed != before
        assert (await client.get(f"{url}/health")).status_code == 200, "the connection from before goes on"
        shutil.copy(authority.issue("other").key, own.key)
        with pytest.raises(
            ConfigError, match=r"tls_cert: .*tls.key: the certificate or its key cannot be used: .*mismatch"
        ):
            await reloader.reload()
        assert await serial(url) == renewed


async def test_whoever_does_not_speak_tls_is_cut_off(own: Certificate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "HANDSHAKE_S", 0.2)
    async with FakeEngine() as engine, https(engine.url, own) as (_, url, _):
        host, _, port = url.removeprefix("https://").partition(":")
        for first in (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b""):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(first)
            data = b""
            with contextlib.suppress(ConnectionError):
                data = await reader.read()
            assert b"HTTP" not in data
            writer.close()
        assert "ok" in await ran("curl", "-sk", f"{url}/health")


async def test_engines_see_the_servers_certificate_and_its_renewal(
    authority: Authority, own: Certificate, tmp_path: Path
) -> None:
    (tmp_path / "client").mkdir()
    client_files = copied(authority.issue("client-1"), tmp_path / "client")
    fields = {
        "engine_tls_ca": str(authority.certificate),
        "engine_tls_cert": str(client_files.certificate),
        "engine_tls_key": str(client_files.key),
    }
    async with (
        FakeEngine(step_s=0.001) as engine,
        TlsFront(engine.url, authority.issue("engine"), authority.certificate) as front,
        https(front.url, own, **fields) as (_, url, reloader),
        httpx.AsyncClient(verify=ssl.create_default_context(cafile=str(authority.certificate))) as client,
    ):
        assert (await client.post(f"{url}/v1/completions", json=BODY)).status_code == 200
        assert front.seen == {"client-1"}
        copied(authority.issue("client-2"), tmp_path / "client")
        await reloader.reload()
        endless = {**BODY, "max_tokens": 100_000, "stream": True}
        async with client.stream("POST", f"{url}/v1/completions", json=endless) as response:
            await anext(response.aiter_lines())
            assert (await client.post(f"{url}/v1/completions", json=BODY)).status_code == 200
            assert "client-2" in front.seen, "one connection was in use, so another was opened"


@pytest.mark.parametrize("has_certificate", [True, False])
async def test_an_engines_certificate_must_be_right_and_ours_be_there(
    authority: Authority, own: Certificate, has_certificate: bool, caplog: pytest.LogCaptureFixture
) -> None:
    files = authority.issue("client-1")
    shown = {"engine_tls_cert": str(files.certificate), "engine_tls_key": str(files.key)} if has_certificate else {}
    named = authority.issue("named", host="DNS:engines.internal")
    async with FakeEngine() as engine, TlsFront(engine.url, named, authority.certificate) as front:
        fields = {"engine_tls_ca": str(authority.certificate), **shown}
        config = Config(server=ServerConfig(port=0), engines=EngineConfig(engine=(front.url,), **fields))
        async with serving(config):
            await until(lambda: "certificate" in caplog.text)
        assert front.seen == set()
        if has_certificate:
            async with https(front.url, own, **fields, engine_tls_name="engines.internal"):
                assert front.seen == {"client-1"}


def test_files_that_cannot_be_used_are_said_before_any_start(own: Certificate, tmp_path: Path) -> None:
    def refusal(**fields: Any) -> str:
        engine = {name: fields.pop(name) for name in list(fields) if name.startswith("engine_")}
        with pytest.raises(ConfigError) as refused:
            checked(Config(server=ServerConfig(**fields), engines=EngineConfig(engine=("http://a",), **engine)))
        return str(refused.value)

    certificate, key = str(own.certificate), str(own.key)
    assert "tls_key: there is no certificate" in refusal(tls_key=key)
    assert "no such file" in refusal(tls_cert=str(tmp_path / "none"))
    assert "cannot be used" in refusal(tls_cert=certificate), "the key is in no file"
    assert "no certificate of an authority" in refusal(engine_tls_ca=key)
    assert "cannot be used" in refusal(engine_tls_cert=key)
    locked = tmp_path / "locked.key"
    words = ["openssl", "ec", "-in", key, "-out", str(locked), "-aes256", "-passout", "pass:secret"]
    subprocess.run(words, check=True, capture_output=True, timeout=60)
    assert "has a password" in refusal(tls_cert=certificate, tls_key=str(locked))


async def test_the_command_serves_https_and_takes_a_renewed_certificate_by_sighup(
    authority: Authority, own: Certificate
) -> None:
    async with FakeEngine(step_s=0.001) as engine:
        flags = ("--engine", engine.url, "--tls-cert", str(own.certificate), "--tls-key", str(own.key))
        server = await asyncio.to_thread(Server, *flags)
        try:
            assert server.url.startswith("https://")
            words = ("curl", "-sS", "--cacert", authority.certificate)
            body = ("-H", "content-type: application/json", "-d", json.dumps({**BODY, "stream": True}))
            assert "[DONE]" in await ran(*words, f"{server.url}/v1/completions", *body)
            other = Authority(own.certificate.parent / "other")
            copied(other.issue("server"), own.certificate.parent)
            server.process.send_signal(signal.SIGHUP)

            async def is_renewed() -> bool:
                return "ok" in await ran("curl", "-sS", "--cacert", other.certificate, f"{server.url}/health")

            async with asyncio.timeout(60):
                while not await is_renewed():  # noqa: ASYNC110 (no event to wait for)
                    await asyncio.sleep(0.1)
            assert await asyncio.to_thread(server.stop) == 0
        finally:
            server.close()
