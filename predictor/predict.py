"""A trained predictor in memory: prompts in, predicted output tokens out."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from predictor.errors import BadPredictor
from predictor.model import LengthConfig, LengthModel
from predictor.text import CHARACTERS_PER_TOKEN
from predictor.tokenizer import encode

LENGTHS_FILE = "training_lengths.json"


class LengthPredictor:
    """Text -> predicted output tokens.

    training_lengths : the sorted output tokens of (a bounded sample of) the training answers; the first bin edges
    come from them. Threads are the caller's choice: `torch.set_num_threads(1)` is best for single prompts.
    """

    def __init__(self, model: LengthModel, tokenizer: PreTrainedTokenizerBase, training_lengths: Sequence[int]) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.training_lengths = list(training_lengths)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """From a folder that `save` made; computes in float32 whatever the weights are stored in.

        Never reaches for the network. Raises BadPredictor with the folder and the reason.
        """
        folder = Path(folder)
        if not (folder / "config.json").is_file():
            raise BadPredictor(f"{folder} is not a predictor's folder: it has no config.json")
        try:
            model = _load_model(folder)
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
            lengths = json.loads((folder / LENGTHS_FILE).read_text())
            if not isinstance(lengths, list) or not lengths:
                raise ValueError(f"{LENGTHS_FILE} holds no list of lengths")
            predictor = cls(model, tokenizer, lengths)
            predictor.predict(["a first prompt"])  # finds missing parts now, and warms up
        except Exception as error:  # the libraries raise many kinds for a damaged folder
            raise BadPredictor(f"cannot load a predictor from {folder}: {error}") from error
        return predictor

    def save(self, folder: str | Path) -> None:
        """Everything that `load` needs."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        (Path(folder) / LENGTHS_FILE).write_text(json.dumps(self.training_lengths) + "\n")

    @property
    def characters_max(self) -> int:
        """Of a prompt with more characters than this, only the two ends are looked at (`text.head_and_tail`)."""
        return int(self.model.config.max_length_tokens) * CHARACTERS_PER_TOKEN

    def predict(self, prompts: Sequence[str], batch_size: int = 32) -> list[float]:
        """Predicted output tokens, at least 1, in the order of the prompts.

        Prompts of like length run together, so that little is computed for padding.
        """
        ids = encode(self.tokenizer, prompts, self.model.config.max_length_tokens)
        by_length = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        lengths = [0.0] * len(ids)
        for start in range(0, len(ids), batch_size):
            members = by_length[start : start + batch_size]
            for i, length in zip(members, self._run([ids[i] for i in members]), strict=True):
                lengths[i] = max(1.0, length)
        return lengths

    def _run(self, ids: list[list[int]]) -> list[float]:
        tokens = max(map(len, ids))
        padding: int = self.tokenizer.pad_token_id
        input_ids = torch.tensor([each + [padding] * (tokens - len(each)) for each in ids])
        attention_mask = torch.tensor([[1] * len(each) + [0] * (tokens - len(each)) for each in ids])
        device = self.model.device
        with torch.inference_mode():
            output = self.model(input_ids.to(device), attention_mask.to(device))
        result: list[float] = output.lengths.tolist()
        return result


def _load_model(folder: Path) -> LengthModel:
    """Raises ValueError for another model's folder, and for weights that are not all there."""
    model_type = json.loads((folder / "config.json").read_text()).get("model_type")
    if model_type != LengthConfig.model_type:
        raise ValueError(f"its config.json is of a {model_type}, not a {LengthConfig.model_type}")
    model: LengthModel
    model, info = LengthModel.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    if info["missing_keys"]:  # transformers would only warn, and fill in random ones
        raise ValueError(f"weights are missing: {', '.join(sorted(info['missing_keys']))}")
    return model
