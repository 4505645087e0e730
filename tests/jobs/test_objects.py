"""What clients see of files and batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from batch_client import CHAT, at, client_of, create, ended, jsonl, request, rows
from front import Front, StartFront

from llmserve.engines.timed.server import FakeEngine, Fault
from llmserve.settings.tree import ApiConfig, JobsConfig, ServerConfig

# ---- files ----------------------------------------------------------------------------------------------------------


async def test_a_file_comes_back_as_it_was_sent_and_is_gone_when_deleted(client: openai.AsyncOpenAI) -> None:
    data = bytes(range(256)) * 5000  # any bytes: the lines are checked by a batch
    file = await client.files.create(file=("a b.jsonl", data), purpose="batch")
    assert (file.bytes, file.filename, file.purpose) == (len(data), "a b.jsonl", "batch")
    assert await client.files.retrieve(file.id) == file
    assert (await client.files.content(file.id)).content == data
    assert (await client.files.delete(file.id)).deleted
    with pytest.raises(openai.NotFoundError, match=file.id):
        await client.files.retrieve(file.id)
    with pytest.raises(openai.NotFoundError):
        await client.files.content(file.id)


async def test_files_of_a_deleted_file_leave_the_disk_and_only_their_owner_can_read_any(
    client: openai.AsyncOpenAI, tmp_path: Path
) -> None:
    kept = await client.files.create(file=("in.jsonl", b"kept"), purpose="batch")
    gone = await client.files.create(file=("in.jsonl", b"gone"), purpose="batch")
    await client.files.delete(gone.id)
    (path,) = (tmp_path / "state" / "jobs").iterdir()
    assert path.read_bytes() == b"kept"
    for path in (tmp_path / "state").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
    assert kept.expires_at == kept.created_at + 30 * 86400


async def test_lists_have_pages(client: openai.AsyncOpenAI) -> None:
    made = [(await client.files.create(file=(f"{number}", b"x"), purpose="batch")).id for number in range(5)]
    assert [file.id async for file in client.files.list(limit=2)] == made[::-1]
    assert [file.id async for file in client.files.list(limit=2, order="asc")] == made
    page = await client.files.list(limit=2, order="asc", after=made[1])
    assert [file.id for file in page.data] == made[2:4]
    assert page.has_more
    assert not (await client.files.list(purpose="batch_output")).data
    for wrong in ({"limit": 0}, {"limit": 10_001}, {"after": "file-none"}, {"order": "up"}):
        with pytest.raises(openai.BadRequestError) as error:
            await client.files.list(**wrong)  # type: ignore[arg-type]
        assert error.value.param == next(iter(wrong))


async def test_a_file_of_another_purpose_is_refused(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        await client.files.create(file=("in.jsonl", b"x"), purpose="fine-tune")
    assert error.value.param == "purpose"


async def test_a_file_may_expire_earlier(client: openai.AsyncOpenAI) -> None:
    expires: Any = {"anchor": "created_at", "seconds": 7200}
    file = await client.files.create(file=("in.jsonl", b"x"), purpose="batch", expires_after=expires)
    assert file.expires_at == file.created_at + 7200
    with pytest.raises(openai.BadRequestError) as error:
        await client.files.create(file=("x", b"x"), purpose="batch", expires_after={**expires, "seconds": 10})
    assert error.value.param == "expires_after"


# ---- validation -----------------------------------------------------------------------------------------------------

GOOD = request(0)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"{no json", "invalid_json_line"),
        (b"\xff\xfe", "invalid_json_line"),
        (b"[]", "invalid_line"),
        (json.dumps({**GOOD, "custom_id": 5}).encode(), "invalid_line"),
        (json.dumps({name: GOOD[name] for name in ("method", "url", "body")}).encode(), "invalid_line"),
        (json.dumps(GOOD).encode(), "duplicate_custom_id"),
        (json.dumps({**request(1), "custom_id": ""}).encode(), "invalid_custom_id"),
        (json.dumps({**request(1), "url": "/v1/embeddings"}).encode(), "invalid_url"),
        (json.dumps({**request(1), "method": "GET"}).encode(), "invalid_method"),
        (json.dumps({**request(1), "body": "text"}).encode(), "invalid_body"),
        (json.dumps(request(1, stream=True)).encode(), "stream_not_supported"),
        (json.dumps(request(1, padding="x" * 9000)).encode(), "line_too_long"),
        (b'{"custom_id": "' + b"x" * 90_000 + b'"', "line_too_long"),
    ],
)
async def test_a_bad_line_fails_the_batch_by_its_number(
    start_front: StartFront, engine: FakeEngine, tmp_path: Path, line: bytes, code: str
) -> None:
    limits = ApiConfig(body_bytes_max=8000)
    front = await start_front(engine, server=ServerConfig(port=0, state=str(tmp_path)), limits=limits)
    client = client_of(front.url)
    data = jsonl([GOOD]) + b"\n" + line + b"\n" + jsonl([request(2)])
    batch = await ended(client, await create(client, data))
    assert (batch.status, batch.output_file_id) == ("failed", None)
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(error.code, error.line) for error in batch.errors.data] == [(code, 3)]
    assert engine.running_max == 0, "nothing was executed"
    assert batch.failed_at is not None


async def test_every_bad_line_is_named_up_to_a_hundred(client: openai.AsyncOpenAI) -> None:
    batch = await ended(client, await create(client, b"no\n" * 300))
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [error.line for error in batch.errors.data] == [*range(1, 101)]


@pytest.mark.parametrize(("data", "code"), [(b"", "empty_file"), (b"\n\n", "empty_file")])
async def test_a_file_without_requests_fails_the_batch(client: openai.AsyncOpenAI, data: bytes, code: str) -> None:
    batch = await ended(client, await create(client, data))
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(error.code, error.line) for error in batch.errors.data] == [(code, None)]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/audio/transcriptions"}, "endpoint"),
        ({"window": "1 day"}, "completion_window"),
        ({"window": "0h"}, "completion_window"),
        ({"window": "31d"}, "completion_window"),
        ({"metadata": {f"key {number}": "" for number in range(17)}}, "metadata"),
        ({"metadata": {"key": "x" * 513}}, "metadata...."),
        ({"extra_body": {"output_expires_after": {"anchor": "created_at", "seconds": 5}}}, "output_expires_after"),
    ],
)
async def test_a_wrong_batch_is_refused_by_the_name_of_the_field(
    client: openai.AsyncOpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        await create(client, jsonl([GOOD]), **fields)
    assert str(error.value.param).startswith(param.rstrip("."))


async def test_a_batch_of_no_file_is_refused(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        await client.batches.create(input_file_id="file-none", endpoint=CHAT, completion_window="24h")
    assert error.value.param == "input_file_id"


# ---- answers and errors ---------------------------------------------------------------------------------------------


async def test_a_request_that_is_refused_is_in_the_error_file_and_stops_no_other(client: openai.AsyncOpenAI) -> None:
    requests = [request(0), request(1, n=1000), request(2, model="unknown"), request(3)]
    batch = await ended(client, await create(client, jsonl(requests)))
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 2)
    assert {row["custom_id"] for row in await rows(client, batch.output_file_id)} == {"request-0", "request-3"}
    errors = {row["custom_id"]: row for row in await rows(client, batch.error_file_id)}
    assert errors["request-1"]["response"]["status_code"] == 400
    assert errors["request-1"]["response"]["body"]["error"]["param"] == "n"
    assert errors["request-2"]["response"]["status_code"] == 404
    assert {row["error"] for row in errors.values()} == {None}


async def test_plain_completions_are_an_endpoint_too(client: openai.AsyncOpenAI) -> None:
    url: Any = "/v1/completions"
    requests = [request(number, url=url) for number in range(3)]
    batch = await ended(client, await create(client, jsonl(requests), endpoint=url))
    output = await rows(client, batch.output_file_id)
    assert [row["response"]["body"]["object"] for row in output] == ["text_completion"] * 3


async def test_a_line_that_fails_on_the_engine_again_and_again_ends_in_the_error_file(
    front: Front, client: openai.AsyncOpenAI, engine: FakeEngine
) -> None:
    engine.fault = Fault("500")
    batch = await ended(client, await create(client, jsonl([request(0)])))
    (row,) = await rows(client, batch.error_file_id)
    assert (batch.status, row["response"]["status_code"]) == ("completed", 500)


# ---- cancel, expiry, idempotency -----------------------------------------------------------------------------------


@pytest.fixture
async def slow_engine(engine: FakeEngine) -> FakeEngine:
    """An engine whose answers never come."""
    engine.fault = Fault("hang")
    return engine


async def test_a_cancelled_batch_keeps_the_results_that_it_has(
    front: Front, client: openai.AsyncOpenAI, engine: FakeEngine
) -> None:
    requests = [request(number, max_tokens=3 if number < 4 else 100_000) for number in range(11)]  # 7 for 8 slots
    batch = await create(client, jsonl(requests))
    while (counts := (await client.batches.retrieve(batch.id)).request_counts) is None or counts.completed < 4:
        pass
    batch = await client.batches.cancel(batch.id)
    assert batch.status in ("cancelling", "cancelled")
    batch = await at(client, batch, "cancelled")
    assert len(await rows(client, batch.output_file_id)) == 4
    assert batch.error_file_id is None
    assert (await client.batches.cancel(batch.id)).status == "cancelled", "a second time changes nothing"
    assert engine.running == 0, "the engine works for nobody"


async def test_a_batch_is_cancelled_while_it_is_validated(client: openai.AsyncOpenAI) -> None:
    batch = await create(client, jsonl([GOOD]))
    assert batch.status == "validating"
    batch = await client.batches.cancel(batch.id)
    batch = await at(client, batch, "cancelled")
    assert batch.in_progress_at is None
    assert batch.output_file_id is None


async def test_a_batch_that_has_ended_is_not_cancelled(client: openai.AsyncOpenAI) -> None:
    batch = await ended(client, await create(client, jsonl([GOOD])))
    with pytest.raises(openai.BadRequestError) as error:
        await client.batches.cancel(batch.id)
    assert error.value.code == "batch_not_cancellable"


async def test_after_its_window_a_batch_expires_and_names_each_unfinished_request(
    front: Front, client: openai.AsyncOpenAI, slow_engine: FakeEngine
) -> None:
    batch = await ended(client, await create(client, jsonl([request(number) for number in range(20)]), window="5s"))
    assert (batch.status, batch.output_file_id) == ("expired", None)
    assert batch.expires_at is not None
    assert batch.expired_at is not None
    assert batch.expired_at >= batch.expires_at == batch.created_at + 5
    errors = await rows(client, batch.error_file_id)
    assert sorted(row["custom_id"] for row in errors) == sorted(f"request-{number}" for number in range(20))
    assert {row["error"]["code"] for row in errors} == {"batch_expired"}
    assert {row["response"] for row in errors} == {None}
    assert batch.request_counts is not None
    assert batch.request_counts.failed == 20


async def test_an_idempotency_key_makes_one_batch(client: openai.AsyncOpenAI) -> None:
    header = {"Idempotency-Key": "once"}
    first = await create(client, jsonl([GOOD]), extra_headers=header)
    fields: Any = {"endpoint": CHAT, "completion_window": "24h", "input_file_id": first.input_file_id}
    again = await client.batches.create(**fields, extra_headers=header)
    assert again.id == first.id
    other = await client.batches.create(**fields)
    assert other.id != first.id
    with pytest.raises(openai.BadRequestError) as error:
        await client.batches.create(**{**fields, "completion_window": "1h"}, extra_headers=header)
    assert error.value.code == "idempotency_key_reused"
    assert {batch.id async for batch in client.batches.list(limit=1)} == {first.id, other.id}


async def test_an_input_file_in_use_is_not_deleted(
    front: Front, client: openai.AsyncOpenAI, slow_engine: FakeEngine
) -> None:
    batch = await create(client, jsonl([GOOD]))
    with pytest.raises(openai.BadRequestError) as error:
        await client.files.delete(batch.input_file_id)
    assert error.value.code == "file_in_use"
    await at(client, await client.batches.cancel(batch.id), "cancelled")
    await client.files.delete(batch.input_file_id)


async def test_results_may_expire_later_than_other_files(client: openai.AsyncOpenAI) -> None:
    expires: Any = {"anchor": "created_at", "seconds": 3600}
    batch = await ended(client, await create(client, jsonl([GOOD]), output_expires_after=expires))
    assert batch.output_file_id is not None
    output = await client.files.retrieve(batch.output_file_id)
    assert (output.purpose, output.expires_at) == ("batch_output", output.created_at + 3600)


# ---- keys and limits ------------------------------------------------------------------------------------------------


async def test_keys_see_their_own_files_and_batches_only(
    start_front: StartFront, engine: FakeEngine, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("red: secret-of-red\nblue: secret-of-blue\n")
    (tmp_path / "keys").chmod(0o600)
    server = ServerConfig(port=0, state=str(tmp_path / "state"), api_key_file=str(tmp_path / "keys"))
    front = await start_front(engine, server=server)
    red, blue = client_of(front.url, "secret-of-red"), client_of(front.url, "secret-of-blue")
    batch = await ended(red, await create(red, jsonl([GOOD])))
    assert batch.status == "completed"
    assert batch.output_file_id is not None
    for look in (
        blue.batches.retrieve(batch.id),
        blue.batches.cancel(batch.id),
        blue.files.retrieve(batch.input_file_id),
        blue.files.content(batch.output_file_id),
        blue.files.delete(batch.output_file_id),
        blue.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"),
    ):
        with pytest.raises(openai.NotFoundError):
            await look
    assert not (await blue.files.list()).data
    assert not (await blue.batches.list()).data
    nobody = client_of(front.url, "wrong")
    for refused in (nobody.files.create(file=b"x", purpose="batch"), nobody.batches.list()):
        with pytest.raises(openai.AuthenticationError):
            await refused


async def test_limits_of_files_and_of_queued_tokens(
    start_front: StartFront, slow_engine: FakeEngine, tmp_path: Path
) -> None:
    jobs = JobsConfig(batch_tokens_max=500, batch_files_max=3, batch_bytes_max=100_000)
    front = await start_front(slow_engine, server=ServerConfig(port=0, state=str(tmp_path)), jobs=jobs)
    client = client_of(front.url)
    first = await create(client, jsonl([request(number, max_tokens=100) for number in range(4)]))
    await at(client, first, "in_progress")
    second = await ended(client, await create(client, jsonl([request(number, max_tokens=50) for number in range(4)])))
    assert second.status == "failed"
    assert second.errors is not None
    assert second.errors.data is not None
    assert second.errors.data[0].code == "token_limit_exceeded"
    with pytest.raises(openai.BadRequestError) as error:
        await client.files.create(file=b"x" * 100_000, purpose="batch")
    assert error.value.code == "files_bytes_max"
    await client.files.create(file=b"x", purpose="batch")
    with pytest.raises(openai.BadRequestError) as error:
        await client.files.create(file=b"x", purpose="batch")
    assert error.value.code == "files_max"
    assert len(list((tmp_path / "jobs").glob("*.jsonl"))) == 3, "refused uploads leave nothing"


async def test_without_a_place_for_files_the_endpoints_say_what_is_missing(
    start_front: StartFront, engine: FakeEngine
) -> None:
    client = client_of((await start_front(engine)).url)
    for refused in (client.files.create(file=b"x", purpose="batch"), client.batches.list(), client.files.retrieve("x")):
        with pytest.raises(openai.NotFoundError, match="--state"):
            await refused


@pytest.mark.parametrize("depth", [500, 980, 983, 100_000])
async def test_a_batch_whose_body_is_nested_too_deeply_is_a_bad_request(client: openai.AsyncOpenAI, depth: int) -> None:
    deep: Any = b'{"endpoint":"/v1/completions","metadata":' + b"[" * depth + b"]" * depth + b"}"
    with pytest.raises(openai.BadRequestError, match="nested more than 128 deep"):
        await client.post("/batches", cast_to=object, content=deep)
