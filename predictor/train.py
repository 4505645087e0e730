"""Fine-tuning, or training from scratch, with transformers.Trainer."""

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

from predictor.dataset import Row, Splits, length_sample
from predictor.errors import PredictorError
from predictor.model import LengthConfig, LengthModel
from predictor.numbers import fix_number_embeddings
from predictor.predict import LengthPredictor
from predictor.tokenizer import encode, train_tokenizer

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 384,
        "hidden_dropout_prob": 0.0,  # it blurs the numbers that a regression lives by
        "attention_probs_dropout_prob": 0.0,
    },
}
WORDS_MAX = 1000


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """base_model : a hub id or a folder; without one, the encoder is BERT of the size `from_scratch`, a key of SIZES.

    learning_rate : the peak, after a warm-up over a twentieth of the steps; it falls linearly to zero.
    patience_epochs : training ends early when the validation error has not fallen for so long.
    """

    base_model: str | None = None
    from_scratch: str = "tiny"
    epochs: int = 3
    batch_size: int = 32
    learning_rate: float = 5e-5
    seed: int = 0
    max_length_tokens: int = 512
    pooling: str = "mean"
    patience_epochs: int = 3


FINE_TUNING = TrainingOptions(base_model="bert-base-uncased")
FROM_SCRATCH = TrainingOptions(epochs=60, batch_size=32, learning_rate=7e-4, max_length_tokens=256, patience_epochs=15)


def train(splits: Splits, options: TrainingOptions, output: Path, resume: bool = False) -> LengthPredictor:
    """Train on splits.train and save the checkpoint with the least validation error in `output`.

    Checkpoints, one per epoch, live in `output`/checkpoints until training has ended; `resume` goes on from the last
    one. Raises PredictorError when there is none, or when there is one and `resume` was not asked for.
    """
    checkpoints = output / "checkpoints"
    last = get_last_checkpoint(checkpoints) if checkpoints.is_dir() else None
    if resume and last is None:
        raise PredictorError(f"nothing to resume in {checkpoints}")
    if last is not None and not resume:
        raise PredictorError(f"{checkpoints} holds an unfinished training: resume it, or remove the folder")
    set_seed(options.seed)
    model, tokenizer = _build(splits.train, options)
    trainer = _trainer(model, tokenizer, splits, options, checkpoints)
    trainer.train(resume_from_checkpoint=last)
    predictor = LengthPredictor(model.cpu(), tokenizer, length_sample(splits.train))
    predictor.save(output)
    shutil.rmtree(checkpoints)
    return predictor


def _build(rows: Sequence[Row], options: TrainingOptions) -> tuple[LengthModel, PreTrainedTokenizerBase]:
    """The untrained model, and the tokenizer that belongs to it."""
    if options.base_model is not None:
        encoder, tokenizer = _base_model(options.base_model)
    else:
        encoder, tokenizer = _new_encoder(rows, options)
    config = LengthConfig(
        encoder=encoder.config.to_diff_dict(),
        pooling=options.pooling,
        length_unit=float(np.median([row.output_tokens for row in rows])),
        max_length_tokens=min(
            options.max_length_tokens, encoder.config.max_position_embeddings, tokenizer.model_max_length
        ),
        pad_token_id=tokenizer.pad_token_id,
    )
    return LengthModel(config, encoder), tokenizer


def _base_model(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        return AutoModel.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise PredictorError(f"cannot load the base model {name}: {error}") from error


def _new_encoder(rows: Sequence[Row], options: TrainingOptions) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    tokenizer = train_tokenizer((row.prompt for row in rows), WORDS_MAX)
    config = BertConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=options.max_length_tokens,
        pad_token_id=tokenizer.pad_token_id,
        **SIZES[options.from_scratch],
    )
    encoder = AutoModel.from_config(config)
    fix_number_embeddings(encoder.get_input_embeddings(), tokenizer)
    return encoder, tokenizer


def _trainer(
    model: LengthModel,
    tokenizer: PreTrainedTokenizerBase,
    splits: Splits,
    options: TrainingOptions,
    checkpoints: Path,
) -> Trainer:
    terminal = sys.stderr.isatty()
    arguments = TrainingArguments(
        output_dir=str(checkpoints),
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=2 * options.batch_size,
        learning_rate=options.learning_rate,
        warmup_steps=0.05,  # below 1: a share of all steps
        train_sampling_strategy="group_by_length",  # little padding
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,  # and the best one
        logging_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="mae",
        greater_is_better=False,
        seed=options.seed,
        dataloader_pin_memory=False,
        disable_tqdm=not terminal,
        report_to="none",
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=_examples(splits.train, tokenizer, model.config.max_length_tokens),
        eval_dataset=_examples(splits.validation, tokenizer, model.config.max_length_tokens),
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        compute_metrics=lambda seen: {"mae": float(np.mean(np.abs(seen.predictions - seen.label_ids)))},
        callbacks=[EarlyStoppingCallback(options.patience_epochs)],
    )
    if not terminal:
        logging.disable_progress_bar()
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(PlainProgress())
    return trainer


def _examples(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, max_length_tokens: int) -> list[dict[str, Any]]:
    ids = encode(tokenizer, [row.prompt for row in rows], max_length_tokens)
    return [
        {"input_ids": each, "attention_mask": [1] * len(each), "labels": float(row.output_tokens)}
        for each, row in zip(ids, rows, strict=True)
    ]


class PlainProgress(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """One line per epoch, for logs and pipes, where a progress bar is a nuisance."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.started_s = time.monotonic()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
        print(
            f"epoch {round(state.epoch)}/{round(state.num_train_epochs)}: validation error "
            f"{metrics['eval_mae']:.2f} tokens, {time.monotonic() - self.started_s:.0f} s",
            file=sys.stderr,
            flush=True,
        )
