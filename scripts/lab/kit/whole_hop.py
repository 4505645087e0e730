"""One process with a trivial upstream, `llmserve serve`, and raw clients: the processor time of a request's whole way.

    python scripts/lab/kit/whole_hop.py REQUESTS BATCHES CLIENTS    # prints microseconds of each batch, as JSON

Everything goes over loopback sockets. The upstream answers at once and the clients write the same bytes again and
again, so that most of the time is the front-end's. Nothing is learnt from answers: learning takes a share of the time,
which would hide a change of the rest. Any checkout of llmserve may be measured: PYTHONPATH says which.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import sys
import time
from typing import Any

import uvloop

from llmserve.server.serving import serving
from llmserve.settings.tree import Config, EngineConfig, LiveConfig, PredictorConfig, ServerConfig

SLOTS = 64
START_S = 60.0
USAGE = b'"usage":{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10}'
TOLD = b'{"id":"a","choices":[{"index":0,"message":{"content":"word"},"finish_reason":"stop"}],%b}' % USAGE
HEAD = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
LISTED = b'{"data":[{"id":"demo"}]}'
ANSWERS = {
    b"/v1/chat/completions": HEAD % (b"200 OK", len(TOLD)) + TOLD,
    b"/v1/models": HEAD % (b"200 OK", len(LISTED)) + LISTED,
    b"/health": HEAD % (b"200 OK", 0),
}
NOT_FOUND = HEAD % (b"404 Not Found", 0)
MESSAGES = [{"role": "user", "content": "How long is a piece of string?"}]
ASKED = json.dumps({"model": "demo", "messages": MESSAGES, "max_tokens": 16}).encode()
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n" % len(ASKED) + ASKED
)


class Upstream(asyncio.Protocol):
    """An engine that answers each request at its last byte. Its peer sends the next one after the answer."""

    def connection_made(self, transport: Any) -> None:
        self._transport, self._read = transport, b""

    def data_received(self, data: bytes) -> None:
        self._read += data
        head, end, body = self._read.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        if not end or len(body) < int(length or 0):
            return
        self._read = b""
        _, path, _ = head.split(b" ", 2)
        self._transport.write(ANSWERS.get(path, NOT_FOUND))


class Client(asyncio.Protocol):
    """Asks again when its answer is complete, while its load has requests left."""

    def __init__(self, load: Load) -> None:
        self._load, self._read = load, b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def ask(self) -> None:
        self.transport.write(REQUEST)

    def data_received(self, data: bytes) -> None:
        self._read += data
        if not self._read.endswith(b"}"):
            return
        if not self._read.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"the server answered {self._read!r}")
        self._read = b""
        self._load.answered(self)


class Load:
    """Requests over all clients at once."""

    def __init__(self) -> None:
        self.clients: list[Client] = []
        self._left = self._open = 0

    async def run(self, requests: int) -> None:
        self._done = asyncio.get_running_loop().create_future()
        self._left, self._open = requests - len(self.clients), len(self.clients)
        for client in self.clients:
            client.ask()
        await self._done

    def answered(self, client: Client) -> None:
        if self._left > 0:
            self._left -= 1
            client.ask()
            return
        self._open -= 1
        if self._open == 0:
            self._done.set_result(None)


async def measure(requests: int, batches: int, clients: int) -> list[float]:
    """Processor microseconds of a request in each batch of requests, after one that is not measured."""
    loop = asyncio.get_running_loop()
    upstream = await loop.create_server(Upstream, "127.0.0.1", 0)
    port = upstream.sockets[0].getsockname()[1]
    config = Config(
        server=ServerConfig(port=0),
        engines=EngineConfig(engine=(f"http://127.0.0.1:{port}",), slots=SLOTS),
        prediction=PredictorConfig(memory_keys=0),
        live=LiveConfig(probe_every_s=5.0),
    )
    async with serving(config) as (cluster, url):
        async with asyncio.timeout(START_S):
            while not all(cluster.engines_ready.values()):  # noqa: ASYNC110 (once)
                await asyncio.sleep(0.01)
        load = Load()
        for _ in range(clients):
            _, client = await loop.create_connection(lambda: Client(load), "127.0.0.1", int(url.rpartition(":")[2]))
            load.clients.append(client)
        await load.run(requests)
        times_us = []
        for _ in range(batches):
            gc.collect()
            began_s = time.process_time()
            await load.run(requests)
            times_us.append(1e6 * (time.process_time() - began_s) / requests)
        for client in load.clients:
            client.transport.close()
    upstream.close()
    return times_us


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    print(json.dumps(uvloop.run(measure(*map(int, sys.argv[1:])))))
