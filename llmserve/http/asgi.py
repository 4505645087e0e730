"""Answers complete requests by an ASGI application."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message

from llmserve.errors import RequestError
from llmserve.http.exchange import Exchange

log = logging.getLogger("llmserve")


class AsgiHandler:
    """Answers requests by an ASGI application, each in a task. refused : see Handler in listening.py."""

    def __init__(self, app: ASGIApp, refused: Callable[[Exchange, RequestError], None]) -> None:
        self.refused = refused
        self._app = app
        self._tasks: set[asyncio.Task[None]] = set()

    def admit(self, exchange: Exchange) -> None:
        """Admit every request. No body is kept: the paths that are served by this alone take none."""
        exchange.keeps_body = False

    def handle(self, exchange: Exchange) -> None:
        answering = asyncio.get_running_loop().create_task(self._answer(exchange))
        self._tasks.add(answering)
        answering.add_done_callback(self._tasks.discard)

    async def _answer(self, exchange: Exchange) -> None:
        try:
            await run_asgi(self._app, exchange)
        except Exception as error:  # FastAPI has answered with status 500, and raises the error again
            exchange.refuse(RequestError("the front-end failed on this request", code="internal_error"))
            if exchange.started:
                log.debug("%s %s failed", exchange.method, exchange.path, exc_info=error)


async def run_asgi(app: ASGIApp, exchange: Exchange) -> None:
    """Answer the request by the application, whose errors are raised."""
    gone = asyncio.get_running_loop().create_future()
    exchange.on_gone = lambda: None if gone.done() else gone.set_result(None)
    body: bytes | None = exchange.body

    async def receive() -> Message:
        nonlocal body
        if body is None:
            await gone
            return {"type": "http.disconnect"}
        part, body = body, None
        return {"type": "http.request", "body": part, "more_body": False}

    async def send(message: Message) -> None:
        if gone.done():
            return
        if message["type"] == "http.response.start":
            headers = [(name.lower(), value) for name, value in message.get("headers", ())]
            length = next((int(value) for name, value in headers if name == b"content-length"), None)
            others = [(name, value) for name, value in headers if name != b"content-length"]
            exchange.start(message["status"], others, length)
            return
        exchange.write(message.get("body", b""))
        if not message.get("more_body", False):
            exchange.end()
        elif exchange.paused:
            await exchange.writable()

    await app(_scope(exchange), receive, send)


def _scope(exchange: Exchange) -> dict[str, Any]:
    host, _, port = exchange.peer.rpartition(":")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.0" if exchange.old else "1.1",
        "method": exchange.method,
        "scheme": "http",
        "path": exchange.path,
        "raw_path": exchange.path.encode("latin-1", "replace"),
        "query_string": exchange.query,
        "root_path": "",
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in exchange.headers.items()],
        "client": (host, int(port)) if port else None,
        "server": None,
        "llmserve.upload": exchange.upload,
    }
