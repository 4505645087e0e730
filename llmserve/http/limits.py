"""What a server allows its clients."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from llmserve.http.proxies import TrustedProxies


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """body_bytes_max     of one request
    buffer_bytes_max   of one answer that its client has not taken: more slows the engine down
    buffers_bytes_max  of all requests and answers in memory
    client_stall_s     without a byte taken, until a client is cut off
    connections_max    None: half of the files that the process may open
    keep_alive_s       silence after which a stream gets a comment; 0: never
    trusted_proxies    whose word on the client's address counts
    streamed           paths whose bodies the handler takes as they arrive, and limits itself
    """

    body_bytes_max: int
    buffer_bytes_max: int
    buffers_bytes_max: int
    client_stall_s: float
    connections_max: int | None = None
    keep_alive_s: float = 0.0
    streamed: Container[str] = ()
    trusted_proxies: TrustedProxies = field(default_factory=lambda: TrustedProxies(()))
