"""Background tasks that continue after an exception, which the log and /ready report.

A loop that saves, feeds, claims or watches has no caller to notice its end. So `lasting` runs each such loop, even if
the loop catches exceptions itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple
from weakref import WeakKeyDictionary

log = logging.getLogger("llmserve")

AGAIN_S, AGAIN_S_MAX = 1.0, 60.0  # until a task that failed goes on; doubled each time it fails again soon
FAILING_S = 120.0  # a task that failed counts as failing for so long


class Failure(NamedTuple):
    name: str
    cause: str
    at_s: float  # of the monotonic clock


# Which tasks of this process fail belongs to the process, as its log does: /ready tells it for all of them.
_failures: WeakKeyDictionary[asyncio.Task[None], Failure] = WeakKeyDictionary()


def lasting(name: str, run: Callable[[], Awaitable[None]], *, again_s: float = AGAIN_S) -> asyncio.Task[None]:
    """Begin a task that runs `run()`, again after each exception, until it returns or the task is cancelled.

    name : what the task does, in words for the log: "the feed of batch jobs"
    """
    return asyncio.create_task(_last(name, run, again_s), name=name)


def failing() -> dict[str, str]:
    """The tasks that have failed lately: the last cause by name."""
    since_s = time.monotonic() - FAILING_S
    failures = [failure for task, failure in _failures.items() if not task.done() and failure.at_s >= since_s]
    return {failure.name: failure.cause for failure in failures}


async def _last(name: str, run: Callable[[], Awaitable[None]], again_s: float) -> None:
    pause_s = again_s
    task = asyncio.current_task()
    assert task is not None, "a coroutine runs in a task"
    while True:
        began_s = time.monotonic()
        try:
            await run()
        except Exception as error:
            if time.monotonic() - began_s > AGAIN_S_MAX:
                pause_s = again_s
            log.exception("%s failed, and goes on in %g s", name, pause_s)
            _failures[task] = Failure(name, f"{type(error).__name__}: {error}", time.monotonic())
        else:
            return
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, AGAIN_S_MAX)
