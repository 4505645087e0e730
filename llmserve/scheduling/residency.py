"""Which prompts each engine has in its prefix cache, as far as the scheduler can know.

A prompt comes as the hashes of its blocks (`Request.blocks`), each of which depends on all blocks before it. So an
engine that has a block has all earlier ones, and a search by halves finds how much of a prompt the engine has.

An engine has what was sent to it, until its cache is full and drops what was used longest ago, the end of a prompt
before its beginning, as vLLM and SGLang do. Where an engine tells what it stores and drops, that counts instead.

How much a cache holds is what the engine tells, or less: answers and other clients take their part of it. So where
engines say how much of a prompt they had, the expected part is compared with that over some answers.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence

from llmserve.request import Request

BLOCKS_MAX = 131_072  # blocks of all engines together: some 17 million tokens, in less than 32 MiB
BLOCKS_MIN = 1_024  # blocks that each of very many engines may have all the same
CHECKED = 16  # answers over which expected and told hits are compared: prompts that start together miss by chance
WRONG = 0.5  # share of the larger: where the smaller is less, the cache is taken for another size
LEARNT_MIN = 1_024.0  # tokens: a smaller cache would not be told from none, and could not be found to be larger


class Cache:
    """The blocks in one engine's cache, those used longest ago first.

    tokens      of all blocks
    told_max    tokens that it can hold, as the engine tells; inf: unknown.  learnt_max : by its hits
    """

    __slots__ = ("_checked", "_expected", "_had", "_held", "blocks", "learnt_max", "tokens", "told_max")

    def __init__(self) -> None:
        self.blocks: OrderedDict[int, int] = OrderedDict()  # tokens by hash; whole, so that sums return to zero
        self.tokens = 0
        self.told_max = self.learnt_max = math.inf
        self._held: dict[int, int] | None = None  # how many caches have each block; None: this is the only cache
        self._checked, self._expected, self._had = 0, 0.0, 0.0

    @property
    def tokens_max(self) -> float:
        return min(self.told_max, self.learnt_max)

    def share(self, held: dict[int, int]) -> None:
        """Count the blocks with those of other caches from now on. held : how many caches have each block"""
        self._held = held
        for block in self.blocks:
            held[block] = held.get(block, 0) + 1

    def compare(self, expected: float, had: float) -> None:
        """Compare tokens of a prompt that were expected here with those that the engine has told."""
        self._checked, self._expected, self._had = self._checked + 1, self._expected + expected, self._had + had
        if self._checked < CHECKED:
            return
        if self._had < WRONG * self._expected:
            self.learnt_max = max(LEARNT_MIN, WRONG * min(self.tokens_max, self.tokens))
        elif self._expected < WRONG * self._had:
            self.learnt_max /= WRONG
        self._checked, self._expected, self._had = 0, 0.0, 0.0

    def use(self, blocks: Sequence[int], tokens: int) -> int:
        """Have these blocks of one prompt, of so many tokens each, as those used last: the first block the latest.
        Returns how many of them were there.
        """
        cached, held, new = self.blocks, self._held, 0
        for block in reversed(blocks):
            if block in cached:
                cached.move_to_end(block)
            else:
                cached[block] = tokens
                new += 1
                if held is not None:
                    held[block] = held.get(block, 0) + 1
        self.tokens += new * tokens
        return len(blocks) - new

    def drop(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if (tokens := self.blocks.pop(block, None)) is not None:
                self.tokens -= tokens
                self._leave(block)

    def fit(self, blocks_max: int) -> None:
        """Drop what was used longest ago, until the rest fits."""
        cached, tokens_max = self.blocks, self.tokens_max
        while cached and (self.tokens > tokens_max or len(cached) > blocks_max):
            block, tokens = cached.popitem(last=False)
            self.tokens -= tokens
            self._leave(block)

    def clear(self) -> None:
        for block in self.blocks:
            self._leave(block)
        self.blocks.clear()
        self.tokens = 0

    def _leave(self, block: int) -> None:
        """The block, which this cache had, is in one cache less."""
        held = self._held
        if held is None:
            return
        if (others := held[block] - 1) > 0:
            held[block] = others
        else:
            del held[block]


def leading(blocks: Sequence[int], held: Container[int]) -> int:
    """How many of a prompt's blocks are held, from its first on. Who holds a block holds all earlier ones.

    Most prompts that are held go on from another one, so the search begins at the end, in growing steps.
    """
    if not blocks or blocks[0] not in held:
        return 0
    if blocks[-1] in held:
        return len(blocks)
    here, gone, back = len(blocks), len(blocks) + 1, 1
    while here > 1 and blocks[here - 1] not in held:
        gone, here, back = here, max(1, here - back), 2 * back
    while gone - here > 1:
        middle = (here + gone) // 2
        if blocks[middle - 1] in held:
            here = middle
        else:
            gone = middle
    return here


class Residency:
    """The caches of all engines, by name. blocks_max : of all together"""

    def __init__(self, blocks_max: int = BLOCKS_MAX) -> None:
        self._caches: dict[str, Cache] = {}
        self._held: dict[int, int] = {}  # how many caches have each block, where there are several
        self._blocks_max = self._share_max = blocks_max  # of one cache

    def __len__(self) -> int:
        """The number of blocks in all caches."""
        return sum([len(cache.blocks) for cache in self._caches.values()])

    def limit(self, engine: str, tokens_max: int | None) -> None:
        """Note how much an engine's cache holds. tokens_max : None: unknown; 0: it keeps no prompts"""
        if tokens_max is not None or engine in self._caches:
            self._cache(engine).told_max = math.inf if tokens_max is None else tokens_max

    def sent(self, engine: str, request: Request) -> float:
        """The prompt is in the engine's cache from now on: the request starts there. Returns the tokens of it that were
        there before.
        """
        if not request.blocks:
            return 0.0
        return self._have(engine, request.blocks, _whole(request.block_tokens)) * request.block_tokens

    def hit_tokens(self, engine: str, request: Request) -> float:
        """Tokens of the prompt that the engine has in its cache."""
        cache = self._caches.get(engine)
        return leading(request.blocks, cache.blocks) * request.block_tokens if cache is not None else 0.0

    def most_tokens(self, request: Request) -> float:
        """Tokens of the prompt that the engine has in its cache which has most of it."""
        held: Container[int] = self._held
        if len(self._caches) == 1:
            (cache,) = self._caches.values()
            held = cache.blocks
        return leading(request.blocks, held) * request.block_tokens

    def changed(self, engine: str, stored: Sequence[int], removed: Iterable[int], *, cleared: bool) -> None:
        """Note what an engine tells of its cache. cleared : all at first.  stored : of prompts, beginnings first"""
        cache = self._cache(engine)
        if cleared:
            cache.clear()
        cache.drop(removed)
        if stored:
            mean = cache.tokens / len(cache.blocks) if cache.blocks else 0.0
            self._have(engine, stored, _whole(mean))

    def ended(self, engine: str, expected_tokens: float, cached_tokens: float) -> None:
        """Learn how much an engine's cache holds from an answer that tells its hits.

        expected_tokens : that were expected to be in the cache when the request started
        """
        if expected_tokens or cached_tokens:
            self._cache(engine).compare(expected_tokens, cached_tokens)

    def forget(self, engine: str) -> None:
        """Note that an engine has lost its cache."""
        if (cache := self._caches.get(engine)) is not None:
            cache.clear()

    def _have(self, engine: str, blocks: Sequence[int], tokens: int) -> int:
        cache = self._caches.get(engine) or self._cache(engine)
        before = cache.use(blocks, tokens)
        if cache.tokens > cache.told_max or cache.tokens > cache.learnt_max or len(cache.blocks) > self._share_max:
            cache.fit(self._share_max)
        return before

    def _cache(self, engine: str) -> Cache:
        cache = self._caches.get(engine)
        if cache is None:
            cache = self._caches[engine] = Cache()
            if len(self._caches) > 1:
                for member in self._caches.values() if len(self._caches) == 2 else (cache,):
                    member.share(self._held)
            self._share_max = max(BLOCKS_MIN, self._blocks_max // len(self._caches))
        return cache


def _whole(block_tokens: float) -> int:
    return max(1, round(block_tokens))
