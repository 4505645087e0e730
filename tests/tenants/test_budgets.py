"""Budgets by day and month, and the file that keeps them."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from calls import a_call
from front import until
from server_process import Server

from llmserve.calls.in_flight import InFlightCall
from llmserve.engines.timed.server import FakeEngine
from llmserve.errors import BadRequest, ConfigError, RateLimited
from llmserve.settings.tree import Config, ServerConfig
from llmserve.tenants.budgets import Ledger
from llmserve.tenants.key_file import Budgets, KeyFile, KeyPolicy, Limits, Price
from llmserve.tenants.keys import keys_of
from llmserve.tenants.limits import KeyCharge, KeyLimits
from llmserve.tenants.usage_file import Entry, Reserve, UsageFile, admit
from predictor.prompt import Prompt

NOBODY: Any = None
NOON = datetime(2026, 11, 23, 12, tzinfo=UTC).timestamp()
MONTHS_END = datetime(2026, 12, 1, tzinfo=UTC).timestamp()
TODAY = Entry("alice", "2026-11-23", "tokens")


class Clock:
    def __init__(self, at_s: float = NOON) -> None:
        self.at_s = at_s

    def __call__(self) -> float:
        return self.at_s


def limits_of(ledger: Ledger, prices: Mapping[str, Price] | None = None, **budgets: float) -> KeyLimits:
    policy = KeyPolicy(budgets=Budgets(**budgets))  # type: ignore[arg-type]
    file = KeyFile(keys={"alice": "sk-1"}, policies={"alice": policy}, prices=prices or {})
    return KeyLimits(file, ledger=ledger)


def call_of(model: str = "m") -> InFlightCall:
    return InFlightCall(a_call("/v1/completions", b"", Prompt("", model), stream=False), 1, NOBODY)


async def charged(limits: KeyLimits, prompt: float, output: float, model: str = "m") -> tuple[KeyCharge, InFlightCall]:
    charge = limits.account("alice").charge(model)
    assert charge is not None
    call = call_of(model)
    reserving = charge.reserve(call, prompt, output)
    assert reserving is not None, "budgets are asked in the file"
    await reserving
    return charge, call


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "usage.sqlite"


def amounts(path: Path, periods: Sequence[str] = ("2026-11-23", "2026-11", "2026-12")) -> dict[Entry, float]:
    file = UsageFile(path)
    spent, _ = file.update({}, periods)
    file.close()
    return spent


async def test_a_budget_reserves_and_settles_by_day_and_month(path: Path) -> None:
    ledger = Ledger(UsageFile(path), Clock())
    limits = limits_of(ledger, tokens_per_day=1_000, tokens_per_month=10_000)
    charge, call = await charged(limits, 100, 800)
    with pytest.raises(RateLimited, match="100 tokens left of its budget of 1,000 tokens per day") as refusal:
        await charged(limits, 1, 100)
    assert refusal.value.code == "insufficient_quota"
    assert refusal.value.retry_after_s == 1.0, "a request in flight may give back enough"
    charge.settle(call, 100, 50)
    charge, call = await charged(limits, 50, 800)
    charge.settle(call, 50, 800)
    with pytest.raises(RateLimited) as refusal:
        await charged(limits, 1, 100)
    assert refusal.value.retry_after_s == pytest.approx(12 * 3600), "the next day begins at midnight of UTC"
    await ledger.close()
    assert amounts(path) == {TODAY: 1_000.0, Entry("alice", "2026-11", "tokens"): 1_000.0}


async def test_a_request_above_the_whole_budget_is_no_matter_of_time(path: Path) -> None:
    limits = limits_of(Ledger(UsageFile(path), Clock()), tokens_per_day=1_000)
    with pytest.raises(BadRequest, match="may need 1,001 tokens, but 1,000 tokens per day is this key's whole budget"):
        await charged(limits, 1, 1_000)


async def test_money_goes_by_the_models_price(path: Path) -> None:
    prices = {"m": Price(input=1.0, output=10.0)}
    limits = limits_of(Ledger(UsageFile(path), Clock()), prices, money_per_month=0.01)
    charge, call = await charged(limits, 1_000, 500)  # 0.001 + 0.005
    with pytest.raises(RateLimited, match=r"0\.004 of money left"):
        await charged(limits, 0, 500)
    charge.settle(call, 1_000, 100)
    await charged(limits, 0, 500)
    with pytest.raises(BadRequest, match="the model 'other' has no price"):
        await charged(limits, 0, 1, model="other")


async def test_a_new_day_has_a_new_budget_and_a_request_is_settled_in_its_own(path: Path) -> None:
    clock = Clock(MONTHS_END - 60)
    ledger = Ledger(UsageFile(path), clock)
    limits = limits_of(ledger, tokens_per_month=100)
    charge, call = await charged(limits, 0, 90)
    clock.at_s = MONTHS_END
    await charged(limits, 0, 100)
    charge.settle(call, 0, 10)
    await ledger.close()
    assert amounts(path) == {Entry("alice", "2026-11", "tokens"): 10.0, Entry("alice", "2026-12", "tokens"): 100.0}


async def test_a_restart_remembers_what_was_spent(path: Path) -> None:
    ledger = Ledger(UsageFile(path), Clock())
    await charged(limits_of(ledger, tokens_per_day=100), 0, 80)
    await ledger.close()
    limits = limits_of(Ledger(UsageFile(path), Clock()), tokens_per_day=100)
    with pytest.raises(RateLimited):
        await charged(limits, 0, 30)
    await charged(limits, 0, 20)


async def test_a_server_sees_at_once_what_another_reserves(path: Path) -> None:
    one, other = Ledger(UsageFile(path), Clock()), Ledger(UsageFile(path), Clock())
    limits = limits_of(other, tokens_per_day=100)
    await charged(limits_of(one, tokens_per_day=100), 0, 80)
    await charged(limits, 0, 10)
    with pytest.raises(RateLimited, match="10 tokens left"):
        await charged(limits, 0, 11)
    assert amounts(path) == {TODAY: 90.0}
    await one.close()
    await other.close()


async def test_what_fits_only_some_of_the_budgets_reserves_nothing(path: Path) -> None:
    limits = limits_of(Ledger(UsageFile(path), Clock()), tokens_per_day=1_000, tokens_per_month=100)
    await charged(limits, 0, 60)
    with pytest.raises(RateLimited, match="40 tokens left of its budget of 100 tokens per month"):
        await charged(limits, 0, 50)
    assert amounts(path) == {TODAY: 60.0, Entry("alice", "2026-11", "tokens"): 60.0}
    assert [budget.reserved for budget in limits.account("alice").budgets] == [60.0, 60.0]


async def test_a_call_that_ends_while_its_budget_is_asked_gives_all_back(path: Path) -> None:
    ledger = Ledger(UsageFile(path), Clock())
    limits = limits_of(ledger, tokens_per_day=100)
    charge, call = limits.account("alice").charge("m"), call_of()
    assert charge is not None
    reserving = charge.reserve(call, 0, 80)
    assert reserving is not None
    asking = asyncio.ensure_future(reserving)
    await asyncio.sleep(0.0)
    charge.settle(call, 0.0, 0.0)
    await asking
    await charged(limits, 0, 100)
    await ledger.close()
    assert amounts(path) == {TODAY: 100.0}


async def test_many_that_ask_at_once_share_transactions(path: Path) -> None:
    file, transactions = UsageFile(path), 0
    limits = limits_of(Ledger(file, Clock()), tokens_per_day=1_000)
    update = file.update

    def counted(*args: Any) -> Any:
        nonlocal transactions
        transactions += 1
        return update(*args)

    file.update = counted  # type: ignore[method-assign]
    asked = await asyncio.gather(*[charged(limits, 0, 10) for _ in range(200)], return_exceptions=True)
    assert sum(isinstance(answer, tuple) for answer in asked) == 100
    assert transactions < 20


class FailingFile:
    """Fails while `fails`; otherwise the changes go to `written`."""

    def __init__(self) -> None:
        self.fails = False
        self.written: dict[Entry, float] = {}

    def update(
        self, changes: Mapping[Entry, float], periods: Sequence[str], asked: Sequence[Sequence[Reserve]] = ()
    ) -> tuple[dict[Entry, float], list[bool]]:
        if self.fails:
            raise sqlite3.OperationalError("disk I/O error")
        for entry, amount in changes.items():
            self.written[entry] = self.written.get(entry, 0.0) + amount
        admitted = [admit(reserves, self.written) for reserves in asked]
        return dict(self.written), admitted

    def close(self) -> None:
        pass


async def test_what_cannot_be_written_still_counts_and_is_written_later(caplog: pytest.LogCaptureFixture) -> None:
    file = FailingFile()
    ledger = Ledger(file, Clock())
    limits = limits_of(ledger, tokens_per_day=100)
    file.fails = True
    await charged(limits, 0, 60)
    await ledger._flush()
    await ledger._flush()
    assert caplog.text.count("disk I/O error") == 1, "a failure is logged once"
    with pytest.raises(RateLimited):
        await charged(limits, 0, 50)
    file.fails = False
    await ledger._flush()
    assert file.written == {TODAY: 60.0}


async def test_what_is_spent_during_a_write_counts_at_once_and_is_written_next(path: Path) -> None:
    file = UsageFile(path)
    ledger = Ledger(file, Clock())
    ledger.add(TODAY, 1.0)
    writing, go_on = threading.Event(), threading.Event()
    update = file.update

    def slow(*args: Any) -> Any:
        writing.set()
        assert go_on.wait(30.0)
        return update(*args)

    file.update = slow  # type: ignore[method-assign]
    flushing = asyncio.ensure_future(ledger._flush())
    await asyncio.to_thread(writing.wait, 30.0)
    ledger.add(TODAY, 2.0)
    go_on.set()
    await flushing
    assert ledger.spent(TODAY) == 3.0
    await ledger._flush()
    assert ledger.spent(TODAY) == 3.0
    assert amounts(path) == {TODAY: 3.0}


async def test_a_running_ledger_writes_by_itself(path: Path) -> None:
    ledger = Ledger(UsageFile(path), Clock())
    ledger.start()
    ledger.add(TODAY, 7.0)
    async with asyncio.timeout(30.0):
        while amounts(path) != {TODAY: 7.0}:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await ledger.close()


ADDING = """
import sys
from pathlib import Path
from llmserve.tenants.usage_file import Entry, UsageFile

file = UsageFile(Path(sys.argv[1]))
for _ in range(200):
    file.update({Entry("alice", "2026-11-23", "tokens"): 1.0}, [])
"""


def test_two_servers_on_one_file_lose_nothing(path: Path) -> None:
    adding = [subprocess.Popen([sys.executable, "-c", ADDING, str(path)]) for _ in range(2)]
    assert [process.wait(timeout=120) for process in adding] == [0, 0]
    assert amounts(path) == {TODAY: 400.0}


KILLED = """
import os, signal, sys
from pathlib import Path
from llmserve.tenants.usage_file import Entry, UsageFile

file = UsageFile(Path(sys.argv[1]))
file.update({Entry("alice", "2026-11-23", "tokens"): 5.0}, [])
file._connection.execute("BEGIN IMMEDIATE")
file._connection.execute("UPDATE spent SET amount = 77")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_server_killed_in_mid_write_leaves_the_last_whole_one(path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", KILLED, str(path)], timeout=120).returncode < 0
    assert amounts(path) == {TODAY: 5.0}


def test_a_file_of_something_else_is_an_error_that_names_it(tmp_path: Path) -> None:
    other = tmp_path / "notes"
    other.write_text("not a database, but long enough to be taken for one" * 9)
    with pytest.raises(ConfigError, match=r"usage_file: cannot use .*notes"):
        UsageFile(other)
    foreign = tmp_path / "foreign.sqlite"
    sqlite3.connect(foreign).execute("CREATE TABLE songs (name)").connection.close()
    with pytest.raises(ConfigError, match="is no file of llmserve's budgets"):
        UsageFile(foreign)
    with pytest.raises(ConfigError, match="usage_file"):
        UsageFile(tmp_path / "nowhere" / "usage.sqlite")


def test_only_its_owner_can_read_the_file(path: Path) -> None:
    UsageFile(path).close()
    assert path.stat().st_mode & 0o777 == 0o600


async def test_a_changed_budget_keeps_what_is_spent_and_reserved(path: Path) -> None:
    ledger = Ledger(UsageFile(path), Clock())
    limits = limits_of(ledger, tokens_per_day=100)
    await charged(limits, 0, 80)
    more = KeyPolicy(budgets=Budgets(tokens_per_day=200))
    limits.change(KeyFile(keys={"alice": "sk-1"}, policies={"alice": more}), Limits())
    (budget,) = limits.account("alice").budgets
    assert budget.described() == {
        **{"key": "alice", "unit": "tokens", "per": "day"},
        **{"limit": 200, "spent": 0, "reserved": 80},
    }
    await charged(limits, 0, 120)


async def test_a_budget_tells_what_is_reserved(path: Path) -> None:
    limits = limits_of(Ledger(UsageFile(path), Clock()), tokens_per_day=100)
    (budget,) = limits.account("alice").budgets
    charge, call = await charged(limits, 10, 50)
    assert (budget.left, budget.reserved) == (40, 60)
    charge.settle(call, 10, 0)
    assert (budget.left, budget.reserved) == (90, 0)


# ---- settings ----


def test_budgets_need_a_file_that_keeps_them(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[keys.alice]\nkey = "sk-1"\ntokens_per_day = 5\n')
    server = ServerConfig(api_key_file=str(keys))
    with pytest.raises(ConfigError, match=r"keys\.toml: budgets need .*--usage-file or --state"):
        keys_of(Config(server=server))
    keys_of(Config(server=msgspec.structs.replace(server, state=str(tmp_path))))
    keys_of(Config(server=msgspec.structs.replace(server, usage_file=str(tmp_path / "usage"))))


def test_a_usage_file_without_budgets_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="usage_file: only a TOML file"):
        keys_of(Config(server=ServerConfig(usage_file=str(tmp_path / "usage"))))


# ---- a crash --------------------------------------------------------------------------------------------------------


def today() -> list[str]:
    """The present day of UTC, and its neighbours."""
    now = datetime.now(UTC)
    return [f"{now + timedelta(days=days):%Y-%m-%d}" for days in (-1, 0, 1)]


async def test_a_killed_server_forgets_no_more_than_its_last_second(tmp_path: Path) -> None:
    """What was written is spent, and what was in flight stays reserved."""
    async with FakeEngine(step_s=0.02) as engine:
        keys = tmp_path / "keys.toml"
        keys.write_text('[keys.alice]\nkey = "sk-1"\ntokens_per_day = 1000\n')
        flags = ("--engine", engine.url, "--api-key-file", str(keys), "--state", str(tmp_path))

        async def ask(session: aiohttp.ClientSession, url: str, tokens: int) -> int:
            body = {"model": "fake", "prompt": "x", "max_tokens": tokens}
            headers = {"authorization": "Bearer sk-1"}
            async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
                return response.status

        server = await asyncio.to_thread(Server, *flags)
        async with aiohttp.ClientSession() as session:
            try:
                assert await ask(session, server.url, 100) == 200
                in_flight = asyncio.ensure_future(ask(session, server.url, 600))
                await until(lambda: sum(amounts(tmp_path / "usage.sqlite", today()).values()) > 700)
                server.process.kill()
                with pytest.raises(aiohttp.ClientError):
                    await in_flight
            finally:
                server.close()
            server = await asyncio.to_thread(Server, *flags)
            try:
                assert await ask(session, server.url, 400) == 429
                assert await ask(session, server.url, 5) == 200
            finally:
                server.close()
