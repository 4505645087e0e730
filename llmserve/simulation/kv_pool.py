"""The KV cache of a simulated engine: blocks, which texts they hold, and which of them are given away first.

As in vLLM V1: a block holds a few tokens; a full block can be used again by every sequence that begins with the
same tokens; blocks that no sequence uses are free, keep their contents, and are given away in the order in which they
became free, those of one sequence from its end.

A text is a tuple of parts, `(name, tokens)` each: the first tokens of the part of this name that follows the parts
before it. Two sequences share the blocks that lie whole within the same parts, so names stand for contents. Answers
continue the last part of their prompt.

Because who uses a block uses all blocks before it, the blocks of a text that are free became free from its end. So what
is cached of a part is its first blocks, and free blocks are kept as runs of neighbours: the cost of an operation grows
with the parts of a text, not with its blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from hashlib import blake2b

from llmserve.request import BLOCK_TOKENS

Text = tuple[tuple[Hashable, int], ...]

ODD = 0x9E3779B97F4A7C15  # spreads the numbers of blocks over all bits
HASH_MAX = 2**63 - 1
DEAD_MAX = 1_000  # emptied runs in the queue before it is cleaned


class _Part:
    """The blocks of one part of a text.

    held   its first blocks, which sequences use
    end    its first blocks that are used or cached: those from `held` on are free, and cached
    users  sequences that use blocks, with the place of this part in their texts
    runs   the free blocks, the last of the part first
    """

    __slots__ = ("end", "held", "key", "runs", "users")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.held = 0
        self.end = 0
        self.users: dict[Sequence, int] = {}
        self.runs: deque[_Run] = deque()

    @property
    def computed(self) -> int:
        """Its first blocks that another sequence can use, or begins to compute before another sequence could start."""
        used = max([user.computed_blocks(place) for user, place in self.users.items()], default=0)
        return self.end if used >= self.held else used


class _Run:
    """Free blocks [first, stop) of a part, or `stop - first` blocks without usable contents (part None)."""

    __slots__ = ("first", "part", "stop")

    def __init__(self, part: _Part | None, first: int, stop: int) -> None:
        self.part = part
        self.first = first
        self.stop = stop


class Sequence:
    """What one sequence has of the pool. Made by `KVPool.admit`.

    cached_tokens  tokens that need not be computed
    computed       tokens that are computed, or will be before another sequence starts; the caller keeps it up to date
    """

    __slots__ = ("_block_tokens", "_copies", "_parts", "_sizes", "_starts", "cached_tokens", "computed")

    def __init__(
        self, parts: list[_Part], starts: list[int], sizes: list[int], cached_tokens: int, block_tokens: int
    ) -> None:
        self._block_tokens = block_tokens
        self._parts = parts
        self._starts = starts  # first block of each part
        self._sizes = sizes  # blocks of each part
        self._copies = [0] * len(parts)  # blocks of each part with the contents of blocks that others use
        self.cached_tokens = cached_tokens
        self.computed = cached_tokens

    @property
    def blocks(self) -> int:
        return self._starts[-1] + self._sizes[-1]

    def computed_blocks(self, place: int) -> int:
        """The first blocks of a part that are computed."""
        return max(0, min(self._sizes[place], self.computed // self._block_tokens - self._starts[place]))


class KVPool:
    """The blocks of one engine.

    blocks   in all, of block_tokens tokens each
    free     blocks that no sequence uses; what some of them hold is cached
    evicted  blocks so far whose contents were given up
    """

    def __init__(self, blocks: int, block_tokens: int = BLOCK_TOKENS) -> None:
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.free = blocks
        self.evicted = 0
        self._parts: dict[Hashable, _Part] = {}
        self._queue = deque([_Run(None, 0, blocks)])  # the free blocks, those that are given away first
        self._dead = 0  # emptied runs in the queue

    def cached_tokens(self, text: Text) -> int:
        """Tokens of a text that need not be computed now: whole blocks, and never its last token."""
        found = 0
        for key, _, size in _walk(text, self.block_tokens):
            part = self._parts.get(key)
            usable = min(size, part.computed) if part is not None else 0
            found += usable
            if usable < size:
                break
        last = (sum([tokens for _, tokens in text]) - 1) // self.block_tokens
        return min(found, last) * self.block_tokens

    def admit(self, text: Text) -> Sequence | None:
        """Take the blocks for a whole text, with those that are cached; None: there are not enough free blocks."""
        cached_tokens = self.cached_tokens(text)
        walk = list(_walk(text, self.block_tokens))
        known = [self._parts.get(key) for key, _, _ in walk]
        cached = cached_tokens // self.block_tokens
        copies: list[int] = []  # blocks of each part that others use but this sequence cannot
        needed = 0
        for part, (_, start, size) in zip(known, walk, strict=True):
            held = 0 if part is None else part.held
            copies.append(max(0, min(size, held) - max(0, cached - start)))
            needed += copies[-1] + max(0, size - held)
        if needed > self.free:
            return None
        parts = [self._parts.setdefault(key, part or _Part(key)) for part, (key, _, _) in zip(known, walk, strict=True)]
        starts, sizes = [start for _, start, _ in walk], [size for *_, size in walk]
        sequence = Sequence(parts, starts, sizes, cached_tokens, self.block_tokens)
        for place, part in enumerate(parts):
            part.users[sequence] = place
        fresh = sum(copies) + sum([self._hold(part, size) for part, (*_, size) in zip(parts, walk, strict=True)])
        sequence._copies = copies
        self._take(fresh)
        return sequence

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        """Take the blocks for so many tokens in all. Returns whether there were enough; if not, nothing changes."""
        more = -(-tokens // self.block_tokens) - sequence.blocks
        if more <= 0:
            return True
        if more > self.free:
            return False
        part, size = sequence._parts[-1], sequence._sizes[-1]
        copies = max(0, min(size + more, part.held) - size)
        sequence._copies[-1] += copies
        sequence._sizes[-1] = size + more
        self._take(copies + self._hold(part, size + more))
        return True

    def release(self, sequence: Sequence) -> None:
        """Give all blocks of a sequence back. What it has computed stays cached until the blocks are given away."""
        runs: list[_Run] = []
        without = 0  # blocks without usable contents
        for place in range(len(sequence._parts) - 1, -1, -1):
            part, size = sequence._parts[place], sequence._sizes[place]
            computed = part.computed
            del part.users[sequence]
            without += sequence._copies[place]
            if len(part.users) == 1:  # who is left needs no copies
                ((user, at),) = part.users.items()
                without += user._copies[at]
                user._copies[at] = 0
            others = max([user._sizes[at] for user, at in part.users.items()], default=0)
            if size > others:
                part.held = others
                cached = min(max(computed, others), size)
                if cached < size:
                    without += size - cached
                    self._forget_after(part)
                    part.end = cached
                if cached > others:
                    run = _Run(part, others, cached)
                    part.runs.append(run)
                    runs.append(run)
            self._tidy(part)
        if without:
            runs.insert(0, _Run(None, 0, without))
        self.free += sum([run.stop - run.first for run in runs])
        self._queue.extend(runs)

    def _hold(self, part: _Part, size: int) -> int:
        """Use the first blocks of a part. Returns how many of them need blocks: the others are used or cached."""
        while part.runs and part.runs[-1].first < size:
            run = part.runs[-1]
            stop = min(run.stop, size)
            self.free -= stop - run.first
            run.first = stop
            if run.first == run.stop:
                part.runs.pop()
                self._dead += 1
        fresh = max(0, size - part.end)
        part.held = max(part.held, size)
        part.end = max(part.end, size)
        return fresh

    def _take(self, count: int) -> None:
        """Give away the free blocks that are first in the queue."""
        assert count <= self.free, "more blocks than are free"
        self.free -= count
        queue = self._queue
        while count:
            run = queue[0]
            part = run.part
            taken = min(count, run.stop - run.first)
            run.stop -= taken
            count -= taken
            if part is not None and taken:
                assert part.runs[0] is run, "a part's last blocks are given away first"
                part.end = run.stop
                self.evicted += taken
            if run.stop == run.first:
                queue.popleft()
                if not taken:
                    self._dead -= 1
                elif part is not None:
                    part.runs.popleft()
                    self._tidy(part)
        if self._dead > DEAD_MAX and 2 * self._dead > len(queue):
            self._queue = deque([run for run in queue if run.stop > run.first])
            self._dead = 0

    def _forget_after(self, part: _Part) -> None:
        """The free blocks of a part hold nothing that can be used, for a block before them is gone."""
        for run in part.runs:
            run.part = None
        part.runs.clear()

    def _tidy(self, part: _Part) -> None:
        """Forget a part of which nothing is used or cached."""
        if not part.users and not part.end:
            self._parts.pop(part.key, None)


def hashes(text: Text, block_tokens: int) -> tuple[int, ...]:
    """A hash of each whole block of a text, which depends on all that is before it, as `Request.blocks`.

    Texts that share blocks in a KVPool share hashes; a text has the same hashes in every process.
    """
    found: list[int] = []
    for key, start, blocks in _walk(text, block_tokens):
        seed = int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest())
        found += [(seed ^ (start + place + 1) * ODD) & HASH_MAX for place in range(blocks)]
    return tuple(found[: sum([tokens for _, tokens in text]) // block_tokens])


def _walk(text: Text, block_tokens: int) -> Iterator[tuple[Hashable, int, int]]:
    """(key, first block, blocks) of each part of a text. A block that reaches into a part belongs to that part."""
    key: Hashable = None
    tokens = start = 0
    for place, (name, count) in enumerate(text):
        key = (key, tokens, name)
        tokens += count
        stop = -(-tokens // block_tokens) if place == len(text) - 1 else tokens // block_tokens
        yield key, start, stop - start
        start = stop
