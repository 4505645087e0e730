"""A store that the disk has damaged: it is noticed, mended where it can be, and stops one batch at most."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections import deque
from collections.abc import Callable
from pathlib import Path

import openai
import pytest
from batch_client import client_of, create, ended, jsonl, request, rows

from llmserve.engines.timed.server import FakeEngine, Fault
from llmserve.jobs.run import input_checker
from llmserve.server.serving import serving
from llmserve.settings.tree import Config, EngineConfig, LiveConfig, ServerConfig

LINES = 60
BEGUN = 24  # lines that the engine of a first server answers, however late the test looks


def config(engine: FakeEngine, home: Path) -> Config:
    return Config(
        server=ServerConfig(port=0, state=str(home)),
        engines=EngineConfig(engine=(engine.url,), slots=8),
        live=LiveConfig(probe_every_s=0.05),
    )


def lines(name: str) -> bytes:
    return jsonl([request(number, user=name, max_tokens=5) for number in range(LINES)])


class Begun(deque[bytes]):
    """The bodies of an engine, which answers only the first ones."""

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__()
        self._engine = engine

    def append(self, body: bytes) -> None:
        super().append(body)
        if len(self) > BEGUN:
            self._engine.fault = Fault("hang")


async def begun(client: openai.AsyncOpenAI, batch_id: str) -> None:
    """Wait until some lines of a batch have their results."""
    async with asyncio.timeout(20):
        while True:
            counts = (await client.batches.retrieve(batch_id)).request_counts
            if counts is not None and counts.completed >= 10:
                return
            await asyncio.sleep(0.01)


def names(home: Path, statement: str, *values: str) -> list[Path]:
    connection = sqlite3.connect(home / "jobs.sqlite")
    found = [home / "jobs" / name for (name,) in connection.execute(statement, values)]
    connection.close()
    return found


def input_of(home: Path, batch_id: str) -> Path:
    statement = "SELECT name FROM parts JOIN batches ON file_id = input_file_id WHERE batches.id = ?"
    (path,) = names(home, statement, batch_id)
    return path


def index_of(home: Path, batch_id: str) -> Path:
    (path,) = (home / "jobs").glob(f"{input_of(home, batch_id).name}*.index")
    return path


def output_of(home: Path, batch_id: str) -> Path:
    (path,) = names(home, "SELECT name FROM segments WHERE batch_id = ? AND kind = 'output'", batch_id)
    return path


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def gone(path: Path) -> None:
    path.unlink()


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def wrong(path: Path) -> None:
    """Some bytes in the middle are zeros, as after a power failure."""
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 40] = bytes(40)
    path.write_bytes(data)


def changed(path: Path) -> None:
    """One bit is another, within a text: what is there can still be read."""
    data = bytearray(path.read_bytes())
    place = data.find(b"hello", len(data) // 2)
    data[max(place, len(data) // 2)] ^= 1
    path.write_bytes(data)


DAMAGES = [cut, gone, emptied, wrong, changed]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("part", [input_of, index_of, output_of])
async def test_a_damaged_file_stops_its_own_batch_at_most(
    tmp_path: Path, part: Callable[[Path, str], Path], damage: Callable[[Path], None]
) -> None:
    async with FakeEngine(slots=8, step_s=0.001) as engine:
        engine.bodies = Begun(engine)
        async with serving(config(engine, tmp_path)) as (_, url):
            client = client_of(url)
            hurt, other = await create(client, lines("hurt")), await create(client, lines("other"))
            await begun(client, hurt.id)
        damage(part(tmp_path, hurt.id))
        engine.bodies, engine.fault = deque(), Fault()
        async with serving(config(engine, tmp_path)) as (_, url):
            client = client_of(url)
            assert (await ended(client, other)).status == "completed"
            hurt = await ended(client, hurt)
            output = await rows(client, hurt.output_file_id)
            await client.batches.list()
    delivered = [row["custom_id"] for row in output]
    assert len(set(delivered)) == len(delivered)
    if part is index_of:
        assert (hurt.status, len(delivered)) == ("completed", LINES), "an index is made again"
        return
    assert hurt.status == "failed"
    assert hurt.errors is not None
    assert hurt.errors.data is not None
    assert hurt.errors.data[0].code == ("input_damaged" if part is input_of else "results_damaged")
    assert hurt.request_counts is not None
    assert hurt.request_counts.completed == len(delivered)
    if part is input_of:
        assert len(delivered) >= 10, "the answers that came are kept"
    elif damage in (cut, wrong, changed):
        assert delivered, "what can be read is kept"


@pytest.mark.parametrize("column", ["status", "expires_at", "total", "metadata"])
async def test_a_damaged_row_of_the_database_stops_its_own_batch_at_most(tmp_path: Path, column: str) -> None:
    async with FakeEngine(slots=8, step_s=0.01) as engine:
        async with serving(config(engine, tmp_path)) as (_, url):
            client = client_of(url)
            hurt, other = await create(client, lines("hurt")), await create(client, lines("other"))
            await begun(client, hurt.id)
        connection = sqlite3.connect(tmp_path / "jobs.sqlite")
        connection.execute(f"UPDATE batches SET {column} = x'00ff' WHERE id = ?", (hurt.id,))
        connection.commit()
        connection.close()
        async with serving(config(engine, tmp_path)) as (_, url):
            client = client_of(url)
            assert (await ended(client, other)).status == "completed"
            listed = {batch.id: batch.status for batch in (await client.batches.list()).data}
            assert listed[other.id] == "completed"
            if column != "status":  # whose batch nobody knows to be active
                assert (await ended(client, hurt)).status == "failed"


async def test_a_file_is_checked_once_for_all_its_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    checks = 0
    validate = input_checker.validate

    def counted(task: input_checker.Task) -> input_checker.Report:
        nonlocal checks
        checks += 1
        return validate(task)

    monkeypatch.setattr(input_checker, "validate", counted)
    async with FakeEngine() as engine, serving(config(engine, tmp_path)) as (_, url):
        client = client_of(url)
        file = await client.files.create(file=("in.jsonl", lines("x")), purpose="batch")
        bad = await client.files.create(file=("in.jsonl", b"no line\n"), purpose="batch")
        endpoint = "/v1/chat/completions"
        made = [
            await client.batches.create(input_file_id=one.id, endpoint=endpoint, completion_window="24h")
            for one in (file, file, file, bad, bad)
        ]
        statuses = [(await ended(client, batch)).status for batch in made]
        assert statuses == ["completed"] * 3 + ["failed"] * 2
        assert checks == 2
        await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        while checks < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
