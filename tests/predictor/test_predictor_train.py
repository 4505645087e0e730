"""From rows to a trained predictor and its predictions."""

import json
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from script_module import load_script
from transformers import (
    AutoModel,
    BertConfig,
    BertModel,
    MPNetConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    RobertaConfig,
)

from predictor.dataset import Row, Splits, split_rows
from predictor.errors import PredictorError
from predictor.model import LengthConfig, LengthModel
from predictor.numbers import SCALE, fix_number_embeddings, number_features
from predictor.predict import LengthPredictor
from predictor.prompt import Prompt
from predictor.tokenizer import NUMBERS, train_tokenizer
from predictor.train import FROM_SCRATCH, SIZES, PlainProgress, Trained, _base_model, _load_best_weights, train

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread: on a busy machine threads of such small models slow each other down many times."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def toy_rows(n: int) -> list[Row]:
    """Answers of the length that the prompt states."""
    words = ("apples", "pears", "plums", "figs")
    return [Row(Prompt(f"write {i % 50 + 1} {words[i // 50 % 4]}, number {i}", "toy"), i % 50 + 1) for i in range(n)]


def toy_splits(n: int = 60) -> Splits:
    return split_rows(toy_rows(n), seed=0)


QUICK = replace(FROM_SCRATCH, from_scratch="least", epochs=3, max_length_tokens=16)
LEAST = {"hidden_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 96}


@pytest.fixture(autouse=True, scope="module")
def least_network() -> Iterator[None]:
    """Train the smallest network, in tests that do not judge its predictions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIZES, "least", LEAST)
        yield


def predictor_of(trained: Trained | None) -> LengthPredictor:
    assert trained is not None, "there is only one process"
    return trained.predictor


SEVEN = [Prompt("write 7 figs")]
TINY = BertConfig(vocab_size=10, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)


# --- from script to predictor -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_script_trains_a_predictor_that_beats_the_baselines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "toy.jsonl"
    lines = [json.dumps({"question": row.prompt.text, "tokens": row.output_tokens}) for row in toy_rows(400)]
    data.write_text("\n".join([*lines, "not JSON"]))
    command = ["train_predictor.py", "--data", str(data), "--output", str(tmp_path / "out")]
    options = ["--from-scratch", "tiny", "--epochs", "8", "--batch-size", "16", "--seed", "3"]
    columns = ["--prompt-column", "question", "--length-column", "tokens"]
    monkeypatch.setattr(sys, "argv", [*command, *options, *columns, "--threads", "1"])
    status = load_script("train_predictor").main()
    output = capsys.readouterr()
    assert status == 0, output.err
    assert "Not usable: 1 x not JSON; the first: " in output.err
    assert "epoch 8/8: validation loss" in output.err
    assert "│ predictor " in output.out

    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    held_out = metrics["metrics"]
    assert held_out["predictor"]["mae_tokens"] < held_out["constant"]["mae_tokens"] / 2
    assert held_out["predictor"]["mae_tokens"] < held_out["prompt length"]["mae_tokens"] / 2
    assert held_out["predictor"]["kendall_tau"] > 0.6
    assert metrics["bad"] == {"not JSON": 1}
    assert metrics["arguments"][:4] == ["--data", "toy.jsonl", "--output", "out"]
    assert str(tmp_path) not in json.dumps(metrics)

    trained = LengthPredictor.load(tmp_path / "out")
    few, many = trained.predict([Prompt("write 3 figs, number 9"), Prompt("write 48 figs, number 9")])
    assert few.shape == (15,)
    assert (np.diff(few) > 0).all()
    assert (few < many).all()
    assert len(trained.training_lengths) == metrics["rows"]["train"]
    assert np.shape(trained.forecasts) == (metrics["rows"]["validation"], 15)
    assert {"confusion.png", "gains.png", "calibration.png"} <= {path.name for path in (tmp_path / "out").iterdir()}


def test_the_script_reports_bad_data_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    command = [sys.executable, ROOT / "scripts" / "train_predictor.py", "--data", tmp_path / "a.jsonl"]
    done = subprocess.run(
        [*command, "--output", tmp_path / "out"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("train_predictor: no usable row in ")


@pytest.mark.slow
def test_an_interrupted_training_is_resumed_and_ends_like_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits, prompts = toy_splits(), [row.prompt for row in toy_splits().held_out]
    undisturbed = predictor_of(train(splits, QUICK, tmp_path / "undisturbed")).predict(prompts)

    def interrupt(_callback: PlainProgress, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.epoch > 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PlainProgress, "on_step_end", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(splits, QUICK, tmp_path / "out")
    with pytest.raises(PredictorError, match="unfinished training"):
        train(splits, QUICK, tmp_path / "out")
    resumed = predictor_of(train(splits, QUICK, tmp_path / "out", resume=True)).predict(prompts)
    assert resumed == pytest.approx(undisturbed, rel=1e-3)
    assert not (tmp_path / "out" / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"seed": 1}, {"quantiles": 9}, {"learning_rate": 1e-3}])
def test_a_training_with_other_options_is_not_resumed(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PlainProgress, "on_save", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(toy_splits(), QUICK, tmp_path / "out")
    with pytest.raises(PredictorError, match="other data or options"):
        train(toy_splits(), replace(QUICK, **change), tmp_path / "out", resume=True)


@pytest.mark.slow
def test_a_training_that_failed_before_its_first_checkpoint_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PlainProgress, "on_step_end", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(toy_splits(), QUICK, tmp_path / "out")
    assert predictor_of(train(toy_splits(), QUICK, tmp_path / "out")).predict(SEVEN).shape == (1, 15)


@pytest.mark.slow
def test_the_trainings_of_a_soup_are_resumed_separately(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def count(_callback: PlainProgress, args: Any, *_: Any, **__: Any) -> None:
        seeds.append(args.seed)
        if seeds == [0, 1]:
            raise KeyboardInterrupt

    monkeypatch.setattr(PlainProgress, "on_epoch_begin", count)
    soup = replace(QUICK, epochs=1, soup=3)
    with pytest.raises(KeyboardInterrupt):
        train(toy_splits(), soup, tmp_path / "out")
    averaged = predictor_of(train(toy_splits(), soup, tmp_path / "out", resume=True))
    assert seeds == [0, 1, 1, 2]
    assert averaged.predict(SEVEN).shape == (1, 15)


def test_the_average_of_a_soup_is_taken_only_when_it_is_better() -> None:
    class Losses:
        """The loss is the distance of the weight from 5."""

        def __init__(self) -> None:
            self.model = torch.nn.Linear(1, 1, bias=False)
            self.eval_dataset = None

        def predict(self, _: None) -> Any:
            return SimpleNamespace(metrics={"test_loss": abs(5 - self.model.weight.item())})

    for members, best in (([4.0, 6.5], 5.25), ([5.0, 9.0], 5.0)):
        trainer: Any = Losses()
        _load_best_weights(trainer, [{"weight": torch.tensor([[member]])} for member in members])
        assert trainer.model.weight.item() == best


def test_a_base_model_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    with pytest.raises(PredictorError, match=r"cannot load the base model .*absent"):
        train(toy_splits(), replace(QUICK, base_model=str(tmp_path / "absent")), tmp_path)


def test_nothing_to_resume_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PredictorError, match="nothing to resume"):
        train(toy_splits(), QUICK, tmp_path, resume=True)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_predictor_and_another_seed_another(tmp_path: Path) -> None:
    quick = replace(QUICK, epochs=1)
    first, same_seed, other_seed = (
        predictor_of(train(toy_splits(), replace(quick, seed=seed), tmp_path / str(i))).predict(SEVEN).tolist()
        for i, seed in enumerate([1, 1, 2])
    )
    assert first == same_seed != other_seed


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A small BERT in the format of the hub."""
    tokenizer = train_tokenizer([row.prompt.text for row in toy_rows(60)], words_max=100)
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=24, **special).save_pretrained(
        tmp_path / "base"
    )
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
    )
    BertModel(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.slow
def test_fine_tuning_starts_from_the_base_model_and_reads_as_long_a_prompt_as_it_can(
    base: Path, tmp_path: Path
) -> None:
    options = replace(QUICK, base_model=str(base), epochs=1, learning_rate=1e-9, max_length_tokens=512)
    tuned = predictor_of(train(toy_splits(), options, tmp_path / "out"))
    assert tuned.networks[0].encoding.max_length_tokens == 24
    encoder = AutoModel.from_pretrained(base).eval()
    unit = np.median([row.output_tokens for row in toy_splits().train])
    model = LengthModel(LengthConfig(encoder=encoder.config.to_diff_dict(), quantiles=15, length_unit=unit), encoder)
    model.start_from([row.output_tokens for row in toy_splits().train])
    assert tuned.predict(SEVEN)[0] == pytest.approx(model.head.bias.new_tensor(untrained(model)), rel=0.3)
    assert str(tmp_path) not in (tmp_path / "out" / "predictor.json").read_text()


@pytest.mark.parametrize("family", [RobertaConfig, MPNetConfig])
def test_families_whose_positions_start_behind_the_padding_read_their_longest_prompt(
    base: Path, family: type[PreTrainedConfig]
) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base, model_max_length=512)
    tokenizer.save_pretrained(base)
    config = family(vocab_size=len(tokenizer), max_position_embeddings=40, pad_token_id=tokenizer.pad_token_id, **sizes)
    AutoModel.from_config(config).save_pretrained(base)
    rows = [replace(row, prompt=Prompt(row.prompt.text * 20)) for row in toy_rows(2)]
    encoder, backend, encoding = _base_model(str(base), rows, replace(QUICK, max_length_tokens=512))
    (line, _) = encoding.encode(backend, [row.prompt for row in rows])
    assert len(line) == encoding.max_length_tokens < 40
    assert encoder(torch.tensor([line])).last_hidden_state.shape == (1, len(line), 32)


def untrained(model: LengthModel) -> list[float]:
    """The predictions before training: the quantiles of the training lengths."""
    with torch.no_grad():
        lengths = model._ascending(model.head.bias.unsqueeze(0)).exp() * model.config.length_unit
    result: list[float] = lengths[0].tolist()
    return result


@pytest.mark.slow
def test_one_predictor_serves_several_models_and_reads_system_prompts_and_history(base: Path, tmp_path: Path) -> None:
    rng = random.Random(0)
    rows = []
    for i in range(400):
        model, system, history = rng.choice(["terse", "wordy"]), rng.choice(["", "be brief"]), rng.choice([0, 50_000])
        tokens = 40 * (3 if model == "wordy" else 1) * (1 if system else 2) * (2 if history else 1)
        rows.append(Row(Prompt(f"number {i}", model, system, history), tokens))
    options = replace(QUICK, base_model=str(base), epochs=40, learning_rate=1e-3, max_length_tokens=24)
    trained = predictor_of(train(split_rows(rows, seed=0), options, tmp_path / "out"))

    def median(**fields: Any) -> float:
        return float(trained.predict([Prompt("number 7", **fields)])[0, 7])

    assert median(model="wordy") > 1.5 * median(model="terse")
    assert median(model="terse") > 1.1 * median(
        model="terse", system="be brief"
    )  # 1 if the system prompt is ignored, 2 in truth
    assert median(model="terse", history_characters=60_000) > 1.2 * median(model="terse")
    assert median(model="terse") < median(model="never heard of") < median(model="wordy")


@pytest.mark.slow
def test_the_papers_loss_gives_a_point(tmp_path: Path) -> None:
    assert predictor_of(train(toy_splits(), replace(QUICK, loss="l1"), tmp_path)).predict(SEVEN).shape == (1, 1)


def test_a_cut_answer_is_a_lower_bound_in_the_loss() -> None:
    model = LengthModel(LengthConfig(encoder=TINY.to_diff_dict(), quantiles=3, length_unit=100.0)).eval()
    model.start_from([50, 100, 200])
    ids = torch.tensor([[1, 2]])

    def loss(length: float, ceiling: float) -> float:
        with torch.no_grad():
            labels, ceilings = torch.tensor([length]), torch.tensor([ceiling])
            return float(model(ids, torch.ones_like(ids), labels=labels, ceilings=ceilings).loss)

    assert loss(1.0, ceiling=1.0) == pytest.approx(0.0, abs=1e-6)
    assert loss(1.0, ceiling=math.inf) > 0.1
    assert loss(9_000.0, ceiling=9_000.0) == pytest.approx(loss(9_000.0, ceiling=math.inf))


def test_different_ceilings_of_answers_bias_no_quantile() -> None:
    rng = np.random.default_rng(0)
    lengths, ceilings = rng.lognormal(np.log(200), 1, 20_000), np.tile([100.0, 2000.0], 10_000)
    model = LengthModel(LengthConfig(encoder=TINY.to_diff_dict(), quantiles=3, length_unit=1.0)).eval()
    observed, ceiling = (torch.tensor(x).unsqueeze(1) for x in (np.minimum(lengths, ceilings), ceilings))

    def loss(guess: float) -> float:
        return float(model._pinball(torch.minimum(torch.full((len(observed), 3), guess), ceiling), observed))

    guesses = np.geomspace(50, 800, 120)
    model.levels[:] = 0.5  # three times the median
    assert guesses[int(np.argmin([loss(guess) for guess in guesses]))] == pytest.approx(200, rel=0.06)


def test_the_pinball_loss_is_least_at_the_quantiles() -> None:
    config = LengthConfig(encoder=TINY.to_diff_dict(), quantiles=5, length_unit=100.0)
    model = LengthModel(config).eval()
    lengths = np.random.default_rng(0).lognormal(4, 1, 4001)
    observed = torch.tensor(lengths / 100.0).unsqueeze(1)
    best = torch.tensor(np.quantile(lengths, model.levels.numpy()) / 100.0)

    def loss(guess: torch.Tensor) -> float:
        return float(model._pinball(guess.expand(len(lengths), -1), observed))

    for i in range(5):
        for factor in (0.8, 1.25):
            shifted = best.clone()
            shifted[i] *= factor
            assert loss(shifted) > loss(best)


def test_quantiles_never_cross_whatever_the_weights() -> None:
    torch.manual_seed(0)
    model = LengthModel(LengthConfig(encoder=TINY.to_diff_dict(), quantiles=15, length_unit=50.0)).eval()
    torch.nn.init.normal_(model.head.weight, std=5.0)
    ids = torch.randint(0, 9, (64, 6))
    assert (model(ids, torch.ones_like(ids)).lengths.diff(dim=1) >= 0).all()


# --- numbers ----------------------------------------------------------------------------------------------------


def test_near_numbers_have_near_features_all_along() -> None:
    features = number_features(torch.arange(1001), 96)
    assert features.shape == (1001, 96)
    assert features.abs().max() <= 1
    steps = (features[1:] - features[:-1]).norm(dim=1)
    far = (features[100:] - features[:-100]).norm(dim=1)
    assert steps.min() > 0
    assert steps[10:].max() < far.min()  # the logarithm spreads the smallest numbers


def test_training_does_not_change_the_features_of_numbers() -> None:
    tokenizer = train_tokenizer(["count"], words_max=10)
    embeddings = torch.nn.Embedding(tokenizer.get_vocab_size(), 96)
    fix_number_embeddings(embeddings, tokenizer)
    optimizer = torch.optim.SGD(embeddings.parameters(), lr=1.0)
    embeddings.weight.sum().backward()
    weights_before = embeddings.weight.detach().clone()
    optimizer.step()
    rows = torch.tensor([tokenizer.token_to_id(number) for number in NUMBERS])
    assert torch.allclose(embeddings.weight[rows], SCALE * number_features(torch.arange(1001), 96))
    assert not torch.allclose(
        embeddings.weight[tokenizer.token_to_id("[UNK]")], weights_before[tokenizer.token_to_id("[UNK]")]
    )
