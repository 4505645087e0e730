"""The tokens of prompts that an engine has computed, by its own tokenizer.

An engine is asked after it has answered, so that no request waits for a tokenizer: until then the scheduler goes by
what was sent. One prompt at a time is asked for, and of many the last ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

import msgspec

from llmserve.calls.in_flight import InFlightCall
from llmserve.engines.engine import EngineError, Passed
from llmserve.kv_events.chains import Chains
from llmserve.kv_events.following import Count
from llmserve.request import Call
from llmserve.wire.lenient_json import read

log = logging.getLogger("llmserve")

PATH = "/tokenize"
PATHS = ("/v1/chat/completions", "/v1/completions")  # whose bodies the tokenizer takes as they are
WAITING_MAX = 16  # prompts; of more the oldest is left out
ABSENT = (404, 405, 501)

Ask = Callable[[str, str, bytes | None], Awaitable[Passed]]


class _Tokens(msgspec.Struct):
    tokens: list[int]


class Tokenizing:
    """Ties the prompts of one engine's answers to its blocks.

    ask    sends the engine a request of our own
    count  takes what the metrics count, with its number
    """

    def __init__(self, engine: str, chains: Chains, ask: Ask, count: Count) -> None:
        self._engine, self._chains, self._ask, self._count = engine, chains, ask, count
        self._waiting: deque[tuple[Call, int]] = deque(maxlen=WAITING_MAX)
        self._task: asyncio.Task[None] | None = None
        self._absent = False

    def answered(self, in_flight: InFlightCall) -> None:
        """Take note of a call that the engine has answered."""
        call, counts = in_flight.call, in_flight.measured.counts
        told = counts.prompt_tokens if counts is not None else None
        if self._absent or not self._chains.block_size or call.wire.path not in PATHS:
            return
        if not told or self._chains.knows(call.blocks):
            return
        self._waiting.append((call, told))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())

    async def _work(self) -> None:
        while self._waiting and not self._absent:
            call, told = self._waiting.popleft()
            try:
                passed = await self._ask("POST", PATH, call.wire.sent_body)
            except EngineError:
                continue
            self._absent = passed.status in ABSENT
            if self._absent:
                text = "engine %s has no %s: its KV events tell when its cache is cleared, and no more"
                log.warning(text, self._engine, PATH)
            said = read(_Tokens, passed.body) if passed.status == 200 else None
            if said is not None and len(said.tokens) == told:
                self._chains.tie(call.blocks, call.block_share, said.tokens)
                self._count("tied", 1)

    def close(self) -> None:
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
