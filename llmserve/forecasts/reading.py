"""Prompts whose words are read in another process than the one that forecasts: most of a forecast's time is this."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from predictor.online import READING_CHARACTERS_MAX, READINGS_MAX
from predictor.prompt import Prompt
from predictor.text_features import Features, TextFeatures


class ReadPrompt(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The features of a prompt for a model, as they cross to another process; see predictor.text_features.Features."""

    model: str
    indices: bytes
    values: bytes
    sender: int

    @property
    def features(self) -> Features:
        indices = np.frombuffer(self.indices, np.int32).astype(np.int64)
        return Features(indices, np.frombuffer(self.values, np.float32), self.sender)


class PromptReaders:
    """Reads prompts for forecasters elsewhere. secrets : of their features (Forecasts.secrets)"""

    def __init__(self, secrets: Mapping[str, bytes]) -> None:
        self._readers = {model: TextFeatures(secret) for model, secret in secrets.items()}
        self._kept: dict[Prompt, ReadPrompt] = {}  # short prompts, which may come again

    def read(self, prompt: Prompt) -> ReadPrompt | None:
        """None: the forecaster of the prompt's model reads no words."""
        reader = self._readers.get(prompt.model) or self._readers.get("")
        if reader is None:
            return None
        if len(prompt.text) + len(prompt.system) > READING_CHARACTERS_MAX:
            return _read(reader, prompt)
        if (known := self._kept.get(prompt)) is None:
            if len(self._kept) >= READINGS_MAX:
                self._kept.clear()
            known = self._kept[prompt] = _read(reader, prompt)
        return known


def _read(reader: TextFeatures, prompt: Prompt) -> ReadPrompt:
    indices, values, sender = reader.read(prompt)
    return ReadPrompt(prompt.model, indices.astype(np.int32).tobytes(), values.tobytes(), sender)
