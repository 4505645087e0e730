"""The choice of the next token of each row, from the model's logits.

Rows are independent: a row's choices depend only on its own logits, parameters and random numbers. A request with
a seed therefore gets the same answer in every batch.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Sampling:
    """A request's sampling parameters. temperature 0 is greedy, top_k 0 is no limit."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    @property
    def penalised(self) -> bool:
        """Whether a penalty applies to tokens that have occurred."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)


class Sampler:
    """Chooses the next tokens of one batch, step by step."""

    def __init__(self, rows: Sequence[Sampling], prompts: Sequence[Sequence[int]]) -> None:
        self._randoms = [random.Random(row.seed) for row in rows]
        self._greedy = torch.tensor([row.temperature == 0 for row in rows])
        self._all_greedy = all(row.temperature == 0 for row in rows)
        # In a mixed batch `choose` also draws for greedy rows, then overwrites the result. 1 avoids division by 0.
        self._temperature = _column([row.temperature or 1.0 for row in rows])
        self._top_p = _column([row.top_p for row in rows])
        self._top_k = torch.tensor([[row.top_k or torch.iinfo(torch.int64).max] for row in rows])
        self._truncated = any(row.top_p < 1 or row.top_k for row in rows)
        self._penalties = _Penalties(rows, prompts) if any(row.penalised for row in rows) else None

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """Choose one token per row: logits (rows, vocabulary) -> token ids (rows,), int64.

        A GPU makes greedy choices only. Other choices are computed on the CPU.
        """
        if not self._all_greedy or self._penalties is not None:
            logits = logits.cpu()
        if self._penalties is not None:
            logits = self._penalties.apply(logits.float())
        ids = logits.argmax(dim=-1)
        if not self._all_greedy:
            ids = torch.where(self._greedy, ids, self._draw(logits))
        if self._penalties is not None:
            self._penalties.count(ids)
        return ids

    def _draw(self, logits: torch.Tensor) -> torch.Tensor:
        # The last bits of the logits depend on the batch's shape. In double precision and in the vocabulary's order
        # (not sorted), these bits can shift a border between two tokens, but cannot swap two tokens.
        probabilities = (logits.double() / self._temperature).softmax(dim=-1)
        if self._truncated:
            probabilities = self._truncate(probabilities)
        cumulative = probabilities.cumsum(dim=-1)
        uniform = _column([rng.random() for rng in self._randoms])
        ids = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
        return ids.clamp(max=logits.shape[-1] - 1).squeeze(-1)

    def _truncate(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Keep the top_k most probable tokens, then the fewest of these tokens with a share top_p of their mass."""
        # numpy's sort is vectorised; torch's sort takes longer than a whole step of a small model.
        ranked = torch.from_numpy(np.sort(probabilities.numpy(), axis=-1)).flip(-1)  # (rows, vocabulary)
        rank = torch.arange(ranked.shape[-1])
        ranked = torch.where(rank < self._top_k, ranked, 0.0)
        mass_before = ranked.cumsum(dim=-1) - ranked
        nucleus = (mass_before < self._top_p * ranked.sum(dim=-1, keepdim=True)) & (ranked > 0)
        least = ranked.gather(-1, nucleus.sum(dim=-1, keepdim=True) - 1)
        return torch.where(probabilities >= least, probabilities, 0.0)


class _Penalties:
    """Presence and frequency penalties (over the answer) and repetition penalties (over prompt and answer)."""

    def __init__(self, rows: Sequence[Sampling], prompts: Sequence[Sequence[int]]) -> None:
        self._presence = _column([row.presence_penalty for row in rows]).float()
        self._frequency = _column([row.frequency_penalty for row in rows]).float()
        self._repetition = _column([row.repetition_penalty for row in rows]).float()
        self._prompts = prompts
        self._counts: torch.Tensor | None = None  # (rows, vocabulary), occurrences in the answers
        self._in_prompt: torch.Tensor | None = None  # (rows, vocabulary), bool

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if self._counts is None or self._in_prompt is None:
            self._counts = torch.zeros_like(logits)
            self._in_prompt = torch.zeros_like(logits, dtype=torch.bool)
            for row, prompt in enumerate(self._prompts):
                self._in_prompt[row, list(prompt)] = True
        occurred = self._in_prompt | (self._counts > 0)
        damped = torch.where(logits > 0, logits / self._repetition, logits * self._repetition)
        logits = torch.where(occurred, damped, logits)
        return logits - self._frequency * self._counts - self._presence * (self._counts > 0)

    def count(self, ids: torch.Tensor) -> None:
        assert self._counts is not None
        self._counts.scatter_add_(1, ids[:, None], torch.ones_like(ids[:, None], dtype=self._counts.dtype))


def _column(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]
