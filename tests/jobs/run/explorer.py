"""Random interleavings of clients, servers, deaths and failures, on the real code and a real SQLite file.

Everything runs in one thread under a virtual clock, so a seed gives the same run again. Every statement and every
commit may fail, before or after it took effect; every write to a file may fail half-way; a server may die between any
two of its statements. After the trouble everything is repaired, and the laws below are checked.

* Each change of a status is one that contract.py allows. (A trigger of the database writes them down.)
* Each batch ends; the files of a completed or expired one have each line once, those of a cancelled one none twice.
* A line whose result is safe is not executed again.
* request_counts are the rows of the files.
* The bytes of every file are there.
* An index that is damaged is made again: nobody sees the difference.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import selectors
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
from sqlalchemy import Connection, create_engine, event
from sqlalchemy.exc import OperationalError

from llmserve.errors import EngineFailed, RateLimited, RequestError, Unauthorized, Unavailable
from llmserve.jobs.objects import ACTIVE, CHANGES, BatchRow, NewBatch
from llmserve.jobs.run import input_index
from llmserve.jobs.run.estimates import Work
from llmserve.jobs.run.input_index import Report, Rules
from llmserve.jobs.run.runner import Runner
from llmserve.jobs.run.validation import Task, validate
from llmserve.jobs.store.batches import BatchLimits, BatchStore
from llmserve.jobs.store.files import FileLimits, FileStore
from llmserve.jobs.store.folder import Appended, Folder
from llmserve.jobs.store.owner import OwnerStore
from llmserve.jobs.store.rows import Part
from llmserve.jobs.store.servers import Servers
from llmserve.jobs.store.tables import metadata

KEY, URL = "red", "/v1/completions"
HISTORY = """CREATE TABLE history (id TEXT, before TEXT, after TEXT);
CREATE TRIGGER changes AFTER UPDATE OF status ON batches WHEN old.status <> new.status
BEGIN INSERT INTO history VALUES (old.id, old.status, new.status); END;"""
TROUBLE_S = 60.0
CALM_S = 5000.0


class NoSockets(selectors.SelectSelector):
    """Asks the system for nothing, since nobody in these worlds waits for a socket."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes only when everybody waits for it."""

    _virtual_s = 0.0

    def __init__(self) -> None:
        super().__init__(NoSockets())

    def time(self) -> float:
        return self._virtual_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self._virtual_s = max(self._virtual_s, self._scheduled[0]._when)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


class Disk:
    """The database of all servers, and the trouble that it and the folder have."""

    def __init__(self, home: Path, drawn: random.Random) -> None:
        self.drawn = drawn
        self.trouble = 0.0  # probability that a statement fails
        self.engine = create_engine(f"sqlite:///{home / 'jobs.sqlite'}", connect_args={"isolation_level": None})
        self.seen = sqlite3.connect(home / "jobs.sqlite", isolation_level=None)  # by the laws, without trouble

        @event.listens_for(self.engine, "connect")
        def set_up(connection: Any, record: object) -> None:
            for pragma in ("journal_mode = WAL", "synchronous = OFF", "foreign_keys = ON"):
                connection.execute(f"PRAGMA {pragma}")

        metadata.create_all(self.engine)
        raw = self.engine.raw_connection()
        raw.driver_connection.executescript(HISTORY)  # type: ignore[union-attr]
        raw.close()
        self.turn = asyncio.Lock()

    def close(self) -> None:
        self.seen.close()
        self.engine.dispose()

    def may_fail(self) -> None:
        if self.drawn.random() < self.trouble:
            raise OperationalError("a statement", {}, Exception("the disk failed"))

    async def pause(self) -> None:
        """Let others run first, or not."""
        for _ in range(self.drawn.randrange(3)):
            await asyncio.sleep(0)
        if self.drawn.random() < 0.05:
            await asyncio.sleep(self.drawn.uniform(0, 0.3))


class LiveConnection:
    """A connection of a server; the server may be dead."""

    def __init__(self, connection: Connection, disk: Disk, server: Server) -> None:
        self._connection, self._disk, self._server = connection, disk, server

    async def execute(self, statement: Any, *values: Any) -> Any:
        await self._server.breathe()
        self._disk.may_fail()
        result = self._connection.execute(statement, *values)
        try:
            self._disk.may_fail()
        except OperationalError:
            result.close()  # SQLite cannot roll back while a statement has rows to give; aiosqlite has read all
            raise
        return result


class DiskDatabase:
    """Stands for Database."""

    def __init__(self, disk: Disk, server: Server, presence: _Presence) -> None:
        self.presence = presence
        self._disk, self._server = disk, server

    @contextlib.asynccontextmanager
    async def write(self, within_s: float | None = None) -> AsyncIterator[LiveConnection]:
        await self._server.breathe()
        async with self._disk.turn:
            with self._disk.engine.connect() as connection:
                self._disk.may_fail()
                connection.exec_driver_sql("BEGIN IMMEDIATE")
                self._server.writing = True
                try:
                    yield LiveConnection(connection, self._disk, self._server)
                    await self._server.breathe()
                    self._disk.may_fail()
                    connection.commit()
                finally:
                    self._server.writing = False
        self._disk.may_fail()  # after the commit: nobody knows whether it took effect
        await self._server.breathe()

    @contextlib.asynccontextmanager
    async def read(self) -> AsyncIterator[LiveConnection]:
        await self._server.breathe()
        with self._disk.engine.connect() as connection:
            connection.exec_driver_sql("BEGIN")
            yield LiveConnection(connection, self._disk, self._server)


class Killed(BaseException):
    """The server was killed while it held the database's lock: the transaction is rolled back."""


class Server:
    """One server, alive or dead."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.dead = self.writing = False
        base: Any = DiskDatabase(world.disk, self, _Presence(world, self))
        self.servers = Servers(base)
        self.files = FileStore(base, self.servers, FileLimits())
        self.batches = BatchStore(base, BatchLimits())
        self.work = OwnerStore(base, self.servers)
        self.folder = Folder(world.home / "files")
        parts: Any = _Checker(world, self), Gateway(world, self)
        checker, gateway = parts
        self.runner = Runner(self.work, self.folder, checker, gateway, clock=world.clock)

    async def breathe(self) -> None:
        """A moment at which the server may be found dead."""
        await self.world.disk.pause()
        if self.dead:
            if self.writing:
                raise Killed
            await asyncio.Event().wait()


class _Presence:
    """Stands for a Presence: the world knows who is alive."""

    is_lost = False

    def __init__(self, world: World, server: Server) -> None:
        self._world, self._server = world, server

    async def begin(self) -> None:
        """Nothing to prepare."""

    async def hold(self, generation: int) -> None:
        self._world.generations[generation] = self._server

    async def check(self) -> None:
        """Nothing is lost before the server dies."""

    async def is_dead(self, generation: int) -> bool:
        server = self._world.generations.get(generation)
        return server is not None and server.dead

    async def end(self) -> None:
        """Nothing is held."""


class _Checker:
    """Stands for InputChecker: the same validation, in this process."""

    def __init__(self, world: World, server: Server) -> None:
        self._world, self._server = world, server

    async def checked(self, batch: BatchRow, part: Part) -> tuple[Report, input_index.Index]:
        await self._server.breathe()
        self._world.folder_may_fail()
        folder = self._server.folder
        index = folder.index(part.name, batch.endpoint)
        limits = {"line_bytes_max": 1000, "prompt_chars_max": 1000, "lines_max": 100}
        rules = Rules(endpoint=batch.endpoint, size=part.bytes, crc=part.crc, **limits)
        if (found := input_index.read(index, rules)) is not None:
            return found
        report = validate(Task(path=str(folder.path / part.name), index=str(index), rules=rules))
        return input_index.read(index, rules) or (report, input_index.EMPTY)

    async def too_much(self, *of: object) -> list[Any]:
        return []


class Gateway:
    """Stands for the queue and the engines: answers late, or fails."""

    is_open, barrier = True, False

    def __init__(self, world: World, server: Server) -> None:
        self._world, self._server = world, server

    def slots(self, model: str) -> int:
        return 0

    def is_up(self, model: str) -> bool:
        return True

    def tokens_per_s(self, key: str, model: str) -> float:
        return 1.0

    async def work_of(self, key: str, path: str, bodies: Sequence[bytes]) -> Work | None:
        await self._server.breathe()
        return Work("m", 1.0 * len(bodies), 1.0 * len(bodies), None, None)

    async def submit(
        self, key: str, path: str, body: bytes, client: Any, *, expires_at: int, after_tokens: float
    ) -> Callable[[], None]:
        await self._server.breathe()
        world, cancelled = self._world, False
        line = msgspec.json.decode(body)["prompt"]
        if world.drawn.random() < 0.05 * world.wild:
            raise Unavailable("no engine is up")
        if not client.is_in_flight:
            return lambda: None
        world.executed(line)

        def end() -> None:
            if cancelled or self._server.dead:
                return
            errors: list[RequestError] = [EngineFailed("lost", code="engine_lost"), Unavailable("no engine")]
            errors += [RateLimited("spent", code="insufficient_quota", retry_after_s=9.0), Unauthorized("no such key")]
            if world.drawn.random() < 0.1 * world.wild:
                client.refused(world.drawn.choice(errors), "r")
            else:
                client.answered(400 if line.endswith("bad") else 200, "r", b'{"ok": 1}')

        def cancel() -> None:
            nonlocal cancelled
            cancelled = True

        asyncio.get_running_loop().call_later(world.drawn.choice([0.0, 0.05, 2.0]), end)
        return cancel


class World:
    """All servers, clients and what they have seen."""

    def __init__(self, home: Path, seed: int) -> None:
        self.home, self.drawn = home, random.Random(seed)
        self.disk = Disk(home, self.drawn)
        self.wild = 1.0
        self.generations: dict[int, Server] = {}
        self.servers: list[Server] = []
        self.lines: dict[str, int] = {}  # of each batch
        self.inputs: list[str] = []
        self.kills = self.executions = 0
        self.violations: list[str] = []  # seen by a server, which would take an exception for its own
        self.skipped_s = 0.0
        self.tasks: list[asyncio.Task[Any]] = []

    def clock(self) -> float:
        return asyncio.get_running_loop().time() + self.skipped_s

    def folder_may_fail(self) -> None:
        if self.drawn.random() < self.disk.trouble:
            raise OSError(self.drawn.choice([errno.ENOSPC, errno.EIO]), "the disk failed")

    # ---- the run ----

    async def run(self) -> None:
        self.disk.trouble = self.drawn.choice([0.0, 0.01, 0.05])
        await self._start()
        until_s = self.clock() + TROUBLE_S
        while self.clock() < until_s:
            await self._step()
            await asyncio.sleep(self.drawn.uniform(0.0, 3.0))
        self.disk.trouble = self.wild = 0.0
        if all(server.dead for server in self.servers):
            await self._start()
        async with asyncio.timeout(CALM_S):
            while self._rows(f"SELECT 1 FROM batches WHERE status IN {ACTIVE}"):  # noqa: ASYNC110
                await asyncio.sleep(1.0)
        self.check()

    async def _step(self) -> None:
        alive = [server for server in self.servers if not server.dead]
        kinds = [self._create, self._create, self._cancel, self._delete, self._kill, self._start_another, self._tidy]
        kinds.append(self._damage_index)
        kind = self.drawn.choice(kinds)
        if not alive:
            kind = self._start_another
        with contextlib.suppress(RequestError, OperationalError, OSError):
            await kind()

    def _alive(self) -> Server:
        return self.drawn.choice([server for server in self.servers if not server.dead])

    async def _start(self) -> None:
        for _ in range(100):
            server = Server(self)
            try:
                server.folder.generation = await server.servers.begin()
                break
            except OperationalError as error:
                last = error
        else:
            raise last
        self.servers.append(server)
        server.runner.start()

    async def _start_another(self) -> None:
        if len([server for server in self.servers if not server.dead]) < 3:
            await self._start()

    async def _kill(self) -> None:
        self._alive().dead = True
        self.kills += 1

    async def _create(self) -> None:
        """Upload a file, perhaps a bad one, and make a batch of it."""
        server, count = self._alive(), self.drawn.randrange(12)
        name = f"{len(self.inputs)}-{count}"
        rows = [
            {"custom_id": f"{name}-{number}", "url": URL, "body": {"model": "m", "prompt": f"{name}-{number}"}}
            for number in range(count)
        ]
        for row in rows[::4]:
            row["body"]["prompt"] += "-bad"  # type: ignore[index]
        data = b"".join([msgspec.json.encode(row) + b"\n" for row in rows])
        if self.drawn.random() < 0.1:
            data += b"no line\n"
        file = server.folder.create()
        file.write(data)
        file.sync()
        self.inputs.append("")
        made = await server.files.add_file(
            KEY, name, Part(file.name, file.size, file.crc), now_s=int(self.clock()), expires_at=None
        )
        file.close()
        self.inputs[-1] = made.id
        window_s = self.drawn.choice([3, 20, 3600])
        new = NewBatch(input_file_id=made.id, endpoint=URL, completion_window=f"{window_s}s")
        await server.batches.create(
            KEY, new, window_s=window_s, now_s=int(self.clock()), idempotency_key=None, asked=""
        )
        server.runner.notice()

    async def _cancel(self) -> None:
        server = self._alive()
        if ids := self._rows("SELECT id FROM batches ORDER BY seq"):
            (batch_id,) = self.drawn.choice(ids)
            await server.batches.cancel(KEY, batch_id, int(self.clock()))
            server.runner.notice(batch_id)

    async def _delete(self) -> None:
        server = self._alive()
        if ids := self._rows("SELECT id FROM files WHERE purpose = 'batch' ORDER BY seq"):
            (file_id,) = self.drawn.choice(ids)
            server.folder.remove(await server.files.delete_file(KEY, file_id))

    async def _damage_index(self) -> None:
        """Change, cut or remove an index, which can be made again."""
        indexes = sorted((self.home / "files").glob("*.index"), key=lambda path: path.stat().st_size)
        if indexes:
            path = self.drawn.choice(indexes)
            data = bytearray(path.read_bytes())
            place = self.drawn.randrange(max(1, len(data)))
            data[place : place + 1] = bytes([self.drawn.randrange(256)])
            path.write_bytes(self.drawn.choice([data, data[:place], b""]))

    async def _tidy(self) -> None:
        server = self._alive()
        alive = await server.work.alive()
        needed = await server.files.names()
        server.folder.sweep(alive, needed)

    # ---- the laws ----

    def executed(self, line: str) -> None:
        self.executions += 1
        if line.removesuffix("-bad") in self._safe():
            self.violations.append(f"{line} is executed although its result is safe")

    def _safe(self) -> set[str]:
        found = self._rows("SELECT name, safe_bytes FROM segments")
        results = "file_id IN (SELECT id FROM files WHERE purpose = 'batch_output')"
        found += self._rows(f"SELECT name, bytes FROM parts WHERE {results}")
        texts = [(self.home / "files" / name).read_bytes()[:size] for name, size in found]
        return {msgspec.json.decode(row)["custom_id"] for text in texts for row in text.splitlines()}

    def _rows(self, statement: str) -> list[Any]:
        return self.disk.seen.execute(statement).fetchall()

    def check(self) -> None:
        assert not self.violations
        history = self._rows("SELECT id, before, after FROM history")
        for batch_id, before, after in history:
            assert after in CHANGES.get(before, ()), f"{batch_id} went from {before} to {after}"
        for name, size in self._rows("SELECT name, bytes FROM parts"):
            assert (self.home / "files" / name).stat().st_size >= size, f"{name} is too short"
        columns = "id, status, total, completed, failed, output_file_id, error_file_id, input_file_id"
        for batch in self._rows(f"SELECT {columns} FROM batches"):
            self._check_batch(*batch)

    def _check_batch(
        self, batch_id: str, status: str, total: int, completed: int, failed: int, output: str, error: str, source: str
    ) -> None:
        found = {kind: self._lines(file_id) for kind, file_id in (("output", output), ("error", error))}
        delivered = Counter([row["custom_id"] for rows in found.values() for row in rows])
        assert all(count == 1 for count in delivered.values()), f"{batch_id} ({status}) has lines twice: {delivered}"
        assert (len(found["output"]), len(found["error"])) == (completed, failed), f"{batch_id}: wrong counts"
        if status == "completed" or (status == "expired" and total):
            assert len(delivered) == total, f"{batch_id} ({status}) has lost lines"
        if status == "failed":
            assert not delivered
        if status == "completed":
            assert not [row for row in found["error"] if row["error"] is not None], "an expired line of a completed job"

    def _lines(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        parts = self._rows(f"SELECT name, bytes FROM parts WHERE file_id = '{file_id}' ORDER BY place")
        assert parts, "an output file has bytes"
        texts = [(self.home / "files" / name).read_bytes()[:size] for name, size in parts]
        return [msgspec.json.decode(row) for text in texts for row in text.splitlines()]


def explore(home: Path, seed: int) -> World:
    """Run one world. Raises AssertionError when a law is violated."""
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(_explore(home, seed))
    finally:
        asyncio.set_event_loop(None)
        loop.close()


async def _explore(home: Path, seed: int) -> World:
    world = World(home, seed)
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, problem: problems.append(problem))

    async def in_this_thread(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        await world.disk.pause()
        result = function(*arguments, **named)
        await world.disk.pause()
        return result

    write, sync = Appended.write, Appended.sync

    def failing_write(file: Appended, data: bytes) -> None:
        if world.drawn.random() < world.disk.trouble:
            write(file, data[: world.drawn.randrange(len(data) + 1)])
            raise OSError(errno.ENOSPC, "the disk is full")
        write(file, data)

    def failing_sync(file: Appended) -> None:
        world.folder_may_fail()
        sync(file)

    with (
        mock.patch("asyncio.to_thread", in_this_thread),
        mock.patch("os.fsync"),  # the machine itself does not fail here
        mock.patch.object(Appended, "write", failing_write),
        mock.patch.object(Appended, "sync", failing_sync),
    ):
        await world.run()
    world.disk.close()
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await asyncio.sleep(0)
    asserted = [problem["exception"] for problem in problems if isinstance(problem.get("exception"), AssertionError)]
    if asserted:
        raise asserted[0]
    return world
