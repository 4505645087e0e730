"""A full disk, a lost database, a drain, and several servers: online requests go on, and jobs end well."""

from __future__ import annotations

import asyncio
import errno
import sqlite3
from pathlib import Path
from unittest import mock

import openai
import pytest
from batch_client import at, client_of, create, ended, jsonl, request, rows
from front import Front, StartFront, until
from sqlalchemy.exc import OperationalError

from llmserve.engines.timed.server import FakeEngine
from llmserve.jobs.store import batches as batch_store
from llmserve.jobs.store import files as file_store
from llmserve.jobs.store.folder import Appended
from llmserve.jobs.store.owner import OwnerStore
from llmserve.jobs.store.sqlite import BUSY_S
from llmserve.server.serving import serving
from llmserve.settings.tree import Config, EngineConfig, JobsConfig, LiveConfig, ServerConfig


async def pause_of(client: openai.AsyncOpenAI, batch_id: str) -> str | None:
    batch = await client.batches.retrieve(batch_id)
    pause: str | None = batch.llmserve["paused"]  # type: ignore[attr-defined]
    return pause


async def paused(client: openai.AsyncOpenAI, batch_id: str, reason: str) -> None:
    async with asyncio.timeout(30):
        while await pause_of(client, batch_id) != reason:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_full_disk_pauses_jobs_by_name_while_online_requests_go_on(
    front: Front, client: openai.AsyncOpenAI, engine: FakeEngine
) -> None:
    write, is_full = Appended.write, False

    def failing(file: Appended, data: bytes) -> None:
        if is_full:
            write(file, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, data)

    with mock.patch.object(Appended, "write", failing):
        batch = await create(client, jsonl([request(number) for number in range(400)]))
        await at(client, batch, "in_progress")
        is_full = True
        await paused(client, batch.id, "disk_full")
        async with front.post() as answer:
            assert answer.status == 200
        with pytest.raises(openai.InternalServerError) as error:
            await client.files.create(file=b"x", purpose="batch")
        assert error.value.code == "disk"
        await until(lambda: engine.running == 0)
        is_full = False
        batch = await ended(client, batch)
    output = await rows(client, batch.output_file_id)
    assert sorted(row["custom_id"] for row in output) == sorted(f"request-{number}" for number in range(400))


async def test_without_its_database_the_server_says_so_and_goes_on_when_it_is_back(
    front: Front, client: openai.AsyncOpenAI
) -> None:
    record, is_gone = OwnerStore.record, False

    async def failing(store: OwnerStore, progress: object) -> object:
        if is_gone:
            raise OperationalError("UPDATE", {}, Exception("connection lost"))
        return await record(store, progress)  # type: ignore[arg-type]

    with mock.patch.object(OwnerStore, "record", failing):
        batch = await create(client, jsonl([request(number) for number in range(400)]))
        await at(client, batch, "in_progress")
        is_gone = True
        await paused(client, batch.id, "store_unavailable")
        async with front.post() as answer:
            assert answer.status == 200
        is_gone = False
        batch = await ended(client, batch)
    assert len(await rows(client, batch.output_file_id)) == 400


async def test_without_an_engine_a_batch_waits_and_says_why(
    front: Front, client: openai.AsyncOpenAI, engine: FakeEngine
) -> None:
    await engine.__aexit__(None, None, None)
    await until(lambda: not any(front.cluster.engines_ready.values()))
    batch = await create(client, jsonl([request(number) for number in range(20)]))
    await at(client, batch, "in_progress")
    await paused(client, batch.id, "no_engine")
    await engine.__aenter__()
    assert (await ended(client, batch)).status == "completed"


async def test_a_server_that_ends_leaves_its_batches_to_the_next(engine: FakeEngine, tmp_path: Path) -> None:
    config = Config(
        server=ServerConfig(port=0, state=str(tmp_path)),
        engines=EngineConfig(engine=(engine.url,), slots=8),
        live=LiveConfig(probe_every_s=0.05),
    )
    async with serving(config) as (cluster, url):
        await until(lambda: all(cluster.engines_ready.values()))
        client = client_of(url)
        batch = await create(client, jsonl([request(number, max_tokens=40) for number in range(400)]))
        await at(client, batch, "in_progress")
        await until(lambda: len(engine.bodies) > 40)
    executed = len(engine.bodies)
    async with serving(config) as (cluster, url):
        client = client_of(url)
        batch = await ended(client, batch)
        assert batch.status == "completed"
        output = await rows(client, batch.output_file_id)
    assert sorted(row["custom_id"] for row in output) == sorted(f"request-{number}" for number in range(400))
    assert executed < 400, "the first server had not done everything"


async def test_two_servers_with_one_store_answer_for_each_others_batches(
    start_front: StartFront, engine: FakeEngine, postgres_url: str, tmp_path: Path
) -> None:
    jobs = JobsConfig(store=postgres_url, store_folder=str(tmp_path / "files"))
    first = await start_front(engine, jobs=jobs)
    client = client_of(first.url)
    batch = await create(client, jsonl([request(number, max_tokens=60) for number in range(300)]))
    await at(client, batch, "in_progress")
    second = await start_front(engine, jobs=jobs)
    other = client_of(second.url)
    assert (await other.batches.retrieve(batch.id)).status == "in_progress", "any server answers for it"
    cancelled = await create(other, jsonl([request(number, max_tokens=100_000) for number in range(300)]))
    await at(other, cancelled, "in_progress")
    assert (await client.batches.cancel(cancelled.id)).status == "cancelling", "at a server that does not own it"
    await at(client, cancelled, "cancelled")
    batch = await ended(other, batch)
    output = await rows(other, batch.output_file_id)
    assert sorted(row["custom_id"] for row in output) == sorted(f"request-{number}" for number in range(300))


async def test_a_locked_database_is_a_refusal_that_comes_soon(
    front: Front, client: openai.AsyncOpenAI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (batch_store, file_store):
        monkeypatch.setattr(module, "CLIENT_WAITS_S", 0.1)
    batch = await create(client, jsonl([request(0)]))
    batch = await ended(client, batch)
    locking = sqlite3.connect(tmp_path / "state" / "jobs.sqlite", isolation_level=None)
    locking.execute("BEGIN IMMEDIATE")
    for asked in (client.files.create(file=b"x", purpose="batch"), client.files.delete(batch.input_file_id)):
        with pytest.raises(openai.InternalServerError, match="locked by another program") as refusal:
            async with asyncio.timeout(BUSY_S / 2):
                await asked
        assert refusal.value.code == "store_unavailable"
        assert refusal.value.response.headers["retry-after"]
    assert (await client.batches.retrieve(batch.id)).status == "completed", "what only reads goes on"
    locking.execute("ROLLBACK")
    locking.close()
    assert (await ended(client, await create(client, jsonl([request(0)])))).status == "completed"
