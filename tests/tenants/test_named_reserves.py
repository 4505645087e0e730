"""Reserves of budgets that outlive the process that has made them."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_budgets import Clock, amounts, call_of, limits_of

from llmserve.tenants.budgets import Ledger
from llmserve.tenants.limits import KeyCharge, KeyLimits
from llmserve.tenants.usage_file import Entry, UsageFile

TODAY, MONTH = Entry("alice", "2026-11-23", "tokens"), Entry("alice", "2026-11", "tokens")
BOTH = {"tokens_per_day": 100.0, "tokens_per_month": 100.0}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "usage.sqlite"


class Process:
    """A process of a server, with its ledger. It is killed unless it is closed."""

    def __init__(self, path: Path, **budgets: float) -> None:
        self.ledger = Ledger(UsageFile(path), Clock(), "server")
        self.limits: KeyLimits = limits_of(self.ledger, **(budgets or BOTH))
        self.written: list[str] = []
        self.ledger.on_written = self.written.extend

    async def charged(self, name: str, tokens: float, *, again: bool = False) -> KeyCharge:
        charge = self.limits.account("alice").named_charge("m", name, again=again)
        assert charge is not None
        reserving = charge.reserve(call_of(), 0.0, tokens)
        if reserving is not None:
            await reserving
        return charge


async def test_the_next_process_settles_what_an_earlier_one_has_reserved(path: Path) -> None:
    await Process(path).charged("relay/1", 80)
    after = Process(path)
    charge = await after.charged("relay/1", 80, again=True)
    assert after.ledger.spent(TODAY) == 80.0, "it is reserved once"
    charge.settle(call_of(), 0.0, 30)
    await after.ledger.close()
    assert amounts(path) == {TODAY: 30.0, MONTH: 30.0}
    assert after.written == ["relay/1"]
    assert Process(path).ledger.take_over("relay/1") == []


async def test_what_nobody_takes_over_is_given_back(path: Path) -> None:
    before = Process(path)
    for name in ("relay/1", "relay/2"):
        await before.charged(name, 40)
    after = Process(path)
    await after.charged("relay/2", 40, again=True)
    after.ledger.give_up_rest()
    await after.ledger.close()
    assert amounts(path) == {TODAY: 40.0, MONTH: 40.0}


async def test_what_is_written_is_not_settled_twice(path: Path) -> None:
    before = Process(path)
    charge = await before.charged("relay/1", 80)
    charge.settle(call_of(), 0.0, 30)
    assert Process(path).ledger.has_left("relay/1"), "a process that is killed now has not written it"
    await before.ledger.close()
    assert not Process(path).ledger.has_left("relay/1")


async def test_who_was_admitted_is_not_refused_again(path: Path) -> None:
    """What was reserved was lost before it was written, and another request has taken the budget meanwhile."""
    after = Process(path)
    await after.charged("relay/2", 90)
    charge = await after.charged("relay/1", 80, again=True)
    charge.settle(call_of(), 0.0, 5)
    await after.ledger.close()
    assert amounts(path) == {TODAY: 95.0, MONTH: 95.0}


async def test_an_answer_that_ends_before_its_reserve_is_written_pays_what_it_used(path: Path) -> None:
    process = Process(path)
    charge = process.limits.account("alice").named_charge("m", "relay/1", again=True)
    assert charge is not None
    reserving = charge.reserve(call_of(), 0.0, 80)
    charge.settle(call_of(), 0.0, 30)
    assert reserving is not None
    await reserving
    await process.ledger.close()
    assert amounts(path) == {TODAY: 30.0, MONTH: 30.0}


async def test_a_budget_that_was_removed_meanwhile_gets_its_reserve_back(path: Path) -> None:
    await Process(path).charged("relay/1", 80)
    after = Process(path, tokens_per_day=100.0)
    charge = await after.charged("relay/1", 80, again=True)
    charge.settle(call_of(), 0.0, 30)
    await after.ledger.close()
    assert amounts(path) == {TODAY: 30.0, MONTH: 0.0}


async def test_another_server_takes_over_nothing(path: Path) -> None:
    await Process(path).charged("relay/1", 80)
    other = Ledger(UsageFile(path), Clock(), "another server")
    assert not other.has_left("relay/1")
    assert other.spent(TODAY) == 80.0
