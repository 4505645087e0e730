"""The report on a predictor, and the command that prints it."""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from script_module import load_script

from llmserve.__main__ import main as llmserve
from llmserve.commands import evaluate
from predictor.dataset import Row, Splits, split_rows
from predictor.errors import DatasetError
from predictor.evaluate import BATCH_SIZES, GAIN_BIN_COUNTS
from predictor.options import natural, split_of_models
from predictor.prediction import Prediction
from predictor.prompt import Prompt
from predictor.report import held_out_report, transfer_report, validation_report

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "evaluate_predictor.py"
WORDS = ("apples", "pears", "plums", "figs", "dates", "limes", "nuts", "kale", "rice", "corn")


def toy_rows(n: int = 600) -> list[Row]:
    """Answers of the length that the prompt states; every tenth answer is twice as long."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(n):
        stated = int(rng.integers(1, 100))
        text = f"{stated} " + " ".join(rng.choice(WORDS, size=4)) + f" please, order {i}"
        rows.append(Row(Prompt(text, "toy" if i % 3 else "doll"), stated * (1 if i % 10 else 2)))
    return rows


class Reader:
    """Predicts the stated length, with quantiles down to half and, for every tenth level, up to double."""

    def __init__(self, noise: float = 0.0, factors: Sequence[float] = (1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2)) -> None:
        self.noise, self.factors = noise, factors
        self.asked: list[Prompt] = []

    def predict(self, prompts: Sequence[Prompt], /) -> NDArray[np.float64]:
        self.asked += prompts
        stated = np.array([float(prompt.text.split()[0]) for prompt in prompts])
        stated *= np.exp(self.noise * np.random.default_rng(0).normal(size=stated.size))
        return np.outer(stated, self.factors)

    def predictions(self, prompts: Sequence[Prompt]) -> list[Prediction]:
        return [Prediction(lengths) for lengths in self.predict(prompts).tolist()]


SPLITS = split_rows(toy_rows(), seed=0, held_out_share=0.3)


# --- reports ----------------------------------------------------------------------------------------------------


def test_a_report_compares_the_predictor_with_the_baselines_the_oracle_and_chance() -> None:
    report = held_out_report(Reader(), SPLITS)
    assert list(report.metrics) == ["predictor", "constant", "prompt length", "TF-IDF ridge"]
    assert list(report.gains) == [
        *("oracle", "predictor, bins by risk", "predictor, bins by median"),
        *("TF-IDF ridge", "prompt length", "random"),
    ]
    assert report.answers == len(SPLITS.held_out)
    for size in BATCH_SIZES:
        for count in GAIN_BIN_COUNTS:
            oracle, risk, median, *_, chance = (gains[size][count] for gains in report.gains.values())
            assert oracle >= risk == pytest.approx(median)  # each risk is the same multiple of its median
            assert oracle > chance
    assert report.metrics["predictor"].kendall_tau > 0.8 > report.metrics["TF-IDF ridge"].kendall_tau


def test_bins_by_risk_separate_prompts_that_may_have_long_answers() -> None:
    """Half of the prompts of one stated length are certain; the others may have answers twenty times as long."""
    rng = np.random.default_rng(0)
    wild = rng.random(4000) < 0.5
    rows = [
        Row(Prompt(f"{'wild' if w else 'tame'} {i}"), 200 if w and rng.random() < 0.2 else 10)
        for i, w in enumerate(wild)
    ]
    splits = replace(SPLITS, held_out=rows)

    class Cautious(Reader):
        def predict(self, prompts: Sequence[Prompt], /) -> NDArray[np.float64]:
            return np.array([[10, 10, 10, 10, 200 if prompt.text.startswith("wild") else 10] for prompt in prompts])

    report = held_out_report(Cautious(), splits)
    assert report.gains["predictor, bins by median"][8][2] == pytest.approx(1, abs=0.02)
    of_all, of_wild = (10 + 190 * (1 - (1 - share) ** 8) for share in (0.1, 0.2))  # the longest of 8
    assert report.gains["predictor, bins by risk"][8][2] == pytest.approx(of_all / ((10 + of_wild) / 2), rel=0.05)


def test_only_held_out_prompts_are_predicted_and_no_more_than_the_limit() -> None:
    reader = Reader()
    assert held_out_report(reader, SPLITS, answers_max=50).answers == 50
    assert len(reader.asked) == 50
    assert set(reader.asked) <= {row.prompt for row in SPLITS.held_out}


def test_a_validation_report_compares_with_baselines_fitted_to_the_training_rows() -> None:
    reader = Reader()
    report = validation_report(reader, SPLITS)
    assert reader.asked == [row.prompt for row in SPLITS.validation]
    constant = np.median([row.output_tokens for row in SPLITS.train])
    errors = [abs(row.output_tokens - constant) for row in SPLITS.validation]
    assert report.metrics["constant"].mae_tokens == pytest.approx(np.mean(errors))
    assert report.tables().startswith(f"{len(SPLITS.validation)} validation answers, ")
    assert any("use them to choose a predictor" in note for note in report.notes)
    assert not any("use them to choose a predictor" in note for note in held_out_report(reader, SPLITS).notes)


def test_a_predictor_that_ranks_no_better_than_chance_is_marked() -> None:
    class Backwards(Reader):
        def predict(self, prompts: Sequence[Prompt], /) -> NDArray[np.float64]:
            return 1e4 - super().predict(prompts)[:, ::-1]

    (warning,) = held_out_report(Backwards(), SPLITS).warnings
    assert "does not rank these 175 answers" in warning
    assert held_out_report(Backwards(), SPLITS).tables().startswith(f"**{warning}**")
    assert held_out_report(Reader(), SPLITS).warnings == ()
    # 42 answers: chance alone gives up to 2 sqrt(2 (84 + 5) / (9 * 42 * 41)) = 0.21
    assert "gives up to 0.21" in held_out_report(Backwards(), SPLITS, answers_max=42).warnings[0]


def test_a_transfer_report_is_on_all_rows_with_bins_of_their_own_lengths() -> None:
    report = transfer_report(Reader(), toy_rows())
    assert report.answers == 600
    assert report.edges[2] == [np.median([row.output_tokens for row in toy_rows()])]
    assert held_out_report(Reader(), SPLITS).edges[2] == [np.median([row.output_tokens for row in SPLITS.train])]


def test_a_point_prediction_has_no_bins_by_risk_and_no_calibration(tmp_path: Path) -> None:
    report = held_out_report(Reader(factors=[1]), SPLITS)
    assert "predictor, bins by risk" not in report.gains
    assert {path.name for path in report.figures(tmp_path)} == {"confusion.png", "gains.png"}


def test_predictions_end_at_the_ceilings_and_cut_answers_are_counted() -> None:
    cut = [replace(row, output_tokens=5, capped=True, output_tokens_max=5) for row in SPLITS.held_out]
    report = held_out_report(Reader(), replace(SPLITS, held_out=cut))
    assert report.capped == len(cut)
    assert report.metrics["predictor"].bin_accuracy[2] == 1


def test_answers_cut_at_an_unknown_length_do_not_count_as_complete() -> None:
    """All answers were cut at half of their length; quantiles beyond the cut are no error."""
    cut = [replace(row, output_tokens=max(1, row.output_tokens // 2), capped=True) for row in SPLITS.held_out]
    with_limits = [replace(row, output_tokens_max=row.output_tokens) for row in cut]
    unknown, by_max_tokens = (held_out_report(Reader(), replace(SPLITS, held_out=rows)) for rows in (cut, with_limits))
    assert unknown.metrics["predictor"] == by_max_tokens.metrics["predictor"]
    assert unknown.metrics["predictor"].pinball_tokens < 1
    assert unknown.metrics["predictor"].calibration_error == pytest.approx(0, abs=0.02)


def test_the_tables_are_markdown_with_the_published_line_and_no_gain_where_answers_are_few() -> None:
    text = held_out_report(Reader(), SPLITS).tables()
    assert "_Multi-Bin, Table 1_" in text
    assert "| B × bins | 8 × 2 |" in text
    gains = next(line for line in text.splitlines() if line.startswith("| oracle |") and "–" in line[-6:])
    assert gains.split("|")[2].strip() != "–"
    assert gains.endswith("| – |"), "175 answers fill no 32 bins of 128"
    tables = [part.splitlines() for part in text.split("\n\n") if part.startswith("|")]
    assert len(tables) == 2
    assert all(len({line.count("|") for line in lines}) == 1 for lines in tables)


def test_the_json_contains_every_figure_once() -> None:
    report = json.loads(json.dumps(held_out_report(Reader(), SPLITS, other=Reader(noise=0.5)).as_json()))
    assert report["metrics"]["constant"]["kendall_tau"] is None
    assert "gains" not in report["metrics"]["predictor"]
    assert report["gains"]["oracle"]["8"]["2"] > 1
    assert sum(map(sum, report["confusion"]["8"])) == report["answers"]
    assert set(report["differences"]["MAE, tokens"]) == {"value", "low", "high"}


def test_two_predictors_are_in_the_same_tables_with_their_difference_below() -> None:
    report = held_out_report(Reader(), SPLITS, other=Reader(noise=0.5))
    assert list(report.metrics)[:2] == ["predictor", "other"]
    assert {"other, bins by risk", "other, bins by median"} < set(report.gains)
    assert report.differences["MAE, tokens"].high < 0
    assert "| MAE, tokens | -" in report.tables()


# --- options ----------------------------------------------------------------------------------------------------


def test_the_rows_of_selected_models_stay_on_their_sides() -> None:
    dolls = split_of_models(SPLITS, ["doll"])
    assert dolls.held_out == [row for row in SPLITS.held_out if row.prompt.model == "doll"]
    assert 0 < len(dolls.train) < len(SPLITS.train)
    assert split_of_models(SPLITS, ["toy", "doll"]) == SPLITS


def test_bins_are_equal_mass_over_the_training_answers_of_the_selected_models() -> None:
    longer = [Row(Prompt(row.prompt.text, "long"), 10_000) for row in toy_rows()]
    of_both = split_rows([*toy_rows(), *longer], seed=0, held_out_share=0.3)
    alone = held_out_report(Reader(), SPLITS)
    assert held_out_report(Reader(), split_of_models(of_both, ["toy", "doll"])).edges == alone.edges
    assert held_out_report(Reader(), of_both).edges[2][0] > alone.edges[2][0]


def test_models_without_rows_and_parts_without_rows_are_errors() -> None:
    with pytest.raises(DatasetError, match=r"^no row is of the model 'absent'$"):
        split_of_models(SPLITS, ["toy", "absent"])
    toy, doll = Row(Prompt("a", "toy"), 1), Row(Prompt("b", "doll"), 1)
    with pytest.raises(DatasetError, match=r"^no held-out row is of 'toy'$"):
        split_of_models(Splits([toy, doll], [toy], [doll]), ["toy"])


@pytest.mark.parametrize("text", ["-1", "1.5", "", "x", str(2**32), "9" * 5000])
def test_a_seed_is_a_natural_number_that_every_generator_takes(text: str) -> None:
    assert natural("0") == 0
    assert natural(str(2**32 - 1)) == 2**32 - 1
    with pytest.raises(argparse.ArgumentTypeError, match="not a whole number from 0 to 4294967295"):
        natural(text)


# --- the command ------------------------------------------------------------------------------------------------


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with a predictor in every folder that reads the length stated by the prompt."""
    load = lambda folder, threads: Reader(0.5 if "noisy" in folder.name else 0)  # noqa: E731
    monkeypatch.setattr(evaluate, "load_predictor", load)
    return load_script("evaluate_predictor")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "toy.jsonl"
    lines = [{"question": r.prompt.text, "model": r.prompt.model, "output_tokens": r.output_tokens} for r in toy_rows()]
    path.write_text("\n".join([*map(json.dumps, lines), "not JSON"]))
    return path


def folder(path: Path, metrics: dict[str, Any]) -> Path:
    path.mkdir()
    (path / "metrics.json").write_text(json.dumps(metrics))
    return path


TRAINED = {"split": {"seed": 4, "held_out_share": 0.3, "validation_share": 0.1}}


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["evaluate_predictor.py", *map(str, arguments)])
    code: int = script.main()
    return code


def test_the_split_is_that_of_the_predictors_training(
    script: ModuleType,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model_folder, noisy = folder(tmp_path / "one", TRAINED), folder(tmp_path / "noisy", {})
    options = ["--data", data, "--prompt-column", "question", "--output", tmp_path / "out" / "deep", "--compare", noisy]
    assert run(script, monkeypatch, model_folder, *options) == 0
    text = capsys.readouterr().out
    assert text.startswith("predictor: one, other: noisy")
    assert "Not usable: 1 x not JSON; the first: " in text
    assert "noisy was trained with another split, or an unknown split" in text
    assert "one was" not in text
    result = json.loads((tmp_path / "out" / "deep" / "metrics.json").read_text())
    assert result["split"] == TRAINED["split"]
    assert result["answers"] == len(split_rows(toy_rows(), seed=4, held_out_share=0.3).held_out)
    assert str(tmp_path) not in json.dumps(result)
    for name in ("confusion", "calibration", "gains"):
        assert (tmp_path / "out" / "deep" / f"{name}.png").stat().st_size > 10_000


def test_two_predictors_of_one_name_are_both_warned_of(
    script: ModuleType, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").mkdir()
    folders = [folder(tmp_path / "one", TRAINED), folder(tmp_path / "other" / "one", {})]
    options = ["--data", data, "--prompt-column", "question", "--seed", 5, "--compare"]
    assert run(script, monkeypatch, folders[0], *options, folders[1]) == 0
    assert capsys.readouterr().out.count("one was trained with another split, or an unknown split") == 2


@pytest.mark.usefixtures("script")
def test_the_command_evaluates_as_the_script_does_and_records_its_arguments(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_folder, out = folder(tmp_path / "one", TRAINED), tmp_path / "out"
    words = [str(model_folder), "--data", str(data), "--prompt-column", "question", "--output", str(out)]
    assert llmserve(["evaluate", *words]) == 0
    assert capsys.readouterr().out.startswith("predictor: one")
    result = json.loads((out / "metrics.json").read_text())
    assert result["arguments"] == ["one", "--data", "toy.jsonl", "--prompt-column", "question", "--output", "out"]


def test_json_is_printed_instead_of_the_tables(
    script: ModuleType, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model_folder, out = folder(tmp_path / "one", TRAINED), tmp_path / "out"
    options = ["--data", data, "--prompt-column", "question", "--output", out, "--json"]
    assert run(script, monkeypatch, model_folder, *options) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((out / "metrics.json").read_text())


def test_the_held_out_rows_of_a_training_can_be_served_online(
    script: ModuleType, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model_folder = folder(tmp_path / "one", TRAINED)
    options = ["--online", "--data", data, "--prompt-column", "question", "--part", "held-out", "--json"]
    assert run(script, monkeypatch, model_folder, *options) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["answers"] == len(split_rows(toy_rows(), seed=4, held_out_share=0.3).held_out)
    assert result["ranges"][0]["tau"] > 0.6


def test_a_model_and_a_limit_select_answers(
    script: ModuleType, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model_folder = folder(tmp_path / "one", {})
    options = [model_folder, "--data", data, "--prompt-column", "question", "--part", "all"]
    assert run(script, monkeypatch, *options, "--model", "doll") == 0
    assert "200 unseen answers" in capsys.readouterr().out
    assert run(script, monkeypatch, *options, "--limit", 40) == 0
    assert "40 unseen answers" in capsys.readouterr().out
    assert run(script, monkeypatch, *options, "--model", "absent") == 1
    assert capsys.readouterr().err == "evaluate_predictor: no row is of the model 'absent'\n"
    assert run(script, monkeypatch, model_folder, "--seed", 0, *options[1:5], "--model", "doll") == 0
    assert "held-out answers" in capsys.readouterr().out


def test_the_validation_part_is_that_of_the_predictors_split(
    script: ModuleType, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model_folder = folder(tmp_path / "one", TRAINED)
    options = ["--data", data, "--prompt-column", "question", "--part", "validation"]
    answers = f"{len(split_rows(toy_rows(), seed=4, held_out_share=0.3).validation)} validation answers"
    assert run(script, monkeypatch, model_folder, *options, "--compare", model_folder, "--markdown") == 0
    output = capsys.readouterr().out
    assert answers in output
    assert "| gain at B=8, 8 bins by risk | +0.000 |" in output
    assert "| 128 × 2 |" in output
    assert run(script, monkeypatch, model_folder, *options, "--compare", model_folder) == 0
    output = capsys.readouterr().out
    assert answers in output
    assert "│ gain at B=8, 8 bins by risk " in output
    lines = [line for line in output.splitlines() if line.startswith("│")]
    assert max(map(len, lines)) <= 80, "tables too wide for a terminal are cut in two"
    assert "128 × 2" not in output, "a column that has nothing is left out"
    assert run(script, monkeypatch, folder(tmp_path / "untold", {}), *options) == 1
    assert "give --seed" in capsys.readouterr().err


def test_all_of_a_few_prompts_are_evaluated_without_a_split(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, model_folder = tmp_path / "few.jsonl", folder(tmp_path / "one", TRAINED)
    lines = [
        {"prompt": f"{i + 1} {word}", "model": model, "output_tokens": i + 1}
        for i, word in enumerate(WORDS[:6])
        for model in ("toy", "doll")
    ]
    data.write_text("\n".join(map(json.dumps, lines)))
    options = ["--data", data, "--part", "all", "--model", "doll"]
    assert run(script, monkeypatch, model_folder, *options, "--output", tmp_path / "out") == 0
    assert "6 unseen answers" in capsys.readouterr().out
    result = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert (result["split"], result["seed"]) == (None, 4)
    assert run(script, monkeypatch, model_folder, *options, "--limit", 4) == 1
    assert capsys.readouterr().err == "evaluate_predictor: too few different prompts for 5 folds\n"


def test_a_predictor_of_one_models_rows_recognises_its_data(
    script: ModuleType, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dolls = split_of_models(split_rows(toy_rows(), seed=4, held_out_share=0.3), ["doll"])
    rows = {name: len(getattr(dolls, name)) for name in ("train", "validation", "held_out")}
    options = ["--data", data, "--prompt-column", "question"]
    for number, (models, warned) in enumerate([(["doll"], False), (["toy"], True), (["absent"], True), (None, True)]):
        model_folder = folder(tmp_path / f"{number}", {**TRAINED, "rows": rows, "models": models})
        assert run(script, monkeypatch, model_folder, *options) == 0
        assert ("was trained with other data" in capsys.readouterr().out) is warned
    assert run(script, monkeypatch, folder(tmp_path / "bad", {**TRAINED, "models": "doll"}), *options) == 1
    assert "has no good list of models: 'doll'" in capsys.readouterr().err


def test_data_other_than_in_training_is_reported(
    script: ModuleType, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model_folder = folder(tmp_path / "one", {**TRAINED, "rows": {"train": 7}})
    assert run(script, monkeypatch, model_folder, "--data", data, "--prompt-column", "question") == 0
    assert "one was trained with other data: it may have seen some of these answers." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("metrics", "options", "complaint"),
    [
        (None, [], "does not say how the rows were split: give --seed"),
        ("{", [], "cannot read "),
        ("[]", [], "not a JSON object"),
        ('{"split": {"seed": 1}}', [], "has no good split: {'seed': 1}"),
        ('{"split": {"seed": -1, "held_out_share": 0.1, "validation_share": 0.1}}', [], "has no good split: {'seed':"),
        (None, ["--seed", "-1", "--limit", "20"], "not a whole number from 0 to 4294967295: '-1'"),
        (None, ["--seed", "1", "--held-out-share", "0.6", "--validation-share", "0.6"], "leave nothing to train on"),
        (None, ["--seed", "1"], "is not a predictor's folder"),
        (None, ["--seed", "1", "--limit", "0"], "not a whole number above 0: '0'"),
        (None, ["--seed", "1", "--held-out-share", "x"], "not a share between 0 and 1: 'x'"),
    ],
)
def test_an_error_is_one_clear_line(
    metrics: str | None, options: list[str], complaint: str, data: Path, tmp_path: Path
) -> None:
    if metrics is not None:
        (tmp_path / "metrics.json").write_text(metrics)
    command = [sys.executable, str(SCRIPT), str(tmp_path), "--data", str(data), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (1, 2)
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--prompt-column", "absent"], "no usable row in "),  # the column's name is "question"
        (["--data", "absent.jsonl"], "cannot read absent.jsonl"),
        (["--answer-tokenizer", str(SCRIPT)], f"cannot load the tokenizer {SCRIPT}"),
    ],
)
def test_bad_data_is_one_clear_line(
    options: list[str],
    complaint: str,
    script: ModuleType,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(script, monkeypatch, tmp_path, "--seed", 0, "--data", data, *options) == 1
    error = capsys.readouterr().err
    assert error.startswith("evaluate_predictor: ")
    assert complaint in error
    assert error.count("\n") == 1


def test_an_output_that_cannot_be_written_is_one_clear_line(
    script: ModuleType, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--seed", 0, "--data", data, "--prompt-column", "question", "--output", data / "below"]
    assert run(script, monkeypatch, tmp_path, *options) == 1
    assert "Not a directory" in capsys.readouterr().err


def test_a_predictors_own_metrics_are_not_overwritten(
    script: ModuleType, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model_folder = folder(tmp_path / "one", TRAINED)
    assert (
        run(script, monkeypatch, model_folder, "--data", data, "--prompt-column", "question", "--output", model_folder)
        == 1
    )
    assert "give another --output" in capsys.readouterr().err
    assert json.loads((model_folder / "metrics.json").read_text()) == TRAINED
