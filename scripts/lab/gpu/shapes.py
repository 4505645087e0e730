"""Shapes of the models that a campaign runs, and the prompts that set the lengths of their answers. Needs no torch.

The text of an answer means nothing, so the prompt sets its length: the last word of the prompt is the number of tokens.
The length is not in max_tokens, because the scheduler reads that field.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

CONTEXT = 4096
PROMPT_WORDS = 32


@dataclass(frozen=True, slots=True)
class Shape:
    """What fixes the cost of a Llama's step. size : of a head."""

    layers: int
    width: int
    inner: int
    heads: int
    key_heads: int
    size: int
    vocabulary: int
    tied: bool = False

    @property
    def step_parameters(self) -> int:
        """Weights that a step reads: all but the embeddings of other tokens."""
        attention = self.width * self.size * 2 * (self.heads + self.key_heads)
        return self.layers * (attention + 3 * self.width * self.inner) + self.vocabulary * self.width

    @property
    def cached_numbers(self) -> int:
        """Numbers in the cache for each token."""
        return 2 * self.layers * self.key_heads * self.size

    def step_bytes(self, rows: int, context: int, number_bytes: int = 2) -> int:
        """What a step must read: the weights, and each row's cache, once."""
        return number_bytes * (self.step_parameters + rows * context * self.cached_numbers)


SHAPES = {
    "llama-8b": Shape(layers=32, width=4096, inner=14336, heads=32, key_heads=8, size=128, vocabulary=128_256),
    "llama-1b": Shape(layers=16, width=2048, inner=8192, heads=32, key_heads=8, size=64, vocabulary=128_256, tied=True),
    "tiny": Shape(layers=2, width=32, inner=64, heads=4, key_heads=2, size=8, vocabulary=CONTEXT),
}


def prompt_for(tokens: float) -> str:
    """A prompt of PROMPT_WORDS tokens whose answer has so many."""
    return f"{'word ' * (PROMPT_WORDS - 1)}{math.ceil(tokens)}"
