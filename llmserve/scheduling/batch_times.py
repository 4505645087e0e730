"""How long a batch would take: its engine's speed, its pace lately, and its bin's lengths.

    T(b) = pace * (prefill_s + E[longest answer of b] * step_s(b))

Where slots refill each request ends for itself, in a step that all slots share:

    T(b) = pace * (prefill_s + E[an answer] * step_s(slots))

An engine whose speed nobody told takes no time, as far as is known: then only deadlines that have passed are late.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from bins.profile import StepTimes
from llmserve.request import EngineInfo
from llmserve.scheduling.engines import EngineState
from llmserve.scheduling.lengths import Tokens
from llmserve.scheduling.queues import QueuedRequest

SURELY_LATE_S = 1e-6  # past the last moment: what could start in that very moment still can
PACE_GRID = 0.02  # paces are told apart in steps of 2 %


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """expected : seconds of batches of 1, 2, ... requests as long as answers are on average.  least : as short as the
    shortest are, on an engine that runs nothing else.  Both non-decreasing.
    """

    expected: tuple[float, ...]
    least: tuple[float, ...]

    def at(self, pace: float) -> BatchTimes:
        return BatchTimes(tuple([pace * s for s in self.expected]), tuple([pace * s for s in self.least]))


class Timetable:
    """Batch times of every engine, model and bin; made again when lengths, speeds or paces change."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        # By group and model: what a request takes alone, on each engine, and until when that holds.
        self._alone: dict[tuple[str, str], tuple[float, set[tuple[float, float]]]] = {}
        # By engine, model and bin: of which answers, which engine and at which pace; at pace 1, and at that pace.
        self._times: dict[tuple[str, str, int], tuple[Tokens, EngineInfo, float, BatchTimes, BatchTimes]] = {}

    def late_at_s(self, queued: QueuedRequest, engines: Sequence[EngineState], least: float, now_s: float) -> float:
        """From when on a request with a deadline cannot be in time any more, as far as is known now: even alone and at
        once on the fastest of these engines, and as short as the shortest of its bin or as its own prediction.

        least : output tokens of the shortest answers of its bin
        """
        request = queued.request
        own = request.quantiles[0] if request.quantiles else request.predicted_tokens
        tokens = least if own is None else min(own, least)
        lines = self._lines_of(queued.group, request.model, engines, now_s)
        alone_s = min([prefill_s + tokens * step_s for prefill_s, step_s in lines], default=0.0)
        return min(queued.deadline_s, queued.deadline_s - alone_s + SURELY_LATE_S)

    def invalidate(self) -> None:
        """After a change of who serves what, and how fast."""
        self._alone.clear()

    def _lines_of(
        self, group: str, model: str, engines: Sequence[EngineState], now_s: float
    ) -> set[tuple[float, float]]:
        """What a request takes alone on each engine: seconds before its first token, and for each. No time, as far as
        is known, on one that has shown nothing of its pace lately.
        """
        until_s, lines = self._alone.get((group, model), (-math.inf, set()))
        if now_s >= until_s:
            until_s, lines = math.inf, set()
            for engine in engines:
                proven_until_s = engine.proven_until_s(model)
                if now_s < proven_until_s:
                    lines.add(_alone(engine, model))
                    until_s = min(until_s, proven_until_s)
                else:
                    lines.add((0.0, 0.0))
            self._alone[group, model] = until_s, lines
        return lines

    def of(self, engine: EngineState, model: str, bin_index: int, tokens: Tokens) -> BatchTimes:
        """tokens : of the bin's answers."""
        pace = _rounded(engine.pace(model))
        key = (engine.info.name, model, bin_index)
        known = self._times.get(key)
        if known is not None and known[0] is tokens and known[1] is engine.info:
            if known[2] == pace:
                return known[4]
            told = known[3]
        else:
            told = _told(engine.speed(model), engine.info.slots, engine.info.barrier, tokens, self._batch_size)
        times = told if pace == 1.0 else told.at(pace)
        self._times[key] = tokens, engine.info, pace, told, times
        return times


@lru_cache(maxsize=1024)  # engines of a kind are told the same
def _told(speed: StepTimes | None, slots: int, barrier: bool, tokens: Tokens, batch_size: int) -> BatchTimes:
    """At pace 1."""
    if speed is None or not speed.step_s:
        nothing = (0.0,) * batch_size
        return BatchTimes(nothing, nothing)
    slots = min(slots, len(speed.step_s))
    together = [min(size, slots) for size in range(1, batch_size + 1)]
    least = [speed.batch_s(tokens.least, size) for size in together]
    if barrier:
        expected = [speed.batch_s(longest, size) for longest, size in zip(tokens.longest, together, strict=True)]
    else:  # each ends for itself, in a step that all slots share
        expected = [speed.batch_s(tokens.longest[0], slots)] * batch_size
    return BatchTimes(_rising(expected), _rising(least))


def _alone(engine: EngineState, model: str) -> tuple[float, float]:
    speed, pace = engine.speed(model), _rounded(engine.pace(model))
    return (pace * speed.prefill_s, pace * speed.step_s[0]) if speed is not None and speed.step_s else (0.0, 0.0)


def _rounded(pace: float) -> float:
    return 1.0 if pace == 1.0 else max(1, round(pace / PACE_GRID)) * PACE_GRID


def _rising(times: list[float]) -> tuple[float, ...]:
    return tuple(accumulate(times, max))
