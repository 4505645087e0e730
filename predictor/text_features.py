"""A prompt as hashed features, for a linear model that learns while serving.

The features are the words of the text, their first letters, pairs of words, the text's first and last words, its
length and form, and the facts beside the text: model, system prompt, history, stop strings, tools, format and
max_tokens. The words are features once for all models and once for the prompt's own model, so that models share what
they have in common.

Each word is hashed with a secret key (BLAKE2b), so the indices do not reveal the words without the key. Long texts keep
their two ends, so that the work per prompt is bounded.

Pure: the same secret and prompt always give the same features.
"""

import math
import re
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from predictor.prompt import Prompt
from predictor.task_words import TASK_OF

BITS = 18
"""Features are indices below 2**BITS. Two features with the same index share a weight."""
WORDS_MAX = 64
SYSTEM_WORDS_MAX = 32
NAME_CHARACTERS = 100
NUMBERS_MAX = 8
AMOUNT, CHARACTERS = 0.15, 0.4
"""The value of a number that is twice as large, and of a text twice as long."""
CHARACTERS_USUAL = 7.0
"""Logarithm, to the base 2, of the length of a text of value 0."""
TEXT_FIRST, TEXT_LAST = 1400, 600
"""Characters of a long text that are read."""
STEM_LETTERS = 4
VOCABULARY_MAX = 1 << 14
"""Words whose hashes are kept for the next prompt; the oldest half is forgotten when there are more."""

FIRST, PAIRS, EARLY = 4, 2, 8
"""Words and pairs with a feature of their place; words with a feature of being among the first."""
FORMS = 6
"""Facts that every request has."""

_NUMBER = re.compile(r"\b\d{1,9}\b")
_WORD = re.compile(r"[\u3040-\u9fff\uac00-\ud7a3]|[^\W\d_]{1,30}|\d{1,9}|[^\w\s]")
_ASCII_WORD = re.compile(r"[a-z]{1,30}|[0-9]{1,9}|[^a-z0-9_\s\x1c-\x1f]")  # the same words of lower-case ASCII, sooner
# The kinds of features, with their sizes. The sizes of the words' own kinds are over the root of the number of words.
_WORDS = {"word": 1.0, "first letters": 1.5, "pair": 1.0, "word for the model": 0.6}
_OTHERS = {
    "early word": 0.5,
    **{f"word {place}": 0.5 for place in range(FIRST)},
    **{f"pair {place}": 0.5 for place in range(PAIRS)},
    "last word": 0.5,
    "model": 1.0,
    "form": 0.15,
    "fact": 0.5,
    "word of the system prompt": 0.5,  # over the root of their number
    "amount": 1.0,  # each has a value of its own
}
_SIZES = np.array([*_WORDS.values(), *_OTHERS.values()], dtype=np.float32)


class Features(NamedTuple):
    """indices : (n,) below 2**BITS; equal ones only by chance.  values : (n,).
    sender : hash of who sent the prompt; no feature.
    """

    indices: NDArray[np.int64]
    values: NDArray[np.float32]
    sender: int


def _multipliers(count: int) -> NDArray[np.uint64]:
    """(count,) fixed odd numbers, which keep the kinds of a word's features apart."""
    digests = [blake2b(b"%d" % number, digest_size=8).digest() for number in range(count)]
    return np.array([int.from_bytes(digest, "big") | 1 for digest in digests], dtype=np.uint64)


_NAMED = {task: f"task {task}" for task in TASK_OF.values()}
_NAMED_EARLY = {task: f"early task {task}" for task in TASK_OF.values()}
_KINDS = _multipliers(len(_SIZES))
_LEFT, _RIGHT = _multipliers(len(_SIZES) + 2)[-2:]  # for the words of a pair
_SHIFT = np.uint64(64 - BITS)


class TextFeatures:
    """Reads prompts. secret : key of the hashes, at most 64 bytes."""

    def __init__(self, secret: bytes) -> None:
        self._keyed = blake2b(key=secret, digest_size=8)
        self._row_of: dict[str, int] = {}
        self._stems: dict[str, int] = {}  # hashes of first letters
        self._hashes = np.empty((VOCABULARY_MAX, 2), dtype=np.uint64)  # hashes of each word and of its first letters

    def read(self, prompt: Prompt) -> Features:
        words = _words(prompt.text, WORDS_MAX)
        seen = list(dict.fromkeys(words))  # a word counts once, as does a pair of words
        facts = [*_facts(prompt), *_tasks(seen)]
        amounts = _amounts(prompt.text[:TEXT_FIRST], words)
        system = list(dict.fromkeys(_words(prompt.system, SYSTEM_WORDS_MAX))) if prompt.system else []
        names = [*facts, *seen, *system, *amounts, f"sender {prompt.sender[:NAME_CHARACTERS]}"]
        rows, row_of = self._rows_of(names), self._row_of
        hashes = self._hashes.take(rows + [row_of[word] for word in words], axis=0)
        one, start = hashes[:, 0], len(facts)
        end, last = start + len(seen), len(names)
        own, text = one[start:end], one[last:]
        pairs = first_pairs = text[:-1] * _LEFT + text[1:] * _RIGHT
        if len(seen) < len(words) and len(set(pairwise(words))) < len(pairs):
            pairs, _ = np.unique(pairs, return_counts=True)  # without counts NumPy imports numpy.ma first
        parts = (
            *(own, hashes[start:end, 1], pairs, own * one[0]),
            *(own[:EARLY], text[:FIRST], first_pairs[:PAIRS], text[-1:]),
            *(one[:start], one[end : last - 1]),
        )
        kinds, usual = _kinds_and_values(len(words), len(seen), len(pairs), len(facts), len(system), len(amounts))
        indices = np.concatenate(parts) * kinds >> _SHIFT
        values = usual.copy()
        values[-len(amounts) :] = [*amounts.values()]
        return Features(indices.view(np.int64), values, int(one[last - 1]))

    def _rows_of(self, words: list[str]) -> list[int]:
        """Places of the words in `_hashes`."""
        row_of = self._row_of
        if len(row_of) + len(words) > VOCABULARY_MAX:
            row_of.clear()
            self._stems.clear()
        try:
            return [row_of[word] for word in words]
        except KeyError:
            for word in words:
                if word not in row_of:
                    self._remember(word)
            return [row_of[word] for word in words]

    def _remember(self, word: str) -> None:
        row, letters = len(self._row_of), word[:STEM_LETTERS]
        stem = self._stems.get(letters)
        if stem is None:
            stem = self._stems[letters] = self._hash("stem " + letters)
        self._hashes[row, 0], self._hashes[row, 1] = self._hash(word), stem
        self._row_of[word] = row

    def _hash(self, text: str) -> int:
        keyed = self._keyed.copy()
        keyed.update(text.encode("utf-8", "surrogatepass"))
        return int.from_bytes(keyed.digest(), "big")


def _places(words: int) -> tuple[bool, ...]:
    """Which of the features that have a place a text of so many words has."""
    return (*(place < words for place in range(FIRST)), *(place < words - 1 for place in range(PAIRS)), words > 0)


@lru_cache(maxsize=128)
def _kinds_and_values(
    words: int, seen: int, pairs: int, facts: int, system: int, amounts: int
) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
    """The multiplier and the value of each feature of a prompt with so many of each kind, amounts' values aside.

    Most prompts share theirs with earlier ones: all that are kept take less than 0.5 MB.
    """
    counts = np.array([
        *(seen, seen, pairs, seen),
        *(min(EARLY, seen), *_places(words)),
        *(1, FORMS - 1, facts - FORMS, system, amounts),
    ])  # fmt: skip
    sizes = _SIZES.copy()
    sizes[: len(_WORDS)] /= math.sqrt(max(1, words))
    sizes[-2] /= math.sqrt(max(1, system))
    return _KINDS.repeat(counts), sizes.repeat(counts)


def _facts(prompt: Prompt) -> list[str]:
    """The model, the text's length and form, then the facts that not every request has."""
    text = prompt.text
    log = math.log(len(text) + 1)
    facts = [
        f"model {prompt.model[:NAME_CHARACTERS]}",
        f"length {int(2 * log)}",
        f"about {int(log)}",
        f"lines {min(text.count(chr(10)), 6)}",
        f"colon {':' in text}",
        f"end {text[-1:]}",
    ]
    if prompt.system:
        facts.append(f"system {_digest(prompt.system[:TEXT_FIRST])}")
    if prompt.history_characters:
        facts.append(f"history {int(math.log(prompt.history_characters))}")
    if prompt.stop:
        facts.append(f"stop {_digest(repr(prompt.stop))}")
    if prompt.tools:
        facts.append(f"tools {int(math.log2(prompt.tools))}")
    if prompt.format:
        facts.append(f"format {prompt.format[:NAME_CHARACTERS]}")
    if prompt.output_tokens_max:
        facts.append(f"most {int(2 * math.log2(prompt.output_tokens_max))}")
    return facts


def _amounts(text: str, words: Sequence[str]) -> dict[str, float]:
    """Logarithms of the text's length, of its largest number, and of the largest gap between two numbers in turn.

    `list 20 ideas` and `the numbers from 3 to 90` say how long their answers are.
    """
    amounts = {"characters": CHARACTERS * (math.log2(len(text) + 1) - CHARACTERS_USUAL)}
    if any(map(str.isdecimal, words)) and (digits := _NUMBER.findall(text)):
        numbers = [int(number) for number in digits[:NUMBERS_MAX]]
        gaps = [abs(left - right) for left, right in pairwise(numbers)]
        amounts["amount"] = AMOUNT * math.log2(max(numbers) + 1)
        gap = max(gaps, default=numbers[0])
        amounts["amount between" if gaps else "amount alone"] = AMOUNT * math.log2(gap + 1)
    return amounts


def _tasks(words: Sequence[str]) -> dict[str, None]:
    """The tasks that the text names, those that its first words name, and the first two of these together."""
    named = [TASK_OF[word] for word in words if word in TASK_OF]
    first = [TASK_OF[word] for word in words[:EARLY] if word in TASK_OF] if named else []
    return dict.fromkeys(
        ["tasks " + " ".join(first[:2]), *[_NAMED[task] for task in named], *[_NAMED_EARLY[task] for task in first]]
    )


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _words(text: str, words_max: int) -> list[str]:
    """Lower-case words, numbers and signs; of a long text its first and last."""
    if len(text) > TEXT_FIRST + TEXT_LAST:
        text = text[:TEXT_FIRST] + " " + text[-TEXT_LAST:]
    words = (_ASCII_WORD if text.isascii() else _WORD).findall(text.lower())
    if len(words) > words_max:
        words = words[: words_max * 3 // 4] + words[-(words_max // 4) :]
    return words
