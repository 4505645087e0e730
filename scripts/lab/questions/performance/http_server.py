"""llmserve's HTTP server beside uvicorn and granian: processor time of a request and of an event, and slow clients.

    python -m venv granian && granian/bin/pip install granian uvloop      (not one of llmserve's own packages)
    python scripts/lab performance.http_server --granian granian/bin/python --output docs/results/http-server.json

All answer the same (http_app.py), each in one process on uvloop: llmserve by a handler, as the product does, and by the
same ASGI application as the two others. The servers take turns within each round. Processor time is that of a server's
threads, user and system, over a fixed number of requests or events.

Three clients are slow: one never ends its head, one never ends its body, and one reads nothing of 64 MiB. Each server
has --patience seconds to close their connections; nothing else runs then.
"""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import sys
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil
from kit import ROOT
from kit.arguments import add_results, parser_of
from kit.progress import log
from kit.results import day_and_machine, in_turn, rounded, write_json
from kit.servers import Server, running
from kit.tables import show

from llmserve.http.client import HttpClient
from questions.performance.http_app import EVENTS

APP = Path(__file__).with_name("http_app.py")
BODY = b'{"model":"m","messages":[{"role":"user","content":"How long is a piece of string?"}]}'
CONNECTIONS, STREAMS = 32, 100
SLOW = {
    "a head without end": b"GET /answer HTTP/1.1\r\nhost: h\r\n",
    "a body without end": b"POST /answer HTTP/1.1\r\nhost: h\r\ncontent-length: 100\r\n\r\nab",
    "an answer that nobody reads": b"GET /large HTTP/1.1\r\nhost: h\r\n\r\n",
}


def commands(granian: str | None) -> dict[str, Any]:
    """Port -> command line, by server."""
    ours = ("llmserve", "llmserve-asgi", "uvicorn")
    found: dict[str, Any] = {
        name: lambda port, name=name: [sys.executable, str(APP), name, "--port", str(port)] for name in ours
    }
    if granian is not None:
        flags = ["--interface", "asgi", "--host", "127.0.0.1", "--workers", "1", "--loop", "uvloop", "--no-ws"]
        flags += ["--http", "1", "--log-level", "error", "--working-dir", str(APP.parent)]
        found["granian"] = lambda port: [granian, "-m", "granian", *flags, "--port", str(port), "http_app:asgi"]
    return found


def cpu_s(server: Server) -> float:
    """Processor time of a server's threads so far, by Linux's scheduler: to the nanosecond, where ticks have 10 ms."""
    top = psutil.Process(server.process.pid)
    spent_ns = 0
    for process in (top, *top.children(recursive=True)):
        for thread in Path(f"/proc/{process.pid}/task").iterdir():
            spent_ns += int((thread / "schedstat").read_text().split()[0])
    return spent_ns / 1e9


async def request_us(server: Server, requests: int) -> float:
    """Processor microseconds of a request: CONNECTIONS clients each ask again as soon as they are answered."""
    headers = {"content-type": "application/json"}
    async with HttpClient(server.url, connect_s=10, idle_s=60, answer_s=60) as client:

        async def ask(times: int) -> None:
            for _ in range(times):
                assert (await client.answer("POST", "/answer", headers, BODY)).status == 200

        await asyncio.gather(*[ask(10) for _ in range(CONNECTIONS)])
        before_s = cpu_s(server)
        await asyncio.gather(*[ask(requests // CONNECTIONS) for _ in range(CONNECTIONS)])
        return 1e6 * (cpu_s(server) - before_s) / (requests // CONNECTIONS * CONNECTIONS)


async def event_us(server: Server) -> float:
    """Processor microseconds of an event: STREAMS streams at once, an event of each every few milliseconds."""
    async with HttpClient(server.url, connect_s=10, idle_s=60, answer_s=60) as client:
        before_s = cpu_s(server)
        answers = await asyncio.gather(*[client.answer("GET", "/stream") for _ in range(STREAMS)])
        assert all(answer.body.count(b"data: ") == EVENTS for answer in answers)
        return 1e6 * (cpu_s(server) - before_s) / (STREAMS * EVENTS)


async def closed_after_s(server: Server, sent: bytes, patience_s: float) -> float | None:
    """Seconds until the server closes the connection of a client that has sent this and does nothing; None: never."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", server.port))
        await loop.sock_sendall(client, sent)
        port, began_s = client.getsockname()[1], time.monotonic()
        while (waited_s := time.monotonic() - began_s) < patience_s:
            if not holds(server, port):
                await asyncio.sleep(0.1)
                if not holds(server, port):  # the list of connections is not read at one moment
                    return waited_s
            await asyncio.sleep(0.4)
    return None


def holds(server: Server, port: int) -> bool:
    """Whether the server holds the connection to this port of a client: one with unread bytes does not see the end."""
    top = psutil.Process(server.process.pid)
    links = [link for process in (top, *top.children(recursive=True)) for link in process.net_connections("tcp4")]
    return any(link.status == "ESTABLISHED" and link.raddr.port == port for link in links if link.raddr)


async def measure(args: Any) -> Mapping[str, Any]:
    values: dict[str, dict[str, list[float]]] = {}
    slow: dict[str, dict[str, float | None]] = {}
    paths = os.pathsep.join([str(ROOT), str(APP.parent)])
    async with AsyncExitStack() as stack:
        servers = {}
        for name, command in commands(args.granian).items():
            place = running(name, command, ready="/answer", environment={"PYTHONPATH": paths})
            servers[name] = await stack.enter_async_context(place)
            values[name] = {"request_us": [], "event_us": []}
        for number in range(args.rounds):
            for name in in_turn(list(servers), number):
                values[name]["request_us"].append(await request_us(servers[name], args.requests))
                values[name]["event_us"].append(await event_us(servers[name]))
            log(f"round {number + 1}/{args.rounds}")
        probes = {
            (name, kind): closed_after_s(server, sent, args.patience)
            for name, server in servers.items()
            for kind, sent in SLOW.items()
            if args.patience
        }
        for (name, kind), seconds in zip(probes, await asyncio.gather(*probes.values()), strict=True):
            slow.setdefault(name, {})[kind] = seconds
    return {"values": values, "closed_after_s": slow}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--granian", metavar="PYTHON", help="interpreter of an environment with granian and uvloop")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=16_000, help="of each load")
    parser.add_argument(
        "--patience", type=float, default=75.0, help="seconds that slow clients wait; 0: none are tried"
    )
    add_results(parser)
    args = parser.parse_args()
    result = asyncio.run(measure(args))
    rows = []
    for name, values in result["values"].items():
        row = [name]
        for quantity in ("request_us", "event_us"):
            base = result["values"]["llmserve"][quantity]
            ratio = statistics.median([b / a for a, b in zip(base, values[quantity], strict=True)])
            row += [f"{statistics.median(values[quantity]):.1f}", f"{ratio:.2f}"]
        closed = result["closed_after_s"].get(name, {})
        row += ["-" if closed.get(kind) is None else f"{closed[kind]:.0f}" for kind in SLOW]
        rows.append(row)
    show(
        "Processor time, and when slow clients are cut off",
        ["", "request, us", "ratio", "event, us", "ratio", *SLOW],
        rows,
    )
    settings = {"rounds": args.rounds, "requests": args.requests, "patience_s": args.patience}
    write_json(args.output, {**day_and_machine(), **settings, **rounded(result)}, indent=1)


if __name__ == "__main__":
    main()
