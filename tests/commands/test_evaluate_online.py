"""`llmserve evaluate --online`: what the server's learner forecasts while it learns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from missing_modules import without

import predictor
from llmserve.__main__ import main
from predictor.dataset import Row
from predictor.online import OnlineLearner
from predictor.prequential import forecast_stream, scores, scores_by_range
from predictor.prompt import Prompt


def rows_of(count: int, *, capped: bool = False) -> list[Row]:
    """Two templates: answers to "Long" prompts have about 200 tokens, answers to "Short" prompts about 10."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(count):
        kind, mean = (("Long", 200.0), ("Short", 10.0))[number % 2]
        text = f"{kind}: a template whose first words are always the same, then {number}"
        rows.append(Row(Prompt(text, "m"), int(rng.lognormal(np.log(mean), 0.2)), capped))
    return rows


def write(path: Path, rows: list[Row], column: str = "output_tokens", **fields: Any) -> str:
    records = [{"prompt": r.prompt.text, "model": r.prompt.model, column: r.output_tokens, **fields} for r in rows]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def printed(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["evaluate", "--online", "--json", *flags]) == 0
    result = json.loads(capsys.readouterr().out)
    assert isinstance(result, dict)
    return result


# ---- the scores -------------------------------------------------------------------------------------------------


def test_a_forecast_does_not_know_its_own_answer() -> None:
    rows = rows_of(60)
    other = [*rows[:-1], Row(rows[-1].prompt, 9_999)]
    first, second = forecast_stream(OnlineLearner(), rows), forecast_stream(OnlineLearner(), other)
    assert first.shape == (60, 15)
    np.testing.assert_array_equal(first, second)
    assert np.isnan(first[0]).all(), "nothing is known before the first answer"


def test_forecasts_are_those_of_the_servers_learner() -> None:
    rows, learner = rows_of(60), OnlineLearner()
    for row, forecast in zip(rows, forecast_stream(OnlineLearner(), rows), strict=True):
        expected = learner.forecast(row.prompt, None)
        learner.observe(expected, row.output_tokens, row.capped)
        assert tuple(forecast[~np.isnan(forecast)]) == expected.lengths


def test_answers_in_flight_have_not_been_learnt() -> None:
    rows = rows_of(60)
    forecasts = forecast_stream(OnlineLearner(), rows, in_flight=8)
    assert np.isnan(forecasts[:8]).all(), "the first answer is learnt after the eighth forecast"
    other = [*rows[:-8], *[Row(row.prompt, 9_999) for row in rows[-8:]]]
    np.testing.assert_array_equal(forecasts, forecast_stream(OnlineLearner(), other, in_flight=8))
    assert not np.isnan(forecasts[8:]).any()


def test_a_forecast_is_at_most_the_requests_limit() -> None:
    rows = [Row(row.prompt, min(row.output_tokens, 50), row.output_tokens >= 50, 50) for row in rows_of(100)]
    forecasts = forecast_stream(OnlineLearner(), rows)
    assert np.nanmax(forecasts) == 50


def test_scores_are_of_the_median_and_of_the_interval_between_the_quantiles_of_10_and_90_percent() -> None:
    rows = [Row(Prompt("a"), 100), Row(Prompt("b"), 110), Row(Prompt("c"), 90), Row(Prompt("d"), 500)]
    forecasts = np.tile(np.linspace(80.0, 120.0, 15), (4, 1)) + np.array([[0], [5], [-5], [20]])
    assert scores(forecasts, rows) == {"tau": 1.0, "mae_tokens": (0 + 5 + 5 + 380) / 4, "coverage80": 0.75}


def test_a_capped_answer_is_no_error_of_a_longer_forecast() -> None:
    forecasts = np.tile(np.linspace(80.0, 120.0, 15), (2, 1))
    rows = [Row(Prompt("a"), 60, True), Row(Prompt("b"), 100)]
    assert scores(forecasts, rows)["mae_tokens"] == 0


def test_answers_without_a_forecast_have_no_part_in_the_scores() -> None:
    forecasts = np.vstack([np.full(15, np.nan), np.linspace(80.0, 120.0, 15)])
    rows = [Row(Prompt("a"), 1), Row(Prompt("b"), 100)]
    assert scores(forecasts, rows) == {"tau": None, "mae_tokens": 0.0, "coverage80": 1.0}
    assert scores(forecasts[:1], rows[:1]) == {"tau": None, "mae_tokens": None, "coverage80": None}


def test_ranges_go_as_far_as_the_rows() -> None:
    rows = rows_of(350)
    ranges = scores_by_range(forecast_stream(OnlineLearner(), rows), rows)
    assert [(scored["from"], scored["to"]) for scored in ranges] == [(0, 100), (100, 300), (300, 350)]
    assert all(list(scored) == ["from", "to", "tau", "mae_tokens", "coverage80"] for scored in ranges)
    assert ranges[-1]["tau"] > 0.4, "the templates are learnt"
    assert [(s["from"], s["to"]) for s in scores_by_range(np.ones((300, 15)), rows[:300])] == [(0, 100), (100, 300)]


# ---- the command ------------------------------------------------------------------------------------------------


def test_the_command_prints_the_scores_by_answers_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(120)
    result = printed(capsys, "--data", write(tmp_path / "rows.jsonl", rows))
    assert result["ranges"] == scores_by_range(forecast_stream(OnlineLearner(), rows), rows)
    assert (result["answers"], result["capped"], result["without_forecast"]) == (120, 0, 1)
    assert main(["evaluate", "--online", "--data", str(tmp_path / "rows.jsonl")]) == 0
    text = capsys.readouterr().out
    assert "│ 100 to 120 " in text
    assert "Without a trained predictor: 120 answers" in text


def test_several_files_may_count_their_tokens_in_different_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of(120)
    files = [write(tmp_path / "a.jsonl", rows[:70], "tokens"), write(tmp_path / "b.jsonl", rows[70:], "length")]
    result = printed(capsys, "--data", f"{files[0]}:tokens", "--data", f"{files[1]}:length")
    assert result["ranges"] == scores_by_range(forecast_stream(OnlineLearner(), rows), rows)
    assert printed(capsys, "--data", files[0], "--length-column", "tokens")["answers"] == 70


def test_the_seed_of_the_shuffle_decides_the_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write(tmp_path / "rows.jsonl", rows_of(300))
    first, again, other, ordered = (
        printed(capsys, "--data", data, *flags)["ranges"]
        for flags in (["--shuffle", "1"], ["--shuffle", "1"], ["--shuffle", "2"], [])
    )
    assert first == again
    assert first != other
    assert first != ordered


def test_capped_rows_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write(tmp_path / "rows.jsonl", rows_of(20), finish_reason="length")
    assert printed(capsys, "--data", data)["capped"] == 20


def test_only_one_models_answers_can_be_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write(tmp_path / "rows.jsonl", [*rows_of(20), Row(Prompt("Hello", "other"), 5)])
    assert printed(capsys, "--data", data)["models"] == 2
    assert printed(capsys, "--data", data, "--model", "other")["answers"] == 1
    assert main(["evaluate", "--online", "--data", data, "--model", "third"]) == 1
    assert "no row is of the model 'third'" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--predictor", str(predictor.DEMO)], [str(predictor.DEMO)]])
def test_a_trained_predictor_is_corrected_by_the_answers(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The prompts state the lengths, which are three times as long as the predictor was trained for."""
    from predictor.predict import LengthPredictor

    numbers = [int(number) for number in np.random.default_rng(0).integers(10, 150, 150)]
    prompts = [Prompt(f"Count from 1 to {number}.", "llmserve-demo") for number in numbers]
    trained = LengthPredictor.load(predictor.DEMO).predict(prompts)
    rows = [Row(prompt, round(3 * float(p[len(p) // 2]))) for prompt, p in zip(prompts, trained, strict=True)]
    data = write(tmp_path / "rows.jsonl", rows)
    with_predictor, without_one = printed(capsys, "--data", data, *flags), printed(capsys, "--data", data)
    assert with_predictor["predictor"] == predictor.DEMO.name
    assert with_predictor["ranges"][-1]["tau"] > max(0.8, without_one["ranges"][-1]["tau"])
    assert with_predictor["ranges"][-1]["mae_tokens"] < with_predictor["ranges"][0]["mae_tokens"]
    assert main(["evaluate", "--online", "--data", data, *flags]) == 0
    assert "may have been trained on some of these rows" in capsys.readouterr().out


def test_no_extra_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without(monkeypatch, "sklearn", "scipy", "datasketch", "torch", "pyarrow")
    assert printed(capsys, "--data", write(tmp_path / "rows.jsonl", rows_of(5)))["answers"] == 5
    assert main(["evaluate", "--online", "--data", "absent.parquet"]) == 2
    assert "reading absent.parquet needs pyarrow" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--online", "--compare", "other"], "--compare cannot be given with --online"),
        (["--online", "--output", "folder"], "--output cannot be given with --online"),
        (["--online", "--part", "held-out"], "--part held-out with --online needs a predictor"),
        (["--online", "--seed", "1"], "--shuffle SEED orders the rows"),
        (["folder", "--shuffle", "1"], "--shuffle orders the requests of --online"),
        (["folder", "--predictor", "folder"], "the predictor's folder is given twice"),
        ([], "give a predictor's folder, or --online"),
    ],
)
def test_flags_that_contradict_are_refused_before_the_data_are_read(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", "--data", "absent.jsonl", *flags]) == 2
    assert message in capsys.readouterr().err
