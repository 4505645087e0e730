"""An engine's blocks of tokens, and the blocks of prompts that they hold.

An engine names its blocks by hashes of its own. The scheduler knows prompts by the hashes of their text
(calls/prompt_blocks.py), for these are known before a tokenizer is asked. The two are tied once the engine's tokenizer
has told the tokens of a prompt: a block of the prompt ends where its share of the tokens ends, and is in the cache as
long as the engine's block with that end is.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from llmserve.kv_events.reading import HASH_BITS, Stored

SHARDS = 4_096
TIES_MAX = 262_144  # blocks of prompts; past that all are tied anew
PROMPTS_MAX = 16_384  # prompts known to be tied
MASK = (1 << HASH_BITS) - 1
BEGIN = 1  # the chain before its first block


class Numbers:
    """A map of numbers to numbers, 16 bytes an entry: a dict of Python's has a hundred.

    Sorted arrays, each of the keys with the same last bits; keys are hashes, so that these are of one length.
    """

    def __init__(self) -> None:
        self._count = 0
        self._shards: dict[int, tuple[array[int], array[int]]] = {}

    def __len__(self) -> int:
        return self._count

    def get(self, key: int) -> int | None:
        shard = self._shards.get(key % SHARDS)
        if shard is None:
            return None
        keys, values = shard
        place = bisect_left(keys, key)
        return values[place] if place < len(keys) and keys[place] == key else None

    def put(self, key: int, value: int) -> None:
        shard = self._shards.get(key % SHARDS)
        if shard is None:
            shard = self._shards[key % SHARDS] = array("q"), array("q")
        keys, values = shard
        place = bisect_left(keys, key)
        if place < len(keys) and keys[place] == key:
            values[place] = value
            return
        keys.insert(place, key)
        values.insert(place, value)
        self._count += 1

    def pop(self, key: int) -> int | None:
        shard = self._shards.get(key % SHARDS)
        if shard is None:
            return None
        keys, values = shard
        place = bisect_left(keys, key)
        if place == len(keys) or keys[place] != key:
            return None
        del keys[place]
        self._count -= 1
        return values.pop(place)

    def clear(self) -> None:
        self._shards.clear()
        self._count = 0


class Chains:
    """The blocks of one engine.

    block_size  tokens of each, as the engine has told last; 0: not yet
    """

    def __init__(self) -> None:
        self.block_size = 0
        self._chain_of = Numbers()  # by the engine's hash of a block: that of all tokens up to its end
        self._prompts = Numbers()  # by such a chain: the prompt's block that ends there
        self._tied: OrderedDict[int, None] = OrderedDict()  # last blocks of prompts that are tied

    def __len__(self) -> int:
        """The number of the engine's blocks."""
        return len(self._chain_of)

    def store(self, event: Stored) -> list[int]:
        """Note blocks that the engine has stored. Returns the prompts' blocks among these."""
        self.block_size = event.block_size
        chain = BEGIN if event.parent is None else self._chain_of.get(event.parent)
        if chain is None:  # it follows blocks that were not told, or that no tokenizer tells
            return []
        stored = []
        for number, whole in zip(event.hashes, _chains(event.tokens, event.block_size, chain), strict=False):
            self._chain_of.put(number, whole)
            block = self._prompts.get(whole)
            if block is not None:
                stored.append(block)
        return stored

    def remove(self, hashes: Sequence[int]) -> list[int]:
        """Note blocks that the engine has dropped. Returns the prompts' blocks among these.

        They stay tied, so that the engine's next word of them is understood: a request that has just been sent may have
        the engine compute again what is dropped before the request's turn.
        """
        removed = []
        for number in hashes:
            chain = self._chain_of.pop(number)
            block = self._prompts.get(chain) if chain is not None else None
            if block is not None:
                removed.append(block)
        return removed

    def clear(self) -> None:
        self._chain_of.clear()
        self._prompts.clear()
        self._tied.clear()

    def knows(self, blocks: Sequence[int]) -> bool:
        """Whether a prompt is tied."""
        return bool(blocks) and blocks[-1] in self._tied

    def tie(self, blocks: Sequence[int], block_share: float, tokens: Sequence[int]) -> None:
        """Tie a prompt, which the engine has computed, to the engine's blocks. block_share : of the prompt, in each"""
        size = self.block_size
        if not size or not blocks:
            return
        if len(self._prompts) > TIES_MAX:
            self._prompts.clear()
            self._tied.clear()
        ends = iter([int((number + 1) * block_share * len(tokens)) // size for number in range(len(blocks))])
        chains = list(_chains(tokens, size, BEGIN))
        for block, end in zip(blocks, ends, strict=True):
            if 0 < end <= len(chains):
                self._prompts.put(chains[end - 1], block)
        self._tied[blocks[-1]] = None
        if len(self._tied) > PROMPTS_MAX:
            self._tied.popitem(last=False)


def _chains(tokens: Sequence[int], size: int, chain: int) -> Iterator[int]:
    """The hash of each whole block of tokens with all before it, from `chain` on. Of this process alone."""
    data, width = array("q", tokens).tobytes(), 8 * size
    for start in range(0, len(data) - width + 1, width):
        chain = hash((chain, data[start : start + width])) & MASK
        yield chain
