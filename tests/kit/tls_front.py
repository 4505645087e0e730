"""TLS before a plain server, which asks its clients for certificates."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path
from urllib.parse import urlsplit

from certificates import Certificate


class TlsFront:
    """Passes bytes between clients with certificates and a plain server, as an async context manager.

    seen  the common name of each client's certificate
    """

    def __init__(self, url: str, own: Certificate, authority: Path) -> None:
        self._to = urlsplit(url)
        self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority))
        self._tls.load_cert_chain(own.certificate, own.key)
        self._tls.verify_mode = ssl.CERT_REQUIRED
        self.seen: set[str] = set()

    async def __aenter__(self) -> TlsFront:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.url = f"https://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        subject = dict(entry for part in writer.get_extra_info("peercert")["subject"] for entry in part)
        self.seen.add(subject["commonName"])
        engine_reader, engine_writer = await asyncio.open_connection(self._to.hostname, self._to.port)
        ways = [asyncio.ensure_future(_carry(*way)) for way in ((reader, engine_writer), (engine_reader, writer))]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        writer.close()
        engine_writer.close()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
