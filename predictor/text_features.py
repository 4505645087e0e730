"""A prompt as hashed features, for a linear model that learns while serving.

The features are the words of the text, pairs of words, the text's first and last words, its length and form, and the
facts beside the text: model, system prompt, history, stop strings, tools, format, further settings and max_tokens. The
words are features once for all models and once for the prompt's own model, so that models share what they have in
common.

Each word is hashed with a secret key (BLAKE2b), so the indices do not reveal the words without the key. Long texts keep
their two ends, so that the work per prompt is bounded.

Pure: the same secret and prompt always give the same features.
"""

import math
import re
from collections.abc import Iterable, Sequence
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
NUMBERS_MAX, SHAPING_MAX = 8, 8
AMOUNT, CHARACTERS = 0.15, 0.4
"""The value of a number that is twice as large, and of a text twice as long."""
CHARACTERS_USUAL = 7.0
"""Logarithm, to the base 2, of the length of a text of value 0."""
TEXT_FIRST, TEXT_LAST = 1400, 600
"""Characters of a long text that are read."""
WORD_CHARACTERS = 10
"""In so many characters of a text there is usually a word at least, with the space behind it."""
VOCABULARY_MAX = 1 << 14
"""Words and facts whose hashes are kept for the next prompt; then all are forgotten."""
NAMES_MAX = 200
"""More than the words and facts of a prompt."""
FORMS_MAX = 1 << 10
"""Forms of prompts, and lists of tasks, whose facts are kept for the next prompt; then all are forgotten."""

FIRST, PAIRS, EARLY = 4, 2, 8
"""Words and pairs with a feature of their place; words with a feature of being among the first."""
FORMS = 6
"""Facts that every request has: the model, and those of its form."""

_NUMBER = re.compile(r"\b\d{1,9}\b")
_WORD = re.compile(r"[\u3040-\u9fff\uac00-\ud7a3]|[^\W\d_]{1,30}|\d{1,9}|[^\w\s]")
_ASCII_WORD = re.compile(r"[a-z]{1,30}|[0-9]{1,9}|[^a-z0-9_\s\x1c-\x1f]")  # the same words of lower-case ASCII, sooner
# The kinds of features, with their sizes. The sizes of the words' own kinds are over the root of the number of words.
_ALIKE, _FOR_THE_MODEL = 1.0, 0.6  # words and pairs, and words for the model
_OTHERS = {
    **{f"pair {place}": 0.5 for place in range(PAIRS)},
    "early word": 0.5,
    **{f"word {place}": 0.5 for place in range(FIRST)},
    "last word": 0.5,
    "model": 1.0,
    "form": 0.15,
    "fact": 0.5,
    "word of the system prompt": 0.5,  # over the root of their number
    "amount": 1.0,  # each has a value of its own
}
_SIZES = np.array([*_OTHERS.values()], dtype=np.float32)


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


_LEFT, *_OTHER_KINDS = _multipliers(1 + len(_OTHERS)).tolist()
_FIRST_OF_A_PAIR = np.array(_LEFT, dtype=np.uint64)
_KINDS = np.array(_OTHER_KINDS, dtype=np.uint64)
_TASKS = [*dict.fromkeys(TASK_OF.values())]
_SHIFT = np.array(64 - BITS, dtype=np.uint64)


class Vocabulary:
    """Hashes of words and of the names of facts, with a secret key of at most 64 bytes.

    hashes : by row.  task_of : by row, for words that name a task: 2 to the power of its place in _TASKS.
    """

    def __init__(self, secret: bytes) -> None:
        self._keyed = blake2b(key=secret, digest_size=8)
        self._row_of: dict[str, int] = {}
        self.hashes = np.empty(VOCABULARY_MAX, dtype=np.uint64)
        self.task_of: dict[int, int] = {}

    @property
    def is_full(self) -> bool:
        """Whether a prompt's words may find no place."""
        return len(self._row_of) > VOCABULARY_MAX - NAMES_MAX

    def clear(self) -> None:
        """Make all rows free for other words."""
        self._row_of.clear()
        self.task_of.clear()

    def rows_of(self, words: Iterable[str]) -> list[int]:
        """words : may be read twice."""
        rows = [*map(self._row_of.get, words)]
        if None in rows:
            rows = [self._remember(word) if row is None else row for word, row in zip(words, rows, strict=True)]
        return rows  # type: ignore[return-value]

    def _remember(self, word: str) -> int:
        if (known := self._row_of.get(word)) is not None:  # the second time in a text
            return known
        row = self._row_of[word] = len(self._row_of)
        keyed = self._keyed.copy()
        keyed.update(word.encode("utf-8", "surrogatepass"))
        self.hashes[row] = int.from_bytes(keyed.digest(), "big")
        if word in TASK_OF:
            self.task_of[row] = 1 << _TASKS.index(TASK_OF[word])
        return row


class TextFeatures:
    """Reads prompts. secret : key of the hashes, at most 64 bytes."""

    def __init__(self, secret: bytes) -> None:
        self._vocabulary = Vocabulary(secret)
        self._forms: dict[tuple[str, int, int, bool, str], list[int]] = {}  # rows of FORMS facts
        self._tasks_of: dict[tuple[int, ...], list[int]] = {}  # rows of the facts about tasks

    def read(self, prompt: Prompt) -> Features:
        vocabulary = self._vocabulary
        if vocabulary.is_full:
            self._forget()
        text, rows_of = _words(prompt.text, WORDS_MAX), vocabulary.rows_of
        words, amounts = rows_of(text), _amounts(prompt.text[:TEXT_FIRST], text)
        seen = [*dict.fromkeys(words)]  # a word counts once
        facts = _facts(prompt)
        system = [*dict.fromkeys(rows_of(_words(prompt.system, SYSTEM_WORDS_MAX)))] if prompt.system else []
        others = rows_of([*facts, *amounts, f"sender {prompt.sender[:NAME_CHARACTERS]}"])
        facts_rows = self._tasks(seen) + others[: len(facts)]
        others = [*facts_rows, *system, *others[len(facts) :]]
        placed = [*seen[:EARLY], *words[:FIRST], *words[-1:]]
        hashes = vocabulary.hashes.take([*seen, *words, *placed, *self._form(prompt), *others])
        kinds, sizes = _kinds_and_sizes(
            len(seen[:EARLY]), len(words[:FIRST]), len(facts_rows), len(system), len(amounts)
        )
        indices = _indices(hashes, len(words), len(seen), len(placed), kinds)
        unseen = len(words) - len(seen)
        values = np.concatenate((_sizes(len(words))[unseen : unseen + len(indices) - len(sizes)], sizes))
        values[-len(amounts) :] = [*amounts.values()]
        return Features(indices, values, int(hashes[-1]))

    def _forget(self) -> None:
        for kept in (self._vocabulary, self._forms, self._tasks_of):
            kept.clear()

    def _tasks(self, words: list[int]) -> list[int]:
        """Rows of the tasks that the words name, of those that the first words name, and of the first two of these
        together.
        """
        task_of = self._vocabulary.task_of
        named = [task_of[word] for word in words if word in task_of]
        first = [task_of[word] for word in words[:EARLY] if word in task_of] if named else named
        key = (sum({*named}), sum({*first}), *first[:2])
        return self._tasks_of.get(key) or self._remember_tasks(*key)

    def _remember_tasks(self, named: int, first: int, *two: int) -> list[int]:
        """named, first : sums of tasks, each counted once."""
        if len(self._tasks_of) == FORMS_MAX:
            self._tasks_of.clear()
        names = ["tasks " + " ".join(_TASKS[task.bit_length() - 1] for task in two)]
        names += [f"task {task}" for place, task in enumerate(_TASKS) if named >> place & 1]
        names += [f"early task {task}" for place, task in enumerate(_TASKS) if first >> place & 1]
        rows = self._tasks_of[named, first, *two] = self._vocabulary.rows_of(names)
        return rows

    def _form(self, prompt: Prompt) -> list[int]:
        """Rows of the facts that every request has: the model, the text's length, and its form."""
        text, model = prompt.text, prompt.model[:NAME_CHARACTERS]
        double_log, lines = int(2 * math.log(len(text) + 1)), min(text.count("\n"), 6)
        key = model, double_log, lines, ":" in text, text[-1:]
        rows = self._forms.get(key)
        if rows is None:
            length = f"length {double_log}", f"about {double_log // 2}", f"lines {lines}"
            if len(self._forms) == FORMS_MAX:
                self._forms.clear()
            names = f"model {model}", *length, f"colon {key[3]}", f"end {key[4]}"
            rows = self._forms[key] = self._vocabulary.rows_of(names)
        return rows


def _indices(
    hashes: NDArray[np.uint64], words: int, seen: int, placed: int, kinds: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """hashes : of the `seen` words, of all `words`, of `placed` words again, of the facts, and of the sender."""
    end = seen + words
    own, text, model = hashes[:seen], hashes[seen:end], hashes[end + placed, ...]
    pairs = text[:-1] * _FIRST_OF_A_PAIR + text[1:]
    indices = np.concatenate((own * model, own, pairs, pairs[:PAIRS], hashes[end:-1]))
    indices[-len(kinds) :] *= kinds
    indices >>= _SHIFT
    return indices.view(np.int64)


@lru_cache(maxsize=WORDS_MAX + 1)
def _sizes(words: int) -> NDArray[np.float32]:
    """(3 words,) sizes of the features of a text of so many words: words for the model, and words and pairs."""
    sizes = np.array([_FOR_THE_MODEL, _ALIKE, _ALIKE], dtype=np.float32) / np.float32(math.sqrt(max(1, words)))
    return sizes.repeat(words)


@lru_cache(maxsize=512)
def _kinds_and_sizes(
    early: int, first: int, facts: int, system: int, amounts: int
) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
    """The multiplier and the size of each feature of _OTHERS of a prompt with so many of each kind.

    first : words of the first FIRST.  Most prompts share theirs with earlier ones: all that are kept take below 1 MB.
    """
    places = (
        *(place < first - 1 for place in range(PAIRS)),
        early,
        *(place < first for place in range(FIRST)),
        first > 0,
    )
    counts = np.array([*places, 1, FORMS - 1, facts, system, amounts])
    sizes = _SIZES.copy()
    sizes[-2] /= math.sqrt(max(1, system))
    return _KINDS.repeat(counts), sizes.repeat(counts)


def _facts(prompt: Prompt) -> list[str]:
    """Names of the facts that not every request has."""
    facts = []
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
    facts += [setting[:NAME_CHARACTERS] for setting in prompt.shaping[:SHAPING_MAX]]
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


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _words(text: str, words_max: int) -> list[str]:
    """Lower-case words, numbers and signs; of a long text its first and last."""
    if len(text) > TEXT_FIRST + TEXT_LAST:
        text = text[:TEXT_FIRST] + " " + text[-TEXT_LAST:]
    find, text = (_ASCII_WORD if text.isascii() else _WORD).findall, text.lower()
    last = words_max // 4
    first = words_max - last
    if len(text) > 2 * WORD_CHARACTERS * words_max:  # the words between the ends need not be found
        begin, place = find(text[: WORD_CHARACTERS * first]), text.find(" ", -WORD_CHARACTERS * last)
        end = find(text[place:]) if place >= 0 else []
        if len(begin) > first and len(end) >= last:  # the last word found of the beginning may be cut
            return begin[:first] + end[-last:]
    words = find(text)
    return words if len(words) <= words_max else words[:first] + words[-last:]
