"""The same three answers for several HTTP servers: as an ASGI application, and as a handler of llmserve.http.

    python http_app.py llmserve|llmserve-asgi|uvicorn --port PORT      granian --interface asgi http_app:asgi

POST /answer  reads the body, and answers ANSWER        GET /stream  EVENTS events, one each EVENT_S
GET /large    LARGE_BYTES, for clients that read nothing

An event comes from a timer, as it would come from an engine's connection. A handler writes it in the timer's callback;
an ASGI application has to wake its task with it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

ANSWER = b'{"id":"a","choices":[{"index":0,"message":{"role":"assistant","content":"%b"}}]}' % (b"word " * 40)
EVENT = b'data: {"id":"a","model":"m","choices":[{"index":0,"delta":{"content":"word "},"finish_reason":null}]}\n\n'
EVENTS, EVENT_S = 250, 0.008
LARGE_BYTES, PIECE_BYTES = 64 << 20, 1 << 20
JSON, EVENT_STREAM = [(b"content-type", b"application/json")], [(b"content-type", b"text/event-stream")]


def produce(on_event: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
    """Call on_event with each event, at its time."""
    loop = asyncio.get_running_loop()
    begun_s = loop.time()

    def step(number: int) -> None:
        if number == EVENTS:
            on_end()
            return
        on_event(EVENT)
        loop.call_at(begun_s + (number + 1) * EVENT_S, step, number + 1)

    step(0)


# ---- ASGI -----------------------------------------------------------------------------------------------------------


async def asgi(scope: dict[str, Any], receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        await _lifespan(receive, send)
    elif scope["path"] == "/stream":
        await _stream(send)
    elif scope["path"] == "/large":
        await send({"type": "http.response.start", "status": 200, "headers": JSON})
        for _ in range(LARGE_BYTES // PIECE_BYTES):
            await send({"type": "http.response.body", "body": bytes(PIECE_BYTES), "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    else:
        while (await receive()).get("more_body", False):
            pass
        headers = [*JSON, (b"content-length", b"%d" % len(ANSWER))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": ANSWER})


async def _lifespan(receive: Any, send: Any) -> None:
    while (await receive())["type"] != "lifespan.shutdown":
        await send({"type": "lifespan.startup.complete"})
    await send({"type": "lifespan.shutdown.complete"})


async def _stream(send: Any) -> None:
    events: asyncio.Queue[bytes] = asyncio.Queue()
    produce(events.put_nowait, lambda: events.put_nowait(b""))
    await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
    while event := await events.get():
        await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


# ---- llmserve -------------------------------------------------------------------------------------------------------


class Native:
    """A handler of llmserve.http; with `answers`, an ASGI application answers in its place."""

    def __init__(self, answers: Any = None) -> None:
        self._answers = answers

    def new_state(self) -> None:
        return None

    def admit(self, exchange: Any) -> None:
        """Admit every request."""

    def refusal(self, error: Exception, exchange: Any) -> Any:
        return getattr(error, "status", 500), JSON, str(error).encode()

    def handle(self, exchange: Any) -> None:
        if self._answers is not None:
            self._answers.handle(exchange)
        elif exchange.path == "/stream":
            exchange.start(200, EVENT_STREAM, None)
            produce(exchange.write, exchange.end)
        elif exchange.path == "/large":
            exchange.respond(200, JSON, bytes(LARGE_BYTES))
        else:
            exchange.respond(200, JSON, ANSWER)


async def serve_ours(port: int, *, by_asgi: bool) -> None:
    from llmserve.http.accepting import listening_socket
    from llmserve.http.asgi import AsgiAnswers
    from llmserve.http.limits import ServerLimits
    from llmserve.http.server import running

    limits = ServerLimits(16 << 20, 4 << 20, 1 << 30, client_stall_s=60.0)
    handler = Native(AsgiAnswers(asgi) if by_asgi else None)  # type: ignore[arg-type]
    with listening_socket("127.0.0.1", port) as listener:
        async with running(handler, listener, limits):
            await asyncio.Event().wait()


def main() -> None:
    name, port = sys.argv[1], int(sys.argv[sys.argv.index("--port") + 1])
    if name == "uvicorn":
        import uvicorn

        options: dict[str, Any] = {"http": "httptools", "loop": "uvloop", "access_log": False, "log_level": "error"}
        uvicorn.run(asgi, host="127.0.0.1", port=port, **options)
    else:
        import uvloop

        uvloop.run(serve_ours(port, by_asgi=name == "llmserve-asgi"))


if __name__ == "__main__":
    main()
