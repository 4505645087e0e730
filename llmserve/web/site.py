"""The server's own API: every path but those of engines. Starlette answers, by the routes of the rooms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from llmserve.calls.client_request import ClientExchange, ClientRequest
from llmserve.errors import MethodNotAllowed, NotFound, RequestError, UnsupportedMediaType
from llmserve.gateway.answers import Refusals, error_response
from llmserve.gateway.content_coding import HEADER, codings_of
from llmserve.gateway.own_routes import OwnRoute
from llmserve.gateway.part import Upload
from llmserve.http.asgi import AsgiAnswers
from llmserve.http.exchange import Answer
from llmserve.web.paths import Paths


class Site:
    """Answers requests for the server itself.

    routes   the first that matches answers
    uploads  by the path to which their bodies are sent
    posts    paths that take POST and are answered elsewhere
    """

    def __init__(
        self,
        routes: Sequence[OwnRoute],
        refusals: Refusals,
        uploads: Mapping[str, Upload] = MappingProxyType({}),
        posts: Iterable[str] = (),
    ) -> None:
        self._refusals = refusals
        self._uploads = uploads
        self._paths = Paths(routes, posts)
        on_errors = {RequestError: self._on_error, Exception: self._on_error, HTTPException: self._on_no_route}
        app = Starlette(routes=routes, exception_handlers=on_errors)
        app.router.redirect_slashes = False
        self._answers = AsgiAnswers(app)

    def new_state(self) -> ClientRequest:
        return ClientRequest()

    def admit(self, exchange: ClientExchange) -> RequestError | None:
        """Check the key of a request whose body somebody reads. Returns the error with which it is refused."""
        try:
            self.enter(exchange)
        except RequestError as error:
            return error
        return None

    def enter(self, exchange: ClientExchange) -> None:
        """As `admit`, which raises the error."""
        if exchange.method == "POST" and (upload := self._uploads.get(exchange.path)) is not None:
            if HEADER in exchange.headers and codings_of(exchange):
                raise UnsupportedMediaType(f"`{HEADER}`: files are uploaded as they are")
            exchange.sink = upload(exchange)
            return
        route = self._paths.route(exchange.method, exchange.path)
        guard = route.guard if route is not None and route.guard is not None and route.guard.reads_body else None
        exchange.keeps_body = guard is not None
        if guard is not None:
            exchange.holder = exchange.state.key = guard.check(exchange.headers)
        elif exchange.announces_body and not self._paths.methods(exchange.path):
            raise self._no_path(exchange.path)

    def handle(self, exchange: ClientExchange) -> None:
        self._answers.handle(exchange)

    def refusal(self, error: Exception, exchange: ClientExchange | None) -> Answer:
        return self._refusals.answer(error, exchange)

    def methods(self, path: str) -> tuple[str, ...]:
        """The methods that a path of the whole server takes; () when there is no such path."""
        return self._paths.methods(path)

    async def _on_error(self, request: Request, error: Exception) -> Response:
        return error_response(self._refusals.known(error, request.method, request.url.path))

    async def _on_no_route(self, request: Request, error: Exception) -> Response:
        path, methods = request.url.path, ", ".join(self._paths.methods(request.url.path))
        if not methods:
            return error_response(self._no_path(path))
        method = request.scope["exchange"].method
        response = error_response(MethodNotAllowed(f"{method} is not allowed on {path}; it takes {methods}"))
        response.headers["allow"] = methods
        return response

    def _no_path(self, path: str) -> NotFound:
        meant = self._paths.meant(path)
        return NotFound(f"there is no {path}" + (f"; did you mean {meant}?" if meant else ""))
