"""What vLLM's /metrics tell a scheduler: how much runs, how much waits, and how many tokens its KV cache holds."""

from __future__ import annotations

import re
from dataclasses import dataclass

RUNNING = re.compile(r"^vllm:num_requests_running(?:\{.*\})? (\S+)$", re.M)
WAITING = re.compile(r"^vllm:num_requests_waiting(?:\{.*\})? (\S+)$", re.M)
CACHE = re.compile(r"^vllm:cache_config_info\{(.*)\} \S+$", re.M)
CACHE_TOKENS = re.compile(r'\bkv_cache_size_tokens="(\d+)"')
BLOCKS = re.compile(r'\bnum_gpu_blocks="(\d+)"')  # what older versions tell instead
BLOCK_SIZE = re.compile(r'\bblock_size="(\d+)"')

FIRST_GROWTH = 2.0  # of the number of slots, when all of them are in use and nothing waits
GROWTH = 1.25  # likewise, once they were found to be all that there are


@dataclass(frozen=True, slots=True)
class Load:
    """One look at an engine. tokens_max: tokens that its KV cache holds; None when it does not tell."""

    running: int
    waiting: int
    tokens_max: int | None


def read_load(text: str) -> Load | None:
    """From the text of /metrics, summed over the engine's data-parallel ranks; None when it is not vLLM's."""
    if RUNNING.search(text) is None:
        return None
    tokens = sum(_cache_tokens(labels) for labels in CACHE.findall(text))
    return Load(_sum(RUNNING, text), _sum(WAITING, text), tokens or None)


def _cache_tokens(labels: str) -> int:
    """0 when they do not tell."""
    told, blocks, size = (pattern.search(labels) for pattern in (CACHE_TOKENS, BLOCKS, BLOCK_SIZE))
    if told is not None:
        return int(told[1])
    return int(blocks[1]) * int(size[1]) if blocks is not None and size is not None else 0


def _sum(pattern: re.Pattern[str], text: str) -> int:
    return sum(int(float(count)) for count in pattern.findall(text))


class SlotsLearner:
    """How many requests an engine runs at once, from looks at it; vLLM does not tell its max_num_seqs.

    While more wait inside the engine than were sent to wait there, what runs is what fits; while all slots are in use
    and nothing waits, there may be more. One look can fall between a request's arrival and its first step: two in a
    row must agree that something waits.

    slots  to begin with; few, for what is sent too early waits inside the engine, first come first served
    found  more waited inside than was sent to wait there: until then there may be far more slots
    """

    def __init__(self, slots: int, look_ahead: int) -> None:
        self.slots = slots
        self.found = False
        self._look_ahead = look_ahead
        self._before: Load | None = None

    def observe(self, load: Load) -> int:
        """The number of slots to use from now on."""
        before, self._before = self._before, load
        if before is not None and min(before.waiting, load.waiting) > self._look_ahead:
            self.slots, self.found = max(1, before.running, load.running), True
        elif load.waiting == 0 and load.running >= self.slots:
            self.slots = int(self.slots * (GROWTH if self.found else FIRST_GROWTH)) + 1
        return self.slots
