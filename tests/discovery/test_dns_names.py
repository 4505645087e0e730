"""Engines behind a name of DNS."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from name_server import NameServer

from llmserve.discovery import names
from llmserve.discovery.names import Name
from llmserve.discovery.source import CannotFind


@pytest.fixture
async def server() -> AsyncIterator[NameServer]:
    async with NameServer() as server:
        yield server


async def found(name: Name) -> frozenset[str]:
    return await anext(name.found())


async def test_addresses_of_a_name_are_engines_at_its_port(server: NameServer) -> None:
    server.records = {("vllm.", "A"): ["10.0.0.1", "10.0.0.2"], ("vllm.", "AAAA"): ["fd00::1", "fd00::2"]}
    name = Name("vllm", 8000, resolver=server.resolver)
    assert await found(name) == {"http://10.0.0.1:8000", "http://10.0.0.2:8000"}, "both kinds are the same machines"


async def test_a_name_without_ipv4_has_engines_at_ipv6(server: NameServer) -> None:
    server.records = {("vllm.", "AAAA"): ["fd00::1"]}
    assert await found(Name("vllm", 8000, "https", server.resolver)) == {"https://[fd00::1]:8000"}


@pytest.mark.parametrize("beside", [True, False])
async def test_srv_records_of_the_best_priority_name_hosts_and_ports(server: NameServer, beside: bool) -> None:
    addresses = {("a.", "A"): ["10.0.0.1"], ("b.", "A"): ["10.0.0.2"], ("c.", "A"): ["10.0.0.3"]}
    srv = {("_http._tcp.vllm.", "SRV"): ["1 5 8001 a.", "1 5 8002 b.", "2 5 8003 c."]}
    server.records = {**srv, **({} if beside else addresses)}
    server.beside = addresses if beside else {}
    assert await found(Name("_http._tcp.vllm", None, resolver=server.resolver)) == {
        "http://10.0.0.1:8001",
        "http://10.0.0.2:8002",
    }
    assert len(server.asked) == (1 if beside else 3), "what came beside the answer is not asked for"


async def test_a_hundred_addresses_fit_although_udp_has_no_room_for_them(server: NameServer) -> None:
    server.records = {("vllm.", "A"): [f"10.0.1.{number}" for number in range(100)]}
    assert len(await found(Name("vllm", 8000, resolver=server.resolver))) == 100
    server.over_tcp = False
    server.records = {("vllm.", "A"): ["10.0.0.1"]}
    assert len(await found(Name("vllm", 8000, resolver=server.resolver))) == 1, "a server without TCP is asked over UDP"


async def test_all_addresses_are_told_where_udp_tells_three(server: NameServer) -> None:
    server.udp_most = 3  # as Consul does
    server.records = {("vllm.service.consul.", "A"): [f"10.0.0.{number}" for number in range(9)]}
    assert len(await found(Name("vllm.service.consul", 8000, resolver=server.resolver))) == 9


async def test_a_name_that_is_not_there_has_no_engine(server: NameServer) -> None:
    assert await found(Name("vllm", 8000, resolver=server.resolver)) == frozenset()
    assert await found(Name("vllm", None, resolver=server.resolver)) == frozenset()
    server.records = {("vllm.", "TXT"): ["text"]}
    assert await found(Name("vllm", 8000, resolver=server.resolver)) == frozenset(), "the name is there, no address"


@pytest.mark.parametrize("code", ["SERVFAIL", "REFUSED"])
async def test_a_server_of_dns_that_fails_is_not_an_answer(server: NameServer, code: str) -> None:
    server.code = code
    with pytest.raises(CannotFind, match="DNS does not tell A of vllm"):
        await found(Name("vllm", 8000, resolver=server.resolver))


@pytest.mark.parametrize(("ttl_s", "pause_s"), [(0, 2.0), (5, 5.0), (600, 10.0)])
async def test_a_name_is_asked_again_when_its_answer_is_old(
    server: NameServer, ttl_s: int, pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    server.records, server.ttl_s = {("vllm.", "A"): ["10.0.0.1"]}, ttl_s
    name = Name("vllm", 8000, resolver=server.resolver)
    await found(name)
    monkeypatch.setattr(names.asyncio, "sleep", sleep)
    await found(name)
    assert pause_s in slept
