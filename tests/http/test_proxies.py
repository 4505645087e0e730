"""The client's address behind proxies: only a trusted proxy's word counts, and only for the hop before it."""

from __future__ import annotations

import pytest
from front import StartFront, until
from raw_site import site

from llmserve.engines.timed.server import FakeEngine
from llmserve.errors import ConfigError
from llmserve.http.proxies import TrustedProxies
from llmserve.scheduling.messages import RequestArrived
from llmserve.server.serving import serving
from llmserve.settings.tree import ApiConfig, Config, ServerConfig

PROXIES = TrustedProxies(["10.0.0.0/8", "::1", "192.168.1.7"])


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("10.0.0.1", "203.0.113.5", "203.0.113.5"),
        ("10.0.0.1", "6.6.6.6, 203.0.113.5", "203.0.113.5"),
        ("10.0.0.1", "6.6.6.6, 203.0.113.5, 192.168.1.7,10.1.1.1", "203.0.113.5"),
        ("10.0.0.1", "10.0.0.9, 10.0.0.8", "10.0.0.9"),
        ("10.0.0.1", "", "10.0.0.1"),
        ("10.0.0.1", "unknown", "10.0.0.1"),
        ("10.0.0.1", "6.6.6.6, nonsense, 10.0.0.2", "10.0.0.2"),
        ("203.0.113.5", "10.0.0.1", "203.0.113.5"),
        ("::1", "203.0.113.5:4711", "203.0.113.5"),
        ("::1", "[2001:db8::5]:4711", "2001:db8::5"),
        ("::ffff:10.0.0.1", "2001:db8::5", "2001:db8::5"),
        ("", "1.2.3.4", ""),
        ("10.0.0.1", ", ".join(["6.6.6.6"] + ["10.0.0.2"] * 1000), "10.0.0.2"),
    ],
)
def test_the_client_is_the_last_hop_that_no_trusted_proxy_has(peer: str, forwarded: str, client: str) -> None:
    assert PROXIES.client_of(peer, forwarded) == client


@pytest.mark.parametrize(("trusted", "client"), [(("127.0.0.1",), "203.0.113.5"), ((), "127.0.0.1")])
async def test_two_fields_are_one_list(trusted: tuple[str, ...], client: str) -> None:
    """HAProxy adds a field of its own behind the client's."""
    async with site(trusted_proxies=TrustedProxies(trusted)) as at:
        asking = await at.client()
        fields = b"x-forwarded-for: 6.6.6.6\r\nX-Forwarded-For: 203.0.113.5\r\n"
        await asking.send(b"GET /held HTTP/1.1\r\nhost: h\r\n" + fields + b"\r\n")
        await until(lambda: bool(at.echo.held))
        (exchange,) = at.echo.held
        assert (exchange.address, exchange.holder) == (client, client)
        exchange.respond(200, [], b"")


async def test_an_address_that_is_none_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="trusted_proxy: 'proxy' does not appear to be an IPv4 or IPv6 network"):
        async with serving(Config(server=ServerConfig(port=0, trusted_proxy=("proxy",)))):
            pass


async def test_shares_by_address_are_those_of_clients_behind_a_proxy(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0) as engine:
        server = ServerConfig(port=0, trusted_proxy=("127.0.0.1",))
        front = await start_front(engine, server=server, limits=ApiConfig(fair_by="address"))
        for client in ("203.0.113.5", "203.0.113.6"):
            async with front.post(headers={"x-forwarded-for": f"6.6.6.6, {client}"}) as answer:
                assert answer.status == 200
        events = [step.event for step in front.cluster.journal.steps]
        shares = {event.request.share for event in events if isinstance(event, RequestArrived)}
        assert shares == {"203.0.113.5", "203.0.113.6"}
