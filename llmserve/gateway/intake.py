"""The way of a request through the stages of its admission, before and after its body."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any

from llmserve.calls.client_request import ClientExchange
from llmserve.gateway.draft import Draft
from llmserve.gateway.endpoints import Endpoint
from llmserve.gateway.stages import Admission, is_large


class Intake(ABC):
    """Takes requests as far as a draft whose body is read; a subclass decides what becomes of the draft."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._tasks: set[asyncio.Task[None]] = set()

    @abstractmethod
    def _take(self, draft: Draft, exchange: ClientExchange) -> None:
        """Go on with a request whose body is read. Raises RequestError."""

    def admit(self, exchange: ClientExchange, endpoint: Endpoint) -> None:
        """Take a request whose head has arrived through the stages that need no body. Raises RequestError."""
        draft = Draft(endpoint, exchange.headers)
        try:
            self._admission.enter(draft)
        finally:
            if draft.account is not None:
                exchange.on_end = draft.account.release
                exchange.holder = exchange.state.key = draft.key
        exchange.state.draft = draft

    def complete(self, exchange: ClientExchange) -> None:
        """Take a complete request through the stages that read the body."""
        draft: Draft = exchange.state.draft
        exchange.state.draft = None
        draft.body = exchange.body
        if self._admission.by_address:
            draft.address = exchange.address
        if is_large(draft.body):
            self._run(self._complete_large(draft, exchange))
            return
        try:
            self._admission.read(draft)
            self._take(draft, exchange)
        except Exception as error:
            exchange.refuse(error)

    async def _complete_large(self, draft: Draft, exchange: ClientExchange) -> None:
        try:
            await self._admission.read_in_thread(draft)
            if not exchange.ended:
                self._take(draft, exchange)
        except Exception as error:
            exchange.refuse(error)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
