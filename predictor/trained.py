"""What a predictor's metrics.json says of its training."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from predictor.dataset import Splits
from predictor.errors import BadPredictor, PredictorError
from predictor.options import METRICS_FILE, Split, natural


def trained_split(folder: Path) -> Split | None:
    fields = trained_metrics(folder).get("split")
    if fields is None:
        return None
    try:
        return Split(natural(str(fields["seed"])), float(fields["held_out_share"]), float(fields["validation_share"]))
    except (KeyError, TypeError, ValueError, argparse.ArgumentTypeError) as error:
        raise BadPredictor(f"{folder / METRICS_FILE} has no good split: {fields!r}") from error


def trained_models(folder: Path) -> list[str] | None:
    """Return the models whose answers the predictor was trained on; None: all models."""
    models = trained_metrics(folder).get("models")
    if models is not None and not (isinstance(models, list) and all(isinstance(model, str) for model in models)):
        raise BadPredictor(f"{folder / METRICS_FILE} has no good list of models: {models!r}")
    return models


def trained_metrics(folder: Path) -> dict[str, Any]:
    """Return the content of metrics.json; {} without the file."""
    path = folder / METRICS_FILE
    if not path.is_file():
        return {}
    try:
        metrics = json.loads(path.read_text())
    except ValueError as error:
        raise BadPredictor(f"cannot read {path}: {error}") from error
    if not isinstance(metrics, dict):
        raise BadPredictor(f"cannot read {path}: not a JSON object")
    return metrics


def other_training(folder: Path, split: Split, splits: Splits) -> str | None:
    """Return in what the predictor's training differed from this split, so that it may have seen some of its rows."""
    rows, sizes = trained_metrics(folder).get("rows"), part_sizes(splits, trained_models(folder))
    if isinstance(rows, dict) and any(rows.get(name, size) != size for name, size in sizes.items()):
        return "other data"
    return None if trained_split(folder) == split else "another split, or an unknown split"


def check_training(folder: Path, split: Split, splits: Splits) -> None:
    """Raises PredictorError when the predictor may have been trained on rows of the validation or the held-out part."""
    if not folder.is_dir():
        raise BadPredictor(f"{folder} is not a predictor's folder")
    if reason := other_training(folder, split, splits):
        raise PredictorError(f"{folder} was trained with {reason}: it may have learnt rows that judge the mean")


def part_sizes(splits: Splits, models: Sequence[str] | None) -> dict[str, int]:
    """Return the number of rows of the models (None: all models) by part."""
    return {
        part.name: sum(models is None or row.prompt.model in models for row in getattr(splits, part.name))
        for part in dataclasses.fields(Splits)
    }
