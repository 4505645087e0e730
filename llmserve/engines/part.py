"""The engines of a server: those that llmserve starts, and those that run already."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from llmserve.engines.kinds import EngineTls, kinds_of
from llmserve.engines.openai import OpenAIEngine
from llmserve.engines.process import EngineProcess
from llmserve.part import Commit, Part, Server, do_nothing
from llmserve.runtime.at_once import at_once
from llmserve.settings.tree import Config


@dataclass(frozen=True)
class Connected:
    """Clients of all engines. gpus : of the engines that llmserve has started, see EngineKind.gpus"""

    engines: Sequence[OpenAIEngine]
    gpus: str | None


class Engines(Part):
    """Engines: their processes are up inside the block. Engines by URL may be down."""

    def check(self, config: Config) -> Config:
        for kind in kinds_of(config):
            kind.check()
        if config.engines.engine_tls_ca or config.engines.engine_tls_cert:
            EngineTls(config.engines).read()
        return config

    @contextlib.asynccontextmanager
    async def open(self, server: Server) -> AsyncIterator[None]:
        kinds = kinds_of(server.config, server.add(EngineTls(server.config.engines)))
        async with AsyncExitStack() as stack:
            await _start([process for kind in kinds for process in kind.processes()], stack)
            engines = [engine for kind in kinds for engine in kind.connect()]
            for engine in engines:
                stack.push_async_callback(engine.close)
            server.add(Connected(engines, next((kind.gpus for kind in kinds if kind.gpus is not None), None)))
            yield

    def change(self, server: Server, before: Config, after: Config) -> Commit:
        """The certificate that engines see, which is renewed now and then."""
        if not after.engines.engine_tls_cert:
            return do_nothing
        tls = server.get(EngineTls)
        tls.read()
        return tls.renew


async def _start(processes: list[EngineProcess], stack: AsyncExitStack) -> None:
    """Start, and later stop, all processes concurrently. The first failure ends all. Raises EngineStartError."""

    async def stop() -> None:
        await asyncio.gather(*(process.stop() for process in processes))

    stack.push_async_callback(stop)
    async with at_once() as group:
        for process in processes:
            group.create_task(process.start())
