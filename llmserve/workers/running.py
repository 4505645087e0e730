"""A relay as a process: its parts, its server, its link to the scheduler process, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

from llmserve.calls.client_request import ClientExchange
from llmserve.gateway.answers import Refusals
from llmserve.gateway.endpoints import ENDPOINTS
from llmserve.gateway.part import Admissions, tls_of, trusted_proxies
from llmserve.gateway.stages import Admission
from llmserve.http.server import running
from llmserve.observe.part import Followers, Traced
from llmserve.part import Part, Server
from llmserve.runtime.collecting import spare_what_is_loaded
from llmserve.settings.policies import named, order_settings
from llmserve.settings.tree import Config
from llmserve.tenants.authentication import Keys
from llmserve.tenants.issuer_keys import IssuerKeys
from llmserve.tenants.keys import tokens_of
from llmserve.web.app import App
from llmserve.web.part import begin_trace_of, server_limits, watchers_of
from llmserve.workers.passing import PassedOn, Passing
from llmserve.workers.processes import Place
from llmserve.workers.relay import Relay


class RelayApp(App):
    """What clients ask on the port of a relay: completions are relayed, everything else is passed on."""

    def handle(self, exchange: ClientExchange) -> None:
        if isinstance(exchange.sink, Passing):
            exchange.sink.complete()
        else:
            super().handle(exchange)


class _AllButEngines:
    """The paths whose bodies pass on as they come."""

    def __contains__(self, path: object) -> bool:
        return path not in ENDPOINTS


async def relay(config: Config, parts: Sequence[Part], place: Place) -> int:
    """Relay requests until SIGTERM. When the process that has started this one is gone, the scheduler process drains,
    and its end is the end of this one. Returns the exit status.

    parts : of the server, which are in relays
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    starting = asyncio.current_task()
    relayed: Relay | None = None

    def on_stop() -> None:
        nonlocal starting
        if starting is not None:  # there was no scheduler process yet
            starting.cancel()
            starting = None
        stop.set()

    def on_parent_gone() -> None:
        loop.remove_reader(place.parent)
        if relayed is not None and relayed.line.is_open:
            relayed.on_lost = on_stop
        else:
            on_stop()

    loop.add_signal_handler(signal.SIGTERM, on_stop)
    loop.add_reader(place.parent, on_parent_gone)
    assert place.listener is not None, "a relay has a socket"
    with contextlib.suppress(asyncio.CancelledError):
        async with relaying(config, parts, place, place.listener) as relayed:
            starting = None
            spare_what_is_loaded()
            await stop.wait()
    return 0


@contextlib.asynccontextmanager
async def relaying(
    config: Config, parts: Sequence[Part], place: Place, listener: socket.socket
) -> AsyncIterator[Relay]:
    """Relay requests inside the block, once the scheduler process is there."""
    welcome, keys = asyncio.Event(), Keys({}, tokens_of(config))
    relay, server = Relay(config, str(place.messages), keys, welcome.set), Server(config)
    order = named(order_settings(config.scheduling))
    followers = server.add(Followers())
    server.add(Traced(lambda: order, relay.now_s))
    server.add(Admissions(relay.admission, Admission(), Admission()))
    async with AsyncExitStack() as stack:
        if keys.tokens is not None and config.server.jwt_issuer is not None:
            issuer = IssuerKeys(keys.tokens, config.server.jwt_issuer, config.server.jwt_keys)
            stack.push_async_callback(issuer.close)
            await issuer.start()
        for part in parts:
            await stack.enter_async_context(part.open(server))
        relay.begin_trace = begin_trace_of(server)
        connecting = asyncio.create_task(relay.line.keep())
        stack.callback(connecting.cancel)
        stack.callback(relay.close)
        await welcome.wait()
        refusals = Refusals(relay.count_refused)
        cors, watchers = watchers_of(config, keys)
        passed_on = PassedOn(str(place.requests), refusals)
        app = RelayApp(
            relay, None, passed_on, cors=cors, watchers=watchers, body_bytes_max=config.limits.body_bytes_max
        )
        limits = server_limits(config, _AllButEngines(), trusted_proxies(config))
        relay.server = await stack.enter_async_context(running(app, listener, limits, tls_of(config)))
        if followers:
            relay.server.on_ended(lambda exchange: None if passed(exchange) else followers.tell(exchange))
        relay.sharing = place.sharing
        if place.sharing is not None:
            place.sharing.follow(relay.server)
        relay.progress()
        yield relay


def passed(exchange: ClientExchange) -> bool:
    """Whether the scheduler process answers the request, and follows its end."""
    return isinstance(exchange.sink, Passing)
