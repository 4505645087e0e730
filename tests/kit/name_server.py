"""A small server of DNS, over UDP and TCP, whose records a test changes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Any

import dns.asyncresolver
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset

UDP_BYTES_MAX = 512


class NameServer:
    """Answers from `records`, as an async context manager.

    records   (name, kind) -> values, as in a zone file: ("vllm.", "A") -> ["127.0.0.1"]
    beside    the same, for the additional section of every answer
    ttl_s     of each record
    code      of every answer, such as "SERVFAIL"; "": by the records
    over_tcp  whether TCP is answered.  udp_most  records of an answer over UDP; None: all
    asked     (name, kind, whether over TCP) of each question
    """

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], Sequence[str]] = {}
        self.beside: dict[tuple[str, str], Sequence[str]] = {}
        self.ttl_s = 0
        self.code = ""
        self.over_tcp = True
        self.udp_most: int | None = None
        self.asked: list[tuple[str, str, bool]] = []

    async def __aenter__(self) -> NameServer:
        self._tcp = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._tcp.sockets[0].getsockname()[1]
        loop = asyncio.get_running_loop()
        self._udp, _ = await loop.create_datagram_endpoint(
            lambda: _Udp(self), local_addr=("127.0.0.1", self.port), family=socket.AF_INET
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self._udp.close()
        self._tcp.close()

    def resolver(self) -> dns.asyncresolver.Resolver:
        """A resolver that asks this server alone."""
        resolver = dns.asyncresolver.Resolver(configure=False)
        resolver.nameservers, resolver.port = ["127.0.0.1"], self.port
        return resolver

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while self.over_tcp:
                size = int.from_bytes(await reader.readexactly(2), "big")
                data = self.answer(await reader.readexactly(size), over_tcp=True)
                writer.write(len(data).to_bytes(2, "big") + data)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def answer(self, data: bytes, *, over_tcp: bool) -> bytes:
        query = dns.message.from_wire(data)
        (question,) = query.question
        name, kind = question.name.to_text(), dns.rdatatype.to_text(question.rdtype)
        self.asked.append((name, kind, over_tcp))
        answer = dns.message.make_response(query)
        if self.code:
            answer.set_rcode(dns.rcode.from_text(self.code))
            return bytes(answer.to_wire())
        if not any(known == name for known, _ in self.records):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        values = list(self.records.get((name, kind), ()))
        if not over_tcp and self.udp_most is not None:
            values = values[: self.udp_most]
        if values:
            answer.answer.append(dns.rrset.from_text(name, self.ttl_s, "IN", kind, *values))
        for (other, kind_beside), known in self.beside.items():
            answer.additional.append(dns.rrset.from_text(other, self.ttl_s, "IN", kind_beside, *known))
        wire = bytes(answer.to_wire(max_size=65535))
        if not over_tcp and len(wire) > UDP_BYTES_MAX:
            answer.answer.clear()
            answer.flags |= dns.flags.TC
            wire = bytes(answer.to_wire())
        return wire


class _Udp(asyncio.DatagramProtocol):
    def __init__(self, server: NameServer) -> None:
        self._server = server

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, address: Any) -> None:
        self._transport.sendto(self._server.answer(data, over_tcp=False), address)
