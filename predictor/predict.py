"""A loaded predictor: prompts -> equally likely output lengths; without torch or transformers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

import numpy as np

from predictor.errors import BadPredictor
from predictor.network import ENCODING_FILE, Matrix, Network, network_folders
from predictor.prediction import FEATURE, FEATURE_LIMIT, Prediction, mark_of
from predictor.prompt import Prompt

LENGTHS_FILE = "training_lengths.json"
FORECASTS_FILE = "forecasts.json"


class LengthPredictor:
    """Prompts -> equally likely output lengths.

    networks : at least one; of several, the mean of their distributions is the forecast.
    training_lengths : sorted output tokens of the training answers, or of a sample of them.
    forecasts : (prompts, quantiles), this predictor's forecasts for some validation prompts.
    """

    def __init__(
        self,
        networks: Sequence[Network],
        training_lengths: Sequence[int],
        forecasts: Sequence[Sequence[float]] = (),
    ) -> None:
        self.networks = list(networks)
        self.training_lengths = list(training_lengths)
        self.forecasts = [list(lengths) for lengths in forecasts]
        self._mark = mark_of(self.training_lengths, self.forecasts)

    @classmethod
    def load(cls, folder: str | Path, threads: int = 1, *, bits: Literal[8, 32] | None = None) -> Self:
        """Load a folder of `predictor.export`, without network access.

        bits : precision on a CPU; None: on a GPU if ONNX Runtime has one, otherwise 8 bits if the folder has them.
        threads : threads of the model on a CPU; 1 is best for single prompts.
        Raises BadPredictor with the folder and the reason.
        """
        folder = Path(folder)
        if not (folder / ENCODING_FILE).is_file():
            raise BadPredictor(f"{folder} is not a predictor's folder: it has no {ENCODING_FILE}")
        try:
            networks = [Network.load(part, threads, bits) for part in network_folders(folder)]
            predictor = cls(networks, _training_lengths(folder), _forecasts(folder))
            predictor.predict([Prompt("a first prompt")])  # fails on missing parts now, and warms up
        except Exception as error:  # the libraries raise many exceptions for a damaged folder
            raise BadPredictor(f"cannot load a predictor from {folder}: {error}") from error
        return predictor

    @property
    def characters_max(self) -> int:
        """A text with more characters than this is cut to its two ends."""
        return max(network.encoding.characters_max for network in self.networks)

    def predict(self, prompts: Sequence[Prompt], batch_size: int = 16) -> Matrix:
        """(prompts, quantiles) output tokens, at least 1, ascending, equally likely; the middle one is the median."""
        return self.read(prompts, batch_size)[0]

    def predictions(self, prompts: Sequence[Prompt], batch_size: int = 16) -> list[Prediction]:
        """The lengths as of `predict`, with the features."""
        lengths, features = self.read(prompts, batch_size)
        if not features.shape[1]:
            return [Prediction(row) for row in lengths.tolist()]
        known = np.clip(features, -FEATURE_LIMIT, FEATURE_LIMIT).astype(FEATURE)
        return [Prediction(row, self._mark + own.tobytes()) for row, own in zip(lengths.tolist(), known, strict=True)]

    def read(self, prompts: Sequence[Prompt], batch_size: int = 16) -> tuple[Matrix, Matrix]:
        """The lengths as of `predict`, and (prompts, features): what the encoders know of the prompts.

        Several networks give their main ones, together as many as the one with the most.
        """
        lengths, features = zip(*(network.read(prompts, batch_size) for network in self.networks), strict=True)
        counts = [part.shape[1] for part in features]
        share = max(counts) // max(1, np.count_nonzero(counts))
        return pooled(lengths), np.concatenate([part[:, :share] for part in features], axis=1)


def pooled(lengths: Sequence[Matrix]) -> Matrix:
    """(prompts, quantiles) of each network -> the same of the mean of their distributions.

    The lengths of all networks are equally likely. Sorted, and in groups of one for each network, they are quantiles.
    """
    together = np.sort(np.concatenate(lengths, axis=1), axis=1)
    groups: Matrix = together.reshape(*lengths[0].shape, len(lengths)).mean(axis=2)
    return groups


def _training_lengths(folder: Path) -> list[int]:
    lengths = json.loads((folder / LENGTHS_FILE).read_text())
    if not isinstance(lengths, list) or not lengths:
        raise ValueError(f"{LENGTHS_FILE} holds no list of lengths")
    return lengths


def _forecasts(folder: Path) -> list[list[float]]:
    path = folder / FORECASTS_FILE
    if not path.is_file():
        return []
    forecasts = np.asarray(json.loads(path.read_text()), float)
    if forecasts.ndim != 2 or forecasts.size == 0 or not (forecasts > 0).all():
        raise ValueError(f"{FORECASTS_FILE} holds no table of lengths")
    result: list[list[float]] = forecasts.tolist()
    return result
