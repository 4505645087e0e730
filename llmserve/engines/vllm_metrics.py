"""Reads vLLM's /metrics for a scheduler: running and waiting requests, and the KV cache's capacity in tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

RUNNING = re.compile(r"^vllm:num_requests_running(?:\{.*\})? (\S+)$", re.M)
WAITING = re.compile(r"^vllm:num_requests_waiting(?:\{.*\})? (\S+)$", re.M)
CACHE = re.compile(r"^vllm:cache_config_info\{(.*)\} \S+$", re.M)
CACHE_TOKENS = re.compile(r'\bkv_cache_size_tokens="(\d{1,15})"')
BLOCKS = re.compile(r'\bnum_gpu_blocks="(\d{1,15})"')  # older versions have blocks instead of tokens
BLOCK_SIZE = re.compile(r'\bblock_size="(\d{1,15})"')

COUNT_MAX = 1 << 31  # of requests
TOKENS_MAX = 1 << 40
SLOTS_MAX = 1 << 16  # no engine has as many: an engine that always claims to be full must not grow without end

FIRST_GROWTH = 2.0  # growth factor of the number of slots, when all slots are in use and no request waits
GROWTH = 1.25  # the same factor after requests have waited inside the engine once


@dataclass(frozen=True, slots=True)
class Load:
    """One reading of an engine's metrics. tokens_max: KV cache capacity in tokens; None if not reported."""

    running: int
    waiting: int
    tokens_max: int | None


def read_load(text: str) -> Load | None:
    """Parse the text of /metrics, with sums over the engine's data-parallel ranks.

    None if not from vLLM, or if a count is no number of requests. A cache of no size, or of an absurd one, is unknown.
    """
    if RUNNING.search(text) is None:
        return None
    running, waiting = _sum(RUNNING, text), _sum(WAITING, text)
    if running is None or waiting is None:
        return None
    tokens = sum(_cache_tokens(labels) for labels in CACHE.findall(text))
    return Load(running, waiting, tokens if 0 < tokens <= TOKENS_MAX else None)


def _cache_tokens(labels: str) -> int:
    """Return the cache capacity in tokens; 0 if the labels have none."""
    tokens, blocks, size = (pattern.search(labels) for pattern in (CACHE_TOKENS, BLOCKS, BLOCK_SIZE))
    if tokens is not None:
        return int(tokens[1])
    return int(blocks[1]) * int(size[1]) if blocks is not None and size is not None else 0


def _sum(pattern: re.Pattern[str], text: str) -> int | None:
    """The sum of the counts; None if it is none: negative, not finite, absurd, or no number at all."""
    try:
        counts = [float(count) for count in pattern.findall(text)]
    except ValueError:
        return None
    total = sum(counts)
    return int(total) if total <= COUNT_MAX and min(counts, default=0.0) >= 0 else None  # NaN is not <= anything


class SlotsLearner:
    """Estimates an engine's number of slots from readings of its metrics; vLLM does not report its max_num_seqs.

    While more requests than the look-ahead wait inside the engine, the number of running requests is the number of
    slots. While all slots are in use and no request waits, the engine may have more slots. A reading may fall between
    a request's arrival and its first step, so two readings in a row must show the waiting requests.

    slots          first guess; choose few, because requests sent too early wait inside the engine in FCFS order
    limit_reached  more requests than the look-ahead have waited; before that, there may be far more slots
    """

    def __init__(self, slots: int, look_ahead: int) -> None:
        self.slots = slots
        self.limit_reached = False
        self._look_ahead = look_ahead
        self._before: Load | None = None

    def observe(self, load: Load) -> int:
        """Add a reading. Returns the number of slots to use from now on."""
        before, self._before = self._before, load
        if before is not None and min(before.waiting, load.waiting) > self._look_ahead:
            self.slots, self.limit_reached = max(1, before.running, load.running), True
        elif load.waiting == 0 and load.running >= self.slots:
            self.slots = int(self.slots * (GROWTH if self.limit_reached else FIRST_GROWTH)) + 1
        self.slots = min(self.slots, SLOTS_MAX)
        return self.slots

    def state(self) -> dict[str, Any]:
        return {"slots": self.slots, "limit_reached": self.limit_reached}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state. Raises ValueError for anything else."""
        slots, limit_reached = state.get("slots"), state.get("limit_reached")
        if type(slots) is not int or slots < 1 or type(limit_reached) is not bool:
            raise ValueError(f"{state} is no state of an engine's slots")
        self.slots, self.limit_reached = slots, limit_reached
