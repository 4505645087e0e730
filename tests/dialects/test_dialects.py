"""Every dialect of tests/dialects/table.py on every path: probes, whole answers, streams, jobs, faults, refusals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from batch_client import client_of, create, ended, jsonl, request, rows
from dialects.stand_in import BUSY, ERROR_BETWEEN, ERROR_FIRST, GONE, WELL, DialectEngine
from dialects.table import DIALECTS, MODEL, OUTPUT_TOKENS, TEXT, Dialect
from front import Front, StartFront, through_relays_too, until

from llmserve.scheduling.messages import RequestEnded
from llmserve.settings.tree import EngineConfig, LiveConfig, ServerConfig

FAR_S = 3600.0
each_dialect = pytest.mark.parametrize("dialect", DIALECTS, ids=str)


async def answer(front: Front, **fields: Any) -> tuple[int, bytes]:
    async with front.post(**fields) as response:
        return response.status, await response.read()


def ends(front: Front) -> list[RequestEnded]:
    return [step.event for step in front.cluster.journal.steps if isinstance(step.event, RequestEnded)]


async def when_ended(front: Front) -> list[RequestEnded]:
    await until(lambda: not front.cluster.scheduler.requests)
    return ends(front)


# ---- an engine that does well ----


@each_dialect
async def test_an_engine_is_ready_by_its_own_probes(dialect: Dialect, start_front: StartFront) -> None:
    async with DialectEngine(dialect) as engine:
        front = await start_front(engine.url)
        async with front.session.get(front.url + "/v1/models") as response:
            listed = [model["id"] for model in (await response.json())["data"]]
        assert MODEL in listed


@through_relays_too
@each_dialect
async def test_a_whole_answer_passes_byte_for_byte(dialect: Dialect, start_front: StartFront) -> None:
    async with DialectEngine(dialect) as engine:
        front = await start_front(engine.url)
        assert await answer(front) == (200, dialect.whole)
        (end,) = await when_ended(front)
        assert (end.outcome, end.output_tokens) == ("completed", OUTPUT_TOKENS)


@through_relays_too
@each_dialect
@pytest.mark.parametrize("usage", [True, False], ids=["with usage", "without usage"])
async def test_a_stream_passes_byte_for_byte(dialect: Dialect, usage: bool, start_front: StartFront) -> None:
    """Counts are known also where the client did not ask for the event that has them."""
    async with DialectEngine(dialect) as engine:
        front = await start_front(engine.url)
        asked = {"stream_options": {"include_usage": True}} if usage else {}
        assert await answer(front, stream=True, **asked) == (200, dialect.stream(usage=usage))
        (end,) = await when_ended(front)
        assert (end.outcome, end.output_tokens) == ("completed", OUTPUT_TOKENS)


@each_dialect
async def test_the_official_client_reads_both(dialect: Dialect, start_front: StartFront) -> None:
    async with DialectEngine(dialect) as engine:
        front = await start_front(engine.url)
        asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
        async with client_of(front.url) as client:
            whole = await client.chat.completions.create(**asked)
            assert whole.choices[0].message.content == TEXT
            stream = await client.chat.completions.create(**asked, stream=True)
            pieces = [one.choices[0].delta.content or "" async for one in stream if one.choices]
        assert "".join(pieces) == TEXT


@each_dialect
async def test_a_line_of_a_batch_gets_the_engines_own_body(
    dialect: Dialect, start_front: StartFront, tmp_path: Path
) -> None:
    async with DialectEngine(dialect) as engine:
        front = await start_front(engine.url, server=ServerConfig(port=0, state=str(tmp_path)))
        async with client_of(front.url) as client:
            batch = await ended(client, await create(client, jsonl([request(1)])))
            assert batch.status == "completed"
            (row,) = await rows(client, batch.output_file_id)
        assert row["response"]["body"] == json.loads(dialect.whole)
        assert len(engine.requests) == 1


# ---- an engine that fails ----


def beside(*engines: DialectEngine) -> dict[str, Any]:
    """A server whose probes say nothing of what engines answer to requests."""
    return {
        "engines": EngineConfig(engine=tuple(engine.url for engine in engines), slots=4, look_ahead=0),
        "live": LiveConfig(probe_every_s=0.05),
    }


async def all_answered(front: Front, count: int, expected: Sequence[bytes]) -> None:
    """Ask one request after another, streamed and whole: each gets an answer that the good engine gives."""
    for number in range(count):
        status, body = await answer(front, stream=number % 2 == 0)
        assert status == 200
        assert body in expected


@through_relays_too
@each_dialect
@pytest.mark.parametrize("fault", [ERROR_FIRST, BUSY, GONE])
async def test_what_one_replica_does_not_do_another_does(dialect: Dialect, fault: str, start_front: StartFront) -> None:
    if fault == GONE and (dialect.gone is None or dialect.gone.code != 404):
        pytest.skip("this kind answers for any model, or as if the request were wrong")
    async with DialectEngine(dialect, fault) as bad, DialectEngine(dialect) as good:
        front = await start_front(bad.url, good.url, **beside(bad, good))
        await all_answered(front, 12, [dialect.stream(usage=False), dialect.whole])
        assert sum(end.outcome == "completed" for end in await when_ended(front)) == 12
        assert len(bad.requests) <= 6, "whoever refuses draws no traffic"


@each_dialect
async def test_an_error_as_the_whole_stream_is_no_completed_answer(dialect: Dialect, start_front: StartFront) -> None:
    """With one engine there is nobody else: its client gets an error, and the engine the blame."""
    async with DialectEngine(dialect, ERROR_FIRST) as engine:
        front = await start_front(engine.url, **beside(engine), scheduling={"retries_max": 0})
        for stream in (True, False):
            status, body = await answer(front, stream=stream)
            assert status >= 500 or b"error" in body
        told = await when_ended(front)
        assert {(end.outcome, end.fault) for end in told} == {("failed", True)}


@through_relays_too
@each_dialect
async def test_an_error_in_mid_stream_ends_the_answer_and_teaches_nothing(
    dialect: Dialect, start_front: StartFront
) -> None:
    async with DialectEngine(dialect, ERROR_BETWEEN) as bad, DialectEngine(dialect, ERROR_BETWEEN) as other:
        front = await start_front(bad.url, other.url, **beside(bad, other))
        learnt: list[float] = []
        front.cluster.calls.on_answered.append(lambda in_flight, tokens: learnt.append(tokens))
        status, body = await answer(front, stream=True)
        assert status == 200
        assert body.startswith(dialect.opening + dialect.pieces[0] + dialect.error_between)
        (end,) = await when_ended(front)
        assert (end.outcome, end.fault, end.retryable) == ("failed", True, False)
        assert learnt == []
        assert len(bad.requests) + len(other.requests) == 1


@through_relays_too
@each_dialect
async def test_a_refusal_by_all_is_passed_on(dialect: Dialect, start_front: StartFront) -> None:
    async with DialectEngine(dialect, BUSY) as first, DialectEngine(dialect, BUSY) as second:
        front = await start_front(first.url, second.url, **beside(first, second))
        async with front.post() as response:
            assert (response.status, await response.read()) == (dialect.busy.code, dialect.busy.body)
            if dialect.busy.after_s is not None:
                assert int(response.headers["retry-after"]) >= dialect.busy.after_s
        assert first.requests
        assert second.requests


@each_dialect
async def test_an_engine_that_recovers_is_used_again(dialect: Dialect, start_front: StartFront) -> None:
    """The pause after a refusal ends by itself, and is no longer than what the engine has said."""
    async with DialectEngine(dialect, BUSY) as engine:
        front = await start_front(engine.url, **beside(engine))
        status, _ = await answer(front)
        assert status == dialect.busy.code
        engine.says = WELL
        status, body = await answer(front)
        assert (status, body) == (200, dialect.whole)
