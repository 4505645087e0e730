"""An engine that sends whatever bytes a test wants, over a plain socket."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable

Answering = Callable[[asyncio.StreamWriter], Awaitable[None]]

MODELS = b'{"data": [{"id": "fake"}]}'


def http(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    """A whole answer with a content-length."""
    lines = [f"HTTP/1.1 {status}", *headers, f"content-length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


def chunked(*chunks: bytes, end: bool = True, headers: str = "") -> bytes:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n" + headers.encode("latin-1") + b"\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n" * end


class LyingEngine:
    """Probes get good answers, unless `probes` has others by path; a POST gets `answer`.

    answer       bytes, or a function that writes them
    closes       close the connection after an answer to a POST
    requests     bodies of the POSTs so far
    heads        of all requests so far
    connections  number of connections so far
    """

    def __init__(
        self,
        answer: bytes | Answering = b"",
        *,
        probes: dict[str, bytes | Answering] | None = None,
        closes: bool = False,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.answer = answer
        self.closes = closes
        self._tls = tls
        self.requests: list[bytes] = []
        self.heads: list[bytes] = []
        self.connections = 0
        self._probes = {
            "/health": http(b""),
            "/v1/models": http(MODELS),
            "/metrics": http(b"", status="404 Not Found"),
            "/openapi.json": http(b"", status="404 Not Found"),
            **(probes or {}),
        }
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> LyingEngine:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while await self._serve_one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; return whether the connection stays open."""
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        method, path, _ = head.decode("latin-1").split(" ", 2)
        if method == "POST":
            length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
            self.requests.append(await reader.readexactly(int(length)))
            await write(writer, self.answer)
            return not self.closes
        await write(writer, self._probes[path])
        return False


async def write(writer: asyncio.StreamWriter, answer: bytes | Answering) -> None:
    if isinstance(answer, bytes):
        writer.write(answer)
        await writer.drain()
    else:
        await answer(writer)


def endless(head: bytes, piece: bytes) -> Answering:
    """A head, and then the same bytes until the other side closes."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        while True:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)

    return answer


def dripping(head: bytes, piece: bytes, every_s: float) -> Answering:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        while True:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(every_s)

    return answer
