"""Keys, limits and engines change while the server runs: all or nothing."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from front import StartFront, until
from server_process import Server

from llmserve.engines.timed.server import FakeEngine
from llmserve.errors import ConfigError
from llmserve.live.cluster import LiveCluster
from llmserve.live.engine_state import EngineEvent
from llmserve.server.reload import Reloader
from llmserve.server.serving import serving
from llmserve.settings.tree import ApiConfig, Config, EngineConfig, LiveConfig, ServerConfig

ADMIN = {"authorization": "Bearer admin"}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def files(tmp_path: Path, alice: str = "") -> ServerConfig:
    write_keys(tmp_path, alice)
    admin = tmp_path / "admin"
    admin.write_text("admin\n")
    return ServerConfig(port=0, api_key_file=str(tmp_path / "keys.toml"), admin_key_file=str(admin))


def write_keys(tmp_path: Path, alice: str, key: str = "sk-1") -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[keys.alice]\nkey = "{key}"\n{alice}\n')
    path.chmod(0o600)


async def test_keys_and_limits_are_read_again(start_front: StartFront, tmp_path: Path) -> None:
    async with FakeEngine(step_s=0.02) as engine:
        front = await start_front(engine, server=files(tmp_path))

        async def reload(headers: dict[str, str] = ADMIN) -> tuple[int, Any]:
            async with front.session.post(f"{front.url}/admin/reload", headers=headers) as response:
                return response.status, await response.json()

        async def status(key: str) -> int:
            async with front.post(headers=bearer(key), max_tokens=10) as response:
                await response.read()
                return int(response.status)

        assert await status("sk-1") == 200
        in_flight = asyncio.ensure_future(status("sk-1"))
        await until(lambda: engine.running == 1)
        write_keys(tmp_path, "requests_per_minute = 1", key="sk-9")
        assert await reload() == (200, {"engines": sorted(front.cluster.engines_ready)})
        assert await in_flight == 200, "requests in flight of a key that is gone end normally"
        assert [await status(key) for key in ("sk-1", "sk-9", "sk-9")] == [401, 200, 429]
        write_keys(tmp_path, "request_per_minute = 5", key="sk-8")
        code, body = await reload()
        assert (code, body["error"]["code"]) == (400, "configuration")
        assert "[keys.alice]: unknown field 'request_per_minute'" in body["error"]["message"]
        assert [await status(key) for key in ("sk-8", "sk-9")] == [401, 429], "nothing has changed"
        assert (await reload(bearer("sk-9")))[0] == 401


async def test_a_budget_needs_a_file_on_reload_too(start_front: StartFront, tmp_path: Path) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine, server=files(tmp_path))
        write_keys(tmp_path, "tokens_per_day = 5")
        async with front.session.post(f"{front.url}/admin/reload", headers=ADMIN) as response:
            assert response.status == 400
            assert "--usage-file" in (await response.json())["error"]["message"]


# ---- engines --------------------------------------------------------------------------------------------------------


class Reloading:
    """A server whose settings a test changes: `change` gives it other ones and reloads."""

    def __init__(self, *engines: FakeEngine, server: ServerConfig = ServerConfig(port=0)) -> None:  # noqa: B008
        self.config = Config(
            server=server,
            engines=EngineConfig(engine=tuple(engine.url for engine in engines), slots=2, look_ahead=0),
            live=LiveConfig(probe_every_s=0.05),
        )
        self._reloader = Reloader(self.config, lambda: self.config)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Reloading:
        self.cluster, self.url = await self._stack.enter_async_context(serving(self.config, self._reloader))
        self._session = await self._stack.enter_async_context(aiohttp.ClientSession())
        await until(lambda: all(self.cluster.engines_ready.values()))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    cluster: LiveCluster
    url: str

    async def change(self, *engines: FakeEngine | str, **sections: Any) -> None:
        urls = tuple(engine if isinstance(engine, str) else engine.url for engine in engines)
        engine_config = EngineConfig(engine=urls, slots=2, look_ahead=0)
        self.config = Config(
            **{"server": ServerConfig(port=0), "live": self.config.live, **sections}, engines=engine_config
        )
        await self._reloader.reload()

    async def ask(self, model: str = "fake", tokens: int = 5) -> tuple[int, str | None]:
        body = {"model": model, "prompt": "hello", "max_tokens": tokens}
        async with self._session.post(f"{self.url}/v1/completions", json=body) as response:
            await response.read()
            return response.status, response.headers.get("x-llmserve-engine")


def name(engine: FakeEngine) -> str:
    return engine.url.removeprefix("http://")


async def test_an_engine_that_is_added_gets_requests() -> None:
    async with FakeEngine(step_s=0.002) as one, FakeEngine(step_s=0.002, model="new") as new, Reloading(one) as server:
        assert (await server.ask("new"))[0] == 404
        await server.change(one, new)
        await until(lambda: "new" in server.cluster.models)
        assert await server.ask("new") == (200, name(new))
        assert await server.ask() == (200, name(one))
        await server.change(one)
        await until(lambda: "new" not in server.cluster.models)
        assert (await server.ask("new"))[0] == 404


async def test_an_engine_that_is_removed_finishes_its_requests_and_goes() -> None:
    async with FakeEngine(step_s=0.01) as one, FakeEngine(step_s=0.01) as other, Reloading(one, other) as server:
        running = [asyncio.ensure_future(server.ask(tokens=40)) for _ in range(4)]
        await until(lambda: one.running == other.running == 2)
        await server.change(one)
        assert name(other) in server.cluster.fleet.handles
        assert [status for status, _ in await asyncio.gather(*running)] == [200] * 4
        await until(lambda: name(other) not in server.cluster.fleet.handles)
        assert {await server.ask() for _ in range(4)} == {(200, name(one))}
        await server.change(one, other)
        await until(lambda: server.cluster.engines_ready.get(name(other), False))
        answered = await asyncio.gather(*[server.ask(tokens=20) for _ in range(4)])
        assert {engine for _, engine in answered} == {name(one), name(other)}


async def test_an_engine_that_comes_back_before_it_is_empty_stays() -> None:
    async with FakeEngine(step_s=0.01) as one, FakeEngine(step_s=0.01) as other, Reloading(one, other) as server:
        running = [asyncio.ensure_future(server.ask(tokens=30)) for _ in range(4)]
        await until(lambda: one.running == other.running == 2)
        handle = server.cluster.fleet.handles[name(other)]
        await server.change(one)
        await server.change(one, other)
        await asyncio.gather(*running)
        assert server.cluster.fleet.handles[name(other)] is handle
        assert server.cluster.engines_ready == {name(one): True, name(other): True}


async def test_an_engine_that_is_being_removed_cannot_be_resumed(tmp_path: Path) -> None:
    admin = tmp_path / "admin"
    admin.write_text("admin\n")
    async with FakeEngine(step_s=0.01) as one, FakeEngine(step_s=0.01) as other:
        reloading = Reloading(one, other, server=ServerConfig(port=0, admin_key_file=str(admin)))
        async with reloading as server, aiohttp.ClientSession() as session:
            running = [asyncio.ensure_future(server.ask(tokens=30)) for _ in range(4)]
            await until(lambda: one.running == other.running == 2)
            await server.change(one, server=server.config.server)
            url = f"{server.url}/admin/engines/{name(other)}/resume"
            async with session.post(url, headers=ADMIN) as response:
                assert (response.status, "is being removed" in await response.text()) == (400, True)
            await asyncio.gather(*running)


async def test_an_engine_that_was_down_while_it_is_removed_gets_no_new_requests() -> None:
    async with FakeEngine(step_s=0.01) as one, FakeEngine(step_s=0.01) as other, Reloading(one, other) as server:
        running = [asyncio.ensure_future(server.ask(tokens=50)) for _ in range(4)]
        await until(lambda: one.running == other.running == 2)
        handle = server.cluster.fleet.handles[name(other)]
        await server.change(one)
        handle.step(EngineEvent.SILENT)
        await until(lambda: handle.up)
        assert not handle.ready
        assert [status for status, _ in await asyncio.gather(*running)] == [200] * 4


async def test_an_engine_that_is_down_can_be_removed() -> None:
    async with FakeEngine(step_s=0.01) as one:
        async with FakeEngine(step_s=0.01) as other:
            server = await Reloading(one, other).__aenter__()
        try:
            await until(lambda: not server.cluster.engines_ready[name(other)])
            await server.change(one)
            await until(lambda: name(other) not in server.cluster.fleet.handles)
            assert await server.ask() == (200, name(one))
        finally:
            await server.__aexit__()


async def test_a_wrong_change_changes_nothing_and_is_named() -> None:
    async with FakeEngine(step_s=0) as one, FakeEngine(step_s=0) as other, Reloading(one) as server:
        for engines, sections, message in (
            ([one, other], {"server": ServerConfig(port=0, log_level="debug")}, "log_level: cannot change"),
            ([one, other, "ftp://x"], {}, "ftp://x"),
            ([one, f"{one.url}/"], {}, "given twice"),
            ([f"gpu0={one.url}"], {}, "the worker of"),
            ([one, "embedded"], {}, "only URLs can change"),
            ([one, other], {"limits": ApiConfig(concurrent_max=3, choices_max=3)}, "choices_max: cannot change"),
        ):
            with pytest.raises(ConfigError, match=message):
                await server.change(*engines, **sections)
            assert list(server.cluster.fleet.handles) == [name(one)]


async def test_the_servers_own_limits_can_change() -> None:
    async with FakeEngine(step_s=0) as one, Reloading(one) as server:
        await server.change(one, limits=ApiConfig(requests_per_minute_max=1))
        assert [(await server.ask())[0] for _ in range(2)] == [200, 429]


# ---- the signal -----------------------------------------------------------------------------------------------------


class Log:
    """The output of a server, as it comes."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def reloads(self, number: int) -> str:
        """Wait for so many reports of reloads. Returns the last."""

        def read() -> str:
            said = self._server.said
            assert self._server.process.stdout is not None
            while sum("read again" in line or "nothing is changed" in line for line in said) < number:
                line = self._server.process.stdout.readline()
                assert line, "the server ended"
                said.append(line)
            return said[-1]

        return await asyncio.to_thread(read)


async def test_sighup_reads_again_and_an_error_stops_nothing(tmp_path: Path) -> None:
    async with FakeEngine(step_s=0) as engine, FakeEngine(step_s=0, model="new") as new:
        files(tmp_path)
        config = tmp_path / "llmserve.toml"

        def write_engines(*engines: FakeEngine) -> None:
            urls = ", ".join(f'"{engine.url}"' for engine in engines)
            config.write_text(f'[engines]\nengine = [{urls}]\n[server]\napi_key_file = "{tmp_path / "keys.toml"}"\n')

        write_engines(engine)
        server = await asyncio.to_thread(Server, "--config", str(config))
        log = Log(server)

        async def ask(session: aiohttp.ClientSession, key: str, model: str = "fake") -> int:
            body = {"model": model, "prompt": "x"}
            async with session.post(f"{server.url}/v1/completions", json=body, headers=bearer(key)) as response:
                return response.status

        try:
            async with aiohttp.ClientSession() as session:
                write_keys(tmp_path, "weight = 2", key="sk-9")
                write_engines(engine, new)
                server.process.send_signal(signal.SIGHUP)
                assert "read again" in await log.reloads(1)
                assert [await ask(session, key) for key in ("sk-1", "sk-9")] == [401, 200]
                async with asyncio.timeout(30.0):
                    while await ask(session, "sk-9", "new") != 200:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                write_keys(tmp_path, "weight = -2", key="sk-8")
                write_engines(engine)
                server.process.send_signal(signal.SIGHUP)
                said = await log.reloads(2)
                assert "nothing is changed" in said
                assert "[keys.alice]: weight: expected a number, more than 0, not -2" in said
                assert [await ask(session, "sk-8"), await ask(session, "sk-9", "new")] == [401, 200]
            assert await asyncio.to_thread(server.stop) == 0
        finally:
            server.close()


@pytest.fixture
def default_sighup() -> Iterator[None]:
    """The server inherits the default, even when nohup runs the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("default_sighup")
async def test_sighup_without_files_is_a_stop() -> None:
    async with FakeEngine(step_s=0) as engine:
        server = await asyncio.to_thread(Server, "--engine", engine.url)
        try:
            assert await asyncio.to_thread(server.stop, signal.SIGHUP) == 0
        finally:
            server.close()
