"""Tunes a live server: the replays run in a process of their own, and the event loop only sends it the steps."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable

import msgspec

from llmserve.runtime.lasting import lasting
from llmserve.scheduling.messages import Event
from llmserve.simulation.twin.tuner import EVERY_S, Answer, Question, Tuner

log = logging.getLogger("llmserve")

STEPS_A_LINE = 200  # about a millisecond of the event loop
ANSWER_S_MAX = 300.0  # on a busy machine, a process of the lowest priority may wait long for a core


class LiveTuning:
    """Asks a tuner's questions regularly. notify : gives the scheduler an event.  now_s : the scheduler's clock."""

    def __init__(self, tuner: Tuner, notify: Callable[[Event], None], now_s: Callable[[], float]) -> None:
        self._tuner = tuner
        self._notify = notify
        self._now_s = now_s
        self._task: asyncio.Task[None] | None = None
        self._failing = False

    def start(self) -> None:
        """Must be called inside the running event loop."""
        self._task = lasting("tuning the order", self._tune_regularly)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _tune_regularly(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                await self._tune()
                self._failing = False
            except Exception:  # serving goes on with the present order
                if not self._failing:
                    log.exception("the last minutes could not be replayed: the order stays")
                self._failing = True

    async def _tune(self) -> None:
        question = self._tuner.question(self._now_s())
        if question is None:
            return
        event = self._tuner.take(await ask(question))
        if event is not None:
            self._notify(event)


async def ask(question: Question) -> Answer:
    """Answer a question in a process. Raises RuntimeError when the process fails, TimeoutError when it takes too long.

    The question is written in short slices, so that the event loop serves clients in between.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "llmserve.simulation.twin.process",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None, "the process was started with a pipe"
    assert process.stdout is not None, "the process was started with a pipe"
    try:
        async with asyncio.timeout(ANSWER_S_MAX):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the exit status tells more
                process.stdin.write(msgspec.json.encode(msgspec.structs.replace(question, steps=())) + b"\n")
                for start in range(0, len(question.steps), STEPS_A_LINE):
                    line = question.steps[start : start + STEPS_A_LINE]
                    process.stdin.write(msgspec.json.encode(line) + b"\n")
                    await process.stdin.drain()
                    await asyncio.sleep(0)
                process.stdin.close()
            answered = await process.stdout.read()
            status = await process.wait()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    if status != 0:
        raise RuntimeError(f"the process of the replay ended with status {status}")
    return msgspec.json.decode(answered, type=Answer)
