"""Answers complete requests by an ASGI application."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from starlette.types import ASGIApp, Message

from llmserve.http.exchange import Exchange

log = logging.getLogger("llmserve")


class AsgiAnswers:
    """The answers of an ASGI application, each from a task of its own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, exchange: Exchange[Any]) -> None:
        answering = asyncio.get_running_loop().create_task(self._answer(exchange))
        self._tasks.add(answering)
        answering.add_done_callback(self._tasks.discard)

    async def _answer(self, exchange: Exchange[Any]) -> None:
        try:
            await run_asgi(self._app, exchange)
        except Exception as error:
            if exchange.started:  # an application answers with status 500, and raises the error again
                log.debug("%s %s failed", exchange.method, exchange.path, exc_info=error)
            elif not exchange.ended:
                exchange.refuse(error)


async def run_asgi(app: ASGIApp, exchange: Exchange[Any]) -> None:
    """Answer the request by the application, whose errors are raised. It finds the exchange in its scope."""
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
        is_behind = exchange.write(message.get("body", b""))
        if not message.get("more_body", False):
            exchange.end()
        elif is_behind:
            await exchange.writable()

    await app(_scope(exchange), receive, send)


def _scope(exchange: Exchange[Any]) -> dict[str, Any]:
    host, _, port = exchange.peer.rpartition(":")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.0" if exchange.old else "1.1",
        "method": "GET" if exchange.method == "HEAD" else exchange.method,  # the exchange sends no body to a HEAD
        "scheme": "http",
        "path": exchange.path,
        "raw_path": exchange.path.encode("latin-1", "replace"),
        "query_string": exchange.query,
        "root_path": "",
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in exchange.headers.items()],
        "client": (host, int(port)) if port else None,
        "server": None,
        "exchange": exchange,
    }
