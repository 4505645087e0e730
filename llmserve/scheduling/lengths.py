"""Lengths of recent answers, with the scores that chose their bins: the real lengths of each bin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import msgspec
import numpy as np
from numpy.typing import NDArray

from bins.edges import Edges, index_of
from bins.risk import longest_shares
from bins.service import longest_slices

Array = NDArray[np.float64]

LEVELS = 64  # equally likely lengths that represent a bin's lengths
ANSWERS_BETWEEN = 64  # answers between two updates of the bins' lengths; fewer at the start
ENOUGH = 8  # answers; a bin with fewer answers uses the lengths of all bins


class Learned(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model's numbers from before the scheduler's start.

    scores, lengths  sample of scores, and the length of each one's answer; lengths () when they are not known
    service          seconds a token, tokens an answer, and the weight of both in answers (ServiceTime)

    The trust in predictions is not kept: it was measured on forecasts from a time when less was learned.
    """

    scores: tuple[float, ...] = ()
    lengths: tuple[float, ...] = ()
    service: tuple[float, float, float] | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """Output tokens of a bin's answers. longest : mean of the longest of 1, 2, ... answers.  least : the shortest."""

    longest: tuple[float, ...]
    least: float


class SeenLengths:
    """The last `window` answers, as (score, output tokens), in a ring.

    scores, lengths: a starting sample, one length for each score; lengths () when the scores are lengths. Answers
    replace the sample.
    """

    def __init__(
        self, window: int, scores: Sequence[float] = (), lengths: Sequence[float] = (), guess_tokens: float = 256.0
    ) -> None:
        start = np.array([scores, lengths or scores], dtype=float)
        start = np.random.default_rng(0).permutation(start, axis=1)[:, :window]
        self._scores, self._tokens = np.zeros((2, window))
        self._guess_tokens = guess_tokens  # until the first answer
        self._filled = start.shape[1]
        self._scores[: self._filled], self._tokens[: self._filled] = start
        self._next = self._filled % window

    def __bool__(self) -> bool:
        """Whether the ring holds any answer or sample."""
        return bool(self._filled)

    def observe(self, score: float | None, output_tokens: float) -> None:
        """Record one answer. score: None without a prediction."""
        self._scores[self._next], self._tokens[self._next] = score or 0.0, output_tokens
        self._next = (self._next + 1) % self._tokens.size
        self._filled = min(self._filled + 1, self._tokens.size)

    @property
    def predicted(self) -> tuple[Array, Array]:
        """(n,) scores and (n,) output tokens of the answers with a prediction, in no order."""
        scores, tokens = self._scores[: self._filled], self._tokens[: self._filled]
        has_score = scores > 0
        return scores[has_score], tokens[has_score]

    def by_bin(self, edges: Edges, bins: int) -> tuple[tuple[float, ...], ...]:
        """Equally likely lengths of each bin, tokens, ascending."""
        tokens = self._tokens[: self._filled] if self._filled else np.full(1, self._guess_tokens)
        bin_of = index_of(edges, self._scores[: tokens.size])
        members = [tokens[bin_of == index] for index in range(bins)]
        return tuple([_slices(own if own.size >= ENOUGH else tokens) for own in members])


class BinTokens:
    """Output tokens of each bin's answers, computed again after a number of answers that grows to ANSWERS_BETWEEN.

    seen : the answers; None: none are recorded, and all tokens are zero.  batch_size : largest batch
    """

    def __init__(self, seen: SeenLengths | None, batch_size: int) -> None:
        self._seen = seen
        self._batch_size = batch_size
        self._cache: list[Tokens] = []  # by bin; []: to be computed
        self._answers = 0  # since the cache was computed
        self._answers_between = 1

    def answered(self) -> None:
        """Count an answer that was recorded."""
        self._answers += 1

    def forget(self) -> None:
        """Compute the tokens again at the next question: requests are assigned to bins differently from now on."""
        self._cache = []

    def of(self, bin_index: int, edges: Edges, bins: int) -> Tokens:
        """Of a bin's answers, from the answers recorded so far; zeros before the first answer."""
        if not self._cache or self._answers >= self._answers_between:
            if self._answers >= self._answers_between:
                self._answers_between = min(2 * self._answers_between, ANSWERS_BETWEEN)
            self._answers = 0
            self._cache = self._by_bin(edges, bins)
        return self._cache[min(bin_index, len(self._cache) - 1)]

    def _by_bin(self, edges: Edges, bins: int) -> list[Tokens]:
        if not self._seen:
            return [Tokens((0.0,) * self._batch_size, 0.0)]
        return [tokens_of(lengths, self._batch_size) for lengths in self._seen.by_bin(edges, bins)]


def tokens_of(lengths: Sequence[float], batch_size: int) -> Tokens:
    """lengths : LEVELS equally likely lengths, ascending.  batch_size : size of the largest batch."""
    return Tokens(tuple((np.array(lengths) @ _longest_of(batch_size)).tolist()), lengths[0])


@lru_cache(maxsize=8)
def _longest_of(batch_size: int) -> Array:
    """(LEVELS, sizes) weights of equally likely lengths in the mean of the longest of 1, 2, ..., batch_size."""
    return np.array([longest_shares(LEVELS, size) for size in range(1, batch_size + 1)]).T


def _slices(lengths: Array) -> tuple[float, ...]:
    """(LEVELS,) means of equally likely slices; this keeps the mean of the longest answers."""
    return tuple(longest_slices(lengths, [1], LEVELS)[0].round(1).clip(0.1).tolist())
