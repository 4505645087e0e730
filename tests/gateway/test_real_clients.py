"""Clients and proxies as they are shipped, on their defaults, against the whole server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from front import Front, StartFront, through_relays_too

from llmserve.engines.timed.server import FakeEngine
from llmserve.settings.tree import ServerConfig

CHAT = json.dumps({"model": "fake", "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]})
STREAM = json.dumps({**json.loads(CHAT), "stream": True})
END_S = 60.0


def needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} is not installed: scripts/test does")


@pytest.fixture
async def front(start_front: StartFront, tmp_path: Path) -> AsyncIterator[Front]:
    async with FakeEngine(slots=8, step_s=0.001) as engine:
        yield await start_front(engine, server=ServerConfig(port=0, state=str(tmp_path / "state")))


async def output(*command: str, stdin: bytes = b"") -> str:
    """What a program that ends with success prints."""
    program = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        out, error = await asyncio.wait_for(program.communicate(stdin), END_S)
    finally:
        if program.returncode is None:
            program.kill()
    assert program.returncode == 0, (program.returncode, out, error)
    return out.decode()


# ---- clients --------------------------------------------------------------------------------------------------------


@needs("javac")
async def test_javas_http_client_on_its_defaults_gets_answers(front: Front) -> None:
    """By length, in chunks, asking first, as a stream, a file, without a body, and many at once."""
    source = Path(__file__).parent / "EchoOverHttp.java"
    assert (await output("java", "-Xshare:auto", str(source), front.url)).split() == ["200"] * 27


@through_relays_too
@needs("curl")
@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--http1.0",),
        ("-H", "transfer-encoding: chunked"),
        ("-H", "expect: 100-continue"),
        ("-H", "transfer-encoding: chunked", "-H", "expect: 100-continue"),
        ("-H", "connection: close, upgrade", "-H", "upgrade: h2c"),
    ],
)
@pytest.mark.parametrize("body", [CHAT, STREAM, CHAT + " " * 200_000], ids=["whole", "stream", "large"])
async def test_curl_that_asks_for_http_2_gets_its_answer(front: Front, flags: tuple[str, ...], body: str) -> None:
    protocol = () if "--http1.0" in flags else ("--http2",)
    url = f"{front.url}/v1/chat/completions"
    command = ("curl", "-sS", "--fail-with-body", *protocol, *flags, "--data-binary", "@-", url, "--next")
    text = await output(*command, "-sS", *protocol, f"{front.url}/v1/models", stdin=body.encode())
    assert '"finish_reason"' in text
    assert '"object":"list"' in text, "the second request on the same connection"


@through_relays_too
@needs("curl")
async def test_curl_uploads_a_file_with_a_wish_for_http_2(front: Front, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(b"{}\n" * 300_000)
    form = ("-F", "purpose=batch", "-F", f"file=@{file}")
    answer = json.loads(await output("curl", "-sS", "--http2", *form, f"{front.url}/v1/files"))
    assert answer["bytes"] == file.stat().st_size


@needs("curl")
async def test_curl_that_knows_http_2_beforehand_is_refused_at_once(front: Front) -> None:
    program = await asyncio.create_subprocess_exec(
        *("curl", "-sS", "--http2-prior-knowledge", "-d", CHAT, f"{front.url}/v1/chat/completions"),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    await asyncio.wait_for(program.communicate(), END_S)
    assert program.returncode not in (0, 28)


# ---- proxies --------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


@asynccontextmanager
async def running(command: Sequence[str], port: int) -> AsyncIterator[str]:
    """A proxy, once it accepts connections. Yields its base URL."""
    process = subprocess.Popen(command)  # noqa: ASYNC220 (it only forks)
    try:
        async with asyncio.timeout(END_S):
            while process.poll() is None:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    break
                await asyncio.sleep(0.02)
        assert process.poll() is None, "the proxy has ended"
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


@asynccontextmanager
async def nginx(upstream: str, folder: Path, *lines: str) -> AsyncIterator[str]:
    """nginx with proxy_pass, and the lines."""
    port = free_port()
    paths = " ".join(
        [f"{name}_temp_path {folder}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")]
    )
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off; pid {folder}/pid; error_log {folder}/error.log; events {{}}\n"
        f"http {{ access_log off; {paths}\n"
        f"server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass {upstream}; {' '.join(lines)} }} }} }}\n"
    )
    async with running(["nginx", "-p", str(folder), "-c", str(config)], port) as url:
        yield url


@asynccontextmanager
async def haproxy(upstream: str, folder: Path, *lines: str) -> AsyncIterator[str]:
    """HAProxy that checks the server by its default request, OPTIONS /."""
    port = free_port()
    text = "\n  ".join(lines)
    config = folder / "haproxy.cfg"
    config.write_text(
        f"""defaults
  mode http
  timeout connect 5s
  timeout client 60s
  timeout server 60s
frontend all
  bind 127.0.0.1:{port}
  default_backend servers
backend servers
  option httpchk
  {text}
  server one {urlsplit(upstream).netloc} check inter 100ms rise 1 fall 1
"""
    )
    async with running(["haproxy", "-db", "-q", "-f", str(config)], port) as url:
        yield url


async def check_streams_at_once(engine: FakeEngine, url: str) -> None:
    """The first event comes before the engine has made the last."""

    def first_line() -> tuple[bytes, int]:
        body = json.dumps({**json.loads(STREAM), "max_tokens": 2_000}).encode()
        request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=END_S) as answer:
            line = answer.readline()
            return line, engine.running

    line, running_then = await asyncio.to_thread(first_line)
    assert line.startswith(b"data: {")
    assert running_then == 1


@needs("nginx")
@pytest.mark.parametrize(
    "lines",
    [
        (),
        (
            "proxy_http_version 1.1;",
            "proxy_set_header Upgrade $http_upgrade;",
            'proxy_set_header Connection "upgrade";',
        ),
    ],
    ids=["as shipped", "passes upgrades on"],
)
async def test_behind_nginx_streams_come_at_once_and_bodies_are_whole(
    start_front: StartFront, tmp_path: Path, lines: tuple[str, ...]
) -> None:
    async with FakeEngine(slots=8, step_s=0.002) as engine:
        front = await start_front(engine, server=ServerConfig(port=0, state=str(tmp_path / "state")))
        async with nginx(front.url, tmp_path, *lines) as url:
            if shutil.which("curl"):
                command = ("curl", "-sS", "--fail-with-body", "--http2", "-d", CHAT, f"{url}/v1/chat/completions")
                assert '"finish_reason"' in await output(*command)
            if shutil.which("javac"):
                source = Path(__file__).parent / "EchoOverHttp.java"
                assert (await output("java", str(source), url)).split() == ["200"] * 27
            await check_streams_at_once(engine, url)


@through_relays_too
@needs("haproxy")
async def test_haproxys_default_check_finds_the_server_healthy_and_passes_requests(
    start_front: StartFront, tmp_path: Path
) -> None:
    async with FakeEngine(slots=8, step_s=0.002) as engine:
        front = await start_front(engine)
        async with haproxy(front.url, tmp_path) as url:
            await asyncio.sleep(0.5)  # several checks: a server that fails one gets nothing
            for body in (CHAT, STREAM):
                async with front.session.post(f"{url}/v1/chat/completions", data=body) as answer:
                    assert answer.status == 200, await answer.text()
                    assert '"finish_reason"' in await answer.text()
            await check_streams_at_once(engine, url)
