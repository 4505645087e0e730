"""A server with relays, all in this process: a test sees the cluster, and clients reach it through relays alone."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path

from llmserve.gateway.part import listening_socket
from llmserve.http.accepting import base_url
from llmserve.live.cluster import LiveCluster
from llmserve.part import BehindRelays
from llmserve.server.parts import PARTS
from llmserve.server.serving import checked, each, serving
from llmserve.settings.tree import Config
from llmserve.workers.processes import Place
from llmserve.workers.running import relaying


@asynccontextmanager
async def serving_with_relays(config: Config, relays: int) -> AsyncIterator[tuple[LiveCluster, str]]:
    """As `serving`, with so many relays that hold the connections of clients."""
    config = checked(config)
    settings = config.server
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        first = stack.enter_context(listening_socket(settings.host, settings.port, shared=True))
        host, port = first.getsockname()[:2]
        listeners = [first]
        while len(listeners) < relays:
            listeners.append(stack.enter_context(listening_socket(host, port, shared=True)))
        requests = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        requests.bind(str(folder / "requests"))
        requests.listen(128)
        parent = os.eventfd(0)  # which stays: this process is its own parent
        stack.callback(os.close, parent)
        behind = BehindRelays(
            requests, folder / "messages", base_url(first, tls=settings.tls_cert is not None), "here", relays, 0
        )
        async with serving(config, None, behind) as (cluster, _), AsyncExitStack() as running:
            parts = [part for part in each(PARTS) if part.in_relays]
            for listener in listeners:
                place = Place(listener, behind.messages, folder / "requests", parent, relays, 0)
                await running.enter_async_context(relaying(config, parts, place, listener))
            yield cluster, behind.url
