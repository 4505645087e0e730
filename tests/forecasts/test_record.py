"""The length record: its lines, and that it never fails a request."""

import json
from pathlib import Path

import pytest
from calls import a_call
from front import StartFront
from msgspec.structs import replace

from llmserve.engines.timed.server import FakeEngine
from llmserve.errors import JournalError
from llmserve.forecasts.record import LengthRecord
from llmserve.request import Call
from llmserve.settings.tree import PredictorConfig
from predictor.dataset import load_rows
from predictor.prompt import Prompt


def call(body: str = "{}") -> Call:
    return a_call(
        "/v1/chat/completions", body.encode(), Prompt("hi \ud83d", "m", "be brief", 7, ("END",)), stream=False
    )


def test_each_line_is_a_training_row(tmp_path: Path) -> None:
    record = LengthRecord(tmp_path / "lengths.jsonl")
    record.write(call('{"temperature": 0.7, "user": "alice"}'), 12, capped=False)
    record.write(call(), 512, capped=True)
    record.close()
    first, second = load_rows([tmp_path / "lengths.jsonl"]).rows
    assert first.prompt == replace(call().prompt, text="hi ?")  # half a surrogate pair is no text
    assert [(row.output_tokens, row.capped) for row in (first, second)] == [(12, False), (512, True)]
    line = json.loads((tmp_path / "lengths.jsonl").read_text().splitlines()[0])
    assert line["temperature"] == 0.7
    assert "alice" not in str(line)


def test_a_record_is_continued_at_its_end(tmp_path: Path) -> None:
    for _ in range(2):
        record = LengthRecord(tmp_path / "lengths.jsonl")
        record.write(call(), 3, capped=False)
        record.close()
    assert len(load_rows([tmp_path / "lengths.jsonl"]).rows) == 2


def test_a_record_is_its_owners_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "lengths.jsonl"
    LengthRecord(path).close()
    assert (path.stat().st_mode & 0o777, caplog.text) == (0o600, "")
    path.chmod(0o644)
    LengthRecord(path).close()
    assert f"run `chmod 600 {path}`" in caplog.text


def test_an_unwritable_record_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="cannot write the record"):
        LengthRecord(tmp_path / "nowhere" / "lengths.jsonl")


def test_a_full_disk_ends_the_record_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    record = LengthRecord(Path("/dev/full"))
    record.write(call(), 3, capped=False)
    record.write(call(), 3, capped=False)
    assert [entry.levelname for entry in caplog.records].count("ERROR") >= 1


async def test_the_server_records_completed_answers_only_when_asked(start_front: StartFront, tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine, prediction=PredictorConfig(record=str(path)))
        for fields in ({"max_tokens": 5}, {"max_tokens": 6, "stream": True}):
            async with front.post(**fields) as response:
                await response.read()
    rows = load_rows([path]).rows
    assert sorted((row.output_tokens, row.capped) for row in rows) == [(5, True), (6, True)]


async def test_numbers_outside_json_do_no_harm(start_front: StartFront, tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine, slots=1, prediction=PredictorConfig(record=str(path)))
        body = b'{"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "x": 1e999}'
        for _ in range(3):  # more than there are slots: each slot must be freed
            async with front.session.post(f"{front.url}/v1/chat/completions", data=body) as response:
                assert response.status == 200
    assert len(load_rows([path]).rows) == 3


async def test_answers_that_were_forced_or_cut_are_marked(start_front: StartFront, tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    async with FakeEngine(step_s=0, output_tokens=9) as engine:
        front = await start_front(engine, prediction=PredictorConfig(record=str(path)))
        for fields in ({}, {"max_tokens": 4}, {"max_tokens": 4, "ignore_eos": True}, {"min_tokens": 9}):
            for stream in (False, True):
                async with front.post(stream=stream, **fields) as response:
                    await response.read()
    rows = load_rows([path]).rows
    assert sorted((row.output_tokens, row.capped) for row in rows) == [(4, True)] * 2 + [(9, False)] * 2
