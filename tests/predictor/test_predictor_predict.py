"""A predictor in memory, and its folder."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest

import predictor
from predictor.dataset import Row
from predictor.errors import BadPredictor
from predictor.export import quantize, quantize_if_accurate, widest_products
from predictor.network import INT8_FILE, MODEL_FILE
from predictor.predict import LengthPredictor
from predictor.prediction import FEATURE, MARK_BYTES
from predictor.prompt import Prompt

TEXTS = ["count", "spell banana " * 50, "", "7", "half a \ud800 pair", "x" * 10_000]


@pytest.fixture
def folder(random_predictor: Path, tmp_path: Path) -> Path:
    """A copy of the folder, which a test may damage."""
    return Path(shutil.copytree(random_predictor, tmp_path / "predictor"))


def test_a_prediction_does_not_depend_on_its_batch(random_predictor: Path) -> None:
    loaded, prompts = LengthPredictor.load(random_predictor), [Prompt(text) for text in TEXTS]
    alone = np.concatenate([loaded.predict([prompt]) for prompt in prompts])
    assert alone.shape == (6, 5)
    assert loaded.predict(prompts) == pytest.approx(alone, rel=1e-4)
    assert loaded.predict(prompts, batch_size=2) == pytest.approx(alone, rel=1e-4)
    assert len({round(float(length), 3) for length in alone[:, 2]}) > 3
    assert len(loaded.predict([])) == 0


def test_predictions_have_the_features_of_their_prompts(random_predictor: Path) -> None:
    loaded, prompts = LengthPredictor.load(random_predictor), [Prompt(text) for text in TEXTS]
    lengths, features = loaded.read(prompts)
    predictions = loaded.predictions(prompts)
    assert [prediction.lengths for prediction in predictions] == lengths.tolist()
    assert features.shape == (6, 20)  # of as many prompts in its training
    (mark,) = {prediction.features[:MARK_BYTES] for prediction in predictions}
    known = [prediction.features.removeprefix(mark) for prediction in predictions]
    assert known == [row.tobytes() for row in features.astype(FEATURE)]
    assert len({prediction.features for prediction in predictions}) > 3
    assert loaded.predictions([]) == []


def test_an_export_without_features_predicts_without_them() -> None:
    (prediction,) = LengthPredictor.load(predictor.DEMO).predictions([Prompt("Count from 1 to 3.")])
    assert prediction.features == b""
    assert len(prediction.lengths) == 15


def test_the_8_bit_model_predicts_nearly_as_the_32_bit_model(folder: Path) -> None:
    prompts = [Prompt(text) for text in TEXTS]
    full = LengthPredictor.load(folder).predict(prompts)
    quantize(folder)
    small = LengthPredictor.load(folder).predict(prompts)
    assert not np.array_equal(small, full), "the 8-bit model serves on a CPU when it is there"
    assert small == pytest.approx(full, rel=0.1)


def test_8_bits_serve_only_when_they_predict_as_well(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = LengthPredictor.load(folder).predict([Prompt(text) for text in TEXTS])[:, 2]
    rows = [Row(Prompt(text), round(float(length))) for text, length in zip(TEXTS, served, strict=True)]
    assert quantize_if_accurate(folder, rows)["cpu_bits"] == 8
    assert (folder / INT8_FILE).is_file()

    def poor(folder: Path, kept: Sequence[str] = ()) -> None:
        """The 32-bit model with lengths twice as long."""
        model = onnx.load(folder / MODEL_FILE)
        two = onnx.numpy_helper.from_array(np.array(2.0, np.float32), "two")
        model.graph.initializer.append(two)
        for node in model.graph.node:
            node.output[:] = ["half" if name == "lengths" else name for name in node.output]
        model.graph.node.append(onnx.helper.make_node("Mul", ["half", "two"], ["lengths"]))
        onnx.save(model, folder / INT8_FILE)

    monkeypatch.setattr("predictor.export.quantize", poor)
    chosen = quantize_if_accurate(folder, rows)
    assert chosen["cpu_bits"] == 32
    assert chosen["pinball_tokens_8_bits"] > chosen["pinball_tokens_32_bits"]
    assert not (folder / INT8_FILE).exists()


def test_a_product_whose_inputs_are_too_wide_for_8_bits_keeps_32(wide_predictor: Path) -> None:
    loaded, prompts = LengthPredictor.load(wide_predictor), [Prompt(text) for text in TEXTS]
    full = loaded.predict(prompts)
    rows = [Row(prompt, round(float(length))) for prompt, length in zip(prompts, full[:, 2], strict=True)]
    assert widest_products(wide_predictor, loaded.networks[0], prompts)[0].endswith("layer.1/output/dense/MatMul")
    quantize(wide_predictor)
    assert LengthPredictor.load(wide_predictor).predict(prompts) != pytest.approx(full, rel=0.1)
    chosen = quantize_if_accurate(wide_predictor, rows)
    assert (chosen["cpu_bits"], chosen["products_32_bits"]) == (8, 1)
    assert LengthPredictor.load(wide_predictor).predict(prompts) == pytest.approx(full, rel=0.1)


@pytest.mark.parametrize("name", ["predictor.json", "model.onnx", "tokenizer.json", "training_lengths.json"])
def test_a_damaged_folder_is_one_clear_error(name: str, folder: Path) -> None:
    (folder / name).write_text("damaged")
    with pytest.raises(BadPredictor, match=f"cannot load a predictor from {folder}"):
        LengthPredictor.load(folder)


@pytest.mark.parametrize("name", ["model.onnx", "tokenizer.json", "training_lengths.json"])
def test_an_incomplete_folder_is_one_clear_error(name: str, folder: Path) -> None:
    (folder / name).unlink()
    with pytest.raises(BadPredictor, match=f"cannot load a predictor from {folder}"):
        LengthPredictor.load(folder)


def test_a_folder_without_training_lengths_is_an_error(folder: Path) -> None:
    (folder / "training_lengths.json").write_text("[]")
    with pytest.raises(BadPredictor, match="holds no list of lengths"):
        LengthPredictor.load(folder)


def test_the_folder_of_another_kind_of_model_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(BadPredictor, match=r"no predictor\.json"):
        LengthPredictor.load(tmp_path)


def test_serving_needs_neither_torch_nor_transformers(random_predictor: Path) -> None:
    script = (
        "import sys\nfrom predictor.predict import LengthPredictor\n"
        "LengthPredictor.load(sys.argv[1])\n"
        "print([name for name in ('torch', 'transformers', 'scipy', 'sklearn') if name in sys.modules])"
    )
    command = [sys.executable, "-c", script, str(random_predictor)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout == "[]\n"


# --- the shipped predictor --------------------------------------------------------------------------------------

FAMILIAR = [
    ("Count from 3 to 9.", 13),
    ("Count from 100 to 250.", 301),
    ("count down from 40 to 11", 59),
    ("List 5 animals.", 15),
    ("Make a numbered list of 30 fruits.", 90),
    ("Spell banana.", 11),
    ("Recite the alphabet.", 51),
    ("Repeat: red blue green", 3),
    ("Hello!", 10),
]


def test_the_shipped_predictor_beats_the_constant_by_far_on_a_few_prompts() -> None:
    shipped = LengthPredictor.load(predictor.DEMO)
    prompts, lengths = zip(*FAMILIAR, strict=True)
    median = shipped.training_lengths[len(shipped.training_lengths) // 2]
    quantiles = shipped.predict([Prompt(prompt) for prompt in prompts])
    medians = quantiles[:, quantiles.shape[1] // 2]
    error = sum(abs(p - length) for p, length in zip(medians, lengths, strict=True))
    assert error < sum(abs(median - length) for length in lengths) / 3
