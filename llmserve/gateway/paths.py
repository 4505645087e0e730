"""Which paths there are: which methods it takes, and which path a client probably meant."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import FastAPI
from starlette.routing import Match, Route

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class Paths:
    """posts : paths that take POST and are served elsewhere"""

    def __init__(self, app: FastAPI, posts: Iterable[str]) -> None:
        self._routes = [route for route in app.router.routes if isinstance(route, Route)]
        self._posts = frozenset(posts)

    def methods(self, path: str) -> tuple[str, ...]:
        """The methods that a path takes; () when there is no such path."""
        if path in self._posts:
            return ("POST", "OPTIONS")
        scope = {"type": "http", "method": "", "path": path, "root_path": ""}
        taken = {"OPTIONS"}
        for route in self._routes:
            if route.matches(scope)[0] is not Match.NONE:
                taken |= route.methods or set()
        return tuple([method for method in METHODS if method in taken]) if len(taken) > 1 else ()

    def meant(self, path: str) -> str:
        """The path that was probably meant: of a base URL without /v1, with two, or of another server; "" for none."""
        _, version, rest = path.rpartition("/v1/")
        for candidate in (f"/v1{path}", version + rest):
            if candidate and candidate != path and self.methods(candidate):
                return candidate
        ends = [known for known in self._posts if known != path and path.endswith(known.removeprefix("/v1"))]
        return max(ends, key=len, default="")
