"""What keys have spent of their budgets by day and month, in memory and in the usage file."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal, Protocol

from llmserve.runtime.lasting import lasting
from llmserve.tenants.key_file import Budgets
from llmserve.tenants.usage_file import Entry, Held, Reserve, admit, fit

log = logging.getLogger("llmserve")

FLUSH_EVERY_S = 0.5

Unit = Literal["tokens", "money"]
Per = Literal["day", "month"]


class SpentFile(Protocol):
    """Keeps what was spent; see usage_file.py."""

    def held(self, holder: str, periods: Sequence[str]) -> dict[str, list[tuple[Entry, float]]]: ...

    def update(
        self,
        changes: Mapping[Entry, float],
        periods: Sequence[str],
        asked: Sequence[Sequence[Reserve]] = (),
        holds: Sequence[Held | None] = (),
        ended: Sequence[Held] = (),
    ) -> tuple[dict[Entry, float], list[bool]]: ...

    def close(self) -> None: ...


class Ledger:
    """What keys have spent in the present day and month. Reserves count as spent, here and in the file.

    A reserve is compared with what all servers have spent, and added, in one transaction of the file. A thread does
    that; requests that come meanwhile share the next transaction. What a request gives back is written twice a second.
    So a crash loses what was given back in the last half second, and requests in flight at a crash stay charged with
    their reserves. Neither holds for reserves with a name: a process that takes over has them by `take_over`.
    Raises ConfigError when the file cannot be used.

    wall_clock  unix time, s
    holder      of reserves with names; "": there are none

    on_written  called with the names of reserves whose use is written
    """

    def __init__(self, file: SpentFile, wall_clock: Callable[[], float] = time.time, holder: str = "") -> None:
        self.on_written: Callable[[Sequence[str]], None] | None = None
        self._holder = holder
        self._ended: list[str] = []  # names of reserves whose use is not written yet
        self._file = file
        self._wall_clock = wall_clock
        self._until_s = -1.0
        self._periods: dict[Per, tuple[str, float]] = {}  # name, and unix time of the end
        self._changes: dict[Entry, float] = {}
        self._left = file.held(holder, self._names()) if holder else {}  # by an earlier process, by name
        self._spent, _ = file.update({}, self._names())
        self._asked: list[tuple[Sequence[Reserve], str, asyncio.Future[bool]]] = []
        self._lock = asyncio.Lock()  # one transaction at a time
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._reserving: asyncio.Task[None] | None = None
        self._failing = False

    # ---- periods ----

    def period(self, per: Per) -> str:
        """The name of the present day or month of UTC."""
        return self._present(per)[0]

    def renewed_in_s(self, per: Per) -> float:
        return self._present(per)[1] - self._wall_clock()

    def _present(self, per: Per) -> tuple[str, float]:
        now_s = self._wall_clock()
        if not self._until_s - 86_400.0 <= now_s < self._until_s:
            day = datetime.fromtimestamp(now_s, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
            next_month = (day.replace(day=1) + timedelta(days=32)).replace(day=1)
            self._until_s = (day + timedelta(days=1)).timestamp()
            self._periods = {
                "day": (f"{day:%Y-%m-%d}", self._until_s),
                "month": (f"{day:%Y-%m}", next_month.timestamp()),
            }
        return self._periods[per]

    def _names(self) -> list[str]:
        return [self.period("day"), self.period("month")]

    # ---- amounts ----

    def spent(self, entry: Entry) -> float:
        return self._spent.get(entry, 0.0)

    def add(self, entry: Entry, amount: float) -> None:
        self._spent[entry] = self._spent.get(entry, 0.0) + amount
        self._changes[entry] = self._changes.get(entry, 0.0) + amount

    def take_over(self, name: str) -> list[tuple[Entry, float]]:
        """What an earlier process has reserved under this name; []: nothing, or its use is written."""
        return self._left.pop(name, [])

    def has_left(self, name: str) -> bool:
        """Whether `take_over` has something under this name."""
        return name in self._left

    def give_up_rest(self) -> None:
        """Give back what an earlier process has reserved, and nobody has taken over."""
        left, self._left = self._left, {}
        for name, reserved in left.items():
            for entry, amount in reserved:
                self.add(entry, -amount)
            self.end(name)

    def end(self, name: str) -> None:
        """Note that what was reserved under this name is settled."""
        if name:
            self._ended.append(name)

    async def reserve(self, reserves: Sequence[Reserve], name: str = "") -> bool:
        """Reserve these amounts, if all of them fit what all servers have left. True if they do. name : "": none"""
        loop = asyncio.get_running_loop()
        while True:
            admitted: asyncio.Future[bool] = loop.create_future()
            self._asked.append((reserves, name, admitted))
            if self._reserving is None:
                self._reserving = lasting("reserving of budgets", self._reserve_all)
            if await admitted:
                return True
            if not fit(reserves, self._spent):  # otherwise enough was given back meanwhile
                return False

    async def _reserve_all(self) -> None:
        while self._asked:
            await self._flush()
        self._reserving = None

    # ---- the file ----

    def start(self) -> None:
        """Must be called inside the running event loop."""
        self._task = lasting("writing what keys have spent", self._flush_regularly)

    async def close(self) -> None:
        self._stop.set()
        if self._task is not None:
            await self._task
        if self._reserving is not None:
            await self._reserving
            await asyncio.sleep(0.0)  # who has left meanwhile gives back
        await self._flush()
        await asyncio.to_thread(self._file.close)

    async def _flush_regularly(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), FLUSH_EVERY_S)
                return
            await self._flush()

    async def _flush(self) -> None:
        """Write the changes, reserve what was asked for, and read all that was spent."""
        async with self._lock:
            written, self._changes = self._changes, {}
            asked, self._asked = self._asked, []
            ended, self._ended = self._ended, []
            reserves = [reserves for reserves, _, _ in asked]
            named: tuple[list[Held | None], list[Held]] | tuple[()] = ()
            if self._holder:
                named = [self._hold(name) for _, name, _ in asked], [Held(self._holder, name) for name in ended]
            try:
                spent, admitted = await asyncio.to_thread(self._file.update, written, self._names(), reserves, *named)
            except Exception as error:
                admitted = self._go_on(written, reserves, error)
                self._ended[:0] = ended
            else:
                if ended and self.on_written is not None:
                    self.on_written(ended)
                if self._failing:
                    log.info("what keys have spent is written again")
                self._failing = False
                for entry, amount in self._changes.items():  # made meanwhile
                    spent[entry] = spent.get(entry, 0.0) + amount
                self._spent = spent
        for (_, _, future), fits in zip(asked, admitted, strict=True):
            if not future.done():
                future.set_result(fits)

    def _hold(self, name: str) -> Held | None:
        return Held(self._holder, name) if name else None

    def _go_on(
        self, written: Mapping[Entry, float], asked: Sequence[Sequence[Reserve]], error: Exception
    ) -> list[bool]:
        """Serve by what is in memory, for the file has failed. The changes are kept for the next time."""
        if not self._failing:
            log.warning("what keys have spent cannot be written: %s", error)
        self._failing = True
        for entry, amount in written.items():
            self._changes[entry] = self._changes.get(entry, 0.0) + amount
        admitted = []
        for reserves in asked:
            admitted.append(admit(reserves, self._spent))
            for entry, amount, _ in reserves if admitted[-1] else ():
                self._changes[entry] = self._changes.get(entry, 0.0) + amount
        return admitted


class Budget:
    """One budget of one key: `limit` of `unit` in each day or month.

    reserved  for requests in flight; it counts as spent
    """

    def __init__(self, ledger: Ledger, key: str, unit: Unit, per: Per, limit: float) -> None:
        self.key, self.unit, self.per, self.limit = key, unit, per, limit
        self.reserved = 0.0
        self._ledger = ledger

    def __str__(self) -> str:
        return f"{self.shown(self.limit)} per {self.per}"

    def shown(self, amount: float) -> str:
        return f"{amount:,.0f} tokens" if self.unit == "tokens" else f"{amount:,.4g} of money"

    @property
    def left(self) -> float:
        return self.limit - self._ledger.spent(self._entry(self._ledger.period(self.per)))

    def described(self) -> dict[str, str | float]:
        spent = self.limit - self.left - self.reserved
        return {
            **{"key": self.key, "unit": self.unit, "per": self.per, "limit": self.limit},
            **{"spent": round(spent, 6), "reserved": round(self.reserved, 6)},
        }

    def has(self, entry: Entry) -> bool:
        """Whether the entry is of this budget, in whatever day or month."""
        return entry.unit == self.unit and entry.period.count("-") == (2 if self.per == "day" else 1)

    @property
    def renewed_in_s(self) -> float:
        return self._ledger.renewed_in_s(self.per)

    def reserve_of(self, amount: float) -> Reserve:
        """What is to be reserved of this budget for such an amount."""
        return Reserve(self._entry(self._ledger.period(self.per)), amount, self.limit)

    def settle(self, reserve: Reserve, used: float) -> None:
        """Give back what was reserved, and spend what was used."""
        self._ledger.add(reserve.entry, used - reserve.amount)
        self.reserved -= reserve.amount

    def _entry(self, period: str) -> Entry:
        return Entry(self.key, period, self.unit)


def budgets_of(key: str, budgets: Budgets, ledger: Ledger, before: Iterable[Budget] = ()) -> tuple[Budget, ...]:
    """before : the key's budgets so far; they keep what is reserved."""
    limits: list[tuple[Unit, Per, float | None]] = [
        ("tokens", "day", budgets.tokens_per_day),
        ("tokens", "month", budgets.tokens_per_month),
        ("money", "day", budgets.money_per_day),
        ("money", "month", budgets.money_per_month),
    ]
    kept = {(budget.unit, budget.per): budget for budget in before}
    found = []
    for unit, per, limit in limits:
        if limit is not None:
            budget = kept.get((unit, per)) or Budget(ledger, key, unit, per, limit)
            budget.limit = limit
            found.append(budget)
    return tuple(found)
