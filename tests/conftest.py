"""Fixtures shared by several folders of tests, and the lanes in which tests run (pyproject.toml lists the markers)."""

from __future__ import annotations

import os
from pathlib import Path

# What numpy, torch and matplotlib read when they are imported, here or in a process that a test starts. Matrices are
# small: threads that wait for each other on shared cores cost more time than they save.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["MATPLOTLIBRC"] = str(Path(__file__).parent / "kit" / "matplotlibrc")
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else its import asks another host

import resource
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import hypothesis
import pytest
from front import Front, StartFront, until
from relays_here import serving_with_relays

from llmserve.engines.timed.server import FakeEngine
from llmserve.server.serving import serving
from llmserve.settings.policies import SchedulingConfig
from llmserve.settings.tree import Config, EngineConfig, LiveConfig, ServerConfig

# Servers that tests start take over that a signal is ignored, as under nohup; then a hangup would end none of them.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# On a shared machine with two workers the duration of one example says little.
hypothesis.settings.register_profile("shared machine", deadline=None)
hypothesis.settings.load_profile("shared machine")

ONE_AT_A_TIME = (  # prefixes of test ids, marked `serial` unless they need vLLM
    "tests/live/test_fleet.py::test_after_thousands_of_disconnects",
    "tests/live/test_live_equals_simulated.py",
    "tests/predictor/test_predictor_process.py::test_the_event_loop_keeps_ticking",
    "tests/predictor/test_predictor_state.py::test_no_slice_stops_an_event_loop",
    "tests/vllm/",
)
SLOW_FIXTURES = {"shipped", "written"}  # the demo model, and the output of every reproduction
SLOW = (  # prefixes of test ids: whole files or single cases
    "tests/planning/test_replan.py::test_few_models_move_if_necessary",
    "tests/scheduling/test_engines.py::test_after_100_000_random_disconnects",
    "tests/simulation/test_against_theory.py",
    "tests/simulation/test_many_runs.py",
    "tests/simulation/test_simulate.py::test_independent_slots_have_the_known_waiting_times",
    "tests/server/test_serve_plan.py::test_an_engine_that_is_silent_at_the_start",
    "tests/server/test_serve_plan.py::test_groups_are_processes",
    "tests/server/test_serve_plan.py::test_killing_one_groups_process",
    "tests/server/test_soak.py",
    "tests/worlds/test_laws.py",
    "tests/worlds/test_mutations.py::test_a_planted_bug_is_found",
    "tests/worlds/test_worlds.py::test_a_swarm_by_time",
    "tests/worlds/test_worlds.py::test_every_message",
    "tests/worlds/test_worlds.py::test_the_script_runs_a_swarm",
)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests of the lists above."""
    if item.nodeid.startswith(SLOW) or SLOW_FIXTURES.intersection(getattr(item, "fixturenames", ())):
        item.add_marker("slow")
    if item.nodeid.startswith(ONE_AT_A_TIME) and not item.get_closest_marker("vllm"):
        item.add_marker("serial")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each pytest-xdist worker whole files, so that a file's fixtures are built once, and one worker all tests
    that must not run beside each other. (pytest-xdist's `--dist loadgroup` groups nothing under pytest 9.2.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "one at a time" if nodeid.startswith(ONE_AT_A_TIME) else nodeid.partition("::")[0]

    return ByFile(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print CPU time. The workers of pytest-xdist have ended by now, so that their time counts for the children."""
    spent = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu_s = sum(usage.ru_utime + usage.ru_stime for usage in spent)
    terminalreporter.write_line(f"{cpu_s:.0f} CPU-seconds (user and system) in all processes of this run")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--relays", type=int, default=0, help="run the servers of start_front with so many relays")


@pytest.fixture
def relays(request: pytest.FixtureRequest) -> int:
    """Relays of the servers that start_front starts; 0: the server itself has the connections."""
    return int(request.config.getoption("--relays"))


@pytest.fixture
async def start_front(relays: int) -> AsyncIterator[StartFront]:
    """`await start_front(engine, ..., scheduling={...}, config={...})` starts a server; the test's end stops it."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))

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
            server = serving_with_relays(config, relays) if relays else serving(config)
            cluster, url = await stack.enter_async_context(server)
            front = Front(cluster, url, session)
            if wait:
                await until(lambda: all(cluster.engines_ready.values()))
            return front

        yield start
