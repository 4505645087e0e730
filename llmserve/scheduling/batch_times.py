"""How long a batch would take: its engine's speed, its pace lately, and its bin's lengths.

    T(b) = pace * (prefill_s + E[longest answer of b] * step_s(b))

Where slots refill each request ends for itself, in a step that all slots share:

    T(b) = pace * (prefill_s + E[an answer] * step_s(slots))

An engine whose speed nobody told takes no time, as far as is known: then only deadlines that have passed are late.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from llmserve.scheduling.engines import EngineState
from llmserve.scheduling.lengths import Tokens

PACE_GRID = 0.02  # paces are told apart in steps of 2 %


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """expected : seconds of batches of 1, 2, ... requests as long as answers are on average.  least : as short as the
    shortest are, on an engine that runs nothing else.  Both non-decreasing.
    """

    expected: tuple[float, ...]
    least: tuple[float, ...]


class Timetable:
    """Batch times of every engine, model and bin; made again when lengths, speeds or paces change."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._times: dict[tuple[str, str, int], tuple[Tokens, float, object, BatchTimes]] = {}

    def alone(self, engine: EngineState, model: str, now_s: float) -> tuple[float, float]:
        """What a request alone on an engine takes: seconds before its first token, and for each. No time, as far as is
        known, on one that has shown nothing of its pace lately.
        """
        if now_s >= engine.proven_until_s(model):
            return 0.0, 0.0
        speed, pace = engine.speed(model), _rounded(engine.pace(model))
        return (pace * speed.prefill_s, pace * speed.step_s[0]) if speed is not None and speed.step_s else (0.0, 0.0)

    def of(self, engine: EngineState, model: str, bin_index: int, tokens: Tokens) -> BatchTimes:
        """tokens : of the bin's answers."""
        pace = _rounded(engine.pace(model))
        key = (engine.info.name, model, bin_index)
        known = self._times.get(key)
        if known is not None and known[0] is tokens and known[1] == pace and known[2] is engine.info:
            return known[3]
        times = self._make(engine, model, tokens, pace)
        self._times[key] = tokens, pace, engine.info, times
        return times

    def _make(self, engine: EngineState, model: str, tokens: Tokens, pace: float) -> BatchTimes:
        speed = engine.speed(model)
        if speed is None or not speed.step_s:
            nothing = (0.0,) * self._batch_size
            return BatchTimes(nothing, nothing)
        slots = min(engine.info.slots, len(speed.step_s))
        together = [min(size, slots) for size in range(1, self._batch_size + 1)]
        least = [pace * speed.batch_s(tokens.least, size) for size in together]
        if engine.info.barrier:
            expected = [
                pace * speed.batch_s(longest, size) for longest, size in zip(tokens.longest, together, strict=True)
            ]
        else:  # each ends for itself, in a step that all slots share
            expected = [pace * speed.batch_s(tokens.longest[0], slots)] * self._batch_size
        return BatchTimes(_rising(expected), _rising(least))


def _rounded(pace: float) -> float:
    return 1.0 if pace == 1.0 else max(1, round(pace / PACE_GRID)) * PACE_GRID


def _rising(times: list[float]) -> tuple[float, ...]:
    return tuple(accumulate(times, max))
