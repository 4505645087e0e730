"""Batches that cannot run now stand still alone, and say why; those of other keys and models go on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from batch_client import at, client_of, create, ended, jsonl, request, rows
from front import Front, StartFront, until

from llmserve.engines.timed.server import FakeEngine, Fault
from llmserve.jobs.run import item_feeder, runner, seats
from llmserve.jobs.run.item_queue import LINES_MAX
from llmserve.jobs.submission import BatchSubmitter
from llmserve.settings.tree import JobsConfig, ServerConfig

KEYS = """
[keys.red]
key = "secret-of-red"
tokens_per_month = 1000
[keys.blue]
key = "secret-of-blue"
"""
MANY = LINES_MAX + 100


def server_with(home: Path, keys: str) -> ServerConfig:
    path = home / "keys.toml"
    path.write_text(keys)
    path.chmod(0o600)
    return ServerConfig(port=0, state=str(home / "state"), api_key_file=str(path), usage_file=str(home / "usage"))


def lines(count: int, **fields: Any) -> bytes:
    return jsonl([request(number, **fields) for number in range(count)])


async def paused(client: openai.AsyncOpenAI, batch_id: str, reason: str | None) -> Any:
    async with asyncio.timeout(20):
        while True:
            batch: Any = await client.batches.retrieve(batch_id)
            if batch.llmserve["paused"] == reason:
                return batch
            await asyncio.sleep(0.02)


async def test_a_spent_budget_stops_the_batches_of_its_key_alone(
    start_front: StartFront, engine: FakeEngine, tmp_path: Path
) -> None:
    front = await start_front(engine, server=server_with(tmp_path, KEYS))
    red, blue = client_of(front.url, "secret-of-red"), client_of(front.url, "secret-of-blue")
    first = await create(red, lines(MANY, max_tokens=20), window="1h")
    await paused(red, first.id, "budget")
    done = await ended(blue, await create(blue, lines(40)))
    assert done.request_counts is not None
    assert done.request_counts.completed == 40
    async with asyncio.timeout(20):  # until the last of its lines has given back what it did not need
        while (await paused(red, first.id, "budget")).llmserve["expected_end_at"] < first.created_at + 60:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def test_a_model_that_is_down_stops_its_own_lines_alone(start_front: StartFront, tmp_path: Path) -> None:
    async with FakeEngine(model="down") as down, FakeEngine(model="up") as up:
        front = await start_front(down, up, server=ServerConfig(port=0, state=str(tmp_path)))
        await down.__aexit__(None, None, None)
        await until(lambda: sum(front.cluster.engines_ready.values()) == 1)
        client = client_of(front.url)
        first = await create(client, lines(MANY, model="down"), window="1h")
        await paused(client, first.id, "no_engine")
        mixed = [request(number, model=("down", "up")[number % 2]) for number in range(MANY)]
        second = await create(client, jsonl(mixed), window="1h")
        third = await ended(client, await create(client, lines(40, model="up")))
        assert third.status == "completed"
        await paused(client, second.id, "no_engine")
        now = await client.batches.retrieve(second.id)
        assert now.request_counts is not None
        assert now.request_counts.completed == MANY // 2, "those of its lines that can run have run"
        await down.__aenter__()
        assert (await ended(client, first)).status == (await ended(client, second)).status == "completed"


async def test_a_slow_model_leaves_the_slots_of_another_their_lines(start_front: StartFront, tmp_path: Path) -> None:
    async with FakeEngine(model="slow", slots=1, step_s=5.0) as slow, FakeEngine(model="fast", slots=8) as fast:
        front = await start_front(slow, fast, server=ServerConfig(port=0, state=str(tmp_path)))
        client = client_of(front.url)
        first = await create(client, lines(MANY, model="slow"), window="1h")
        await at(client, first, "in_progress")
        done = await ended(client, await create(client, lines(40, model="fast")))
        assert done.status == "completed"


async def test_a_key_that_is_missing_for_a_moment_fails_no_line(
    front: Front, client: openai.AsyncOpenAI, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = BatchSubmitter._account
    monkeypatch.setattr(BatchSubmitter, "_account", lambda submitter, key: None)
    batch = await create(client, lines(60))
    await paused(client, batch.id, "key_missing")
    monkeypatch.setattr(BatchSubmitter, "_account", account)
    batch = await ended(client, batch)
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (60, 0)


@pytest.mark.parametrize("error", [RecursionError("too deep"), OSError(5, "I/O error"), KeyError("x")])
async def test_whatever_fails_where_lines_are_read_stops_one_batch_for_a_while(
    client: openai.AsyncOpenAI, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(runner, "AGAIN_S", 0.1)
    read_lines, failing = item_feeder.read_lines, True

    def read(loaded: Any, numbers: Any) -> list[bytes]:
        texts = read_lines(loaded, numbers)
        if failing and b"poison" in texts[0]:
            raise error
        return texts

    monkeypatch.setattr(item_feeder, "read_lines", read)
    poisoned = await create(client, lines(20, user="poison"), window="1h")
    others = await ended(client, await create(client, lines(20)))
    assert others.status == "completed"
    await paused(client, poisoned.id, "disk_error" if isinstance(error, OSError) else "internal_error")
    failing = False
    done = await ended(client, poisoned)
    assert done.request_counts is not None
    assert done.request_counts.completed == 20


async def test_a_line_nested_deeply_fails_its_batch_by_name_and_leaves_no_second_one(
    front: Front, client: openai.AsyncOpenAI
) -> None:
    deep = jsonl([request(0)]).replace(b'"fake"', b'"fake","metadata":' + b'{"a":' * 960 + b"1" + b"}" * 960)
    batch = await ended(client, await create(client, jsonl([request(1)]) + deep))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert (batch.errors.data[0].code, batch.errors.data[0].line) == ("invalid_json_line", 2)
    assert len((await client.batches.list()).data) == 1
    assert (await ended(client, await create(client, lines(5)))).status == "completed"


async def test_batches_of_one_key_that_have_not_ended_are_bounded(start_front: StartFront, tmp_path: Path) -> None:
    async with FakeEngine(step_s=5.0) as engine:
        jobs = JobsConfig(batch_active_max=2, batch_active_total_max=3)
        keys = "".join([f'[keys.{name}]\nkey = "secret-of-{name}"\n' for name in ("red", "blue")])
        front = await start_front(engine, server=server_with(tmp_path, keys), jobs=jobs)
        red, blue = client_of(front.url, "secret-of-red"), client_of(front.url, "secret-of-blue")
        made = [await create(red, lines(1)) for _ in range(2)]
        with pytest.raises(openai.RateLimitError, match=r"this key has 2 batches .*--batch-active-max") as refusal:
            await create(red, lines(1))
        assert refusal.value.code == "rate_limit_exceeded"
        await create(blue, lines(1))
        with pytest.raises(openai.RateLimitError, match=r"all keys together have 3 .*--batch-active-total-max"):
            await create(blue, lines(1))
        for batch in made:
            await red.batches.cancel(batch.id)
            await at(red, batch, "cancelled")
        await create(blue, lines(1))


async def test_few_batches_are_in_memory_and_all_of_them_end(
    start_front: StartFront, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seats, "SEATS", 2)
    async with FakeEngine(step_s=0.005) as engine:
        front = await start_front(engine, server=ServerConfig(port=0, state=str(tmp_path)))
        await run_eight(client_of(front.url), engine)


async def run_eight(client: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    engine.fault = Fault("slow")  # so that the first batches still run when the last one is looked at
    file = await client.files.create(file=("in.jsonl", lines(30, max_tokens=10)), purpose="batch")
    made = [
        await client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        for _ in range(8)
    ]
    waits = await paused(client, made[-1].id, "queued")
    assert waits.status == "in_progress"
    engine.fault = Fault()
    for batch in made:
        assert (await ended(client, batch)).status == "completed"


async def test_parked_batches_give_their_places_in_memory_to_others(
    start_front: StartFront, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seats, "SEATS", 1)
    monkeypatch.setattr(seats, "PARKED_SEATS", 2)
    monkeypatch.setattr(item_feeder, "UNSEATED_S", 0.2)
    async with FakeEngine(model="down") as down, FakeEngine(model="up") as up:
        front = await start_front(down, up, server=ServerConfig(port=0, state=str(tmp_path)))
        await down.__aexit__(None, None, None)
        await until(lambda: sum(front.cluster.engines_ready.values()) == 1)
        client = client_of(front.url)
        made = [await create(client, lines(20, model="down"), window="1h") for _ in range(6)]
        assert (await ended(client, await create(client, lines(20, model="up")))).status == "completed"
        await down.__aenter__()
        for batch in made:
            done = await ended(client, batch)
            assert sorted([row["custom_id"] for row in await rows(client, done.output_file_id)]) == sorted(
                f"request-{number}" for number in range(20)
            )


ANSWERS = {
    "an absurd count": b'{"choices":[],"usage":{"completion_tokens":1' + b"0" * 400 + b"}}",
    "deep nesting": b'{"choices":' + b"[" * 985 + b"]" * 985 + b"}",
    "no JSON": b"<html>busy</html>",
    "numbers that JSON has not": b'{"choices":[{"logprob":-Infinity,"x":NaN}]}',
    "half a surrogate": rb'{"choices":[{"message":{"content":"\ud83d"}}]}',
    "a control character": b'{"choices":[{"message":{"content":"\x01"}}]}',
    "nothing": b"",
    "500": b"",
}


@pytest.mark.parametrize("kind", ANSWERS)
async def test_whatever_an_engine_answers_a_line_has_one_row_and_runs_as_often_as_online(
    start_front: StartFront, tmp_path: Path, kind: str
) -> None:
    runs = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal runs
        runs += 1
        await request.read()
        return web.Response(status=500 if kind == "500" else 200, body=ANSWERS[kind], content_type="application/json")

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake"}]})

    app = web.Application()
    app.add_routes(
        [web.get("/v1/models", models), web.get("/health", models), web.post("/v1/chat/completions", answer)]
    )
    async with TestServer(app) as engine:
        url = str(engine.make_url("")).rstrip("/")
        front = await start_front(url, server=ServerConfig(port=0, state=str(tmp_path)))
        client = client_of(front.url)
        done = await ended(client, await create(client, lines(1)))
        found = await rows(client, done.output_file_id) + await rows(client, done.error_file_id)
    assert (done.status, [row["custom_id"] for row in found]) == ("completed", ["request-0"])
    assert runs <= 3
