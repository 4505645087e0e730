"""How `llmserve serve` ends: every client gets a whole answer, an error, or a stream with an error event."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import aiohttp
import pytest
from front import StartFront, until
from server_process import Server

from llmserve.engines.timed.server import FakeEngine

StartServer = Callable[..., Awaitable[Server]]


@pytest.fixture
async def start_server() -> AsyncIterator[StartServer]:
    servers: list[Server] = []

    async def start(*flags: str) -> Server:
        servers.append(await asyncio.to_thread(Server, *flags))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a client got. error : the code of the error body, or of the stream's error event."""

    status: int
    error: str | None
    is_stream: bool


async def outcome(session: aiohttp.ClientSession, url: str, *, max_tokens: int, stream: bool) -> Outcome:
    """Raises aiohttp's errors when the answer is cut off."""
    body = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "max_tokens": max_tokens}
    async with session.post(f"{url}/v1/chat/completions", json={**body, "stream": stream}) as response:
        text = await response.text()
        if response.status != 200 or not stream:
            answer = json.loads(text)
            return Outcome(response.status, answer.get("error", {}).get("code"), is_stream=False)
    *events, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    error = json.loads(events[-1].removeprefix("data: ")).get("error")
    return Outcome(response.status, error["code"] if error else None, is_stream=True)


async def ended(server: Server) -> tuple[int, str]:
    """Exit status and output of a server that ends."""
    output, _ = await asyncio.to_thread(server.process.communicate, timeout=40)
    return server.process.returncode, output


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGHUP], [signal.SIGTERM, signal.SIGTERM]])
async def test_an_end_answers_every_open_request(start_server: StartServer, signals: list[signal.Signals]) -> None:
    """Some answers are complete, others run, and others wait when the time for the drain ends."""
    drain_s = "60" if len(signals) == 2 else "0.3"
    async with FakeEngine(slots=8, step_s=0.02) as engine, aiohttp.ClientSession() as session:
        server = await start_server("--engine", engine.url, "--drain-s", drain_s, "--slots", "8", "--look-ahead", "0")
        running = [
            asyncio.ensure_future(
                outcome(session, server.url, max_tokens=2 if index % 8 == 0 else 3_000, stream=index % 2 == 1)
            )
            for index in range(40)
        ]
        await until(lambda: engine.running == 8 and any(request.done() for request in running))
        for number in signals:
            server.process.send_signal(number)
            await asyncio.sleep(0.1)
        outcomes = await asyncio.gather(*running)
        status, output = await ended(server)
    assert status == 0
    assert "Traceback" not in output
    kinds = {(each.status, each.error) for each in outcomes if not each.is_stream}
    assert kinds == {(200, None), (503, "draining")}
    assert {(each.status, each.error) for each in outcomes if each.is_stream} == {(200, "draining")}


async def test_a_client_that_does_not_read_does_not_hold_the_end(start_server: StartServer) -> None:
    async with FakeEngine(step_s=0) as engine, aiohttp.ClientSession() as session:
        server = await start_server("--engine", engine.url, "--drain-s", "0.1")
        body = {"model": "fake", "prompt": "hello", "stream": True, "max_tokens": 400_000}
        response = await session.post(f"{server.url}/v1/completions", json=body)
        server.process.send_signal(signal.SIGTERM)
        status, output = await ended(server)
        response.close()
    assert (status, "Traceback" in output) == (0, False)


async def test_a_request_whose_body_is_on_its_way_at_the_end_is_refused(start_server: StartServer) -> None:
    async with FakeEngine() as engine:
        server = await start_server("--engine", engine.url, "--drain-s", "0.1")
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n"
        writer.write(head + b'{"model": ')
        await asyncio.sleep(0.2)
        server.process.send_signal(signal.SIGTERM)
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        status, _ = await ended(server)
    assert (status, answer[:12]) == (0, b"HTTP/1.1 503")
    assert b'"code":"draining"' in answer


async def test_a_request_that_arrives_after_the_end_of_the_drain_is_refused(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0.05) as engine:
        front = await start_front(engine)
        front.cluster.abort()
        async with front.post() as response:
            assert (response.status, (await response.json())["error"]["code"]) == (503, "draining")


async def test_a_request_whose_head_came_before_the_end_and_its_body_after_is_refused(start_front: StartFront) -> None:
    async with FakeEngine() as engine:
        front = await start_front(engine)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(front.url.rpartition(":")[2]))
        body = b'{"model": "fake", "prompt": "hello"}'
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body))
        await asyncio.sleep(0.1)
        front.cluster.abort()
        writer.write(body)
        answer = await asyncio.wait_for(reader.readuntil(b"}}"), 20)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 503")
    assert b'"code":"draining"' in answer


def test_a_hangup_that_the_shell_ignores_stays_ignored() -> None:
    """As `nohup llmserve serve` asks for."""
    script = (
        "import asyncio, os, signal\n"
        "from llmserve.commands.serve import _on_signals\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "async def main():\n"
        "    with _on_signals(lambda: print('stopped'), None):\n"
        "        os.kill(os.getpid(), signal.SIGHUP)\n"
        "        await asyncio.sleep(0.05)\n"
        "        print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
