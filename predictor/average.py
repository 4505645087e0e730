"""Trained predictors -> one predictor whose forecasts are the mean of theirs, without further training.

Different encoders err on different prompts, and each is too certain of its forecasts. The mean of their distributions
errs less, and is less certain (Stone, The opinion pool, Annals of Mathematical Statistics 32, 1961). A forecast takes
as long as all of theirs.
"""

import json
import shutil
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from predictor.dataset import Row, Splits, length_sample
from predictor.errors import PredictorError
from predictor.evaluate import pinball_loss
from predictor.export import with_forecasts
from predictor.network import ENCODING_FILE, FILES, NETWORKS, network_folders
from predictor.predict import LENGTHS_FILE, LengthPredictor, pooled
from predictor.train import Trained
from predictor.trained import trained_metrics


def average(folders: Sequence[Path], splits: Splits, output: Path) -> Trained:
    """Write the mean of the predictors in `folders` to `output`. No predictor may have learnt rows of splits.validation
    (`trained.check_training`).

    Raises PredictorError, and writes nothing, when the mean has no lower pinball loss on the validation rows than the
    best predictor, when the predictors differ in their number of quantiles, and when `output` has a predictor already.
    """
    if (output / ENCODING_FILE).exists():
        raise PredictorError(f"{output} has a predictor already: give another folder")
    losses = _losses(folders, splits.validation)
    networks = dict(enumerate(chain.from_iterable(map(network_folders, folders))))
    for number, network in networks.items():
        _copy(network, output / str(number))
    (output / LENGTHS_FILE).write_text(json.dumps(length_sample(splits.train)) + "\n")
    (output / ENCODING_FILE).write_text(json.dumps({NETWORKS: [str(number) for number in networks]}) + "\n")
    parameters = sum(trained_metrics(folder).get("parameters", 0) for folder in folders)
    return Trained(with_forecasts(output, splits.validation), parameters, losses)


def _copy(network: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        if (network / name).is_file():
            shutil.copyfile(network / name, folder / name)
        else:
            (folder / name).unlink(missing_ok=True)  # of an average that was interrupted


def _losses(folders: Sequence[Path], rows: Sequence[Row]) -> dict[str, float]:
    """The pinball losses of the predictors and of their mean, tokens, as served on this machine."""
    prompts, actual = [row.prompt for row in rows], np.array([row.output_tokens for row in rows], float)

    def loss(lengths: Sequence[np.ndarray], name: str) -> float:
        tokens = pinball_loss(pooled(lengths).astype(float), actual)
        print(f"pinball loss on the validation rows: {tokens:.2f} tokens, {name}", file=sys.stderr, flush=True)
        return tokens

    each, alone = [], []
    for folder in folders:
        each.append([network.read(prompts)[0] for network in LengthPredictor.load(folder).networks])
        alone.append(loss(each[-1], folder.name))
    lengths = list(chain.from_iterable(each))
    if len({part.shape for part in lengths}) > 1:
        raise PredictorError("the predictors differ in their number of quantiles")
    mean = loss(lengths, "their mean")
    if mean >= min(alone):
        raise PredictorError(f"the mean is no better than {folders[int(np.argmin(alone))]}: serve that predictor")
    return {"pinball_tokens": round(mean, 3), "pinball_tokens_best_alone": round(min(alone), 3)}
