"""A prompt as hashed features, for a linear model that learns while serving.

The features are the words of the text, their first letters, pairs of words, the text's first and last words, its length
and form, and the facts beside the text: model, system prompt, history, stop strings, tools, format and max_tokens. The
words are features once for all models and once for the prompt's own model, so that models share what they have in common.

Each word is hashed with a secret key (BLAKE2b), so the indices do not reveal the words without the key. Long texts keep
their two ends, so that the work per prompt is bounded.

Pure: the same secret and prompt always give the same features.
"""

import math
import re
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from predictor.prompt import Prompt

BITS = 18
"""Features are indices below 2**BITS. Two features with the same index share a weight."""
WORDS_MAX = 96
SYSTEM_WORDS_MAX = 32
TEXT_FIRST, TEXT_LAST = 1400, 600
"""Characters of a long text that are read."""
STEM_LETTERS = 4
VOCABULARY_MAX = 1 << 14
"""Words whose hashes are kept for the next prompt; the oldest half is forgotten when there are more."""

FIRST, EARLY = 4, 12
"""Words with a feature of their place; words with a feature of being among the first."""
FORMS = 6
"""Facts that every request has."""

_WORD = re.compile(r"[\u3040-\u9fff\uac00-\ud7a3]|[^\W\d_]{1,30}|\d{1,9}|[^\w\s]")
# Of a word, its first letters, a pair, a pair around a word, and a word for the model alone, each over the root of the
# number of words; an early word, a word's place, the first two and three, the last word, the model, a form, a fact, and a
# word of the system prompt, over the root of their number.
_SIZES = np.array([1.0, 1.5, 1.0, 0.5, 0.3, 0.25, 0.5, 0.5, 0.5, 1.0, 0.15, 0.5, 0.5], dtype=np.float32)


class Features(NamedTuple):
    """indices : (n,) below 2**BITS.  values : (n,) positive. An index that is there twice counts twice."""

    indices: NDArray[np.int64]
    values: NDArray[np.float32]


def _multipliers(count: int) -> list[np.uint64]:
    """Fixed odd numbers, one for each kind of feature: they keep the kinds of a word's features apart."""
    digests = [blake2b(b"%d" % number, digest_size=8).digest() for number in range(count)]
    return [np.uint64(int.from_bytes(digest, "big") | 1) for digest in digests]


_INDEX, _EARLY, _LAST, _SYSTEM, *_rest = _multipliers(7 + FIRST)
_PAIRS = np.array(_rest[:3], dtype=np.uint64).reshape(3, 1)  # for the left word next to another, beyond one, the right
_PLACES = np.array(_rest[3:], dtype=np.uint64)
_SHIFT = np.uint64(64 - BITS)


class TextFeatures:
    """Reads prompts. secret : key of the hashes, at most 64 bytes."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._row_of: dict[str, int] = {}
        self._rows = np.empty((VOCABULARY_MAX, 2), dtype=np.uint64)  # hashes of each word and of its first letters

    def read(self, prompt: Prompt) -> Features:
        words, facts = _words(prompt.text, WORDS_MAX), _facts(prompt)
        seen = dict.fromkeys(words)  # a word counts once, a pair of words as often as it occurs
        system = dict.fromkeys(_words(prompt.system, SYSTEM_WORDS_MAX)) if prompt.system else ()
        hashes = self._hashes([*facts, *seen, *words, *system])
        one, stems = hashes[:, 0], hashes[len(facts) : len(facts) + len(seen), 1]
        own, rest = one[len(facts) : len(facts) + len(seen)], one[len(facts) + len(seen) :]
        text, system_words = rest[: len(words)], rest[len(words) :]
        left, around, right = text * _PAIRS
        placed = text[:FIRST] * _PLACES[: min(FIRST, len(words))]
        parts = (
            own,
            stems,
            left[:-1] + right[1:],
            around[:-2] + right[2:],
            own * one[0],
            text[:EARLY] * _EARLY,
            placed,
            placed.cumsum()[1:3],
            text[-1:] * _LAST,
            one[:1],
            one[1:FORMS],
            one[FORMS : len(facts)],
            system_words * _SYSTEM,
        )
        values = _SIZES.copy()
        values[:5] /= math.sqrt(max(1, len(words)))
        values[-1] /= math.sqrt(max(1, len(system_words)))
        indices = np.concatenate(parts) * _INDEX >> _SHIFT
        return Features(indices.astype(np.int64), values.repeat([len(part) for part in parts]))

    def _hashes(self, words: list[str]) -> NDArray[np.uint64]:
        """(n, 2) hashes of each word and of its first letters."""
        row_of = self._row_of
        if len(row_of) + len(words) > VOCABULARY_MAX:
            row_of.clear()
        try:
            rows = [row_of[word] for word in words]
        except KeyError:
            for word in words:
                if word not in row_of:
                    self._rows[len(row_of)] = self._hash(word), self._hash("stem " + word[:STEM_LETTERS])
                    row_of[word] = len(row_of)
            rows = [row_of[word] for word in words]
        return self._rows.take(rows, axis=0)

    def _hash(self, text: str) -> int:
        digest = blake2b(text.encode("utf-8", "surrogatepass"), key=self._secret, digest_size=8)
        return int.from_bytes(digest.digest(), "big")


def _facts(prompt: Prompt) -> list[str]:
    """The model, the text's length and form, then the facts that not every request has."""
    text = prompt.text
    log = math.log(len(text) + 1)
    facts = [
        f"model {prompt.model}",
        f"length {int(2 * log)}",
        f"about {int(log)}",
        f"lines {min(text.count(chr(10)), 6)}",
        f"colon {':' in text}",
        f"end {text[-1:]}",
    ]
    if prompt.system:
        facts.append(f"system {prompt.system[:TEXT_FIRST]}")
    if prompt.history_characters:
        facts.append(f"history {int(math.log(prompt.history_characters))}")
    if prompt.stop:
        facts.append(f"stop {prompt.stop!r}"[:TEXT_FIRST])
    return facts


def _words(text: str, words_max: int) -> list[str]:
    """Lower-case words, numbers and signs; of a long text its first and last."""
    if len(text) > TEXT_FIRST + TEXT_LAST:
        text = text[:TEXT_FIRST] + " " + text[-TEXT_LAST:]
    words = _WORD.findall(text.lower())
    if len(words) > words_max:
        words = words[: words_max * 3 // 4] + words[-(words_max // 4) :]
    return words
