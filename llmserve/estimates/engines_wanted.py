"""How many engines a model wants: the signal for whoever starts and stops engines. Pure.

    work        engine-seconds: the seconds for which a request has one of an engine's slots, over the slots
    r           arriving work, engine-seconds a second: what arrivals alone keep busy
    W(d)        waiting work that is due by d, a deadline; requests without one are due REPLY_S after now
    start_s     how long an engine takes to start: none helps earlier

    wanted = ceil(r / BUSY + max over d of W(d) / max(d - now, start_s))

The second term is the demand bound of scheduling by the earliest deadline (Baruah, Rosier and Howell, 1990): with fewer
engines some deadline cannot be met, however the requests are ordered. BUSY leaves room for chance: at 1 the queue of
random arrivals grows without end. Work that is due before an engine could start counts at start_s: more engines would
come too late for it, and fewer would make the rest late.

Hysteresis (`Wanted`): up at once, for a queue that waits for engines grows meanwhile; down to the largest number wanted
in the last DOWN_AFTER_S, for an engine that is stopped costs a start when it is wanted again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping

import msgspec

from llmserve.scheduling.queues.model_queues import ModelQueues

BUSY = 0.8
REPLY_S = 60.0
DOWN_AFTER_S = 300.0
ROUNDING = 1e-9


class Load(msgspec.Struct, frozen=True):
    """The load of one model.

    arriving  engine-seconds of work that arrive each second
    waiting   (seconds until the deadline, None without one; engine-seconds of the forecast) of each waiting request
    start_s   seconds that an engine takes to start
    """

    arriving: float
    waiting: tuple[tuple[float | None, float], ...] = ()
    start_s: float = 60.0


def engines_wanted(load: Load) -> int:
    """Engines for this load now, without hysteresis; 0 without any load."""
    within = load.arriving / BUSY + _backlog(load.waiting, load.start_s)
    return math.ceil(within - ROUNDING)


def _backlog(waiting: Iterable[tuple[float | None, float]], start_s: float) -> float:
    """The largest ratio of the waiting work that is due by a time, to that time."""
    due = sorted((REPLY_S if left_s is None else left_s, work) for left_s, work in waiting)
    most = total = 0.0
    for left_s, work in due:
        total += work
        most = max(most, total / max(left_s, start_s, ROUNDING))
    return most


class Peak:
    """The largest number of the last `down_after_s` seconds. Times never decrease."""

    def __init__(self, down_after_s: float) -> None:
        self._down_after_s = down_after_s
        self._peaks: deque[tuple[float, int]] = deque()  # (time, number) that no later number exceeds

    def at(self, now_s: float, number: int) -> int:
        """The peak from now on. number : now"""
        while self._peaks and self._peaks[-1][1] <= number:
            self._peaks.pop()
        self._peaks.append((now_s, number))
        while self._peaks[0][0] < now_s - self._down_after_s:
            self._peaks.popleft()
        return self._peaks[0][1]


class Wanted:
    """The number with hysteresis. least, most : engines, whatever the load. Times never decrease."""

    def __init__(self, *, least: int = 0, most: int | None = None, down_after_s: float = DOWN_AFTER_S) -> None:
        self._least, self._most, self._peak = least, most, Peak(down_after_s)

    def at(self, now_s: float, load: Load) -> int:
        """Engines wanted from now on."""
        wanted = max(engines_wanted(load), self._least)
        return self._peak.at(now_s, wanted if self._most is None else min(wanted, self._most))


class EnginesWanted:
    """The signal of each model. Call `update` once in a while: each second, or at each scrape."""

    def __init__(self) -> None:
        self._wanted: dict[str, Wanted] = {}

    def update(self, models: Mapping[str, ModelQueues], now_s: float) -> dict[str, int]:
        """Engines by model. A model without answers so far wants the engines that it has; without these, one."""
        self._wanted = {model: wanted for model, wanted in self._wanted.items() if model in models}
        return {model: self._of(model, queues, now_s) for model, queues in models.items()}

    def _of(self, model: str, queues: ModelQueues, now_s: float) -> int:
        if not queues.engines or not queues.service.answers:
            return len(queues.engines) or min(1, queues.waiting)
        return self._wanted.setdefault(model, Wanted()).at(now_s, load_of(queues, now_s))


def load_of(queues: ModelQueues, now_s: float) -> Load:
    """The load of a model with engines and answers. What runs is what arrivals keep busy (Little's law)."""
    slots = sum([engine.info.slots for engine in queues.engines]) / len(queues.engines)
    running = [run.queued.request for engine in queues.engines for run in engine.running.values()]
    busy = sum([request.sequences for request in running if request.model == queues.model]) / slots
    waiting = []
    for queued in queues.all_waiting():
        request = queued.request
        answer_s, prompt_s = queues.work(queued.expected_tokens, request.prompt_tokens, queued.cached_tokens)
        left_s = None if request.deadline_s is None else max(0.0, request.deadline_s - now_s)
        waiting.append((left_s, (request.sequences * answer_s + prompt_s) / slots))
    return Load(busy, tuple(waiting))
