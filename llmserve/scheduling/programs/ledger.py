"""The ledger of one engine's KV cache: the tokens of running requests, and those kept for programs in a tool call.

What several hold counts once: a prompt comes as the hashes of its blocks, each of all before it (`Request.blocks`), so
the system prompt that a hundred programs share is in the ledger once, whoever holds it. A block has as many tokens as
its first holder says: how many they are is an estimate, which moves.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections.abc import Iterator, Sequence

from llmserve.scheduling.residency import leading

STALE_MAX = 64  # times that do not count any more, beside as many as there are holdings


class Holding:
    """What one program, or one request without a program, has in the ledger.

    blocks   of the prompt.  more : tokens beyond these, with the answer
    ended_s  when its last request ended; inf while a request runs
    over_s   until when it is held for the next request; inf while a request runs
    """

    __slots__ = ("blocks", "ended_s", "more", "over_s")

    def __init__(self, blocks: tuple[int, ...], more: int) -> None:
        self.blocks, self.more = blocks, more
        self.ended_s = self.over_s = math.inf

    @property
    def runs(self) -> bool:
        return self.ended_s == math.inf


class Ledger:
    """The holdings of one engine, by holder. tokens : of all, whole, so that sums return to zero"""

    def __init__(self) -> None:
        self.tokens = 0
        self._holdings: dict[int, Holding] = {}
        self._users: dict[int, int] = {}  # holders of each block
        self._block_tokens: dict[int, int] = {}  # of each block
        self._ends: list[tuple[float, int]] = []  # a heap of (over_s, holder), also of some that were dropped since
        self._over: list[tuple[float, int]] = []  # those of the heap whose time is over, in order

    def __contains__(self, holder: int) -> bool:
        return holder in self._holdings

    def __iter__(self) -> Iterator[tuple[int, Holding]]:
        return iter(self._holdings.items())

    def __len__(self) -> int:
        return len(self._holdings)

    def is_kept(self, holder: int) -> bool:
        """Whether tokens are kept for a holder that runs nothing."""
        holding = self._holdings.get(holder)
        return holding is not None and not holding.runs

    def need(self, holder: int, blocks: Sequence[int], block_tokens: int, more: int) -> int:
        """Tokens that the ledger would grow by if the holder had these instead of what it has."""
        missing = len(blocks) - leading(blocks, self._users)
        holding = self._holdings.get(holder)
        return missing * block_tokens + more - (holding.more if holding else 0)

    def run(self, holder: int, blocks: tuple[int, ...], block_tokens: int, more: int) -> None:
        """A request of the holder runs. block_tokens : of each block that nobody has yet"""
        self._put(holder, Holding(blocks, more), block_tokens)

    def keep(self, holder: int, more: int, ended_s: float, over_s: float) -> None:
        """The holder's request has ended; keep its tokens until `over_s`. more : as in Holding"""
        holding = self._holdings.get(holder)
        if holding is not None:
            self.tokens += more - holding.more
            holding.more, holding.ended_s, holding.over_s = more, ended_s, over_s
            if over_s < math.inf:
                self._end_at(over_s, holder)

    def drop(self, holder: int) -> None:
        """Keep nothing for the holder."""
        holding = self._holdings.pop(holder, None)
        if holding is not None:
            self.tokens -= holding.more
            self._leave(holding.blocks)

    def clear(self) -> None:
        self.tokens = 0
        self._holdings.clear()
        self._users.clear()
        self._block_tokens.clear()
        self._ends.clear()
        self._over.clear()

    def over(self, now_s: float) -> list[int]:
        """Holders whose time is over, the one over longest first. now_s : never before that of an earlier call"""
        self._pass_ends(now_s)
        if self._over:
            self._over = [end for end in self._over if self._is_end(*end)]
        return [holder for _, holder in self._over]

    def next_over_s(self, now_s: float) -> float | None:
        """When the next time is over; None: nobody's will be. now_s : as of `over`"""
        self._pass_ends(now_s)
        return self._ends[0][0] if self._ends else None

    def _end_at(self, over_s: float, holder: int) -> None:
        heapq.heappush(self._ends, (over_s, holder))
        if len(self._ends) > len(self._holdings) + STALE_MAX:
            self._ends = [end for end in self._ends if self._is_end(*end)]
            heapq.heapify(self._ends)

    def _pass_ends(self, now_s: float) -> None:
        """Move the times that are over to the others that are; the first of those that remain is somebody's."""
        ends = self._ends
        while ends and (ends[0][0] <= now_s or not self._is_end(*ends[0])):
            end = heapq.heappop(ends)
            if self._is_end(*end) and end not in self._over:
                insort(self._over, end)

    def _is_end(self, over_s: float, holder: int) -> bool:
        holding = self._holdings.get(holder)
        return holding is not None and holding.over_s == over_s

    def first_kept(self) -> int | None:
        """The holder, of those that run nothing, whose request ended first; None: there is none."""
        kept = [(holding.ended_s, holder) for holder, holding in self._holdings.items() if not holding.runs]
        return min(kept)[1] if kept else None

    def _put(self, holder: int, holding: Holding, block_tokens: int) -> None:
        before = self._holdings.get(holder)
        self._holdings[holder] = holding
        users, here = self._users, 0
        if before is not None:
            self.tokens -= before.more
            if holding.blocks[: len(before.blocks)] == before.blocks:
                here = len(before.blocks)
            else:
                self._leave(before.blocks)
        for block in holding.blocks[here:]:
            count = users.get(block, 0)
            users[block] = count + 1
            if not count:
                self._block_tokens[block] = block_tokens
                self.tokens += block_tokens
        self.tokens += holding.more

    def _leave(self, blocks: Sequence[int]) -> None:
        users = self._users
        for block in blocks:
            count = users[block] - 1
            if count:
                users[block] = count
            else:
                del users[block]
                self.tokens -= self._block_tokens.pop(block)
