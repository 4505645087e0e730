"""Saves what a server has learnt: every minute, and at the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from llmserve.runtime.lasting import lasting
from predictor.state import Saving

log = logging.getLogger("llmserve")

SAVE_EVERY_S = 60.0


class States(Protocol):
    """Where states are written."""

    def write(self, state: dict[str, Any]) -> int:
        """Returns the number of bytes."""
        ...


@dataclass(frozen=True, slots=True)
class Saved:
    """A state that was saved. at_s : its end, unix time.  seconds : to make and to write it.  size : bytes."""

    at_s: float
    seconds: float
    size: int


class Saver:
    """Regular saves of a state, which is made on the event loop in slices, and written in a thread.

    A write that fails is logged once, and tried again with the next state.

    last      None until a state is saved
    failures  number of states that could not be saved
    """

    def __init__(self, states: States, saving: Callable[[], Saving], *, every_s: float = SAVE_EVERY_S) -> None:
        self._states = states
        self._saving = saving
        self._every_s = every_s
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._failing = False
        self.last: Saved | None = None
        self.failures = 0

    def start(self) -> None:
        """Must be called inside the running event loop."""
        self._task = lasting("saving what was learnt", self._save_regularly)

    async def close(self) -> None:
        """Save for the last time. A write that has begun is completed first."""
        self._stop.set()
        if self._task is not None:
            await self._task
        await self._save()

    async def _save_regularly(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), self._every_s)
                return
            await self._save()

    async def _save(self) -> None:
        began_s = time.perf_counter()
        try:
            state = await _in_slices(self._saving())
            size = await asyncio.to_thread(self._states.write, state)
        except Exception as error:  # serving goes on without a file
            if not self._failing:
                log.warning("what was learnt cannot be saved: %s", error, exc_info=not isinstance(error, OSError))
            self._failing = True
            self.failures += 1
        else:
            self.last = Saved(time.time(), time.perf_counter() - began_s, size)
            if self._failing:
                log.info("what was learnt is saved again")
            self._failing = False


async def _in_slices(saving: Saving) -> dict[str, Any]:
    """Let the event loop do other work after each slice."""
    while True:
        try:
            next(saving)
        except StopIteration as done:
            state: dict[str, Any] = done.value
            return state
        await asyncio.sleep(0)
