"""Fixtures that several folders of tests share, and the lanes in which tests run (pyproject.toml lists the markers)."""

from __future__ import annotations

import resource
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from front import Front, StartFront, until

from llmserve.cluster.live import LiveConfig
from llmserve.config import Config, EngineConfig, ServerConfig
from llmserve.engines.fake import FakeEngine
from llmserve.scheduling.policies import SchedulingConfig
from llmserve.serve import serving

ONE_AT_A_TIME = pytest.mark.xdist_group("one-at-a-time")


def pytest_itemcollected(item: pytest.Item) -> None:
    """One worker of pytest-xdist takes all tests that must not run beside each other."""
    if item.get_closest_marker("vllm") or item.get_closest_marker("serial"):
        item.add_marker(ONE_AT_A_TIME)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The workers of pytest-xdist have ended by now, so that their time is our children's."""
    spent = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu_s = sum(usage.ru_utime + usage.ru_stime for usage in spent)
    terminalreporter.write_line(f"{cpu_s:.0f} CPU-seconds (user and system) in all processes of this run")


@pytest.fixture
async def start_front() -> AsyncIterator[StartFront]:
    """`await start_front(engine, ..., scheduling={...}, config={...})` starts a server; it ends with the test."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())

        async def start(
            *engines: FakeEngine | str,
            slots: int | None = 8,
            barrier: bool = False,
            look_ahead: int = 0,
            scheduling: dict[str, Any] | None = None,
            engine_idle_s: float = 30.0,
            wait: bool = True,
            **sections: Any,
        ) -> Front:
            urls = tuple(engine if isinstance(engine, str) else engine.url for engine in engines)
            config = Config(
                **{
                    "server": ServerConfig(port=0),
                    "engines": EngineConfig(
                        engine=urls, slots=slots, barrier=barrier, look_ahead=look_ahead, engine_idle_s=engine_idle_s
                    ),
                    "scheduling": SchedulingConfig(**(scheduling or {})),
                    "live": LiveConfig(probe_every_s=0.05),
                    **sections,
                }
            )
            cluster, url = await stack.enter_async_context(serving(config))
            front = Front(cluster, url, session)
            if wait:
                await until(lambda: all(cluster.engines_ready.values()))
            return front

        yield start
