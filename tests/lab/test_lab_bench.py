"""The kit of the laboratory's benchmarks: requests at given times, rows, progress, tables, and JSON."""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path

import pytest
from kit import ROOT, arguments, client, progress, results, rows, servers, tables
from kit.rows import Row

from llmserve.engines.timed.server import FakeEngine, Fault


def test_importing_the_kit_puts_the_repository_on_the_path() -> None:
    assert (ROOT / "pyproject.toml").is_file()
    assert str(ROOT) in sys.path


# ---- requests -----------------------------------------------------------------------------------------------------


async def test_a_reply_has_its_tokens_and_a_refusal_is_no_answer() -> None:
    async with FakeEngine(model=client.MODEL, output_tokens=7) as engine, client.session_of() as session:
        reply = await client.ask(session, engine.url, client.body_of("Hi"))
        other = await client.ask(session, engine.url, client.body_of("Hi", model="other"))
    assert (reply.status, reply.tokens, reply.batch, reply.error) == (200, 7, "", "")
    assert other.status == 404
    with pytest.raises(AssertionError, match="404"):
        _ = other.answer


async def test_a_reply_keeps_the_beginning_of_a_broken_stream() -> None:
    chunks: list[bytes] = []
    async with FakeEngine(model=client.MODEL, step_s=0.001) as engine, client.session_of() as session:
        engine.fault = Fault("close_mid_stream", after_tokens=3)
        reply = await client.ask(session, engine.url, client.body_of("Hi", stream=True), on_chunk=chunks.append)
    assert (reply.status, bool(reply.error)) == (0, True)
    assert reply.body == b"".join(chunks)
    assert b"data: " in reply.body


async def test_calls_start_at_their_times_and_results_keep_their_order() -> None:
    async def late_by(index: int, due_s: float) -> tuple[int, float]:
        return index, time.perf_counter() - due_s

    done = await client.at_their_times([0.05, 0.0, 0.02], late_by)
    assert [index for index, _ in done] == [0, 1, 2]
    assert all(late_s >= 0 for _, late_s in done), "never before it is due"


async def test_a_call_that_fails_cancels_all_other_calls() -> None:
    async def fail(index: int, due_s: float) -> None:
        raise ValueError(f"call {index}")

    with pytest.raises(ExceptionGroup) as raised:
        await client.at_their_times([0.0, 100.0], fail)
    assert [str(error) for error in raised.value.exceptions] == ["call 0"]


# ---- rows ---------------------------------------------------------------------------------------------------------

ROWS = [
    Row({"order": "a", "seed": 1}, {"latency_s": 1.0, "dropped": 0}),
    Row({"order": "b", "seed": 1}, {"latency_s": 0.5, "dropped": 0}),
    Row({"order": "a", "seed": 2}, {"latency_s": 30.0, "dropped": 4}),
    Row({"order": "b", "seed": 2}, {"latency_s": 21.0, "dropped": 2}),
]


def test_a_row_has_its_case_and_its_numbers_by_name() -> None:
    assert (ROWS[0]["order"], ROWS[0]["latency_s"]) == ("a", 1.0)
    with pytest.raises(KeyError):
        _ = ROWS[0]["throughput"]


def test_rows_are_selected_and_grouped_by_their_case() -> None:
    assert rows.select(ROWS, order="b", seed=2) == [ROWS[3]]
    assert rows.group(ROWS, "order") == {("a",): [ROWS[0], ROWS[2]], ("b",): [ROWS[1], ROWS[3]]}
    assert rows.values(ROWS, "dropped") == [0, 0, 4, 2]


def test_medians_over_seeds_leave_a_row_for_each_other_case() -> None:
    assert rows.medians(ROWS, "seed") == [
        Row({"order": "a"}, {"latency_s": 15.5, "dropped": 2.0}),
        Row({"order": "b"}, {"latency_s": 10.75, "dropped": 1.0}),
    ]


def test_a_ratio_pairs_rows_of_the_same_seed() -> None:
    own, reference = rows.select(ROWS, order="b"), rows.select(ROWS, order="a")
    assert rows.ratio(own, reference, "latency_s", "seed") == pytest.approx(0.6), "of 0.5 and 0.7, not 21.5 / 31"


def test_rows_are_read_as_they_were_saved(tmp_path: Path) -> None:
    with_ratios = Row({"order": "a", "seed": 3}, {"latency_s": 1.0}, {"direct": {"latency_s": 0.9}})
    rows.save_rows(tmp_path / "rows.json", [*ROWS, with_ratios])
    assert rows.read_rows(tmp_path / "rows.json", ("order", "seed")) == [*ROWS, with_ratios]
    assert json.loads((tmp_path / "rows.json").read_text())[0] == {
        "order": "a",
        "seed": 1,
        "latency_s": 1.0,
        "dropped": 0,
    }
    with pytest.raises(KeyError, match="policy"):
        rows.read_rows(tmp_path / "rows.json", ("policy",))


def test_cases_are_measured_in_turn_round_after_round(capsys: pytest.CaptureFixture[str]) -> None:
    measures = {"one": lambda number: {"ms": 1.0 + number}, "two": lambda number: {"ms": 2.0 + number}}
    measured = list(rows.in_rounds(2, "case", measures, lambda row: f"{row['ms']:g} ms"))
    assert [row["case"] for row in measured] == ["one", "two", "one", "two"]
    assert rows.medians(measured, "round")[0] == Row({"case": "one"}, {"ms": 1.5})
    assert capsys.readouterr().err.splitlines()[-1] == "round 2/2: two: 3 ms"


def test_cells_show_a_rows_values_in_the_columns_formats() -> None:
    columns = {"order": ("order", ""), "mean (s)": ("latency_s", ".2f")}
    assert tables.cells(ROWS[:2], columns) == [["a", "1.00"], ["b", "0.50"]]


# ---- progress, tables, results ------------------------------------------------------------------------------------


def test_without_a_terminal_a_counter_prints_about_twenty_lines(capsys: pytest.CaptureFixture[str]) -> None:
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
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition("  ")[2] for line in lines] == ["the first", "the second"]


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ((0.0, 0.2, 0.25, 1.0), ["", "about 40 s left", "about 60 s left", ""]),  # parts begin every 10 s
        ((0.9, 0.92, 0.95), ["", "about 40 s left", "about 20 s left"]),  # resumed: nine tenths took no time here
        ((0.0, 0.01), ["", "about 16 min left"]),
        ((0.5, 0.5), ["", ""]),
    ],
)
def test_without_a_terminal_each_part_has_the_time_left(
    shares: tuple[float, ...],
    expected: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = itertools.count(0.0, 10.0)
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    with progress.shared() as report:
        for share in shares:
            report("part", share)
    lines = [line.split("  ") for line in capsys.readouterr().err.splitlines()]
    assert [next((text for text in line if "left" in text), "") for line in lines] == expected


def test_markdown_has_a_title_a_head_and_numbers_to_the_right() -> None:
    assert tables.markdown(["a", "b"], [["x", "1"]]) == "| a | b |\n| --- | --- |\n| x | 1 |"
    titled = tables.markdown(["a", "b"], [], title="What", right=True)
    assert titled == "**What**\n\n| a | b |\n| --- | ---: |"


def test_each_round_begins_with_another_item() -> None:
    orders = [results.in_turn("abc", number) for number in range(4)]
    assert ["".join(order) for order in orders] == ["abc", "bca", "cab", "abc"]


def test_results_are_json_with_a_row_a_line(tmp_path: Path) -> None:
    result = {"seed": 1, "runs": [{"a": 1 / 3}, {"a": 2}]}
    text = results.with_rows(results.rounded(result), "runs")
    assert json.loads(text) == {"seed": 1, "runs": [{"a": 0.333333}, {"a": 2}]}
    assert text.count("\n") == 5
    results.write_rows(tmp_path / "new" / "rows.json", result["runs"])
    assert (tmp_path / "new" / "rows.json").read_text().splitlines()[2] == '{"a": 2}'
    results.write_json(None, result)


def test_an_expected_error_ends_a_script_with_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["scripts/lab/some.py"])
    with pytest.raises(SystemExit, match="some: error: no such file"), arguments.exit_on(ValueError):
        raise ValueError("no such file")
    with pytest.raises(KeyError), arguments.exit_on(ValueError):
        raise KeyError("another")


def test_a_flag_may_be_repeated() -> None:
    assert servers.flags_of("engine", ["a", "b"]) == ["--engine", "a", "--engine", "b"]
