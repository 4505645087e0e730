"""Who may use a path of the server's own API.

A guard also shows in the document of the API which key a path needs, and the application asks the guard of a path that
reads a body before the body is kept (web/site.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from starlette.requests import Request

from llmserve.errors import NotFound, Unauthorized
from llmserve.tenants.authentication import Keys, authorization_of

Check = Callable[[Mapping[str, str]], str]
"""The name of the key in these headers, with lower-case names. Raises RequestError."""


class Guard:
    """Tells the name of a request's key, or refuses the request.

    name        in the document of the API
    check       by the request's headers
    reads_body  the path reads the body of its request, which is kept in memory for a right key only
    """

    def __init__(self, name: str, check: Check, *, reads_body: bool = False) -> None:
        self.name = name
        self.check = check
        self.reads_body = reads_body

    @property
    def with_body(self) -> Guard:
        """The same guard, of a path that reads the body."""
        return Guard(self.name, self.check, reads_body=True)


def key_of(request: Request) -> str:
    """Name of the key of a request that a guard has passed; "" where no key is required."""
    key: str = request.state.key
    return key


def client_key(keys: Keys, *, bare: bool = False) -> Guard:
    """A key of a client. bare : it may come as `x-api-key`, too, as Anthropic's clients send it"""

    def check(headers: Mapping[str, str]) -> str:
        return keys.authenticate(authorization_of(headers) if bare else headers.get("authorization"))

    return Guard("client key", check)


def admin_key(keys: Keys | None, what: str = "/admin") -> Guard:
    """An operator's key. keys : None: there is none, and so there is no such path.  what : the path, for the refusal"""

    def check(headers: Mapping[str, str]) -> str:
        if keys is None:
            raise NotFound(f"{what} is disabled: start the server with --admin-key-file FILE to enable it")
        return keys.authenticate(headers.get("authorization"))

    return Guard("admin key", check)


def any_key(kinds: Sequence[Keys]) -> Guard:
    """A key of one of these kinds. () : no key is needed"""

    def check(headers: Mapping[str, str]) -> str:
        refusal = None
        for keys in kinds:
            try:
                return keys.authenticate(headers.get("authorization"))
            except Unauthorized as error:
                refusal = error
        if refusal is not None:
            raise refusal
        return ""

    return Guard("client key or admin key", check)
