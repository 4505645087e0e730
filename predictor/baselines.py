"""Baseline predictors without a network: a constant, a line in the prompt's length, and ridge regression on words."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from sklearn.compose import ColumnTransformer
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import GroupKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder

from predictor.dataset import Row
from predictor.errors import DatasetError
from predictor.splitting import representatives
from predictor.text import normalised

CONSTANT, PROMPT_LENGTH, TFIDF_RIDGE = "constant", "prompt length", "TF-IDF ridge"
PENALTIES = np.logspace(-1, 3, 9)
FOLDS = 5
TOKEN = r"\w+|[^\w\s]"  # matches single digits, as in "list 5 animals"; every prompt has a token


def baselines(training: Sequence[Row], rows: Sequence[Row]) -> dict[str, NDArray[np.float64]]:
    """Predicted output tokens for the rows, by baseline; fitted to the training rows alone.

    constant : the median training answer, the best constant under L1. prompt length : a straight line in the
    prompt's characters, by least squares. TF-IDF ridge : see `tfidf_ridge`.
    """
    return {
        CONSTANT: np.full(len(rows), np.median([row.output_tokens for row in training])),
        PROMPT_LENGTH: prompt_length_line(training, rows),
        TFIDF_RIDGE: tfidf_ridge(training, rows),
    }


def out_of_fold_baselines(rows: Sequence[Row]) -> dict[str, NDArray[np.float64]]:
    """`baselines` without separate training rows: each row is predicted from rows of other prompts, in 5 folds.

    A prompt's near duplicates and its conversation are in the prompt's fold. The constant is the median of all rows.
    Raises DatasetError for fewer than 5 prompts.
    """
    groups = [normalised(row.group or row.prompt.text) for row in rows]
    first = representatives(set(groups))
    prompts = [first[group] for group in groups]
    if len(set(prompts)) < FOLDS:
        raise DatasetError(f"too few different prompts for {FOLDS} folds")
    lengths = {name: np.empty(len(rows)) for name in (CONSTANT, PROMPT_LENGTH, TFIDF_RIDGE)}
    for training, fold in GroupKFold(FOLDS).split(rows, groups=prompts):
        for name, predicted in baselines([rows[i] for i in training], [rows[i] for i in fold]).items():
            lengths[name][fold] = predicted
    return lengths | {CONSTANT: np.full(len(rows), np.median([row.output_tokens for row in rows]))}


def prompt_length_line(training: Sequence[Row], rows: Sequence[Row]) -> NDArray[np.float64]:
    """(rows,) tokens: the least squares line in the characters of the prompt's text."""
    characters, lengths = [len(row.prompt.text) for row in training], [row.output_tokens for row in training]
    if min(characters) == max(characters):
        return np.full(len(rows), np.mean(lengths))
    slope, intercept = np.polyfit(characters, lengths, deg=1)
    return np.array([slope * len(row.prompt.text) + intercept for row in rows])


def tfidf_ridge(training: Sequence[Row], rows: Sequence[Row]) -> NDArray[np.float64]:
    """(rows,) tokens: ridge regression of the logarithm of the length on the prompt's words and pairs of words.

    The features are TF-IDF weights with sublinear counts, and the requested model. Cross-validation within the training
    rows, with all rows of a prompt in one fold, chooses the penalty; with fewer prompts than folds the penalty is
    infinite. Predictions are clipped to the training lengths, because a linear model of logarithms is unbounded.
    """
    lengths, prompts = [row.output_tokens for row in training], [normalised(row.prompt.text) for row in training]
    if len(set(prompts)) < FOLDS:
        return np.full(len(rows), np.exp(np.mean(np.log(lengths))))
    features = ColumnTransformer(
        [
            ("words", TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=TOKEN), 0),
            ("model", OneHotEncoder(handle_unknown="ignore"), [1]),
        ]
    )
    folds = list(GroupKFold(FOLDS).split(prompts, groups=prompts))
    ridge = make_pipeline(features, RidgeCV(PENALTIES, scoring="neg_mean_squared_error", cv=folds))
    ridge.fit(_features(training), np.log(lengths))
    predicted: NDArray[np.float64] = np.exp(ridge.predict(_features(rows)))
    return predicted.clip(min(lengths), max(lengths))


def _features(rows: Sequence[Row]) -> NDArray[np.object_]:
    """(rows, 2) text and model."""
    return np.array([[row.prompt.text, row.prompt.model] for row in rows], dtype=np.object_)
