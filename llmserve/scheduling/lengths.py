"""How long answers have been, beside what their bins went by: the lengths that a bin really holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from bins.edges import Edges, index_of
from bins.risk import longest_shares
from bins.service import longest_slices

Array = NDArray[np.float64]

LEVELS = 64  # equally likely lengths that stand for a bin's
ENOUGH = 8  # answers; a bin that has seen fewer takes the lengths of all


@dataclass(frozen=True, slots=True)
class Tokens:
    """Output tokens of a bin's answers: of the longest of 1, 2, ... on average; of the shortest there are."""

    longest: tuple[float, ...]
    least: float


class SeenLengths:
    """The last `window` answers, as (score, output tokens); a ring.

    scores, lengths: of a sample of forecasts to begin with, a length each; () when the scores are lengths. Answers
    displace them.
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
        """Whether it knows of any answer."""
        return bool(self._filled)

    def observe(self, score: float | None, output_tokens: float) -> None:
        """One answer. score: None when nothing was predicted."""
        self._scores[self._next], self._tokens[self._next] = score or 0.0, output_tokens
        self._next = (self._next + 1) % self._tokens.size
        self._filled = min(self._filled + 1, self._tokens.size)

    @property
    def predicted(self) -> tuple[Array, Array]:
        """(n,) scores and (n,) output tokens of the answers that were predicted, in no order."""
        scores, tokens = self._scores[: self._filled], self._tokens[: self._filled]
        had_one = scores > 0
        return scores[had_one], tokens[had_one]

    def by_bin(self, edges: Edges, bins: int) -> tuple[tuple[float, ...], ...]:
        """Equally likely lengths of each bin, tokens, ascending."""
        tokens = self._tokens[: self._filled] if self._filled else np.full(1, self._guess_tokens)
        bin_of = index_of(edges, self._scores[: tokens.size])
        members = [tokens[bin_of == index] for index in range(bins)]
        return tuple([_slices(own if own.size >= ENOUGH else tokens) for own in members])


def tokens_of(lengths: Sequence[float], batch_size: int) -> Tokens:
    """lengths : LEVELS equally likely ones, ascending.  batch_size : of the largest batch."""
    return Tokens(tuple((np.array(lengths) @ _longest_of(batch_size)).tolist()), lengths[0])


@lru_cache(maxsize=8)
def _longest_of(batch_size: int) -> Array:
    """(LEVELS, sizes) weights of equally likely lengths in the mean of the longest of 1, 2, ..., batch_size."""
    return np.array([longest_shares(LEVELS, size) for size in range(1, batch_size + 1)]).T


def _slices(lengths: Array) -> tuple[float, ...]:
    """The means of equally likely slices: the longest of several answers is as long as it was."""
    return tuple(longest_slices(lengths, [1], LEVELS)[0].round(1).clip(0.1).tolist())
