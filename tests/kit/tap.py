"""A tap between a client and a server: it passes everything on, and keeps what was answered."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

OF_THE_CONNECTION = {"host", "content-length", "connection", "transfer-encoding"}
CHANGING = re.compile(
    rb'"(?:id|item_id|call_id|request_id|previous_response_id)":"[\w-]*"|chatcmpl-[\w-]+'
    rb'|"(?:created|created_at|completed_at|sequence_number)":[\d.]+'
)
"""What differs between two answers of one vLLM."""
RESPONSE_ID = re.compile(r"resp_\w+")
BETWEEN = b'"finish_reason":null'
PARTIAL = re.compile(rb'"(content|text|delta|arguments|partial_json)":"((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Answer:
    """What a client read. body : with the ids and times of this answer masked.  raw : as it came, not compared

    between : the kinds of a stream's events between the first and the last; () where a busy vLLM had the whole text in
    the last event. Compared by `same` alone.
    """

    path: str
    status: int
    content_type: str
    body: bytes
    between: tuple[bytes, ...] = field(compare=False)
    raw: bytes = field(compare=False)

    def same(self, other: Answer) -> bool:
        return self == other and (self.between == other.between or () in (self.between, other.between))


def masked(content_type: str, body: bytes) -> tuple[bytes, tuple[bytes, ...]]:
    """The body, and the kinds of events between the first and the last of a stream.

    A stream: its texts, joined, and the rest of its events without repetitions, for a busy vLLM puts several tokens
    into one event.
    """
    body = CHANGING.sub(b"-", body)
    if not content_type.startswith("text/event-stream"):
        return body, ()
    events = body.split(b"\n\n")
    text = b"".join([piece for event in events for _, piece in PARTIAL.findall(event)])
    around = [PARTIAL.sub(b"", event) for event in events]  # the last one may have text, too
    kinds = [a for a, before in zip(around, [b"", *around], strict=False) if a != before]
    between = tuple([kind for kind in kinds[1:] if BETWEEN in kind])
    return b"\n\n".join([text, *[kind for kind in kinds if kind not in between]]), between


@dataclass
class Tap:
    url: str = ""
    answers: list[Answer] = field(default_factory=list)


@asynccontextmanager
async def tapping(server_of: Callable[[str], str]) -> AsyncIterator[Tap]:
    """A tap in front of servers. server_of : the base URL that serves a path"""
    tap = Tap()

    async def pass_on(request: web.Request) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in OF_THE_CONNECTION}
        url, data = server_of(request.path) + request.path_qs, await request.read()
        async with session.request(request.method, url, data=data, headers=headers) as told:
            content_type = told.headers["content-type"]
            response = web.StreamResponse(status=told.status, headers={"content-type": content_type})
            await response.prepare(request)
            pieces = []
            async for piece in told.content.iter_any():
                pieces.append(piece)
                await response.write(piece)
        path, body = RESPONSE_ID.sub("", request.path), b"".join(pieces)
        tap.answers.append(Answer(path, told.status, content_type, *masked(content_type, body), body))
        return response

    app = web.Application(client_max_size=1 << 24)
    app.router.add_route("*", "/{path:.*}", pass_on)
    async with aiohttp.ClientSession(skip_auto_headers=["accept-encoding"]) as session, TestServer(app) as server:
        tap.url = str(server.make_url("")).rstrip("/")
        yield tap
