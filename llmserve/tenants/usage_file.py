"""The SQLite file in which servers keep what keys have spent of their budgets.

Several servers may use one file: each adds its changes in a transaction, so none overwrites another's, and reserves are
compared with the limits in the same transaction, so that all servers together admit no more than these allow.

A reserve may have a name. Then the file has it, until what it was for has been used, in the same transaction: so a
process that takes over from one that was killed finds which reserves are open.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from llmserve.errors import ConfigError

VERSION = 1
BUSY_S = 5.0  # longest wait for another server's transaction
BUSY_PAUSE_S = 0.02
CREATE = """CREATE TABLE IF NOT EXISTS spent (
    key TEXT NOT NULL, period TEXT NOT NULL, unit TEXT NOT NULL, amount REAL NOT NULL,
    PRIMARY KEY (key, period, unit)) WITHOUT ROWID"""
CREATE_HELD = """CREATE TABLE IF NOT EXISTS held (
    holder TEXT NOT NULL, name TEXT NOT NULL,
    key TEXT NOT NULL, period TEXT NOT NULL, unit TEXT NOT NULL, amount REAL NOT NULL,
    PRIMARY KEY (holder, name, key, period, unit)) WITHOUT ROWID"""
ADD = """INSERT INTO spent VALUES (?, ?, ?, ?)
    ON CONFLICT (key, period, unit) DO UPDATE SET amount = amount + excluded.amount"""


class Entry(NamedTuple):
    """What one key has spent in one period. period : "2026-11-23" or "2026-11".  unit : "tokens" or "money"."""

    key: str
    period: str
    unit: str


class Reserve(NamedTuple):
    """An amount to be reserved. It is refused if more than `limit` would be spent with it."""

    entry: Entry
    amount: float
    limit: float


class Held(NamedTuple):
    """Who holds reserves with a name. holder : a server's processes"""

    holder: str
    name: str


def fit(reserves: Sequence[Reserve], spent: Mapping[Entry, float]) -> bool:
    """Whether all of the reserves fit beside what was spent."""
    return all(spent.get(entry, 0.0) + amount <= limit for entry, amount, limit in reserves)


def admit(reserves: Sequence[Reserve], spent: dict[Entry, float]) -> bool:
    """Add reserves to what was spent, if all of them fit. True if they do."""
    fits = fit(reserves, spent)
    for entry, amount, _ in reserves if fits else ():
        spent[entry] = spent.get(entry, 0.0) + amount
    return fits


class UsageFile:
    """Raises ConfigError when the file cannot be used."""

    def __init__(self, path: Path) -> None:
        self.path = path = path.expanduser()
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            self._use_log()
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.execute("BEGIN IMMEDIATE")
            version = self._connection.execute("PRAGMA user_version").fetchone()[0]
            tables = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if version != VERSION and tables:
                raise ConfigError(f"usage_file: {path} is no file of llmserve's budgets of version {VERSION}")
            self._connection.execute(CREATE)
            self._connection.execute(CREATE_HELD)
            self._connection.execute(f"PRAGMA user_version = {VERSION}")
            self._connection.execute("COMMIT")
        except (OSError, RuntimeError, sqlite3.Error) as error:
            raise ConfigError(f"usage_file: cannot use {path}: {error}") from error

    def _use_log(self) -> None:
        """Switch the file to a write-ahead log: with synchronous = NORMAL, a commit waits for no disk.

        SQLite does not wait for another process that switches the file at the same moment.
        """
        until_s = time.monotonic() + BUSY_S
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError:
                if time.monotonic() > until_s:
                    raise
                time.sleep(BUSY_PAUSE_S)

    def held(self, holder: str, periods: Sequence[str]) -> dict[str, list[tuple[Entry, float]]]:
        """The open reserves of a holder in these periods, by name. Those of all other periods are forgotten."""
        marks = ", ".join("?" * len(periods))
        self._connection.execute(f"DELETE FROM held WHERE period NOT IN ({marks})", periods)
        rows = self._connection.execute("SELECT name, key, period, unit, amount FROM held WHERE holder = ?", (holder,))
        held: dict[str, list[tuple[Entry, float]]] = {}
        for name, key, period, unit, amount in rows.fetchall():
            held.setdefault(name, []).append((Entry(key, period, unit), amount))
        return held

    def update(
        self,
        changes: Mapping[Entry, float],
        periods: Sequence[str],
        asked: Sequence[Sequence[Reserve]] = (),
        holds: Sequence[Held | None] = (),
        ended: Sequence[Held] = (),
    ) -> tuple[dict[Entry, float], list[bool]]:
        """Add the changes to what was spent, then the reserves of each request that fit, in turn.

        holds : of each request that asks, None for a reserve without a name.  ended : these hold nothing any more
        Returns what all servers have spent in these periods, and whether each request's reserves were added. Raises
        sqlite3.Error; then nothing was added. May be called in a thread, but never twice at once.
        """
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE" if changes or asked else "BEGIN")
        try:
            connection.executemany(ADD, [(*entry, amount) for entry, amount in changes.items()])
            marks = ", ".join("?" * len(periods))
            rows = connection.execute(f"SELECT * FROM spent WHERE period IN ({marks})", periods).fetchall()
            spent = {Entry(key, period, unit): amount for key, period, unit, amount in rows}
            admitted = [admit(reserves, spent) for reserves in asked]
            added = [reserve for reserves, fits in zip(asked, admitted, strict=True) if fits for reserve in reserves]
            connection.executemany(ADD, [(*entry, amount) for entry, amount, _ in added])
            if ended:
                connection.executemany("DELETE FROM held WHERE holder = ? AND name = ?", ended)
            rows_held = [
                (*hold, *entry, amount)
                for hold, reserves, fits in zip(holds, asked, admitted, strict=False)
                if hold is not None and fits
                for entry, amount, _ in reserves
            ]
            if rows_held:
                connection.executemany("INSERT OR REPLACE INTO held VALUES (?, ?, ?, ?, ?, ?)", rows_held)
            connection.execute("COMMIT")
        except BaseException:
            connection.rollback()
            raise
        return spent, admitted

    def close(self) -> None:
        self._connection.close()
