"""Parts open in order and close in reverse; a reload changes all of them or none."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from front import StartFront

from llmserve.engines.timed.server import FakeEngine
from llmserve.errors import ConfigError
from llmserve.part import Commit, Part, Server
from llmserve.server.parts import PARTS
from llmserve.server.reload import Reloader
from llmserve.server.serving import each, opened, running
from llmserve.settings.tree import ApiConfig, Config, LiveConfig, ServerConfig

LOADED = """
import asyncio, sys
from llmserve.server.serving import serving
from llmserve.settings.tree import Config, EngineConfig, ServerConfig
async def main():
    engines = EngineConfig(engine=("http://127.0.0.1:1",))
    async with serving(Config(server=ServerConfig(port=0), engines=engines)):
        print(*sys.modules)
asyncio.run(main())
"""
OPTIONAL = ("sqlalchemy", "aiosqlite", "asyncpg", "alembic", "scipy", "aiohttp", "torch", "opentelemetry.sdk")
OPTIONAL_OWN = ("jobs.service", "observe.traces", "observe.access_log", "webhook.sender")


class Noted(Part):
    """Writes down what is done with the part."""

    def __init__(self, name: str, lines: list[str], *, fails: bool = False, waits: bool = False) -> None:
        self.name, self.lines, self.fails, self.waits = name, lines, fails, waits

    changeable = frozenset({"choices_max"})

    @contextlib.asynccontextmanager
    async def open(self, server: Server) -> AsyncIterator[None]:
        self.lines.append(f"open {self.name}")
        if self.fails:
            raise ConfigError(f"{self.name} fails")
        try:
            if self.waits:
                await asyncio.Event().wait()
            yield
        finally:
            self.lines.append(f"close {self.name}")

    @contextlib.asynccontextmanager
    async def run(self, server: Server) -> AsyncIterator[None]:
        self.lines.append(f"run {self.name}")
        yield
        self.lines.append(f"end {self.name}")

    def change(self, server: Server, before: Config, after: Config) -> Commit:
        self.lines.append(f"check {self.name}")
        if self.fails:
            raise ConfigError(f"{self.name} refuses")
        return lambda: self.lines.append(f"change {self.name} to {after.limits.choices_max}")


async def test_parts_open_and_run_in_order_and_end_in_reverse() -> None:
    lines: list[str] = []
    parts = (Noted("a", lines), Noted("b", lines))
    server = Server(Config())
    async with opened(parts, server), running(parts, server):
        assert lines == ["open a", "open b", "run a", "run b"]
    assert lines[4:] == ["end b", "end a", "close b", "close a"]


async def test_a_part_that_cannot_open_closes_those_before_and_keeps_those_behind_shut() -> None:
    lines: list[str] = []
    parts = (Noted("a", lines), Noted("b", lines, fails=True), Noted("c", lines))
    with pytest.raises(ConfigError, match="b fails"):
        async with opened(parts, Server(Config())):
            pass
    assert lines == ["open a", "open b", "close a"]


async def test_parts_that_open_at_the_same_time_end_with_the_first_that_fails() -> None:
    lines: list[str] = []
    parts = (Noted("a", lines), (Noted("slow", lines, waits=True), Noted("b", lines, fails=True)))
    async with asyncio.timeout(5):
        with pytest.raises(ConfigError, match="b fails"):
            async with opened(parts, Server(Config())):
                pass
    assert lines == ["open a", "open slow", "open b", "close slow", "close a"]


def reloader(lines: list[str], after: Config, *, second_fails: bool = False) -> Reloader:
    reloader = Reloader(Config(), lambda: after)
    reloader.follow(Server(Config()), [Noted("a", lines), Noted("b", lines, fails=second_fails)])
    return reloader


async def test_all_parts_check_other_settings_before_the_first_changes() -> None:
    lines: list[str] = []
    await reloader(lines, Config(limits=ApiConfig(choices_max=2))).reload()
    assert lines == ["check a", "check b", "change a to 2", "change b to 2"]


async def test_what_one_part_refuses_changes_no_part() -> None:
    lines: list[str] = []
    with pytest.raises(ConfigError, match="b refuses"):
        await reloader(lines, Config(limits=ApiConfig(choices_max=2)), second_fails=True).reload()
    assert lines == ["check a", "check b"]


async def test_a_setting_that_no_part_can_change_is_refused_by_name() -> None:
    lines: list[str] = []
    after = Config(limits=ApiConfig(choices_max=2), live=LiveConfig(probe_s=1.0))
    with pytest.raises(ConfigError, match=r"^probe_s: cannot change while the server runs: restart it$"):
        await reloader(lines, after).reload()
    assert lines == []


async def test_a_server_that_is_starting_reads_nothing_again() -> None:
    with pytest.raises(ConfigError, match="is starting"):
        await Reloader(Config()).reload()


def test_things_that_parts_make_are_found_by_their_types() -> None:
    server = Server(Config())
    assert server.find(str) is None
    assert server.add("a thing") == server.get(str) == "a thing"
    with pytest.raises(AssertionError, match="two parts make a str"):
        server.add("another")
    with pytest.raises(AssertionError, match="no part before makes a int"):
        server.get(int)


def test_the_settings_that_may_change_are_those_of_keys_and_engines() -> None:
    changeable = {name for part in each(PARTS) for name in part.changeable}
    limits = {"concurrent_max", "requests_per_minute_max", "tokens_per_minute_max", "limits_part"}
    assert changeable == {"engine", *limits}


async def test_a_file_that_is_checked_and_then_opened_is_warned_of_once(
    start_front: StartFront, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice: sk-1\n")
    keys.chmod(0o644)
    async with FakeEngine() as engine:
        await start_front(engine, server=ServerConfig(port=0, api_key_file=str(keys)))
    warnings = [record.message for record in caplog.records if "other users of this machine" in record.message]
    assert warnings == [f"other users of this machine can read or change {keys}: run `chmod 600 {keys}`"], "two uses"


def test_a_server_imports_nothing_of_a_feature_that_is_off() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "llmserve.webhook.part" in loaded, "a loaded module must be found"
    assert loaded.isdisjoint([*OPTIONAL, *[f"llmserve.{name}" for name in OPTIONAL_OWN]])
