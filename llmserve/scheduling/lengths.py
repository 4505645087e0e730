"""How long answers have been, beside what their bins went by: the lengths that a bin really holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bins.edges import Edges, index_of

LEVELS = 32  # equally likely lengths that stand for a bin's
ENOUGH = 8  # answers; a bin that has seen fewer takes the lengths of all


class SeenLengths:
    """The last `window` answers, as (score, output tokens); a ring.

    sample: scores to begin with, each taken as its own length. Answers displace them.
    """

    def __init__(self, window: int, sample: Sequence[float] = (), guess_tokens: float = 256.0) -> None:
        start = np.random.default_rng(0).permutation(np.asarray(sample, dtype=float))[:window]
        start = start if start.size else np.full(1, guess_tokens)
        self._scores, self._tokens = np.zeros((2, window))
        self._scores[: start.size] = self._tokens[: start.size] = start
        self._filled = int(start.size)
        self._next = self._filled % window

    def observe(self, score: float | None, output_tokens: float) -> None:
        """One answer. score: None when nothing was predicted."""
        self._scores[self._next], self._tokens[self._next] = score or 0.0, output_tokens
        self._next = (self._next + 1) % self._tokens.size
        self._filled = min(self._filled + 1, self._tokens.size)

    def by_bin(self, edges: Edges, bins: int) -> tuple[tuple[float, ...], ...]:
        """Equally likely lengths of each bin, tokens, ascending."""
        tokens = self._tokens[: self._filled]
        bin_of = index_of(edges, self._scores[: self._filled])
        members = [tokens[bin_of == index] for index in range(bins)]
        return tuple([_quantiles(own if own.size >= ENOUGH else tokens) for own in members])


def _quantiles(lengths: np.ndarray[tuple[int], np.dtype[np.float64]]) -> tuple[float, ...]:
    levels = (np.arange(LEVELS) + 0.5) / LEVELS
    return tuple(np.quantile(lengths, levels).round(1).clip(0.1).tolist())
