"""What a prompt tells without being tokenized: about how many tokens it has, and with which others it begins alike."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from llmserve.request import Call

CHARACTERS_PER_TOKEN = 4.0  # a first guess, of English text
MEMORY = 256  # answers after which an observation's weight has fallen to a third
MODELS_MAX = 10_000  # that prompts' sizes are remembered of: names of adapters come and go for ever
PREFIX_CHARACTERS = (256, 512, 1024, 2048, 4096, 8192)  # beginnings worth finding in an engine's prefix cache again


class PromptTokens:
    """Tokens by characters, as engines' own counts have it."""

    def __init__(self) -> None:
        self._characters = self._tokens = 0.0

    def estimate(self, call: Call) -> float:
        if call.prompt_ids:
            return call.prompt_ids
        characters = _characters(call)
        if not self._tokens:
            return characters / CHARACTERS_PER_TOKEN
        return characters * self._tokens / self._characters

    def observe(self, call: Call, tokens: int) -> None:
        keep = 1.0 - 1.0 / MEMORY
        self._characters = keep * self._characters + _characters(call)
        self._tokens = keep * self._tokens + tokens


class PromptTokensByModel:
    """Each model's, as far as its answers are not too long ago: of at most `models_max` models."""

    def __init__(self, models_max: int = MODELS_MAX) -> None:
        self._known: OrderedDict[str, PromptTokens] = OrderedDict()  # the last that was observed is last
        self._models_max = models_max

    def __len__(self) -> int:
        return len(self._known)

    def estimate(self, call: Call) -> float:
        return (self._known.get(call.model) or PromptTokens()).estimate(call)

    def observe(self, call: Call, tokens: int) -> None:
        self._known.setdefault(call.model, PromptTokens()).observe(call, tokens)
        self._known.move_to_end(call.model)
        if len(self._known) > self._models_max:
            self._known.popitem(last=False)


def _characters(call: Call) -> int:
    prompt = call.prompt
    return max(1, len(prompt.text) + len(prompt.system) + prompt.history_characters)


def prefix_hashes(opening: str, secret: bytes) -> tuple[int, ...]:
    """Hashes of ever longer beginnings, () of a short prompt. secret: keeps a journal from telling its prompts."""
    hashes = []
    for characters in PREFIX_CHARACTERS:
        if len(opening) < characters:
            break
        digest = hashlib.blake2b(opening[:characters].encode(errors="replace"), digest_size=6, key=secret)
        hashes.append(int.from_bytes(digest.digest()))
    return tuple(hashes)
