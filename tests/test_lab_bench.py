"""What the laboratory's benchmarks share: asking at given times, progress, tables, and JSON with a row a line."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from bench import ROOT, arguments, client, progress, results, servers, tables

from llmserve.engines.fake import FakeEngine, Fault


def test_importing_it_puts_the_repository_on_the_path() -> None:
    assert (ROOT / "pyproject.toml").is_file()
    assert str(ROOT) in sys.path


# ---- asking -------------------------------------------------------------------------------------------------------


async def test_a_reply_tells_its_tokens_and_a_refusal_is_no_answer() -> None:
    async with FakeEngine(model=client.MODEL, output_tokens=7) as engine, client.session_of() as session:
        reply = await client.ask(session, engine.url, client.body_of("Hi"))
        other = await client.ask(session, engine.url, client.body_of("Hi", model="other"))
    assert (reply.status, reply.tokens, reply.batch, reply.error) == (200, 7, "", "")
    assert other.status == 404
    with pytest.raises(AssertionError, match="404"):
        _ = other.answer


async def test_of_a_broken_stream_what_came_until_then_is_kept() -> None:
    seen: list[bytes] = []
    async with FakeEngine(model=client.MODEL, step_s=0.001) as engine, client.session_of() as session:
        engine.fault = Fault("close_mid_stream", after_tokens=3)
        reply = await client.ask(session, engine.url, client.body_of("Hi", stream=True), on_chunk=seen.append)
    assert (reply.status, bool(reply.error)) == (0, True)
    assert reply.body == b"".join(seen)
    assert b"data: " in reply.body


async def test_each_is_done_at_its_time_and_results_keep_their_order() -> None:
    async def late_by(index: int, due_s: float) -> tuple[int, float]:
        return index, time.perf_counter() - due_s

    done = await client.at_their_times([0.05, 0.0, 0.02], late_by)
    assert [index for index, _ in done] == [0, 1, 2]
    assert all(late_s >= 0 for _, late_s in done), "never before it is due"


async def test_one_that_fails_ends_the_others() -> None:
    async def fail(index: int, due_s: float) -> None:
        raise ValueError(f"the one at {index}")

    with pytest.raises(ExceptionGroup) as raised:
        await client.at_their_times([0.0, 100.0], fail)
    assert [str(error) for error in raised.value.exceptions] == ["the one at 0"]


# ---- progress, tables, results ------------------------------------------------------------------------------------


def test_without_a_terminal_a_count_is_told_in_about_twenty_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.counted(100) as done:
        for number in range(100):
            done(f"item {number}")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == progress.LINES
    assert lines[-1] == "100 of 100: item 99"


def test_without_a_terminal_each_part_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.shared() as report:
        report("the first", 0.0)
        report("the second", 0.5)
    assert [line.split(maxsplit=2)[2] for line in capsys.readouterr().err.splitlines()] == ["the first", "the second"]


def test_markdown_has_a_title_a_head_and_numbers_to_the_right() -> None:
    assert tables.markdown(["a", "b"], [["x", "1"]]) == "| a | b |\n| --- | --- |\n| x | 1 |"
    titled = tables.markdown(["a", "b"], [], title="What", right=True)
    assert titled == "**What**\n\n| a | b |\n| --- | ---: |"


def test_the_first_of_a_round_is_another_each_time() -> None:
    assert [results.in_turn("abc", number) for number in range(4)] == [
        list("abc"),
        list("bca"),
        list("cab"),
        list("abc"),
    ]


def test_results_are_json_with_a_row_a_line(tmp_path: Path) -> None:
    result = {"seed": 1, "runs": [{"a": 1 / 3}, {"a": 2}]}
    text = results.with_rows(results.rounded(result), "runs")
    assert json.loads(text) == {"seed": 1, "runs": [{"a": 0.333333}, {"a": 2}]}
    assert text.count("\n") == 5
    results.write_rows(tmp_path / "new" / "rows.json", result["runs"])
    assert (tmp_path / "new" / "rows.json").read_text().splitlines()[2] == '{"a": 2}'
    results.write_json(None, result)


def test_an_error_that_is_expected_ends_a_script_with_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["scripts/lab/some.py"])
    with pytest.raises(SystemExit, match="some: error: no such file"), arguments.exit_on(ValueError):
        raise ValueError("no such file")
    with pytest.raises(KeyError), arguments.exit_on(ValueError):
        raise KeyError("another")


def test_a_flag_may_be_repeated() -> None:
    assert servers.flags_of("engine", ["a", "b"]) == ["--engine", "a", "--engine", "b"]
