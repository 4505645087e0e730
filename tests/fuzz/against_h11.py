"""The same bytes through this server's connection and through h11: both see the same requests, or refuse them.

    python tests/fuzz/against_h11.py 10000       (a table of what was compared, and each difference that matters)

Pipelines of up to four requests are drawn from a seed: methods, targets, versions and fields, well and badly spelled,
bodies by length and in chunks, wishes for other protocols, expectations; then bytes are changed, lost, doubled, and
cut into packets anywhere. A difference is allowed only by name: see STRICTER and TOLERATED.
"""

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import h11
import httptools

from llmserve.http.connection import CONTINUE, Connection
from llmserve.http.errors import Refusal
from llmserve.http.exchange import Answer, Exchange, Shared
from llmserve.http.heads import path_and_query
from llmserve.http.limits import ServerLimits
from llmserve.http.protocol import READ_BYTES

LIMITS = ServerLimits(1 << 20, 1 << 20, 1 << 30, 60.0)
TURNS_MAX = 1_000  # of the event loop, for all that a few requests cause


class Seen(NamedTuple):
    method: str
    target: tuple[str, bytes]  # path and query
    headers: dict[str, str]  # of a name that is there twice the first
    body: bytes


@dataclass
class Outcome:
    """requests : that were whole.  refused : what followed them was refused"""

    requests: list[Seen] = field(default_factory=list)
    refused: bool = False
    reason: str = ""


# ---- this server ----------------------------------------------------------------------------------------------------


class Transport:
    """A transport without a socket: what is written stays here."""

    def __init__(self) -> None:
        self.written = b""
        self.closing = self.paused = False

    def write(self, data: bytes, /) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def can_write_eof(self) -> bool:
        return True

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    write_eof = abort = close


class Recorder:
    """Answers each request at once, and keeps what it has seen."""

    def __init__(self) -> None:
        self.outcome = Outcome()

    def new_state(self) -> None:
        return None

    def admit(self, exchange: Exchange[None]) -> None:
        """Admit every request."""

    def handle(self, exchange: Exchange[None]) -> None:
        seen = Seen(exchange.method, (exchange.path, exchange.query), exchange.headers, exchange.body)
        if "transfer-encoding" in seen.headers:  # h11 gives its value in lower case
            seen.headers["transfer-encoding"] = seen.headers["transfer-encoding"].lower()
        self.outcome.requests.append(seen)
        exchange.respond(200, [], b"")

    def refusal(self, error: Exception, exchange: Exchange[None] | None) -> Answer:
        assert isinstance(error, Refusal)
        self.outcome.refused = True
        self.outcome.reason = self.outcome.reason or error.message
        return error.status, [], b""


def ours(pieces: list[bytes]) -> Outcome:
    """What this server sees. Each request gets exactly one final answer, and interim ones before it only."""
    recorder, transport = Recorder(), Transport()
    soon: list[Callable[[], None]] = []
    shared = Shared(recorder, LIMITS, lambda: 0.0, soon.append)
    shared.malformed = lambda peer, error: setattr(recorder.outcome, "reason", str(error))  # type: ignore[method-assign]
    connection = Connection(shared, transport, None)
    for piece in pieces:
        for start in range(0, len(piece), READ_BYTES):
            _turn(soon, until=lambda: not transport.paused or transport.closing)
            if transport.closing:
                break
            connection.received(memoryview(piece[start : start + READ_BYTES]))
    _turn(soon, until=lambda: not soon or transport.closing)
    connection.lost()
    answers = transport.written.replace(CONTINUE, b"").count(b"HTTP/1.1 ")
    assert answers == len(recorder.outcome.requests) + recorder.outcome.refused, transport.written
    assert shared.buffers.used_bytes == 0
    return recorder.outcome


def _turn(soon: list[Callable[[], None]], until: Callable[[], bool]) -> None:
    for _ in range(TURNS_MAX):
        if until():
            return
        soon.pop(0)()
    raise AssertionError("the connection reads no more")


# ---- h11 ------------------------------------------------------------------------------------------------------------


def theirs(pieces: list[bytes]) -> Outcome:
    """What h11 sees, of a server that answers each request at once."""
    outcome = Outcome()
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=64 << 10)
    request: h11.Request | None = None
    body = b""
    try:
        for piece in pieces:
            connection.receive_data(piece)
            while True:
                event = connection.next_event()
                if event in (h11.NEED_DATA, h11.PAUSED):
                    break
                if isinstance(event, h11.Request):
                    request, body = event, b""
                elif isinstance(event, h11.Data):
                    body += event.data
                elif isinstance(event, h11.EndOfMessage):
                    assert request is not None
                    outcome.requests.append(_seen(request, body))
                    connection.send(h11.Response(status_code=400, headers=[("content-length", "0")]))
                    connection.send(h11.EndOfMessage())
                    if connection.our_state is not h11.DONE:  # this was the last request
                        outcome.reason = "the end" if request.http_version == b"1.1" else "HTTP/1.0 ends the connection"
                        return outcome
                    connection.start_next_cycle()
    except (h11.RemoteProtocolError, httptools.HttpParserError) as error:
        outcome.refused, outcome.reason = True, str(error)
    return outcome


def _seen(request: h11.Request, body: bytes) -> Seen:
    headers: dict[str, str] = {}
    for name, value in request.headers:
        headers.setdefault(name.decode("latin-1"), value.decode("latin-1"))
    return Seen(request.method.decode(), path_and_query(request.target), headers, body)


# ---- cases ----------------------------------------------------------------------------------------------------------

METHODS = [
    b"GET",
    b"POST",
    b"POST",
    b"POST",
    b"PUT",
    b"DELETE",
    b"HEAD",
    b"OPTIONS",
    b"PATCH",
    b"CONNECT",
    b"get",
    b"PRI",
    b"X",
]
TARGETS = [
    *(b"/", b"/v1/chat/completions", b"/a?b=c&d", b"/a%20b%ff", b"//a", b"*", b"http://h/x?y", b"/a#b", b"h:443"),
    *(b"/a b", b"/\xc3\xa9", b"/\x01", b"/" + b"a" * 300, b"", b"/?" + b"%" * 5, b"/a\\b", b'/{}|^`"'),
]
VERSIONS = [b"HTTP/1.1"] * 12 + [
    b"HTTP/1.0",
    b"HTTP/1.2",
    b"HTTP/2.0",
    b"HTTP/0.9",
    b"http/1.1",
    b"HTTP/1.",
    b"HTTP/11",
    b"",
]
ENDS = [b"\r\n"] * 30 + [b"\n", b"\r", b"\r\n ", b"\r\r\n", b"\r\n\t", b" \r\n"]
COLONS = [b": "] * 12 + [b":", b" : ", b":\t \t", b"\t:", b":  ", b"", b"::"]
FIELDS = [
    *(b"accept|*/*", b"user-agent|x y z", b"X-A|b", b"x-a|c", b"x-empty|", b"content-type|application/json"),
    *(
        b"connection|close",
        b"connection|keep-alive",
        b"connection|Upgrade, HTTP2-Settings",
        b"connection|keep-alive, upgrade",
    ),
    *(
        b"upgrade|h2c",
        b"upgrade|websocket",
        b"http2-settings|AAMAAABkAAQAAP__",
        b"expect|100-continue",
        b"Expect|100-Continue",
    ),
    *(
        b"host|other",
        b"authorization|Bearer x",
        b"authorization|Bearer y",
        b"x-high|\xe9\xff",
        b"x-odd|a\x00b",
        b"x-odd|a\x0bb",
    ),
    *(
        b"x-odd|a\x7fb",
        b"x-odd|\x01",
        b"x-odd|a \t b \t ",
        b"x\xe9|a",
        b"x y|a",
        b"x(y)|a",
        b"|a",
        b"x_y|a",
        b"x-fold|a\r\n b",
    ),
]
FRAMINGS = [
    *(b"content-length|%d",) * 8,
    *(
        b"Content-Length|%d",
        b"content-length|0%d",
        b"content-length|+%d",
        b"content-length|%d ",
        b"content-length|%d, %d",
    ),
    *(b"content-length|-%d", b"content-length|0x%x", b"content-length|", b"content-length|%d\r\ncontent-length: %d"),
    *(b"content-length|%d\r\ncontent-length: 7", b"content-length|99999999999999999999", b"content-length|%d.0"),
]
CODINGS = [
    *(b"transfer-encoding|chunked",) * 10,
    *(
        b"Transfer-Encoding|Chunked",
        b"transfer-encoding|gzip, chunked",
        b"transfer-encoding|identity",
        b"transfer-encoding|chunked, gzip",
    ),
    *(
        b"transfer-encoding| chunked ",
        b"transfer-encoding|chunked\r\ntransfer-encoding: chunked",
        b"transfer-encoding|xchunked",
    ),
    *(
        b"transfer-encoding|chunked\r\ncontent-length: 3",
        b"content-length: 3\r\ntransfer-encoding|chunked",
        b"transfer-encoding|",
    ),
]
SIZES = [b"%x"] * 12 + [
    b"%X",
    b"0%x",
    b"%x ",
    b" %x",
    b"%x;a=b",
    b'%x;a="b;c"',
    b"%x;",
    b"+%x",
    b"-%x",
    b"0x%x",
    b"%xg",
    b"",
    b"%x\t",
]
TRAILERS = [b""] * 10 + [b"x-t: u\r\n", b"content-length: 9\r\n", b"host: evil\r\n", b"x-t : u\r\n", b"bad\r\n"]


class Draw:
    """Draws the cases of a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def case(self) -> list[bytes]:
        """The packets of one connection."""
        chance = self._random.random
        data = b"".join([self._request() for _ in range(self._random.choice([1, 1, 2, 3, 4]))])
        if chance() < 0.05:
            data = (
                self._random.choice(
                    [b"\r\n", b"\r\n\r\n", b"\n", b" ", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01"]
                )
                + data
            )
        if chance() < 0.35:
            data = self._changed(data)
        cuts = sorted(self._random.randrange(len(data) + 1) for _ in range(self._random.choice([0, 0, 1, 2, 5])))
        if chance() < 0.02:
            cuts = list(range(len(data)))
        return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True) if a < b]

    def _request(self) -> bytes:
        """Most of its parts are right: else nothing would be compared but the first wrong one."""
        draw = self._random
        odd = draw.random() < 0.4  # where one part may be wrong, two may be

        def one(of: list[bytes], right: int) -> bytes:
            return draw.choice(of) if odd and draw.random() < 0.3 else draw.choice(of[:right])

        method, body = one(METHODS, 9), draw.randbytes(draw.choice([0, 1, 5, 40, 700]))
        lines = [b"host: h"] if draw.random() < 0.95 else []
        for _ in range(draw.choice([0, 1, 2, 4])):
            name, _, value = one(FIELDS, 15).partition(b"|")
            lines.append(name + one(COLONS, 12) + value)
        if draw.random() < 0.25:
            lines += [b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c"]
        if draw.random() < 0.1 and odd:
            lines += [b"x-%d: y" % number for number in range(draw.choice([90, 99, 101, 200]))]
        if draw.random() < 0.02 and odd:
            lines.append(b"x-long: " + b"a" * draw.choice([60_000, 70_000]))
        content = b""
        if method in (b"POST", b"PUT", b"PATCH") or draw.random() < 0.1:
            if draw.random() < 0.5:
                framing = one(FRAMINGS, 8)
                content, count = body, framing.count(b"%")
                framing = framing % ((len(body),) * count) if count else framing
            else:
                framing, content = one(CODINGS, 10), self._chunks(body, one)
            lines.insert(draw.randrange(len(lines) + 1), framing.replace(b"|", b": ", 1))
        end = one(ENDS, 30)
        head = b" ".join([method, one(TARGETS, 9 if method != b"CONNECT" else 1), one(VERSIONS, 13)]) + one(ENDS, 30)
        return head + b"".join([line + (one(ENDS, 30) if odd else end) for line in lines]) + one(ENDS, 30) + content

    def _chunks(self, body: bytes, one: Callable[[list[bytes], int], bytes]) -> bytes:
        size = self._random.choice([1, 3, 50, 1000])
        parts = [body[start : start + size] for start in range(0, len(body), size)]
        chunks = [one(SIZES, 12) for _ in parts]
        whole = [
            (form % len(part) if b"%" in form else form) + one(ENDS, 30) + part + one(ENDS, 30)
            for form, part in zip(chunks, parts, strict=True)
        ]
        return b"".join(whole) + b"0" + one(ENDS, 30) + one(TRAILERS, 11) + one(ENDS, 30)

    def _changed(self, data: bytes) -> bytes:
        draw = self._random
        for _ in range(draw.choice([1, 1, 2, 4])):
            at = draw.randrange(len(data) + 1)
            until = min(len(data), at + draw.choice([1, 1, 2, 10]))
            data = draw.choice(
                [
                    data[:at] + draw.choice([b"\r", b"\n", b" ", b"\0", b":", b"\xff", b"0", b"\r\n"]) + data[at:],
                    data[:at] + draw.randbytes(1) + data[until:],
                    data[:at] + data[until:],
                    data[:until] + data[at:until] + data[until:],
                    data[:at] if draw.random() < 0.3 else data,
                ]
            )
        return data


# ---- differences ----------------------------------------------------------------------------------------------------


STRICTER = {
    "a method, a version or a target that HTTP/1.1 here has not": (
        "Invalid method|Expected space after method|HTTP/2 Connection Preface|PRI/Upgrade|CONNECT is for proxies|"
        "Invalid (HTTP|major|minor) version|this server speaks HTTP/1.1|Expected HTTP/|Expected dot|Expected CRLF|"
        "Unexpected space after start line|Unexpected (start )?char in url|Invalid char(acters)? in url|"
        "User callback error"
    ),
    "a line that does not end with CRLF, or is continued on the next one": (
        "Missing expected|Expected LF|Unexpected whitespace after header value|Invalid header (token|field char)"
    ),
    "a control character": "Invalid header value char|Invalid char in url",
    "a length that is there twice, in two ways, or as no plain number": (
        "Content-Length|Transfer-Encoding|transfer-encoding|Invalid character in chunk"
    ),
    "a head larger than 64 KiB or 100 fields, or a body above its limit": "the (head of the request|body is larger)",
    "two fields of a kind of which two proxies might take different ones": "the request has two fields",
}
"""What is refused here and read by h11: nothing can be smuggled by what is refused. Patterns of the reason, by name."""
TOLERATED = {
    "no `host`": "Missing mandatory Host",  # nothing here depends on it
    "empty lines before a request": r"no request line received|illegal request line($|: bytearray\(b'(\\r|\\n))",  # 2.2
    "several spaces in the first line": r"illegal request line: bytearray\(b'[A-Z]+ +[^ ]+ +HTTP/",  # RFC 9112, 3
    "a head of about 64 KiB": "Receive buffer too long",  # h11 counts the bytes behind it, too
    "another request behind one of HTTP/1.0 with keep-alive": "HTTP/1.0 ends the connection",
}
"""What h11 refuses and is read here. Patterns of h11's reason, by name."""


def difference(ours: Outcome, theirs: Outcome) -> str:
    """Which difference there is: none (""), `stricter: NAME` or `tolerated: NAME` where allowed, else `matters`.

    Requests that both have seen are the same in any case.
    """
    both = min(len(ours.requests), len(theirs.requests))
    if ours.requests[:both] != theirs.requests[:both]:
        return "matters"
    if len(ours.requests) == len(theirs.requests) and ours.refused == theirs.refused:
        return ""
    for kind, allowed, outcome in (("tolerated", TOLERATED, theirs), ("stricter", STRICTER, ours)):
        if outcome.reason and len(outcome.requests) == both:
            name = next((name for name, pattern in allowed.items() if re.search(pattern, outcome.reason)), "")
            if name:
                return f"{kind}: {name}"
    return "matters"


def compare(seed: int, cases: int) -> tuple[Counter[str], list[str]]:
    """How many cases were equal or differed, by name, and a description of each difference that matters."""
    counts: Counter[str] = Counter()
    found = []
    draw = Draw(seed)
    for number in range(cases):
        pieces = draw.case()
        mine, other = ours(pieces), theirs(pieces)
        name = difference(mine, other)
        counts[name or ("equal, all read" if not mine.refused else "equal, refused")] += 1
        counts["requests seen by both"] += len(mine.requests) if not name else 0
        if name == "matters":
            reasons = f"{mine.refused} {mine.reason!r} / {other.refused} {other.reason!r}"
            found.append(f"case {number}: {reasons}: {b''.join(pieces)!r}\n  ours   {mine}\n  theirs {other}")
    return counts, found


def main() -> None:
    cases = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    counts, found = compare(seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0, cases=cases)
    for name, count in counts.most_common():
        print(f"{count:>8,}  {name}")
    print("\n".join(found[:20]))
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
