"""`llmserve batch run`: a file of requests on an engine, without a server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmserve.__main__ import main
from llmserve.engines.process import free_port
from llmserve.errors import ConfigError
from llmserve.jobs.run.local_file import read_input, results_of


def written(path: Path, count: int, **body: object) -> Path:
    message = {"role": "user", "content": "How are you?"}
    rows = [
        {
            "custom_id": f"line {number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "fake", "messages": [message], "max_tokens": 3 + number % 4, **body},
        }
        for number in range(count)
    ]
    path.write_text("".join([json.dumps(row) + "\n" for row in rows]))
    return path


def test_bad_lines_are_named_by_number_and_nothing_is_run(tmp_path: Path) -> None:
    path = written(tmp_path / "in.jsonl", 3)
    good = path.read_text().splitlines()
    path.write_text("\n".join([good[0], "{", good[0], good[1].replace("/chat/", "/cat/"), good[2]]) + "\n")
    with pytest.raises(ConfigError, match=r"line 2.*\n.*line 3: its custom_id 'line 0' is that of line 1\n.*line 4"):
        read_input(path)


def test_a_torn_last_row_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text('{"custom_id":"a","response":{}}\n{"custom_id":"b","resp')
    assert results_of(path) == ["a"]
    assert path.read_text() == '{"custom_id":"a","response":{}}\n'


def test_results_of_another_file_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, output = written(tmp_path / "in.jsonl", 2), tmp_path / "out.jsonl"
    output.write_text('{"custom_id":"strange"}\n')
    url = f"http://127.0.0.1:{free_port()}"
    assert main(["batch", "run", str(path), str(output), "--engine", url]) == 2
    assert "'strange' is not in" in capsys.readouterr().err


@pytest.fixture
def engine_url() -> Iterator[str]:
    engine = subprocess.Popen(
        [sys.executable, "-m", "llmserve.engines.timed", "--slots", "4", "--step-s", "0.02", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert engine.stdout is not None
        url = re.search(r"http://[\d.]+:\d+", engine.stdout.readline())
        assert url is not None
        yield url[0]
    finally:
        engine.kill()
        engine.wait()


@pytest.mark.slow
def test_lines_may_be_of_any_endpoint_that_answers_in_json(tmp_path: Path, engine_url: str) -> None:
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
        "/v1/responses": {"input": "hello", "max_output_tokens": 2},
        "/v1/embeddings": {"input": "hello"},
        "/v1/no/such": {},
    }
    rows = [
        {"custom_id": url, "method": "POST", "url": url, "body": {"model": "fake", **body}}
        for url, body in bodies.items()
    ]
    path.write_text("".join([json.dumps(row) + "\n" for row in rows]))
    with pytest.raises(ConfigError, match=r"line 4: POST /v1/no/such: only POST to .*/v1/embeddings"):
        read_input(path)
    path.write_text("".join([json.dumps(row) + "\n" for row in rows[:-1]]))
    assert main(["batch", "run", str(path), str(output), "--engine", engine_url, "--slots", "4"]) == 0
    answers = {row["custom_id"]: row for row in map(json.loads, output.read_text().splitlines())}
    assert {url: row["response"]["body"]["object"] for url, row in answers.items()} == {
        "/v1/chat/completions": "chat.completion",
        "/v1/responses": "response",
        "/v1/embeddings": "list",
    }
    assert len({row["id"] for row in answers.values()}) == 3


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_and_runs_nothing_twice(tmp_path: Path, engine_url: str) -> None:
    path, output = written(tmp_path / "in.jsonl", 60), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "llmserve", "batch", "run", str(path), str(output), "--engine", engine_url]
    command += ["--slots", "4"]
    first = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    deadline_s = time.monotonic() + 60.0
    while (not output.exists() or output.read_bytes().count(b"\n") < 10) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    first.kill()
    first.wait()
    done = results_of(output)
    assert 10 <= len(done) < 60
    assert subprocess.run(command, stderr=subprocess.DEVNULL, timeout=120).returncode == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert sorted(row["custom_id"] for row in rows) == sorted(f"line {number}" for number in range(60))
    assert [row["custom_id"] for row in rows][: len(done)] == done
    assert all(row["response"]["status_code"] == 200 and row["error"] is None for row in rows)


def test_a_model_that_no_engine_has_ends_a_run_at_once(
    tmp_path: Path, engine_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, output = written(tmp_path / "in.jsonl", 3, model="llama3"), tmp_path / "out.jsonl"
    assert main(["batch", "run", str(path), str(output), "--engine", engine_url]) == 1
    assert f"no engine serves model 'llama3'; {engine_url.removeprefix('http://')} has fake" in capsys.readouterr().err
    assert output.read_bytes() == b""


def test_lines_of_a_model_that_no_engine_has_fail_beside_others(tmp_path: Path, engine_url: str) -> None:
    path, output = written(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    path.write_text(path.read_text().replace('"fake"', '"llama3"', 1))
    assert main(["batch", "run", str(path), str(output), "--engine", engine_url]) == 1
    assert results_of(output) == ["line 1", "line 2"]
    (row,) = map(json.loads, (tmp_path / "out.jsonl.errors").read_text().splitlines())
    assert (row["custom_id"], row["response"]["body"]["error"]["code"]) == ("line 0", "model_not_found")


def test_a_byte_order_mark_and_half_a_surrogate_stop_no_file_and_another_encoding_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "in.jsonl", 2)
    text = path.read_text()
    path.write_bytes(b"\xef\xbb\xbf" + text.replace("How are you?", r"\ud83d", 1).encode())
    assert [line.custom_id for line in read_input(path)] == ["line 0", "line 1"]
    path.write_text(text, encoding="utf-16")
    with pytest.raises(ConfigError, match=r"in\.jsonl is UTF-16: write it as UTF-8"):
        read_input(path)


def test_a_line_that_is_nested_too_deeply_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "in.jsonl", 1)
    path.write_text(path.read_text().replace('"fake"', '"fake", "x": ' + "[" * 990 + "]" * 990))
    with pytest.raises(ConfigError, match="line 1: its lists and objects are nested more than 128 deep"):
        read_input(path)


def test_a_list_of_batches_shows_every_id_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    batches = [{"id": f"batch_{number:032x}", "status": "in_progress"} for number in range(3)]
    page = json.dumps({"data": batches, "has_more": False}).encode()
    monkeypatch.setattr("llmserve.commands.batch.ask", lambda args, path: page)
    for columns in ("80", "30"):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(["batch", "list", "--url", "http://127.0.0.1:1"]) == 0
        shown = capsys.readouterr().out
        assert all(batch["id"] in shown and "in_progress" in shown for batch in batches)
