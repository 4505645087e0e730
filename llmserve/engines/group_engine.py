"""A serving group in a process of its own, as an engine: llmserve behind llmserve.

The front process is the door: it has read the call, knows its stream and its deadline and has predicted its length. All
that goes along in headers. The group's process schedules, and its answer tells which of its engines ran it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from llmserve.engines.openai_engine import HttpAnswer, OpenAIEngine, Timeouts
from llmserve.headers import PREDICTED_HEADER, SLO_HEADER, STREAM_CHARS_MAX, STREAM_HEADER
from llmserve.request import Batch, Call, EngineInfo

LEAST_MS = 0.001  # a deadline that has just passed: the group says so itself


class GroupEngine(OpenAIEngine):
    """now_s : the front's clock, the one that deadlines are on."""

    def __init__(
        self,
        info: EngineInfo,
        url: str,
        *,
        now_s: Callable[[], float],
        timeouts: Timeouts,
        restart: Callable[[], Awaitable[None]],
    ) -> None:
        super().__init__(info, url, timeouts=timeouts, restart=restart)
        self._now_s = now_s

    @asynccontextmanager
    async def open(self, call: Call, batch: Batch) -> AsyncIterator[HttpAnswer]:
        """The batch has one request, as those of a front process do."""
        (request,) = batch.requests
        headers = dict(call.headers)
        if request.deadline_s is not None:
            left_ms = (request.deadline_s - self._now_s()) * 1e3
            headers[SLO_HEADER] = f"{max(LEAST_MS, left_ms):.3f}"
        if request.predicted_tokens:
            headers[PREDICTED_HEADER] = f"{request.predicted_tokens:g}"
        if call.stream_name.isascii() and call.stream_name.isprintable():
            headers[STREAM_HEADER] = call.stream_name[:STREAM_CHARS_MAX]
        async with super().open(replace(call, headers=tuple(headers.items())), batch) as answer:
            answer.fault = answer.fault and answer.status != 504  # the request was late, not the group at fault
            yield answer
