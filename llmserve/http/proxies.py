"""Who a client is behind a proxy: proxies that are trusted say it in X-Forwarded-For."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

HEADER = "x-forwarded-for"
HOPS_MAX = 16
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class TrustedProxies:
    """texts : addresses and networks, such as 10.0.0.0/8. Raises ValueError."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._networks = tuple([ipaddress.ip_network(text) for text in texts])

    def __bool__(self) -> bool:
        return bool(self._networks)

    def client_of(self, peer: str, forwarded: str) -> str:
        """The client's address: the last one that no trusted proxy has. forwarded : of the header, "" without one

        Whatever stands before it was written by the client, or by a proxy that nobody trusts.
        """
        client = _address(peer)
        hops = [hop.strip() for hop in forwarded.split(",")] if forwarded else []
        for hop in reversed(hops[-HOPS_MAX:]):
            if client is None or not self._trusts(client):
                break
            before = _address(hop)
            if before is None:
                break
            client = before
        return str(client) if client is not None else peer

    def _trusts(self, address: Address) -> bool:
        return any(address in network for network in self._networks)


def _address(text: str) -> Address | None:
    """text : with or without a port"""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
