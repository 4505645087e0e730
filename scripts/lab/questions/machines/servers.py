"""Gateways, groups and engines without Ray: the same programs with the same settings, where nothing is killed."""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
from kit.servers import Server, fake_engine, module, running

from llmserve.machines.processes import DOOR_SETTINGS, GROUP_SETTINGS, as_toml, merged

KEY = "sk-gateways"


@asynccontextmanager
async def gateway_and_groups(models: Sequence[str], *engine_flags: str) -> AsyncIterator[tuple[Server, list[Server]]]:
    """A gateway, and a group with one timed engine for each model."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "key").write_text(f"gateway: {KEY}\n")
        (folder / "key").chmod(0o600)
        groups = []
        for model in models:
            engine = await stack.enter_async_context(fake_engine(model, *engine_flags))
            settings = merged(
                GROUP_SETTINGS,
                {"server": {"gateway_key_file": str(folder / "key")}, "engines": {"engine": [engine.url], "slots": 64}},
            )
            groups.append(await stack.enter_async_context(_serve(folder, f"group of {model}", settings)))
        own = {"engine": [group.url for group in groups], "engines_are_groups": True}
        settings = merged(DOOR_SETTINGS, {"engines": own})
        gateway = await stack.enter_async_context(_serve(folder, "gateway", settings))
        yield gateway, groups


def _serve(folder: Path, name: str, settings: dict[str, dict[str, Any]]) -> AbstractAsyncContextManager[Server]:
    file = folder / f"{name}.toml"
    file.write_text(as_toml(settings))
    environment = {"LLMSERVE_ENGINE_API_KEY": KEY} if name == "gateway" else {}
    command = module("llmserve", "serve", "--config", str(file))
    return running(name, command, ready="/ready", environment={**os.environ, **environment})


def body_of(model: str, tokens: int) -> bytes:
    messages = [{"role": "user", "content": "How long is a piece of string?"}]
    return msgspec.json.encode({"model": model, "max_tokens": tokens, "messages": messages})


class Load:
    """Requests one after the other on each of so many connections."""

    def __init__(self, session: aiohttp.ClientSession, url: str, body: bytes, key: str | None = None) -> None:
        self._session, self._url, self._body = session, f"{url}/v1/chat/completions", body
        self._headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        self.latencies_s: list[float] = []

    async def run(self, connections: int, seconds: float) -> float:
        """Answers a second."""
        self.latencies_s = []
        until_s = time.perf_counter() + seconds
        began_s = time.perf_counter()
        await asyncio.gather(*(self._one(until_s) for _ in range(connections)))
        return len(self.latencies_s) / (time.perf_counter() - began_s)

    async def _one(self, until_s: float) -> None:
        while (began_s := time.perf_counter()) < until_s:
            async with self._session.post(self._url, data=self._body, headers=self._headers) as response:
                await response.read()
                assert response.status == 200, await response.text()
            self.latencies_s.append(time.perf_counter() - began_s)

    @property
    def latency_ms_p05(self) -> float:
        """Of the fastest twentieth, which other work on this machine has hardly delayed."""
        return 1e3 * statistics.quantiles(self.latencies_s, n=20)[0]


def cpu_s(servers: Iterable[Server]) -> float:
    """Processor time of the servers, without that of their supervisors."""
    processes = [child for server in servers for child in psutil.Process(server.process.pid).children()]
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))
