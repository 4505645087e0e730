"""Batch jobs under kill -9: the front-end or the engine dies at random moments, and starts again.

    python scripts/lab kill_jobs --kills 200 --output docs/results/jobs-killed.json
    python scripts/lab kill_jobs --kills 50 --store postgresql --output docs/results/jobs-killed-postgresql.json
    python scripts/lab kill_jobs --kills 50 --victim engine --output docs/results/jobs-killed-engine.json
    python scripts/lab kill_jobs --kills 50 --damage --output docs/results/jobs-killed-damaged.json

Engine and front-end are processes of their own. The engine writes down each request that it begins. Each job has
several kills; after each kill the results that are safe are read from the store. The laws:

* the job ends `completed`, and its output has each line once;
* a line whose result was safe at a kill is never executed again;
* between two kills no line is executed twice: so a line is executed again at most once for each kill, and only if it
  was in flight.

With --damage another job runs beside each, and after the first kill its input, its index or its output is cut, removed,
or changed. The laws above hold for the first job as if nothing had happened; the other ends `completed` when its index
was hurt, else `failed` with a reason (or as it had already ended), and has no line twice.

Front-ends are forked from a process that has imported the program, because imports take most of a start.

A violation ends the campaign with the seed that repeats its moments.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import os
import random
import re
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import openai
from kit import LAB
from kit.postgres import cluster
from kit.progress import log
from kit.results import machine, write_json
from sqlalchemy import select

from llmserve.engines.timed.server import FakeEngine
from llmserve.jobs.run.jsonl import number_of
from llmserve.jobs.store.opening import opened
from llmserve.jobs.store.sqlite import sqlite_url
from llmserve.jobs.store.tables import batches, parts, segments

LINES, SLOTS, STEP_S, TOKENS = 500, 16, 0.02, 3  # without kills a job takes two seconds
KILLS_PER_JOB_MAX = 6
BY_PROGRESS = 0.8  # of the kills come after some lines; the others soon after the start, or in the validation
END_S = 120.0
NUMBER = re.compile(rb"line (\d+)\b")


def main() -> int:
    if sys.argv[1:2] == ["engine"]:
        asyncio.run(_engine(int(sys.argv[2]), Path(sys.argv[3])))
        return 0
    if sys.argv[1:2] == ["front-end"]:
        return _front_ends(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="kills of the campaign (default: 20)")
    parser.add_argument("--lines", type=int, default=LINES, help=f"lines of each job (default: {LINES})")
    parser.add_argument("--victim", choices=("front-end", "engine"), default="front-end")
    parser.add_argument("--store", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--damage", action="store_true", help="damage a file of another job at each first kill")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    began_s = time.monotonic()

    def keep(jobs: list[dict[str, Any]]) -> None:
        log(f"job {len(jobs)}: {jobs[-1]}; {sum(job['kills'] for job in jobs)} kills so far")
        if args.output is not None:
            seconds = round(time.monotonic() - began_s)
            result = {"arguments": sys.argv[1:], **summary(jobs), "seconds": seconds, "jobs": jobs}
            write_json(args.output, {**result, "machine": machine()})

    jobs = asyncio.run(campaign(args.kills, args.lines, args.victim, args.store, args.seed, keep, damage=args.damage))
    log(summary(jobs))
    return 0


def summary(jobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "kills": sum(job["kills"] for job in jobs),
        "jobs_completed": len(jobs),
        "lines": sum(job["lines"] for job in jobs),
        "lines_executed_again": sum(job["executed_again"] for job in jobs),
        "lines_executed_again_per_kill": statistics.mean(job["executed_again"] / max(1, job["kills"]) for job in jobs),
        "lines_lost": 0,
        "lines_delivered_twice": 0,
    }


async def campaign(
    kills: int,
    lines: int,
    victim: str,
    store: str,
    seed: int,
    keep: Callable[[list[dict[str, Any]]], None] = lambda jobs: None,
    *,
    damage: bool = False,
) -> list[dict[str, Any]]:
    """Run jobs until so many kills have happened. Raises AssertionError when a law is violated.

    keep : called after each job with all so far
    """
    drawn, jobs = random.Random(seed), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="llmserve-kill-") as home, _store(store, Path(home)) as url:
        async with _world(Path(home), url, victim) as world:
            while (left := kills - sum(job["kills"] for job in jobs)) > 0:
                wanted = min(left, drawn.randint(1, KILLS_PER_JOB_MAX))
                jobs.append(await _job(world, lines, wanted, drawn, first=2 * len(jobs) * lines, damage=damage))
                keep(jobs)
    return jobs


async def _job(
    world: World, lines: int, kills: int, drawn: random.Random, first: int, *, damage: bool
) -> dict[str, Any]:
    """One job with some kills. first : number of its first line; no two lines of a campaign have one number"""
    numbers = range(first, first + lines)
    hurt_id = await world.create(range(first + lines, first + 2 * lines)) if damage else None
    batch_id = await world.create(numbers)
    hurt: str | None = None
    lives: list[Counter[int]] = []
    safe: list[set[int]] = []
    for _ in range(kills):
        if drawn.random() < BY_PROGRESS:
            await world.progressed(drawn.randrange(2 * lines // (kills + 1)), batch_id)
        await asyncio.sleep(drawn.uniform(0.0, 2 * TOKENS * STEP_S))
        if await world.has_ended(batch_id):
            break
        await world.kill()
        if hurt_id is not None and hurt is None:
            hurt = await world.damage(hurt_id, drawn)
        safe.append({first + number for number in await world.safe(batch_id)})
        lives.append(world.executed(numbers))
        await world.start_again()
    batch = await world.ended(batch_id)
    lives.append(world.executed(numbers))
    _check_lives(lives, safe)
    assert batch.status == "completed", batch
    delivered = Counter(await world.output(batch))
    assert delivered == Counter([f"line-{number}" for number in numbers]), "lines are lost, or delivered twice"
    told = {"damaged": hurt, "ended": await _end_of_hurt(world, hurt_id, hurt)} if hurt_id is not None else {}
    executions = sum(lives, Counter())
    again = sum(count - 1 for count in executions.values())
    return {
        "lines": lines,
        "kills": len(safe),
        "executed_again": again,
        "safe_at_kills": [len(one) for one in safe],
        **told,
    }


async def _end_of_hurt(world: World, batch_id: str, hurt: str | None) -> str:
    """How the job ended of which a file was damaged. hurt : what was done to it; None: nothing could be"""
    batch = await world.ended(batch_id)
    codes = [error.code for error in batch.errors.data] if batch.errors else []
    if hurt is None or hurt.startswith("index"):
        assert batch.status == "completed", (hurt, batch)
    elif batch.status != "completed":
        assert (batch.status, codes) in [("failed", ["input_damaged"]), ("failed", ["results_damaged"])], (hurt, batch)
    delivered = (
        Counter(await world.output(batch)) if batch.output_file_id and batch.status == "completed" else Counter()
    )
    assert all(count == 1 for count in delivered.values()), "lines of the damaged job are delivered twice"
    return f"{batch.status} {' '.join(codes)}".strip()


def _check_lives(lives: list[Counter[int]], safe: list[set[int]]) -> None:
    for life, counts in enumerate(lives):
        twice = [number for number, count in counts.items() if count > 1]
        assert not twice, f"lines {twice} were executed twice between two kills"
        if life:
            again = safe[life - 1] & set(counts)
            assert not again, f"lines {sorted(again)} were executed again although their results were safe"


class World:
    """The processes of a campaign, and what the client does."""

    def __init__(self, home: Path, url: str, victim: str) -> None:
        self.home, self.url, self.victim = home, url, victim
        self.log = home / "executions"
        self.log.touch()
        self._read = 0
        self._ports = _free_ports(2)
        self.fork: asyncio.subprocess.Process | None = None  # forks front-ends
        self.front_pid = 0
        self.engine: asyncio.subprocess.Process | None = None
        self.client = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{self._ports[0]}/v1", api_key="none", max_retries=0
        )

    async def start_engine(self) -> None:
        words = (sys.executable, str(LAB), "kill_jobs", "engine", str(self._ports[1]), str(self.log))
        self.engine = await asyncio.create_subprocess_exec(*words)

    async def start_front(self) -> None:
        flags = ["--port", str(self._ports[0]), "--engine", f"http://127.0.0.1:{self._ports[1]}"]
        flags += ["--slots", str(SLOTS), "--probe-every-s", "0.2", "--log-level", "error"]
        flags += ["--state", str(self.home / "state"), "--predictor", "none"]
        if self.url.startswith("postgresql"):
            flags += ["--store", self.url]
        if self.fork is None:
            self.fork = await asyncio.create_subprocess_exec(
                *(sys.executable, str(LAB), "kill_jobs", "front-end", *flags),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
        assert self.fork.stdin is not None
        self.fork.stdin.write(b"start\n")
        self.front_pid = int(await self._said())
        await self._until_up()

    async def _said(self) -> bytes:
        assert self.fork is not None
        assert self.fork.stdout is not None
        return await self.fork.stdout.readline()

    async def kill(self) -> None:
        if self.victim == "front-end":
            await self._kill_front()
        else:
            assert self.engine is not None, "the engine has not started"
            self.engine.send_signal(signal.SIGKILL)
            await self.engine.wait()

    async def _kill_front(self) -> None:
        os.kill(self.front_pid, signal.SIGKILL)
        self.front_pid = 0
        assert await self._said() == b"ended\n"

    async def start_again(self) -> None:
        await (self.start_front() if self.victim == "front-end" else self.start_engine())

    async def stop(self) -> None:
        if self.front_pid:
            await self._kill_front()
        for process in (self.fork, self.engine):
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()

    async def _until_up(self) -> None:
        async with asyncio.timeout(END_S):
            while True:
                with contextlib.suppress(openai.APIError):
                    await self.client.models.list()
                    return
                await asyncio.sleep(0.02)

    # ---- the client ----

    async def create(self, numbers: range) -> str:
        rows = [
            {
                "custom_id": f"line-{number}",
                "method": "POST",
                "url": "/v1/completions",
                "body": {"model": "fake", "max_tokens": TOKENS, "prompt": f"line {number} of a job"},
            }
            for number in numbers
        ]
        data = b"".join([msgspec.json.encode(row) + b"\n" for row in rows])
        file = await self.client.files.create(file=("in.jsonl", data), purpose="batch")
        batch = await self.client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        return batch.id

    async def has_ended(self, batch_id: str) -> bool:
        with contextlib.suppress(openai.APIConnectionError):
            return (await self.client.batches.retrieve(batch_id)).status == "completed"
        return False

    async def ended(self, batch_id: str) -> Any:
        return await self.at(batch_id, "completed", "failed", "expired", "cancelled")

    async def at(self, batch_id: str, *statuses: str) -> Any:
        """The batch at one of these statuses."""
        async with asyncio.timeout(END_S):
            while True:
                with contextlib.suppress(openai.APIConnectionError):
                    batch = await self.client.batches.retrieve(batch_id)
                    if batch.status in statuses:
                        return batch
                await asyncio.sleep(0.02)

    async def output(self, batch: Any) -> list[str]:
        content = await self.client.files.content(batch.output_file_id)
        return [msgspec.json.decode(row)["custom_id"] for row in content.content.splitlines()]

    # ---- what was executed, and what is safe ----

    def executed(self, numbers: range) -> Counter[int]:
        """How often the engine has begun each line since the last call."""
        data = self.log.read_bytes()[self._read :]
        self._read += len(data)
        counts = Counter(int(word) for word in data.split())
        return Counter({number: count for number, count in counts.items() if number in numbers})

    async def progressed(self, count: int, batch_id: str) -> None:
        """Wait until the engine has begun so many lines since the last kill, or the job has ended."""
        async with asyncio.timeout(END_S):
            while self.log.read_bytes()[self._read :].count(b"\n") < count:
                if await self.has_ended(batch_id):
                    return
                await asyncio.sleep(0.005)

    async def damage(self, batch_id: str, drawn: random.Random) -> str | None:
        """Damage one of the files of a job while no front-end lives. Says what was done; None: nothing."""
        database = await opened(self.url)
        try:
            async with database.read() as connection:
                source = select(parts.c.name).join(batches, parts.c.file_id == batches.c.input_file_id)
                (name,) = (await connection.execute(source.where(batches.c.id == batch_id))).one()
                written = select(segments.c.name).where(segments.c.batch_id == batch_id, segments.c.kind == "output")
                outputs = list((await connection.execute(written)).scalars())
        finally:
            await database.close()
        folder = self.home / "state" / "jobs"
        files = {"input": [folder / name], "index": [*folder.glob(f"{name}*.index")]}
        files["output"] = [folder / output for output in outputs]
        kind = drawn.choice([kind for kind, paths in files.items() if paths])
        how = drawn.choice(["cut", "gone", "changed"])
        path = files[kind][0]
        data = bytearray(path.read_bytes())
        if not data:
            return None
        if how == "gone":
            path.unlink()
        elif how == "cut":
            path.write_bytes(data[: drawn.randrange(len(data))])
        else:
            data[drawn.randrange(len(data))] ^= 1 << drawn.randrange(8)
            path.write_bytes(data)
        return f"{kind} {how}"

    async def safe(self, batch_id: str) -> set[int]:
        """Numbers of the lines, within the job, whose results count."""
        database = await opened(self.url)
        try:
            async with database.read() as connection:
                rows = await connection.execute(
                    select(segments.c.name, segments.c.safe_bytes).where(segments.c.batch_id == batch_id)
                )
                found = [tuple(row) for row in rows]
                if not found:  # the job may have ended: its segments are the parts of its files
                    found = [tuple(row) for row in await connection.execute(select(parts.c.name, parts.c.bytes))]
        finally:
            await database.close()
        mark = f'{{"id":"batch_req_{batch_id.removeprefix("batch_")}_'.encode()
        folder = self.home / "state" / "jobs"  # a file of another job may have been removed
        texts = [(folder / name).read_bytes()[:size] for name, size in found if (folder / name).exists()]
        return {number_of(row, batch_id) for text in texts for row in text.splitlines() if row.startswith(mark)}


@contextlib.contextmanager
def _store(kind: str, home: Path) -> Iterator[str]:
    """The URL of an empty store."""
    if kind == "sqlite":
        yield sqlite_url(home / "state" / "jobs.sqlite")
        return
    with cluster() as running:
        yield running.url("jobs")


@contextlib.asynccontextmanager
async def _world(home: Path, url: str, victim: str) -> AsyncIterator[World]:
    world = World(home, url, victim)
    try:
        await world.start_engine()
        await world.start_front()
        yield world
    finally:
        await world.stop()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


# ---- the front-end --------------------------------------------------------------------------------------------------


def _front_ends(flags: Sequence[str]) -> int:
    """Start a front-end for each line of the input, and say its process id, and when it has ended."""
    from llmserve.__main__ import main as llmserve

    for module in (
        "aiosqlite",
        "llmserve.web.app",
        "llmserve.jobs.service",
        "llmserve.server.serving",
    ):
        importlib.import_module(module)
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            os._exit(llmserve(["serve", *flags]))
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("ended", flush=True)
    return 0


# ---- the engine -----------------------------------------------------------------------------------------------------


class _Executions:
    """Takes the place of the engine's list of bodies: each request leaves its number in a file."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)

    def append(self, body: bytes) -> None:
        if (match := NUMBER.search(body)) is not None:
            os.write(self._file, match[1] + b"\n")


async def _engine(port: int, path: Path) -> None:
    engine = FakeEngine(slots=SLOTS, step_s=STEP_S, port=port)
    engine.bodies = _Executions(path)  # type: ignore[assignment]
    async with engine:
        await asyncio.Event().wait()
