"""From rows to a predictor, and what the predictor then says."""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, BertConfig, BertModel

import predictor
from predictor.dataset import Row, Splits, split_rows
from predictor.errors import BadPredictor, PredictorError
from predictor.evaluate import baselines, equal_mass_edges, evaluate
from predictor.numbers import SCALE, number_features
from predictor.predict import LengthPredictor
from predictor.text import CHARACTERS_PER_TOKEN
from predictor.tokenizer import NUMBERS, encode, train_tokenizer
from predictor.train import FROM_SCRATCH, PlainProgress, train

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine make such small models many times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def toy_rows(n: int) -> list[Row]:
    """Answers whose length the prompt states."""
    words = ("apples", "pears", "plums", "figs")
    return [Row(f"write {i % 50 + 1} {words[i // 50 % 4]}, number {i}", "toy", i % 50 + 1, False) for i in range(n)]


def toy_splits(n: int = 60) -> Splits:
    return split_rows(toy_rows(n), seed=0)


QUICK = replace(FROM_SCRATCH, epochs=3, max_length_tokens=16)


# --- the whole way ----------------------------------------------------------------------------------------------


def test_the_script_trains_a_predictor_that_beats_the_baselines(tmp_path: Path) -> None:
    data = tmp_path / "toy.jsonl"
    lines = [json.dumps({"question": row.prompt, "tokens": row.output_tokens}) for row in toy_rows(800)]
    data.write_text("\n".join([*lines, "not JSON"]))
    command = [sys.executable, ROOT / "scripts" / "train_predictor.py", "--data", data, "--output", tmp_path / "out"]
    options = ["--from-scratch", "tiny", "--epochs", "8", "--batch-size", "16", "--seed", "3"]
    columns = ["--prompt-column", "question", "--length-column", "tokens"]
    done = subprocess.run(
        [*command, *options, *columns, "--threads", "1"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "1 unusable: not a JSON object" in done.stderr
    assert "epoch 8/8: validation error" in done.stderr
    assert "| predictor |" in done.stdout

    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    held_out = metrics["held_out"]
    assert held_out["predictor"]["mae_tokens"] < held_out["constant"]["mae_tokens"] / 2
    assert held_out["predictor"]["mae_tokens"] < held_out["prompt length"]["mae_tokens"] / 2
    assert held_out["predictor"]["kendall_tau"] > 0.6
    assert metrics["rows"]["bad"] == {"not a JSON object": 1}
    assert metrics["arguments"][:4] == ["--data", "toy.jsonl", "--output", "out"]
    assert str(tmp_path) not in json.dumps(metrics)

    trained = LengthPredictor.load(tmp_path / "out")
    few, many = trained.predict(["write 3 figs, number 9", "write 48 figs, number 9"])
    assert few < many
    assert len(trained.training_lengths) == metrics["rows"]["train"]


def test_the_script_says_what_is_wrong_with_the_data_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    command = [sys.executable, ROOT / "scripts" / "train_predictor.py", "--data", tmp_path / "a.jsonl"]
    done = subprocess.run(
        [*command, "--output", tmp_path / "out"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("train_predictor: no usable row in ")


def test_an_interrupted_training_is_resumed_and_ends_like_an_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits, prompts = toy_splits(), [row.prompt for row in toy_splits().held_out]
    undisturbed = train(splits, QUICK, tmp_path / "undisturbed").predict(prompts)

    def interrupt(_callback: PlainProgress, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.epoch > 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PlainProgress, "on_step_end", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(splits, QUICK, tmp_path / "out")
    with pytest.raises(PredictorError, match="unfinished training"):
        train(splits, QUICK, tmp_path / "out")
    resumed = train(splits, QUICK, tmp_path / "out", resume=True).predict(prompts)
    assert resumed == pytest.approx(undisturbed, rel=1e-3)
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_a_base_model_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    with pytest.raises(PredictorError, match=r"cannot load the base model .*absent"):
        train(toy_splits(), replace(QUICK, base_model=str(tmp_path / "absent")), tmp_path)


def test_nothing_to_resume_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PredictorError, match="nothing to resume"):
        train(toy_splits(), QUICK, tmp_path, resume=True)


def test_the_same_seed_gives_the_same_predictor_and_another_seed_another(tmp_path: Path) -> None:
    once, again, other = (
        train(toy_splits(), replace(QUICK, epochs=1, seed=seed), tmp_path / str(i)).predict(["write 7 figs"])
        for i, seed in enumerate([1, 1, 2])
    )
    assert once == again != other


def test_fine_tuning_starts_from_the_base_models_weights_and_tokenizer(tmp_path: Path) -> None:
    base = tmp_path / "base"
    tokenizer = train_tokenizer([row.prompt for row in toy_rows(60)], words_max=100)
    tokenizer.save_pretrained(base)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    encoder = BertModel(config)
    encoder.save_pretrained(base)

    options = replace(QUICK, base_model=str(base), epochs=1, learning_rate=1e-6)
    tuned = train(toy_splits(), options, tmp_path / "out")
    assert isinstance(tuned.tokenizer, type(AutoTokenizer.from_pretrained(base)))
    before, after = encoder.state_dict(), tuned.model.encoder.state_dict()
    assert set(before) - set(after) == {"pooler.dense.weight", "pooler.dense.bias"}
    assert all(torch.allclose(before[name], weight, atol=1e-4) for name, weight in after.items())
    assert str(tmp_path) not in (tmp_path / "out" / "config.json").read_text()


# --- tokens -----------------------------------------------------------------------------------------------------


def test_a_too_long_prompt_keeps_its_head_and_its_tail() -> None:
    tokenizer = train_tokenizer(["zero"], words_max=100)
    numbers = [str(number) for number in range(100)]
    (ids,) = encode(tokenizer, [" ".join(numbers)], max_length_tokens=8)
    assert tokenizer.convert_ids_to_tokens(ids) == ["[CLS]", "0", "1", "2", "97", "98", "99", "[SEP]"]


def test_a_prompt_that_just_fits_is_left_alone() -> None:
    tokenizer = train_tokenizer(["zero"], words_max=100)
    (ids,) = encode(tokenizer, ["1 2 3 4 5 6"], max_length_tokens=8)
    assert tokenizer.convert_ids_to_tokens(ids) == ["[CLS]", "1", "2", "3", "4", "5", "6", "[SEP]"]


def test_a_gigantic_prompt_costs_no_more_than_a_long_one() -> None:
    tokenizer = train_tokenizer(["zero"], words_max=100)
    gigantic = "7 " + "x " * 10_000_000 + "9"
    (ids,) = encode(tokenizer, [gigantic], max_length_tokens=6)
    assert tokenizer.convert_ids_to_tokens(ids) == ["[CLS]", "7", "x", "x", "9", "[SEP]"]
    assert len(gigantic) > 6 * CHARACTERS_PER_TOKEN


def test_numbers_are_whole_tokens_and_unknown_words_are_spelt() -> None:
    tokenizer = train_tokenizer(["count", "Count from", "from"], words_max=100)
    assert tokenizer.tokenize("Count from 17 to 1000!") == ["count", "from", "17", "t", "##o", "1000", "!"]


def test_only_the_most_frequent_words_become_tokens_and_none_that_was_seen_once() -> None:
    tokenizer = train_tokenizer(["red red red blue blue green", "pink pink pink"], words_max=3)
    assert tokenizer.tokenize("red blue") == ["red", "blue"]
    assert tokenizer.tokenize("green")[:2] == ["g", "##r"]


# --- numbers ----------------------------------------------------------------------------------------------------


def test_near_numbers_have_near_features_all_along() -> None:
    features = number_features(torch.arange(1001), 96)
    assert features.shape == (1001, 96)
    assert features.abs().max() <= 1
    steps = (features[1:] - features[:-1]).norm(dim=1)
    far = (features[100:] - features[:-100]).norm(dim=1)
    assert steps.min() > 0
    assert steps[10:].max() < far.min()  # the logarithm spreads the smallest numbers out


def test_training_leaves_the_numbers_where_they_were(tmp_path: Path) -> None:
    trained = train(toy_splits(), QUICK, tmp_path)
    embeddings = trained.model.encoder.get_input_embeddings().weight
    rows = trained.tokenizer.convert_tokens_to_ids(NUMBERS)
    assert torch.allclose(embeddings[rows], SCALE * number_features(torch.arange(1001), embeddings.shape[1]))


# --- predictions ------------------------------------------------------------------------------------------------


def test_a_prediction_does_not_depend_on_its_batch(random_predictor: Path) -> None:
    loaded = LengthPredictor.load(random_predictor)
    prompts = ["count", "spell banana " * 50, "", "7", "half a \ud800 pair", "x" * 10_000]
    alone = [loaded.predict([prompt])[0] for prompt in prompts]
    assert loaded.predict(prompts) == pytest.approx(alone, rel=1e-4)
    assert loaded.predict(prompts, batch_size=2) == pytest.approx(alone, rel=1e-4)
    assert len({round(length, 3) for length in alone}) > 3
    assert loaded.predict([]) == []


def test_a_saved_predictor_predicts_the_same_also_from_half_precision(random_predictor: Path, tmp_path: Path) -> None:
    loaded, prompts = LengthPredictor.load(random_predictor), ["count to 9", "spell banana"]
    loaded.save(tmp_path)
    weights = tmp_path / "model.safetensors"
    assert LengthPredictor.load(tmp_path).predict(prompts) == loaded.predict(prompts)
    save_file({name: w.half() for name, w in load_file(weights).items()}, weights, {"format": "pt"})
    halved = LengthPredictor.load(tmp_path)
    assert halved.model.dtype == torch.float32
    assert halved.predict(prompts) == pytest.approx(loaded.predict(prompts), rel=1e-2)
    assert halved.training_lengths == [10, 20, 30]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "training_lengths.json"])
def test_a_damaged_folder_is_one_clear_error(name: str, random_predictor: Path, tmp_path: Path) -> None:
    LengthPredictor.load(random_predictor).save(tmp_path)
    (tmp_path / name).write_text("damaged")
    with pytest.raises(BadPredictor, match=f"cannot load a predictor from {tmp_path}"):
        LengthPredictor.load(tmp_path)


def test_a_folder_without_training_lengths_is_an_error(random_predictor: Path, tmp_path: Path) -> None:
    LengthPredictor.load(random_predictor).save(tmp_path)
    (tmp_path / "training_lengths.json").write_text("[]")
    with pytest.raises(BadPredictor, match="holds no list of lengths"):
        LengthPredictor.load(tmp_path)


def test_missing_weights_are_an_error_instead_of_random_ones(random_predictor: Path, tmp_path: Path) -> None:
    LengthPredictor.load(random_predictor).save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["head.bias"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadPredictor, match=r"weights are missing: head\.bias"):
        LengthPredictor.load(tmp_path)


def test_another_models_folder_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(BadPredictor, match=r"no config\.json"):
        LengthPredictor.load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(BadPredictor, match="of a bert, not a length-predictor"):
        LengthPredictor.load(tmp_path)


# --- metrics ----------------------------------------------------------------------------------------------------

ONE_TO_EIGHT = list(range(1, 9))


def test_perfect_predictions_have_perfect_metrics() -> None:
    metrics = evaluate(ONE_TO_EIGHT, ONE_TO_EIGHT, ONE_TO_EIGHT)
    assert metrics.mae_tokens == 0
    assert metrics.kendall_tau == pytest.approx(1)
    assert metrics.bin_accuracy == metrics.near_accuracy == {2: 1, 4: 1, 8: 1}


def test_metrics_of_known_errors() -> None:
    metrics = evaluate([2.0, 2.4, 3.0, 4.0, 5.0, 6.0, 7.0, 1.0], ONE_TO_EIGHT, ONE_TO_EIGHT)
    assert metrics.mae_tokens == pytest.approx((1 + 0.4 + 7) / 8)
    assert metrics.bin_accuracy == {2: 7 / 8, 4: 7 / 8, 8: 6 / 8}
    assert metrics.near_accuracy == {2: 1.0, 4: 7 / 8, 8: 7 / 8}


def test_bins_are_equal_mass_and_collapse_when_lengths_repeat() -> None:
    assert equal_mass_edges(range(1, 101), 4).tolist() == pytest.approx([25.75, 50.5, 75.25])
    assert equal_mass_edges([5] * 90 + [9] * 10, 4).tolist() == []
    assert evaluate([5, 9], [5, 9], [5] * 60 + [9] * 40).distinct_bins == {2: 1, 4: 2, 8: 2}


def test_a_constant_has_no_rank_correlation() -> None:
    metrics = evaluate([4.0] * 8, ONE_TO_EIGHT, ONE_TO_EIGHT)
    assert math.isnan(metrics.kendall_tau)
    assert metrics.as_json()["kendall_tau"] is None


def test_the_baselines_are_the_median_and_a_line_in_the_prompts_length() -> None:
    training = [Row("x" * n, "", 10 * n, False) for n in (1, 2, 6)]
    rows = [Row("x" * n, "", 1, False) for n in (3, 4)]
    assert baselines(training, rows)["constant"] == [20, 20]
    assert baselines(training, rows)["prompt length"] == pytest.approx([30, 40])


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
    error = sum(abs(p - length) for p, length in zip(shipped.predict(prompts), lengths, strict=True))
    assert error < sum(abs(median - length) for length in lengths) / 3
