"""Paths of the server's own API: who may use each, what answers, and what the document of the API says of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from llmserve.tenants.guards import Guard

Answering = Callable[[Request], Awaitable[Response]]


class OwnRoute(Route):
    """A path with one method.

    answer  its docstring is the description in the document
    guard   None: everybody may use the path
    tag     its section in the document; "": the document is silent about the path
    extra   further fields in the document, such as the body
    """

    def __init__(
        self,
        method: str,
        path: str,
        answer: Answering,
        *,
        guard: Guard | None = None,
        tag: str = "",
        extra: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        async def guarded(request: Request) -> Response:
            if guard is not None:
                request.state.key = guard.check(request.headers)
            return await answer(request)

        super().__init__(path, guarded, methods=[method])
        self.method, self.answer, self.guard, self.tag, self.extra = method, answer, guard, tag, extra

    def operation(self) -> dict[str, Any]:
        """The path's entry in the document."""
        name: str = getattr(self.answer, "__name__", "")
        entry: dict[str, Any] = {
            "tags": [self.tag],
            "summary": name.replace("_", " ").capitalize(),
            "description": (self.answer.__doc__ or "").strip(),
            "operationId": f"{self.method.lower()} {self.path_format}",
            "responses": {"200": {"description": "The answer"}},
        }
        if self.param_convertors:
            entry["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in self.param_convertors
            ]
        if self.guard is not None:
            entry["security"] = [{self.guard.name: []}]
        return {**entry, **self.extra}
