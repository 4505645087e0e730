"""Which paths there are: which methods each takes, and which path a client probably meant."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.routing import Match
from starlette.types import Scope

from llmserve.gateway.own_routes import OwnRoute

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class Paths:
    """routes : of the server's own API.  posts : paths that take POST and are served elsewhere"""

    def __init__(self, routes: Iterable[OwnRoute], posts: Iterable[str]) -> None:
        self._routes = tuple(routes)
        self._posts = frozenset(posts)

    def route(self, method: str, path: str) -> OwnRoute | None:
        """What answers a request; None: nothing does."""
        scope = _scope("GET" if method == "HEAD" else method, path)
        return next((route for route in self._routes if route.matches(scope)[0] is Match.FULL), None)

    def methods(self, path: str) -> tuple[str, ...]:
        """The methods that a path takes; () when there is no such path."""
        if path in self._posts:
            return ("POST", "OPTIONS")
        scope, taken = _scope("", path), {"OPTIONS"}
        for route in self._routes:
            if route.matches(scope)[0] is not Match.NONE:
                taken |= route.methods or set()
        if "GET" in taken:
            taken.add("HEAD")
        return tuple([method for method in METHODS if method in taken]) if len(taken) > 1 else ()

    def meant(self, path: str) -> str:
        """The path that was probably meant: of a base URL without /v1, with two, or of another server; "" for none."""
        _, version, rest = path.rpartition("/v1/")
        for candidate in (f"/v1{path}", version + rest):
            if candidate and candidate != path and self.methods(candidate):
                return candidate
        ends = [known for known in self._posts if known != path and path.endswith(known.removeprefix("/v1"))]
        return max(ends, key=len, default="")


def _scope(method: str, path: str) -> Scope:
    return {"type": "http", "method": method, "path": path, "root_path": ""}
