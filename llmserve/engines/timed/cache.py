"""The prefix cache of the timed engine, as vLLM's: whole blocks of a prompt, each found only behind all before it.

Words stand for tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

BLOCK_WORDS = 16


class PrefixCache:
    """The blocks of earlier prompts. The least recently used leave first, of one prompt the last ones.

    words_max : capacity
    """

    def __init__(self, words_max: int) -> None:
        self._blocks_max = words_max // BLOCK_WORDS
        self._blocks: dict[int, None] = {}  # by hash, the least recently used first

    def take(self, words: Sequence[bytes]) -> int:
        """Cache a prompt. Returns how many of its words were cached; the last word never counts, for it is computed."""
        blocks = _chained(words)
        cached = 0
        while cached < len(blocks) and blocks[cached] in self._blocks:
            cached += 1
        for block in reversed(blocks):
            self._blocks.pop(block, None)
            self._blocks[block] = None
        while len(self._blocks) > self._blocks_max:
            del self._blocks[next(iter(self._blocks))]
        return min(cached, (len(words) - 1) // BLOCK_WORDS) * BLOCK_WORDS


def _chained(words: Sequence[bytes]) -> list[int]:
    """The hashes of the whole blocks, each of its words and the block before."""
    blocks: list[int] = []
    for start in range(0, len(words) - BLOCK_WORDS + 1, BLOCK_WORDS):
        before = blocks[-1] if blocks else 0
        blocks.append(hash((before, *words[start : start + BLOCK_WORDS])))
    return blocks
