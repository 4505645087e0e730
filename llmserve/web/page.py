"""The page for people: GET / and its files, and GET /events, which tells what happens every second.

The page shows what the engines and the queue do, and has a box to try a model. It asks no other host for anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from importlib import resources

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from llmserve.gateway.own_routes import OwnRoute
from llmserve.jobs.sums import JobSums
from llmserve.observe.watch import Watch
from llmserve.runtime.lasting import lasting
from llmserve.tenants.guards import Guard
from llmserve.wire.headers import STREAM_HEADERS

EVERY_S = 1.0
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
}
OF_STREAM = {name.decode(): value.decode() for name, value in STREAM_HEADERS}
HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


class PageEndpoints:
    """The page's files are for everybody, the events for whoever has an admin key, if clients need keys.

    key  : whoever passes sees the events
    jobs : None: the server has no place for batches
    """

    def __init__(self, watch: Watch, key: Guard, jobs: JobSums | None = None) -> None:
        self._watch = watch
        self._jobs = jobs
        self._watching = 0
        self._told = asyncio.Event()
        self._ticking: asyncio.Task[None] | None = None
        self._last = b""
        files = [OwnRoute("GET", path, self._file) for path in FILES]
        self.routes = [*files, OwnRoute("GET", "/events", self.events, guard=key, tag="page")]

    async def _file(self, request: Request) -> Response:
        name, content_type = FILES[request.url.path]
        data = resources.files("llmserve.web").joinpath("static", name).read_bytes()
        return Response(data, media_type=content_type, headers=HEADERS)

    async def events(self, _: Request) -> Response:
        """Server-sent events, one snapshot each; see watch.Snapshot."""
        return StreamingResponse(self._events(), media_type="text/event-stream", headers=OF_STREAM)

    async def _events(self) -> AsyncIterator[bytes]:
        self._watch.begin()
        self._watching += 1
        if self._ticking is None:
            self._ticking = lasting("snapshots for the page", self._tick)
        try:
            yield b"retry: 2000\n\n" + self._last
            while True:
                await self._told.wait()
                yield self._last
        finally:
            self._watching -= 1
            self._watch.stop()

    async def _tick(self) -> None:
        """Make one snapshot a second for all who watch, while somebody does."""
        following = lasting("sums of batch jobs for the page", self._jobs.follow) if self._jobs is not None else None
        try:
            while self._watching:
                jobs = self._jobs.seen if self._jobs is not None else None
                self._last = b"data: %b\n\n" % msgspec.json.encode(self._watch.snapshot(jobs))
                told, self._told = self._told, asyncio.Event()
                told.set()
                await asyncio.sleep(EVERY_S)
        finally:
            if following is not None:
                following.cancel()
        self._ticking, self._last = None, b""
