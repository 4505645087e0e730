"""All that clients ask on one port: completions go to the engines, everything else to the server's own API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from llmserve.calls.client_request import ClientExchange, ClientRequest
from llmserve.errors import RequestError
from llmserve.gateway.content_coding import HEADER, Unpacker, codings_of
from llmserve.gateway.endpoints import ENDPOINTS
from llmserve.gateway.forecasting import PATH as FORECAST
from llmserve.gateway.forecasting import Forecasting
from llmserve.gateway.intake import Intake
from llmserve.http.exchange import Answer
from llmserve.web.cors import Cors
from llmserve.web.paths import METHODS

Watcher = Callable[[ClientExchange], None]
"""Sees the head of each request before anything else does. Raises RequestError to refuse the request."""


class OwnSite(Protocol):
    """Answers every path but those of engines; see site.py."""

    def enter(self, exchange: ClientExchange) -> None:
        """Look at a request whose head has arrived. Raises RequestError."""
        ...

    def handle(self, exchange: ClientExchange) -> None: ...

    def refusal(self, error: Exception, exchange: ClientExchange | None) -> Answer: ...

    def methods(self, path: str) -> tuple[str, ...]:
        """The methods that a path takes; () when there is no such path."""
        ...


class App:
    """Answers requests: for engines' endpoints and for forecasts directly, every other path by Starlette.

    Requests to engines bypass ASGI and Starlette: routing, middlewares and a task for each client would cost more time
    than all of scheduling (scripts/lab/questions/performance/frontend.py).

    forecasting     None: the site answers forecasts, too
    cors            answers browsers that ask what pages may send; None: pages of other origins may send nothing
    watchers        see every request first
    body_bytes_max  of a body that was packed, when it is unpacked
    """

    def __init__(
        self,
        completions: Intake,
        forecasting: Forecasting | None,
        site: OwnSite,
        *,
        cors: Cors | None = None,
        watchers: Sequence[Watcher] = (),
        body_bytes_max: int = 16 << 20,
    ) -> None:
        self._completions, self._forecasting, self._site = completions, forecasting, site
        self._cors = cors
        self._watchers = tuple(watchers)
        self._unpacker = Unpacker(body_bytes_max)
        self._unpacking: set[asyncio.Task[None]] = set()
        self.new_state = ClientRequest

    def admit(self, exchange: ClientExchange) -> RequestError | None:
        """Check the key before the body is read. Returns the error with which the request is refused."""
        try:
            self._admit(exchange)
        except RequestError as error:
            return error
        return None

    def _admit(self, exchange: ClientExchange) -> None:
        for watcher in self._watchers:
            watcher(exchange)
        if exchange.method == "POST" and (endpoint := ENDPOINTS.get(exchange.path)) is not None:
            exchange.state.form = endpoint.form
            self._completions.admit(exchange, endpoint)
        elif self._forecasting is not None and exchange.method == "POST" and exchange.path == FORECAST:
            self._forecasting.enter(exchange)
        else:
            self._site.enter(exchange)
        if HEADER in exchange.headers and exchange.keeps_body:
            exchange.state.codings = codings_of(exchange)

    def handle(self, exchange: ClientExchange) -> None:
        state = exchange.state
        if state.codings:
            self._run(self._handle_packed(exchange))
        elif state.form is not None:
            self._completions.complete(exchange)
        elif self._forecasting is not None and state.draft is not None:
            self._forecasting.complete(exchange)
        elif exchange.method == "OPTIONS":
            self._answer_options(exchange)
        else:
            self._site.handle(exchange)

    async def _handle_packed(self, exchange: ClientExchange) -> None:
        try:
            codings, exchange.state.codings = exchange.state.codings, ()
            await self._unpacker.unpack(exchange, codings)
        except Exception as error:
            exchange.refuse(error)
        else:
            if not exchange.ended:
                self.handle(exchange)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._unpacking.add(task)
        task.add_done_callback(self._unpacking.discard)

    def _answer_options(self, exchange: ClientExchange) -> None:
        """Tell browsers what pages may send, and load balancers that the server lives."""
        if self._cors is not None and self._cors.is_preflight(exchange):
            self._cors.answer(exchange)
            return
        methods = METHODS if exchange.path == "*" else self._site.methods(exchange.path) or ("OPTIONS",)
        exchange.start(204, [(b"allow", ", ".join(methods).encode())], None)
        exchange.end()

    def refusal(self, error: Exception, exchange: ClientExchange | None) -> Answer:
        return self._site.refusal(error, exchange)
