"""The estimated tokens of a prompt, and who sent it, without a tokenizer."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from itertools import islice
from typing import Any

import numpy as np

from llmserve.request import Call

CHARACTERS_PER_TOKEN = 4.0  # a first estimate, for English text
MEMORY = 256  # answers after which an observation's weight has fallen to a third
MODELS_MAX = 10_000  # models with an estimate: the names of adapters change without end
SAVED_MAX = 1_000  # models whose estimates survive a restart
SENDER_CHARACTERS = 512  # of either end of a prompt, by which prompts without a key are told apart


class PromptTokens:
    """The ratio of tokens to characters, from engines' counts of prompt tokens.

    characters, tokens : sums at the start, as from `sums`.
    """

    def __init__(self, characters: float = 0.0, tokens: float = 0.0) -> None:
        self._characters, self._tokens = characters, tokens

    @property
    def sums(self) -> tuple[float, float]:
        return self._characters, self._tokens

    def estimate(self, call: Call) -> float:
        if call.bounds.prompt_ids:
            return call.bounds.prompt_ids
        characters = _characters(call)
        if not self._tokens:
            return characters / CHARACTERS_PER_TOKEN
        return characters * self._tokens / self._characters

    def observe(self, call: Call, tokens: int) -> None:
        keep = 1.0 - 1.0 / MEMORY
        self._characters = keep * self._characters + _characters(call)
        self._tokens = keep * self._tokens + tokens


class PromptTokensByModel:
    """PromptTokens of the `models_max` models that were observed last."""

    def __init__(self, models_max: int = MODELS_MAX) -> None:
        self._by_model: OrderedDict[str, PromptTokens] = OrderedDict()  # the model observed last is last
        self._models_max = models_max

    def __len__(self) -> int:
        return len(self._by_model)

    def estimate(self, call: Call) -> float:
        return (self._by_model.get(call.model) or PromptTokens()).estimate(call)

    def observe(self, call: Call, tokens: int) -> None:
        model = call.model
        sizes = self._by_model.get(model)
        if sizes is None:
            sizes = self._by_model[model] = PromptTokens()
        sizes.observe(call, tokens)
        self._by_model.move_to_end(model)
        if len(self._by_model) > self._models_max:
            self._by_model.popitem(last=False)

    def state(self) -> dict[str, Any]:
        """The sums of the SAVED_MAX models that were observed last: (models, 2) characters and tokens."""
        latest = list(islice(reversed(self._by_model.items()), SAVED_MAX))[::-1]
        sums = np.array([sizes.sums for _, sizes in latest]).reshape(len(latest), 2)
        return {"models": [model for model, _ in latest], "sums": sums}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state. Raises ValueError for anything else."""
        models, sums = state.get("models"), np.asarray(state.get("sums"))
        if not isinstance(models, list) or sums.shape != (len(models), 2) or not (sums >= 0).all():
            raise ValueError("the state has no prompt sizes")
        self._by_model = OrderedDict(
            (model, PromptTokens(characters, tokens))
            for model, (characters, tokens) in zip(models, sums.tolist(), strict=True)
        )


def _characters(call: Call) -> int:
    prompt = call.prompt
    return max(1, len(prompt.text) + len(prompt.system) + prompt.history_characters)


def sender_hash(call: Call, secret: bytes) -> int:
    """Hash of the client's key; without keys of the prompt, by the ends of its last turn. secret : hides both"""
    prompt = call.prompt
    ends = prompt.text[:SENDER_CHARACTERS], prompt.text[-SENDER_CHARACTERS:], call.opening[:SENDER_CHARACTERS]
    who = prompt.sender or "\0".join(ends)
    digest = hashlib.blake2b(who.encode(errors="replace"), digest_size=6, key=secret)
    return int.from_bytes(digest.digest()) or 1
