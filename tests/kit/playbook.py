"""Playbooks: what a connection does, in order, as one expression that a test asserts.

    assert (
        Playbook()
        >> Received(b"GET / HTTP/1.1\\r\\nhost: h\\r\\n\\r\\n")
        << Request("GET", "/")
        >> Respond(b"hello")
        << Sent(answer(b"hello"))
    )

`>>` is what happens to the connection, `<<` what it does. After each event everything that it has caused must be named
before the next event. The clock stands still until `At`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from llmserve.http.connection import Connection
from llmserve.http.errors import Refusal
from llmserve.http.exchange import Answer, Exchange, Shared
from llmserve.http.limits import ServerLimits

LIMITS = {"body_bytes_max": 1 << 20, "buffer_bytes_max": 1 << 20, "buffers_bytes_max": 1 << 30, "client_stall_s": 60.0}
# ---- what happens ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Received:
    data: bytes


@dataclass(frozen=True)
class Ended:
    """The client closes its sending side."""


@dataclass(frozen=True)
class Lost:
    """The connection is closed."""


@dataclass(frozen=True)
class At:
    """The clock shows a time, and the server sweeps. unread : bytes that the client has not taken"""

    now_s: float
    unread: int = 0


@dataclass(frozen=True)
class Turn:
    """The next turn of the event loop."""


@dataclass(frozen=True)
class Respond:
    """The request that waits for longest is answered."""

    body: bytes
    status: int = 200


@dataclass(frozen=True)
class Begin:
    """The answer of unknown length to the request that waits for longest begins. on_silence : what is written then"""

    on_silence: bytes = b""


@dataclass(frozen=True)
class Write:
    data: bytes


@dataclass(frozen=True)
class Finish:
    """The answer that has begun is complete."""


@dataclass(frozen=True)
class SinkFull:
    """The sink of the body that arrives has enough, or has room again."""

    full: bool


@dataclass(frozen=True)
class Draining:
    """The server is closing."""


# ---- what the connection does ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """A complete request comes to the handler."""

    method: str
    path: str
    body: bytes = b""


@dataclass(frozen=True)
class Refused:
    """The handler is asked for the answer to a request that is refused."""

    status: int
    reason: str


@dataclass(frozen=True)
class Gone:
    """The handler hears that the client has left before the end of its answer."""


@dataclass(frozen=True)
class Sent:
    """All bytes that were written, one after the other."""

    data: bytes


@dataclass(frozen=True)
class Does:
    """What the connection asks of its transport: pause, resume, half-close, close, abort."""

    what: str


def head_of(status: int = 200, *fields: bytes) -> bytes:
    lines = [b"HTTP/1.1 %d %b" % (status, HTTPStatus(status).phrase.encode()), b"date: D", *fields]
    return b"".join([line + b"\r\n" for line in lines]) + b"\r\n"


def answer(body: bytes, status: int = 200, *fields: bytes) -> bytes:
    return head_of(status, b"content-length: %d" % len(body), *fields) + body


def refused(reason: bytes, status: int) -> bytes:
    """The last answer of a connection."""
    return answer(reason, status, b"connection: close")


# ---- the players ----------------------------------------------------------------------------------------------------


class Transport:
    """A transport without a socket, for Connection: what is done to it is noted."""

    def __init__(self, done: list[Any]) -> None:
        self._done = done
        self.unread = 0
        self.closing = False

    def write(self, data: bytes, /) -> None:
        if self._done and isinstance(self._done[-1], Sent):
            data = self._done.pop().data + data
        self._done.append(Sent(data))

    def pause_reading(self) -> None:
        self._done.append(Does("pause"))

    def resume_reading(self) -> None:
        self._done.append(Does("resume"))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._done.append(Does("half-close"))

    def get_write_buffer_size(self) -> int:
        return self.unread

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True
        self._done.append(Does("close"))

    def abort(self) -> None:
        self.closing = True
        self._done.append(Does("abort"))


class Sink:
    """Takes bodies, and keeps nothing of them."""

    on_full: Callable[[bool], None] | None = None

    def feed(self, data: bytes) -> None:
        """Take the bytes."""

    def discard(self) -> None:
        """Forget nothing."""


class Notes:
    """A handler that notes requests.

    `/secret` is refused, `/none` takes no body, `/of/NAME` belongs to NAME, the body of `/sink` goes to a sink.
    """

    def __init__(self, done: list[Any]) -> None:
        self._done = done
        self.waiting: list[Exchange[None]] = []
        self.sink: Sink | None = None

    def new_state(self) -> None:
        return None

    def admit(self, exchange: Exchange[None]) -> Exception | None:
        exchange.keeps_body = exchange.path != "/none"
        if exchange.path == "/sink":
            exchange.sink = self.sink = Sink()
        if exchange.path.startswith("/of/"):
            exchange.holder = exchange.path.removeprefix("/of/")
        return Refusal(401, "no_key", "no key") if exchange.path == "/secret" else None

    def handle(self, exchange: Exchange[None]) -> None:
        exchange.on_gone = lambda: self._done.append(Gone())
        self._done.append(Request(exchange.method, exchange.path, exchange.body))
        self.waiting.append(exchange)

    def refusal(self, error: Exception, exchange: Exchange[None] | None) -> Answer:
        assert isinstance(error, Refusal)
        self._done.append(Refused(error.status, error.reason))
        return error.status, [], error.reason.encode()


class Clock:
    now_s = 0.0


class Playbook:
    """One connection. limits : as in ServerLimits.  beside : another connection of the same server, and its clock"""

    def __init__(self, beside: Playbook | None = None, **limits: Any) -> None:
        self.clock = beside.clock if beside is not None else Clock()
        self.done: list[Any] = beside.done if beside is not None else []  # since the last event, and not named yet
        self.soon: list[Callable[[], None]] = []
        self.handler = beside.handler if beside is not None else Notes(self.done)
        shared = Shared(
            self.handler,
            ServerLimits(**{**LIMITS, **limits}, streamed=("/sink",)),
            lambda: self.clock.now_s,
            self.soon.append,
        )
        self.shared = beside.shared if beside is not None else shared
        self.shared.date = b"D"
        self.transport = Transport(self.done)
        self.connection = Connection(self.shared, self.transport, ("192.0.2.1", 1))
        self._begun: Exchange[None] | None = None

    def __rshift__(self, event: Any) -> Playbook:
        assert not self.done, f"not named before {event}: {self.done}"
        self._happen(event)
        return self

    def __lshift__(self, expected: Any) -> Playbook:
        assert self.done, f"nothing is done, instead of {expected}"
        done = self.done.pop(0)
        assert done == expected, f"{done} instead of {expected}"
        return self

    def __bool__(self) -> bool:
        assert not self.done, f"not named at the end: {self.done}"
        return True

    def _happen(self, event: Any) -> None:
        match event:
            case Received(data):
                self.connection.received(memoryview(data))
            case Ended():
                if not self.connection.ended():
                    self.transport.close()
            case Lost():
                self.connection.lost()
            case At(now_s, unread):
                self.clock.now_s, self.transport.unread = now_s, unread
                self.connection.tick(now_s)
            case Turn():
                soon, self.soon[:] = self.soon[:], []
                for call in soon:
                    call()
            case Respond(body, status):
                self.handler.waiting.pop(0).respond(status, [], body)
            case Begin(on_silence):
                self._begun = exchange = self.handler.waiting.pop(0)
                exchange.start(200, [], None)
                exchange.on_silence = (lambda: exchange.write(on_silence)) if on_silence else None
            case Write(data):
                assert self._begun is not None
                self._begun.write(data)
            case Finish():
                assert self._begun is not None
                self._begun.end()
            case SinkFull(full):
                assert self.handler.sink is not None
                assert self.handler.sink.on_full is not None
                self.handler.sink.on_full(full)
            case Draining():
                self.shared.closing = True
                self.connection.close_when_answered()
            case _:
                raise AssertionError(f"nothing happens by {event}")
