"""One exported network: prompts -> output lengths; without torch or transformers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from tokenizers import Tokenizer

from predictor.encoding import Encoding
from predictor.prompt import Prompt

MODEL_FILE = "model.onnx"
INT8_FILE = "model.int8.onnx"
ENCODING_FILE = "predictor.json"
TOKENIZER_FILE = "tokenizer.json"
FILES = ENCODING_FILE, TOKENIZER_FILE, MODEL_FILE, INT8_FILE
"""Of a network; the last may be missing."""
NETWORKS = "networks"  # in ENCODING_FILE of a predictor with several networks: the names of their folders

Matrix = NDArray[np.float32]

GPU, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


def network_folders(folder: Path) -> list[Path]:
    """The folders of a predictor's networks: its own, unless its forecasts are the mean of several networks."""
    names = json.loads((folder / ENCODING_FILE).read_text()).get(NETWORKS)
    return [folder] if names is None else [folder / name for name in names]


class Network:
    """One encoder with its head, its tokenizer and its encoding of prompts."""

    def __init__(self, session: onnxruntime.InferenceSession, tokenizer: Tokenizer, encoding: Encoding) -> None:
        self.session = session
        self.tokenizer = tokenizer
        self.encoding = encoding

    @classmethod
    def load(cls, folder: Path, threads: int, bits: Literal[8, 32] | None) -> Self:
        """Load the files of one export. Raises what the libraries raise for a damaged file."""
        return cls(_session(folder, threads, bits), _tokenizer(folder), _encoding(folder))

    def read(self, prompts: Sequence[Prompt], batch_size: int = 16) -> tuple[Matrix, Matrix]:
        """(prompts, quantiles) output tokens, at least 1, ascending; and (prompts, features): an older export has none.

        Prompts of similar length share a batch, so that there is little padding. Raises ValueError for outputs that are
        no numbers.
        """
        lines = self.encoding.encode(self.tokenizer, prompts)
        by_length = sorted(range(len(lines)), key=lambda i: len(lines[i]))
        parts = [by_length[start : start + batch_size] for start in range(0, len(lines), batch_size)]
        if not parts:
            return np.empty((0, 1), np.float32), np.empty((0, 0), np.float32)
        lengths, features = zip(*(self._run([lines[i] for i in part]) for part in parts), strict=True)
        places = np.argsort(by_length)
        return np.maximum(np.concatenate(lengths)[places], 1.0), np.concatenate(features)[places]

    def _run(self, lines: list[list[int]]) -> tuple[Matrix, Matrix]:
        input_ids, attention_mask = self.encoding.padded(lines)
        lengths, *rest = self.session.run(None, {"input_ids": input_ids, "attention_mask": attention_mask})
        features = rest[0] if rest else np.empty((len(lines), 0), np.float32)
        if not (np.isfinite(lengths).all() and np.isfinite(features).all()):
            raise ValueError("the model gave a length or a feature that is not a number")
        return lengths, features


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
