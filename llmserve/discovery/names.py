"""Names of DNS, asked again and again: engines behind a headless Service, a Compose service, Consul."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING

from llmserve.discovery.source import CannotFind

if TYPE_CHECKING:
    from dns.asyncresolver import Resolver
    from dns.resolver import Answer

ASK_EVERY_S = (2.0, 10.0)  # bounds: Consul's answers live for 0 s, those of Docker for 600 s
ASK_S = 5.0  # for an answer


class Name:
    """The addresses of a name, with a port; or the targets of the name's SRV records, with their own ports.

    The system's servers are asked (/etc/resolv.conf, with its search list), over TCP where they take it: over UDP an
    answer may be a part of the truth, such as Consul's three addresses. A name has engines at its IPv4 addresses, or
    else at its IPv6 addresses, for both are usually the same machines. Of SRV records those of the best priority count.

    port      of the engines; None: SRV
    resolver  makes the resolver of one look
    """

    def __init__(
        self, name: str, port: int | None, scheme: str = "http", resolver: Callable[[], Resolver] | None = None
    ) -> None:
        self._name, self._port, self._scheme = name, port, scheme
        self._resolver = resolver or _system_resolver
        self._tcp = True
        self._pause_s = 0.0

    async def found(self) -> AsyncGenerator[frozenset[str], None]:
        if self._pause_s:
            await asyncio.sleep(self._pause_s)
        least, most = ASK_EVERY_S
        self._pause_s = least
        places, ttl_s = await self._look(self._resolver())
        self._pause_s = min(max(ttl_s, least), most)
        yield frozenset([f"{self._scheme}://{_host(address)}:{port}" for address, port in places])

    async def close(self) -> None:
        """Nothing is kept open."""

    async def _look(self, resolver: Resolver) -> tuple[set[tuple[str, int]], float]:
        """(address, port) of each engine, and the seconds for which the answer holds."""
        if self._port is not None:
            addresses, ttl_s = await self._addresses(resolver, self._name)
            return {(address, self._port) for address in addresses}, ttl_s
        answer = await self._ask(resolver, self._name, "SRV")
        if answer is None:
            return set(), 0.0
        best = min([record.priority for record in answer])
        targets = {(record.target.to_text(), record.port) for record in answer if record.priority == best}
        told = _additional(answer)
        unknown = sorted({target for target, _ in targets} - told.keys())
        looked = await asyncio.gather(*(self._addresses(resolver, target) for target in unknown))
        told |= {target: addresses for target, (addresses, _) in zip(unknown, looked, strict=True)}
        places = {(address, port) for target, port in targets for address in told[target]}
        return places, min([float(answer.ttl), *[ttl_s for _, ttl_s in looked]])

    async def _addresses(self, resolver: Resolver, name: str) -> tuple[list[str], float]:
        for kind in ("A", "AAAA"):
            if (answer := await self._ask(resolver, name, kind)) is not None:
                return [record.address for record in answer], float(answer.ttl)
        return [], 0.0

    async def _ask(self, resolver: Resolver, name: str, kind: str) -> Answer | None:
        """None: there are no such records. Raises CannotFind."""
        from dns.exception import DNSException
        from dns.resolver import NXDOMAIN, NoAnswer

        for over_tcp in (True, False) if self._tcp else (False,):
            try:
                return await resolver.resolve(name, kind, tcp=over_tcp, lifetime=ASK_S, search=True)
            except (NXDOMAIN, NoAnswer):
                return None
            except (DNSException, OSError) as error:
                if not over_tcp:
                    raise CannotFind(f"DNS does not tell {kind} of {name}: {error}") from error
                self._tcp = False  # until the server starts again
        raise AssertionError("the last try returns or raises")


def _additional(answer: Answer) -> dict[str, list[str]]:
    """Addresses of targets that came with the answer: of IPv4, or else of IPv6."""
    from dns.rdatatype import AAAA, A

    told: dict[str, list[str]] = {}
    for kind in (AAAA, A):
        for records in answer.response.additional:
            if records.rdtype == kind:
                told[records.name.to_text()] = [record.address for record in records]
    return told


def _host(address: str) -> str:
    return f"[{address}]" if ipaddress.ip_address(address).version == 6 else address


def _system_resolver() -> Resolver:
    from dns.asyncresolver import Resolver
    from dns.resolver import NoResolverConfiguration

    try:
        return Resolver()
    except (NoResolverConfiguration, OSError) as error:
        raise CannotFind(f"this machine names no server of DNS: {error}") from error
