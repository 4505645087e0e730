"""A server whose engines are found: they come and go under load, and no request is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

import aiohttp
import pytest
from front import until
from kubernetes_api import KubernetesApi
from name_server import NameServer

from llmserve.discovery import kubernetes, names
from llmserve.engines.timed.server import FakeEngine
from llmserve.errors import ConfigError
from llmserve.live.cluster import LiveCluster
from llmserve.server.reload import Reloader
from llmserve.server.serving import serving
from llmserve.settings.tree import Config, EngineConfig, LiveConfig, ServerConfig

ENGINES, CLIENTS = 100, 10
BODY = {"model": "fake", "prompt": "hello", "max_tokens": 5, "stream": True}


class Engines:
    """Engines at 127.0.1.1, 127.0.1.2, ..., all at one port."""

    def __init__(self) -> None:
        self.running: dict[str, FakeEngine] = {}
        self.port = 0

    async def start(self, number: int) -> str:
        address = f"127.0.1.{number}"
        engine = await FakeEngine(step_s=0.002, slots=4, host=address, port=self.port).__aenter__()
        self.port = int(engine.url.rpartition(":")[2])
        self.running[address] = engine
        return address

    async def stop(self, addresses: Iterable[str]) -> None:
        await asyncio.gather(*(self.running.pop(address).__aexit__(None, None, None) for address in list(addresses)))

    def names(self, addresses: Iterable[str]) -> set[str]:
        return {f"{address}:{self.port}" for address in addresses}


@pytest.fixture
async def engines() -> AsyncIterator[Engines]:
    engines = Engines()
    yield engines
    await engines.stop(engines.running)


@pytest.fixture
async def name_server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[NameServer]:
    async with NameServer() as server:
        monkeypatch.setattr(names, "_system_resolver", server.resolver)
        monkeypatch.setattr(names, "ASK_EVERY_S", (0.05, 0.05))
        yield server


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KubernetesApi]:
    async with KubernetesApi(tmp_path / "kubernetes") as api:
        host, _, port = api.address.partition(":")
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
        monkeypatch.setattr(kubernetes, "CREDENTIALS", api.credentials)
        yield api


def config(*engine: str) -> Config:
    live = LiveConfig(probe_every_s=5.0, probe_s=60.0)  # of 100 engines in one process that shares its cores
    return Config(
        server=ServerConfig(port=0),
        engines=EngineConfig(engine=engine, slots=4, look_ahead=0, engine_connect_s=60.0),
        live=live,
    )


async def ask(session: aiohttp.ClientSession, url: str) -> tuple[int, bytes]:
    async with session.post(f"{url}/v1/completions", json=BODY) as response:
        return response.status, await response.read()


class Load:
    """Clients that ask one request after the other. lost : answers that are no whole stream"""

    def __init__(self, url: str) -> None:
        self._url, self._ends = url, False
        self.answered, self.lost = 0, list[tuple[int, bytes]]()

    async def __aenter__(self) -> Load:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        self._clients = [asyncio.create_task(self._client()) for _ in range(CLIENTS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ends = True
        await asyncio.gather(*self._clients)
        await self._session.close()

    async def _client(self) -> None:
        while not self._ends:
            status, body = await ask(self._session, self._url)
            self.answered += 1
            if status != 200 or not body.endswith(b"data: [DONE]\n\n"):
                self.lost.append((status, body))


async def grow_and_shrink(cluster: LiveCluster, url: str, engines: Engines, tell: Callable[[list[str]], None]) -> None:
    """From 5 engines to ENGINES and back under load. tell : puts what the source tells"""
    await until(lambda: any(cluster.engines_ready.values()))
    async with Load(url) as load:
        while len(engines.running) < ENGINES:
            for number in range(len(engines.running) + 1, len(engines.running) + 20):
                await engines.start(number)
            tell(list(engines.running))
            await until(lambda: cluster.engines_ready.keys() == engines.names(engines.running), within_s=500)
        await until(lambda: all(cluster.engines_ready.values()), within_s=500)
        assert len(cluster.fleet.handles) == ENGINES
        while len(engines.running) > 5:
            leaving = list(engines.running)[:19]
            tell([address for address in engines.running if address not in leaving])
            await until(lambda: not cluster.fleet.handles.keys() & engines.names(leaving), within_s=500)  # noqa: B023
            await engines.stop(leaving)  # what ends a pod waits for what runs on it
    assert load.lost == []
    assert load.answered > ENGINES
    assert len(cluster.fleet.handles) == 5


async def test_a_hundred_engines_come_and_go_by_dns_and_no_request_is_lost(
    engines: Engines, name_server: NameServer
) -> None:
    def tell(addresses: list[str]) -> None:
        name_server.records = {("vllm.", "A"): addresses}

    tell([await engines.start(number) for number in range(1, 6)])
    async with serving(config(f"dns:vllm:{engines.port}")) as (cluster, url):
        await grow_and_shrink(cluster, url, engines, tell)


async def test_a_hundred_engines_come_and_go_by_slices_with_drops_and_410s_and_no_request_is_lost(
    engines: Engines, api: KubernetesApi
) -> None:
    told = 0

    def tell(addresses: list[str]) -> None:
        nonlocal told
        told += 1
        if told % 3 == 1:
            api.drop()
        if told % 3 == 2:
            api.drop()
            api.forget()
        half = len(addresses) // 2
        api.slice("vllm-a", dict.fromkeys(addresses[:half], True), engines.port)
        api.slice("vllm-b", dict.fromkeys(addresses[half:], True), engines.port)

    tell([await engines.start(number) for number in range(1, 6)])
    async with serving(config("k8s:serving/vllm")) as (cluster, url):
        await grow_and_shrink(cluster, url, engines, tell)


async def test_a_source_that_fails_or_tells_of_none_keeps_its_engines(
    engines: Engines, name_server: NameServer, caplog: pytest.LogCaptureFixture
) -> None:
    address = await engines.start(1)
    text = f"dns:vllm:{engines.port}"
    name_server.records = {("vllm.", "A"): [address]}
    caplog.set_level("INFO", "llmserve")
    async with serving(config(text)) as (cluster, url), aiohttp.ClientSession() as session:
        await until(lambda: all(cluster.engines_ready.values()) and bool(cluster.engines_ready))
        assert f"{text}: 1 engines (1 new): {address}:{engines.port}" in caplog.text
        name_server.code = "SERVFAIL"
        await until(lambda: "DNS does not tell A of vllm" in cluster.membership.looked[text].trouble)
        assert "the 1 engines found before stay" in caplog.text
        name_server.code, name_server.records = "", {}
        await until(lambda: cluster.membership.looked[text].trouble == "it tells of no ready engine")
        assert (await ask(session, url))[0] == 200
        async with session.get(f"{url}/metrics") as response:
            metrics = await response.text()
        assert f'llmserve_source_failing{{source="{text}"}} 1' in metrics
        assert f'llmserve_source_engines{{source="{text}"}} 1' in metrics
        name_server.records = {("vllm.", "A"): [address]}
        await until(lambda: not cluster.membership.looked[text].trouble)


async def test_an_engine_that_the_settings_and_a_source_name_stays_until_neither_does(
    engines: Engines, name_server: NameServer
) -> None:
    first, second = [await engines.start(number) for number in (1, 2)]
    url_of = {address: f"http://{address}:{engines.port}" for address in (first, second)}
    text = f"dns:vllm:{engines.port}"
    name_server.records = {("vllm.", "A"): [first, second]}
    now = config(text, url_of[first])
    reloader = Reloader(now, lambda: now)
    async with serving(now, reloader) as (cluster, _):
        await until(lambda: len(cluster.engines_ready) == 2)
        assert cluster.membership.source_of(f"{first}:{engines.port}") == f"{text}, settings"
        now = config(url_of[first])
        await reloader.reload()
        await until(lambda: cluster.engines_ready.keys() == engines.names([first]))
        assert cluster.membership.looked == {}
        now = config(text)
        await reloader.reload()
        await until(lambda: len(cluster.engines_ready) == 2)
        assert cluster.membership.source_of(f"{first}:{engines.port}") == text


async def test_operators_see_what_is_found(engines: Engines, name_server: NameServer, tmp_path: Path) -> None:
    address = await engines.start(1)
    text = f"dns:vllm:{engines.port}"
    name_server.records = {("vllm.", "A"): [address]}
    (tmp_path / "admin").write_text("admin\n")
    own = ServerConfig(port=0, admin_key_file=str(tmp_path / "admin"))
    engine_config = EngineConfig(engine=(text,))
    async with (
        serving(Config(server=own, engines=engine_config)) as (cluster, url),
        aiohttp.ClientSession() as session,
    ):
        await until(lambda: any(cluster.engines_ready.values()))
        async with session.get(f"{url}/admin/engines", headers={"authorization": "Bearer admin"}) as response:
            told = await response.json()
        name = f"{address}:{engines.port}"
        assert told["sources"] == [{"source": text, "engines": [name], "trouble": None}]
        assert [engine["source"] for engine in told["engines"]] == [text]
        async with session.get(f"{url}/events") as response:
            async for line in response.content:
                if line.startswith(b"data: "):
                    assert json.loads(line[6:])["sources"] == [{"name": text, "engines": 1, "trouble": ""}]
                    break


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (("dns:a:b",), "is neither dns:NAME:PORT"),
        (("dns:a:70000",), "is neither dns:NAME:PORT"),
        (("gpu=dns:a:1",), "only a URL can have a worker"),
        (("k8s:a/b/c",), "is not k8s:NAMESPACE/SERVICE"),
        (("inferencepool:a/b:1",), "is not inferencepool:NAMESPACE/NAME"),
    ],
)
def test_a_source_has_one_of_four_forms(entries: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(engine=entries).check()


def test_kubernetes_needs_a_pod() -> None:
    from llmserve.server.serving import checked

    with pytest.raises(ConfigError, match="k8s:a/b needs a pod of Kubernetes"):
        checked(config("k8s:a/b"))
