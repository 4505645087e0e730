"""The log: its two forms, the fields of a request, and one line for each request with --access-log."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from front import StartFront, until
from server_process import Server

from llmserve.engines.timed.server import FakeEngine, Fault
from llmserve.runtime.logs import JsonLines, TextLines
from llmserve.settings.tree import ServerConfig

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


def record(message: str = "it failed", **fields: Any) -> logging.LogRecord:
    made = logging.makeLogRecord({"msg": message, "levelname": "WARNING"})
    made.fields = fields
    return made


def test_a_line_of_text_has_its_time_its_level_and_its_fields() -> None:
    line = TextLines().format(record(request_id="llmserve-7", ms=12.5, attempt=2))
    assert re.fullmatch(rf"{TIME} WARNING it failed request_id=llmserve-7 ms=12\.5 attempt=2", line)


def test_a_value_of_a_client_cannot_end_the_line_nor_fill_the_log() -> None:
    line = TextLines().format(record(model="a\nINFO b\x1b[2J", request_id="x" * 10_000))
    assert "\n" not in line
    assert "\x1b" not in line
    assert r'model="a\nINFO b\u001b[2J"' in line
    assert len(line) < 400


def test_a_line_of_json_is_an_object_with_the_same_fields() -> None:
    line = json.loads(JsonLines().format(record(request_id="llmserve-7", ms=12.5, attempt=2)))
    assert re.fullmatch(TIME, line.pop("time"))
    assert line == {"level": "warning", "message": "it failed", "request_id": "llmserve-7", "ms": 12.5, "attempt": 2}


@pytest.mark.parametrize("form", [TextLines(), JsonLines()])
def test_an_error_has_its_traceback(form: logging.Formatter) -> None:
    try:
        raise ValueError("no such thing")
    except ValueError as error:
        made = record()
        made.exc_info = (ValueError, error, error.__traceback__)
    assert "ValueError: no such thing" in form.format(made)


# ---- requests ----


def lines_of(caplog: pytest.LogCaptureFixture, logger: str) -> list[dict[str, Any]]:
    return [
        {"message": made.getMessage(), **getattr(made, "fields", {})} for made in caplog.records if made.name == logger
    ]


async def test_each_request_has_a_line_at_its_end(
    start_front: StartFront, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "keys").write_text("me: sk-right\n")
    settings = ServerConfig(port=0, access_log=True, api_key_file=str(tmp_path / "keys"))
    own = {"authorization": "Bearer sk-right"}
    async with FakeEngine(step_s=0.001) as engine:
        front = await start_front(engine, server=settings)
        for headers, fields in (
            (own, {"stream": True, "max_tokens": 3}),
            ({**own, "x-request-id": "mine"}, {"max_tokens": 2}),
            (own, {"max_tokens": "many"}),
            ({"authorization": "Bearer sk-wrong"}, {}),
        ):
            async with front.post(headers=headers, **fields) as response:
                await response.read()
        leaving = asyncio.ensure_future(front.session.get(f"{front.url}/nowhere"))
        (await leaving).close()
        await until(lambda: len(lines_of(caplog, "llmserve.access")) == 5)
    streamed, whole, bad, unknown, lost = lines_of(caplog, "llmserve.access")
    name = engine.url.removeprefix("http://")
    served = {"status": 200, "key": "me", "model": "fake", "engine": name, "attempt": 1}
    assert served.items() <= streamed.items()
    assert streamed["request_id"] == f"llmserve-{streamed['id']}"
    assert streamed["output_tokens"] == 3
    assert streamed["prompt_tokens"] > 0
    assert 0 <= streamed["queue_ms"] <= streamed["first_token_ms"] <= streamed["ms"]
    assert streamed["bytes"] > 100
    assert {**served, "request_id": "mine", "output_tokens": 2}.items() <= whole.items()
    assert "first_token_ms" not in whole
    assert (bad["status"], bad["key"]) == (400, "me")
    assert (unknown["status"], unknown["error"]) == (401, "invalid_api_key")
    assert (lost["status"], lost["path"], lost["method"]) == (404, "/nowhere", "GET")


async def test_a_client_that_left_and_a_refusal_of_the_queue_have_lines_too(
    start_front: StartFront, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeEngine(step_s=0.01) as engine:
        front = await start_front(
            engine, slots=1, scheduling={"queue_requests_max": 1}, server=ServerConfig(port=0, access_log=True)
        )

        async def ask() -> None:
            async with front.post(max_tokens=2000, stream=True) as response:
                await response.read()

        running = asyncio.ensure_future(ask())
        await until(lambda: engine.running == 1)
        waiting = asyncio.ensure_future(ask())
        await until(lambda: front.cluster.scheduler.waiting == 1)
        async with front.post() as response:
            assert response.status == 429
        for lines, task in ((2, waiting), (3, running)):
            task.cancel()
            await until(lambda lines=lines: len(lines_of(caplog, "llmserve.access")) == lines)
    refused, *left = lines_of(caplog, "llmserve.access")
    assert (refused["status"], refused["error"], refused["model"]) == (429, "queue_full", "fake")
    assert "engine" not in refused
    assert [line["gone"] for line in left] == ["client", "client"]
    assert ["engine" in line for line in left] == [False, True]


async def test_trouble_with_an_engine_names_the_request(
    start_front: StartFront, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeEngine(step_s=0.001) as engine:
        engine.fault = Fault("close_mid_stream", after_tokens=1)
        front = await start_front(engine)
        async with front.post(stream=True, max_tokens=9, headers={"x-request-id": "mine"}) as response:
            await response.read()
        await until(lambda: any("broke off" in line["message"] for line in lines_of(caplog, "llmserve")))
    (trouble,) = [line for line in lines_of(caplog, "llmserve") if "broke off" in line["message"]]
    assert (trouble["request_id"], trouble["model"], trouble["attempt"]) == ("mine", "fake", 1)
    assert trouble["engine"] == engine.url.removeprefix("http://")


@pytest.mark.slow
def test_the_server_writes_json_lines(tmp_path: Path) -> None:
    server = Server("--log-format", "json", "--access-log", "--log-level", "error")
    try:
        server.chat("Count from 1 to 3.")
    finally:
        server.stop()
        assert server.process.stdout is not None
        rest = server.process.stdout.read()
        server.close()
    lines = [json.loads(line) for line in rest.splitlines() if line.startswith("{")]
    (access,) = [line for line in lines if line["message"] == "access" and line["path"] == "/v1/chat/completions"]
    assert (access["status"], access["engine"], access["level"]) == (200, "embedded", "info")
