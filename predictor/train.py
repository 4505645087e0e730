"""Fine-tuning, or training from scratch, with transformers.Trainer; then the export."""

import copy
import hashlib
import json
import math
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    EarlyStoppingCallback,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

from predictor.dataset import Row, Splits, length_sample
from predictor.encoding import Encoding
from predictor.errors import PredictorError
from predictor.export import check_export, export, quantize_if_accurate, with_forecasts
from predictor.model import LengthConfig, LengthModel
from predictor.numbers import fix_number_embeddings
from predictor.predict import LengthPredictor
from predictor.tokenizer import CLS, PAD, SEP, train_tokenizer

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 384,
    },
}
WORDS_MAX = 1000

Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """base_model : a hub id or a folder; None: the encoder is a BERT of the size `from_scratch`, a key of SIZES.

    loss : "quantile", or "l1", the paper's loss (predictor/model.py).  quantiles : outputs of the quantile loss, odd.
    learning_rate : the peak rate, after a warm-up over a twentieth of the steps; the rate then falls linearly to zero.
    The head's rate is `head_rate_factor` times larger, and each encoder layer's rate is `layer_rate_factor` times the
    rate of the layer above.
    soup : number of trainings from the same start, with different orders of the rows, whose weights are averaged
    (Wortsman et al., Model soups, 2022); the average is used only if its validation loss is the lowest.
    patience_epochs : training ends early when the validation loss has not fallen for so many epochs.
    """

    base_model: str | None = None
    from_scratch: str = "tiny"
    loss: str = "quantile"
    quantiles: int = 15
    epochs: int = 4
    batch_size: int = 32
    learning_rate: float = 1e-4
    head_rate_factor: float = 10.0
    layer_rate_factor: float = 0.9
    dropout: float = 0.1
    weight_decay: float = 0.01
    precision: Precision = "fp32"
    seed: int = 0
    soup: int = 1
    max_length_tokens: int = 512
    pooling: str = "mean"
    patience_epochs: int = 3


FINE_TUNING = TrainingOptions(base_model="bert-base-uncased")
FROM_SCRATCH = TrainingOptions(
    epochs=60,
    learning_rate=7e-4,
    dropout=0.0,  # dropout would blur the numbers that a regression needs
    weight_decay=0.0,  # weight decay would shrink the fixed embeddings of numbers (predictor/numbers.py)
    head_rate_factor=1.0,
    layer_rate_factor=1.0,
    max_length_tokens=256,
    patience_epochs=15,
)


Weights = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of a training. export : of quantize_if_accurate."""

    predictor: LengthPredictor
    parameters: int
    export: dict[str, Any]


def train(splits: Splits, options: TrainingOptions, output: Path, resume: bool = False) -> Trained | None:
    """Train on splits.train and export the checkpoint with the least validation loss to `output`.

    Under torchrun only the first process exports; the others return None.
    Checkpoints, one per epoch, are in `output`/checkpoints until the end; `resume` continues from the last checkpoint.
    Raises PredictorError when `resume` finds no checkpoint, or when there is a checkpoint without `resume`.
    """
    checkpoints = output / "checkpoints"
    _begin(checkpoints, _identity(splits, options), resume)
    set_seed(options.seed)
    model, tokenizer, encoding = _build(splits.train, options)
    start = copy.deepcopy(model.state_dict())
    check_export(model)  # before hours of training
    data = _examples(splits.train, tokenizer, encoding), _examples(splits.validation, tokenizer, encoding)
    members = []
    for number in range(options.soup):
        model.load_state_dict(start)
        trainer = _trainer(
            model, encoding, data, replace(options, seed=options.seed + number), checkpoints / str(number)
        )
        members.append(_train_member(trainer, checkpoints / f"{number}.safetensors"))
    _load_best_weights(trainer, members)
    if not trainer.is_world_process_zero():
        return None
    trained = LengthModel(model.config)  # a copy without the wrappers of mixed precision
    trained.load_state_dict({name: weight.float().cpu() for name, weight in model.state_dict().items()})
    prompts = [row.prompt for row in splits.validation]
    export(trained, tokenizer, encoding, length_sample(splits.train), output, prompts)
    chosen = quantize_if_accurate(output, splits.validation)
    predictor = with_forecasts(output, splits.validation)
    shutil.rmtree(checkpoints)
    return Trained(predictor, model.num_parameters(), chosen)


def _begin(checkpoints: Path, identity: str, resume: bool) -> None:
    """Make or check the folder for the checkpoints of this training."""
    file = checkpoints / "training.json"
    began = any(checkpoints.glob("*.safetensors")) or any(checkpoints.glob("*/checkpoint-*"))
    if resume and not began:
        raise PredictorError(f"nothing to resume in {checkpoints}")
    if began and not resume:
        raise PredictorError(f"{checkpoints} holds an unfinished training: resume it, or remove the folder")
    if resume and file.is_file() and file.read_text() != identity:
        raise PredictorError(f"{checkpoints} has a training with other data or options: {file.read_text().strip()}")
    checkpoints.mkdir(parents=True, exist_ok=True)
    file.write_text(identity)


def _identity(splits: Splits, options: TrainingOptions) -> str:
    """The data and options that must be the same to resume a training, as JSON; `soup` may change."""
    rows = hashlib.blake2b(repr((splits.train, splits.validation)).encode("utf-8", "replace"), digest_size=8)
    return json.dumps({**asdict(replace(options, soup=1)), "rows": rows.hexdigest()}) + "\n"


def _train_member(trainer: Trainer, file: Path) -> Weights:
    """The weights of one training, from `file` if the training has ended, otherwise resumed at its last checkpoint."""
    if not file.is_file():
        folder = Path(trainer.args.output_dir)
        last = get_last_checkpoint(folder) if folder.is_dir() else None
        trainer.train(resume_from_checkpoint=last)
        if trainer.is_world_process_zero():
            save_file({name: weight.contiguous() for name, weight in trainer.model.state_dict().items()}, file)
        trainer.accelerator.wait_for_everyone()
    weights: Weights = load_file(file)
    return weights


def _load_best_weights(trainer: Trainer, members: Sequence[Weights]) -> None:
    """Load the weights of least validation loss, of one member or averaged, into the trainer's model."""
    average = {name: torch.stack([weights[name] for weights in members]).mean(dim=0) for name in members[0]}
    candidates = [average, *members] if len(members) > 1 else [average]
    losses = []
    for weights in candidates:
        trainer.model.load_state_dict(weights)
        losses.append(trainer.predict(trainer.eval_dataset).metrics["test_loss"])
    trainer.model.load_state_dict(candidates[int(np.argmin(losses))])
    if len(members) > 1:
        alone = ", ".join(f"{loss:.4f}" for loss in losses[1:])
        print(f"validation loss {losses[0]:.4f} averaged, {alone} alone", file=sys.stderr, flush=True)


# ---- the untrained network ----------------------------------------------------------------------------------------


def _build(rows: Sequence[Row], options: TrainingOptions) -> tuple[LengthModel, Tokenizer, Encoding]:
    """The untrained model, its tokenizer and its encoding."""
    lengths = [row.output_tokens for row in rows]
    if options.base_model is not None:
        encoder, tokenizer, encoding = _base_model(options.base_model, rows, options)
    else:
        encoder, tokenizer, encoding = _new_encoder(rows, options)
    other = [] if encoding.other_model is None else [encoding.other_model]
    config = LengthConfig(
        encoder=encoder.config.to_diff_dict(),
        pooling=options.pooling,
        quantiles=options.quantiles if options.loss == "quantile" else 1,
        length_unit=float(np.median(lengths)),
        model_tokens=[*encoding.models.values(), *other],
    )
    model = LengthModel(config, encoder)
    model.start_from(lengths)
    for module in encoder.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = options.dropout
    return model, tokenizer, encoding


def _base_model(
    name: str, rows: Sequence[Row], options: TrainingOptions
) -> tuple[PreTrainedModel, Tokenizer, Encoding]:
    try:
        encoder, tokenizer = AutoModel.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise PredictorError(f"cannot load the base model {name}: {error}") from error
    cls, sep, pad = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id
    if not tokenizer.is_fast or cls is None or sep is None or pad is None:
        raise PredictorError(f"the base model {name} is not of the BERT family: its tokenizer lacks CLS, SEP or PAD")
    room = min(options.max_length_tokens, encoder.config.max_position_embeddings, tokenizer.model_max_length)
    padding = getattr(getattr(encoder, "embeddings", None), "padding_idx", None)
    if padding is not None:  # RoBERTa, MPNet and their like: positions start behind the padding's
        room = min(room, encoder.config.max_position_embeddings - padding - 1)
    encoding = Encoding.for_prompts(
        (row.prompt for row in rows),
        max_length_tokens=room,
        vocabulary=max(len(tokenizer), encoder.config.vocab_size),
        special=(cls, sep, pad),
    )
    if encoding.added_tokens:
        encoder.resize_token_embeddings(max(len(tokenizer), encoder.config.vocab_size) + encoding.added_tokens)
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return encoder, backend, encoding


def _new_encoder(rows: Sequence[Row], options: TrainingOptions) -> tuple[PreTrainedModel, Tokenizer, Encoding]:
    tokenizer = train_tokenizer((row.prompt.text for row in rows), WORDS_MAX)
    ids = tokenizer.get_vocab()
    cls, sep, pad = ids[CLS], ids[SEP], ids[PAD]
    encoding = Encoding.for_prompts(
        (row.prompt for row in rows),
        max_length_tokens=options.max_length_tokens,
        vocabulary=tokenizer.get_vocab_size(),
        special=(cls, sep, pad),
    )
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size() + encoding.added_tokens,
        max_position_embeddings=options.max_length_tokens,
        pad_token_id=pad,
        **SIZES[options.from_scratch],
    )
    encoder = AutoModel.from_config(config)
    fix_number_embeddings(encoder.get_input_embeddings(), tokenizer)
    return encoder, tokenizer, encoding


# ---- the trainer --------------------------------------------------------------------------------------------------


def _trainer(
    model: LengthModel,
    encoding: Encoding,
    data: tuple[list[dict[str, Any]], list[dict[str, Any]]],
    options: TrainingOptions,
    checkpoints: Path,
) -> Trainer:
    """data : examples to train and to validate with."""
    terminal = sys.stderr.isatty()
    arguments = TrainingArguments(
        output_dir=str(checkpoints),
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=2 * options.batch_size,
        learning_rate=options.learning_rate,
        warmup_steps=0.05,  # below 1: a share of all steps
        use_cpu=not torch.accelerator.is_available(),
        bf16=options.precision == "bf16",
        fp16=options.precision == "fp16",
        train_sampling_strategy="group_by_length",  # for little padding
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,  # besides the best checkpoint
        logging_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        seed=options.seed,
        dataloader_pin_memory=False,
        disable_tqdm=not terminal,
        report_to="none",
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=data[0],
        eval_dataset=data[1],
        data_collator=_Collator(encoding),
        optimizers=(_optimizer(model, options), None),
        compute_metrics=lambda result: {"mae": _median_error(result.predictions, result.label_ids)},
        callbacks=[EarlyStoppingCallback(options.patience_epochs)],
    )
    if not terminal:
        logging.disable_progress_bar()
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(PlainProgress())
    return trainer


def _median_error(lengths: Any, labels: Any) -> float:
    """Mean absolute error of the medians, tokens. A cut answer counts with its observed length."""
    return float(np.mean(np.abs(lengths[:, lengths.shape[1] // 2] - labels)))


def _examples(rows: Sequence[Row], tokenizer: Tokenizer, encoding: Encoding) -> list[dict[str, Any]]:
    lines = encoding.encode(tokenizer, [row.prompt for row in rows])
    return [
        {"input_ids": line, "labels": float(row.output_tokens), "ceilings": _ceiling(row)}
        for line, row in zip(lines, rows, strict=True)
    ]


def _ceiling(row: Row) -> float:
    """The limit of the answer's length; inf when no limit is known."""
    if row.capped:
        return float(row.output_tokens)
    return float(row.output_tokens_max) if row.output_tokens_max is not None else math.inf


class _Collator:
    """Examples -> one padded batch."""

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        input_ids, attention_mask = self._encoding.padded([example["input_ids"] for example in examples])
        return {
            "input_ids": torch.from_numpy(input_ids),
            "attention_mask": torch.from_numpy(attention_mask),
            "labels": torch.tensor([example["labels"] for example in examples]),
            "ceilings": torch.tensor([example["ceilings"] for example in examples]),
        }


def _optimizer(model: LengthModel, options: TrainingOptions) -> torch.optim.Optimizer:
    """AdamW with a rate that falls with the distance from the head: the general, lower layers change least."""
    layers = [name for name, _ in model.encoder.named_parameters() if ".layer." in f".{name}"]
    depth = 1 + max((_layer_of(name) for name in layers), default=0)
    groups = []
    for name, parameter in model.named_parameters():
        if name.startswith("head."):
            rate = options.learning_rate * options.head_rate_factor
        else:
            below_top = depth - 1 - _layer_of(name) if ".layer." in name else depth
            rate = options.learning_rate * options.layer_rate_factor**below_top
        decay = options.weight_decay if parameter.ndim > 1 else 0.0
        groups.append({"params": [parameter], "lr": rate, "weight_decay": decay})
    return torch.optim.AdamW(groups, fused=True)  # one pass over the weights: a step is a fifth faster on a CPU


def _layer_of(name: str) -> int:
    """encoder.encoder.layer.3.output.dense.weight -> 3"""
    return int(name.partition("layer.")[2].partition(".")[0])


class PlainProgress(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """One line per epoch, for logs and pipes."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.started_s = time.monotonic()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
        print(
            f"epoch {round(state.epoch)}/{round(state.num_train_epochs)}: validation loss {metrics['eval_loss']:.4f}, "
            f"error {metrics['eval_mae']:.2f} tokens, {time.monotonic() - self.started_s:.0f} s",
            file=sys.stderr,
            flush=True,
        )
