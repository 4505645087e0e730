"""The mean of trained predictors."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from untrained_predictor import export_untrained

from llmserve.__main__ import main as llmserve
from predictor.average import average
from predictor.dataset import Row, Splits, split_rows
from predictor.errors import PredictorError
from predictor.export import quantize
from predictor.options import Split
from predictor.predict import LengthPredictor, pooled
from predictor.prompt import Prompt
from predictor.trained import check_training

SPLIT = Split(held_out_share=0.2, validation_share=0.2)
SHORT, BETWEEN, LONG = 30, 45, 60  # tokens


def splits(tokens: int) -> Splits:
    """Rows whose answers are of about `tokens`."""
    rows = [Row(Prompt(f"count to {number}"), tokens + number % 9 - 4) for number in range(100)]
    return split_rows(rows, SPLIT.seed, SPLIT.validation_share, SPLIT.held_out_share)


def trained(folder: Path, **options: Any) -> Path:
    """A predictor of one length, more or less, whose metrics say that it was trained with SPLIT."""

    def certain(model: Any) -> None:
        model.head.bias.data[0] = 0
        model.head.bias.data[1:] = -6  # a step between quantiles of e**-6, in the logarithm of the length

    export_untrained(folder, certain, **options)
    metrics = {
        "split": dataclasses.asdict(SPLIT),
        "rows": {name: len(rows) for name, rows in dataclasses.asdict(splits(BETWEEN)).items()},
        "parameters": 1000,
    }
    (folder / "metrics.json").write_text(json.dumps(metrics))
    return folder


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    """A predictor whose lengths are too short, and one whose lengths are too long."""
    return [trained(tmp_path / "short", unit=SHORT), trained(tmp_path / "long", unit=LONG, room=64)]


def test_the_lengths_of_all_networks_are_equally_likely() -> None:
    one, other = np.array([[1, 3, 5], [1, 1, 1]], np.float32), np.array([[2, 4, 9], [7, 8, 9]], np.float32)
    assert pooled([one, other]).tolist() == [[1.5, 3.5, 7.0], [1.0, 4.0, 8.5]]
    assert pooled([one]).tolist() == one.tolist()
    assert pooled([one[:0], other[:0]]).shape == (0, 3)


def test_the_mean_is_a_predictor_of_all_networks(
    two: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantize(two[0])
    result = average(two, splits(BETWEEN), tmp_path / "mean")
    predictor, prompts = LengthPredictor.load(tmp_path / "mean"), [Prompt("count to 7"), Prompt("spell banana")]
    alone = [LengthPredictor.load(folder).predict(prompts) for folder in two]
    assert predictor.predict(prompts) == pytest.approx(pooled(alone), rel=1e-5)
    assert result.predictor.predict(prompts) == pytest.approx(pooled(alone), rel=1e-5)
    assert result.parameters == 2000
    assert result.export["pinball_tokens"] < result.export["pinball_tokens_best_alone"]
    assert "their mean" in capsys.readouterr().err
    assert predictor.training_lengths == sorted(row.output_tokens for row in splits(BETWEEN).train)
    assert np.shape(predictor.forecasts) == (len(splits(BETWEEN).validation), 5)
    (_, features), (_, of_first) = predictor.read(prompts), LengthPredictor.load(two[0]).read(prompts)
    assert features.shape == of_first.shape == (2, 20)
    assert features[:, :10] == pytest.approx(of_first[:, :10], rel=1e-4)
    assert predictor.characters_max == LengthPredictor.load(two[1]).characters_max


def test_a_mean_is_a_predictor_that_can_be_averaged(two: list[Path], tmp_path: Path) -> None:
    average(two, splits(BETWEEN), tmp_path / "mean")
    metrics = json.loads((two[0] / "metrics.json").read_text())
    (tmp_path / "mean" / "metrics.json").write_text(json.dumps({**metrics, "parameters": 2000}))
    third = trained(tmp_path / "third", unit=80)
    result = average([tmp_path / "mean", third], splits(LONG), tmp_path / "all")
    prompts = [Prompt("count to 7")]
    alone = [LengthPredictor.load(folder).predict(prompts) for folder in (*two, third)]
    assert result.predictor.predict(prompts) == pytest.approx(pooled(alone), rel=1e-5)
    assert result.parameters == 3000


def test_a_mean_that_is_no_better_is_not_written(two: list[Path], tmp_path: Path) -> None:
    with pytest.raises(PredictorError, match=f"the mean is no better than {two[0]}: serve that predictor"):
        average(two, splits(10), tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


def test_a_predictor_that_may_have_learnt_the_judges_is_refused(two: list[Path], tmp_path: Path) -> None:
    check_training(two[0], SPLIT, splits(BETWEEN))
    with pytest.raises(PredictorError, match=f"{two[0]} was trained with another split"):
        check_training(two[0], dataclasses.replace(SPLIT, seed=1), splits(BETWEEN))
    fewer = dataclasses.replace(splits(BETWEEN), held_out=splits(BETWEEN).held_out[1:])
    with pytest.raises(PredictorError, match=f"{two[0]} was trained with other data"):
        check_training(two[0], SPLIT, fewer)
    (two[1] / "metrics.json").unlink()
    with pytest.raises(PredictorError, match=f"{two[1]} was trained with another split, or an unknown split"):
        check_training(two[1], SPLIT, splits(BETWEEN))
    with pytest.raises(PredictorError, match="absent is not a predictor's folder"):
        check_training(tmp_path / "absent", SPLIT, splits(BETWEEN))


def test_an_interrupted_average_is_made_again(two: list[Path], tmp_path: Path) -> None:
    left = tmp_path / "mean" / "0"
    left.mkdir(parents=True)
    (left / "model.int8.onnx").write_bytes(b"of another network")
    average(two, splits(BETWEEN), tmp_path / "mean")
    assert not (left / "model.int8.onnx").exists()
    assert {path.name for path in left.iterdir()} == {"model.onnx", "predictor.json", "tokenizer.json"}


def test_an_average_may_lie_in_the_folder_of_a_predictor(two: list[Path]) -> None:
    average(two, splits(BETWEEN), two[0] / "mean")
    assert LengthPredictor.load(two[0] / "mean").predict([Prompt("count to 7")]).shape == (1, 5)


def test_networks_with_features_share_their_number(two: list[Path], tmp_path: Path) -> None:
    model = onnx.load(two[0] / "model.onnx")
    del model.graph.output[1]  # an export of before has no features
    onnx.save(model, two[0] / "model.onnx")
    average(two, splits(BETWEEN), tmp_path / "mean")
    (_, features) = LengthPredictor.load(tmp_path / "mean").read([Prompt("count to 7")])
    assert features.shape == (1, 20)


def test_predictors_of_other_quantiles_are_refused(two: list[Path], tmp_path: Path) -> None:
    with pytest.raises(PredictorError, match="differ in their number of quantiles"):
        average([two[0], trained(tmp_path / "seven", quantiles=7)], splits(BETWEEN), tmp_path / "mean")


def test_a_predictor_is_not_overwritten(two: list[Path]) -> None:
    with pytest.raises(PredictorError, match=f"{two[1]} has a predictor already"):
        average(two, splits(BETWEEN), two[1])


def test_the_command_averages_and_evaluates(
    two: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, output = tmp_path / "lengths.jsonl", tmp_path / "mean"
    rows = [row for part in dataclasses.fields(Splits) for row in getattr(splits(BETWEEN), part.name)]
    lines = [
        json.dumps({"prompt": row.prompt.text, "output_tokens": row.output_tokens, "model": "mn"[number % 9 == 0]})
        for number, row in enumerate(rows)
    ]
    data.write_text("\n".join(lines))
    words = ["train", "--data", str(data), "--held-out-share", "0.2", "--validation-share", "0.2"]
    words += ["--average", str(two[0]), "--average", str(two[1]), "--model", "m"]
    assert llmserve([*words, "--output", str(output)]) == 0, capsys.readouterr().err
    assert "│ predictor " in capsys.readouterr().out
    metrics = json.loads((output / "metrics.json").read_text())
    assert metrics["options"] == {"average": ["short", "long"]}
    assert metrics["split"] == dataclasses.asdict(SPLIT)
    assert str(tmp_path) not in json.dumps(metrics)
    assert (output / "gains.png").is_file()
    assert llmserve(["evaluate", str(output), "--data", str(data), "--compare", str(two[0])]) == 0
    assert "was trained with" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--average", "a"], "--average needs at least two predictors"),
        (["--average", "a", "--average", "b", "--epochs", "3"], "--epochs is of a training"),
        (["--average", "a", "--average", "b", "--resume"], "--resume is of a training"),
    ],
)
def test_flags_of_a_training_are_refused(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert llmserve(["train", "--data", "lengths.jsonl", "--output", "mean", *words]) == 2
    assert error in capsys.readouterr().err
