"""A loaded predictor: prompts -> equally likely output lengths; without torch or transformers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from tokenizers import Tokenizer

from predictor.encoding import Encoding
from predictor.errors import BadPredictor
from predictor.prompt import Prompt

MODEL_FILE = "model.onnx"
INT8_FILE = "model.int8.onnx"
ENCODING_FILE = "predictor.json"
TOKENIZER_FILE = "tokenizer.json"
LENGTHS_FILE = "training_lengths.json"
FORECASTS_FILE = "forecasts.json"

GPU, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


class LengthPredictor:
    """Prompts -> equally likely output lengths.

    training_lengths : sorted output tokens of the training answers, or of a sample of them.
    forecasts : (prompts, quantiles), this predictor's forecasts for some validation prompts.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        tokenizer: Tokenizer,
        encoding: Encoding,
        training_lengths: Sequence[int],
        forecasts: Sequence[Sequence[float]] = (),
    ) -> None:
        self._session = session
        self.tokenizer = tokenizer
        self.encoding = encoding
        self.training_lengths = list(training_lengths)
        self.forecasts = [list(lengths) for lengths in forecasts]

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
            predictor = cls(
                _session(folder, threads, bits),
                _tokenizer(folder),
                _encoding(folder),
                _training_lengths(folder),
                _forecasts(folder),
            )
            predictor.predict([Prompt("a first prompt")])  # fails on missing parts now, and warms up
        except Exception as error:  # the libraries raise many exceptions for a damaged folder
            raise BadPredictor(f"cannot load a predictor from {folder}: {error}") from error
        return predictor

    def predict(self, prompts: Sequence[Prompt], batch_size: int = 16) -> NDArray[np.float32]:
        """(prompts, quantiles) output tokens, at least 1, ascending, equally likely; the middle column is the median.

        Prompts of similar length share a batch, so that there is little padding.
        """
        lines = self.encoding.encode(self.tokenizer, prompts)
        by_length = sorted(range(len(lines)), key=lambda i: len(lines[i]))
        parts = [by_length[start : start + batch_size] for start in range(0, len(lines), batch_size)]
        outputs = [self._run([lines[i] for i in part]) for part in parts]
        lengths = np.concatenate(outputs) if outputs else np.empty((0, 1), np.float32)
        return np.maximum(lengths[np.argsort(by_length)], 1.0)

    def _run(self, lines: list[list[int]]) -> NDArray[np.float32]:
        input_ids, attention_mask = self.encoding.padded(lines)
        lengths: NDArray[np.float32]
        (lengths,) = self._session.run(None, {"input_ids": input_ids, "attention_mask": attention_mask})
        if not np.isfinite(lengths).all():
            raise ValueError("the model gave a length that is not a number")
        return lengths


def _session(folder: Path, threads: int, bits: Literal[8, 32] | None) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors only
    if bits is None and GPU in onnxruntime.get_available_providers():
        session = onnxruntime.InferenceSession(folder / MODEL_FILE, options, providers=[GPU, CPU])
        if GPU in session.get_providers():  # the provider may be built in without a device
            return session
    if bits is None:
        bits = 8 if (folder / INT8_FILE).is_file() else 32
    file = folder / (INT8_FILE if bits == 8 else MODEL_FILE)
    return onnxruntime.InferenceSession(file, options, providers=[CPU])


def _tokenizer(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _encoding(folder: Path) -> Encoding:
    fields = json.loads((folder / ENCODING_FILE).read_text())
    return Encoding(**{**fields, "history": tuple(fields["history"])})


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
