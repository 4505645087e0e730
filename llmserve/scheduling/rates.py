"""Rates and times with a bounded memory: arrivals, completions, service times."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")

JUMP_ARRIVALS = 8
# A sum of 8 exponential times of mean 1 lies outside each of these bounds once in ten thousand times; outside, the rate
# counts as jumped.
JUMP_UP, JUMP_DOWN = 1.4, 22.0
ITEM_RATE_S = 600.0  # memory of ItemRate
ROUNDING = 1e-6  # relative: makes a silence longer, so that the estimate falls below the rate despite rounding


class ArrivalRate:
    """Arrivals a second: an exponential window over the last arrivals. A jump of the rate empties the window.

    memory: arrivals after which an observation's weight has fallen to a third.
    """

    def __init__(self, memory: int = 128) -> None:
        self._keep = 1.0 - 1.0 / memory
        self._last_s: deque[float] = deque(maxlen=JUMP_ARRIVALS + 1)
        self._gaps = self._seconds = 0.0  # number and total length of the gaps, both with the same decay
        self._since_jump = 0

    def observe(self, now_s: float) -> bool:
        """Count an arrival. True when the rate has jumped; older arrivals are then forgotten."""
        last_s = self._last_s
        if last_s:
            self._gaps = self._keep * self._gaps + 1.0
            self._seconds = self._keep * self._seconds + now_s - last_s[-1]
        last_s.append(now_s)
        self._since_jump += 1
        if self._since_jump <= JUMP_ARRIVALS or len(last_s) <= JUMP_ARRIVALS:
            return False
        took_s = now_s - last_s[0]
        expected_s = self._seconds / self._gaps  # of one gap
        if JUMP_UP * expected_s <= took_s <= JUMP_DOWN * expected_s:
            return False
        self._gaps, self._seconds, self._since_jump = float(JUMP_ARRIVALS), took_s, 0
        return True

    def per_s(self, now_s: float) -> float | None:
        """The estimate; None before two arrivals. It falls once the present gap is longer than the mean gap."""
        if not self._gaps:
            return None
        silence_s = now_s - self._last_s[-1]
        mean_s = self._seconds / self._gaps
        seconds, gaps = self._seconds, self._gaps
        if silence_s > mean_s:
            seconds, gaps = seconds + silence_s, gaps + 1.0
        return gaps / seconds if seconds > 0 else math.inf

    def below_at_s(self, rate_per_s: float) -> float:
        """When the estimate falls below this rate if nothing arrives, provided that it is not below yet."""
        return self._last_s[-1] + (self._gaps + 1.0) / rate_per_s * (1.0 + ROUNDING) - self._seconds


class Arrivals:
    """Arrivals a second of each bin: the total rate, divided by the bins' shares of the last arrivals."""

    def __init__(self, bins: int, memory: int = 512) -> None:
        self.total = ArrivalRate()
        self._keep = 1.0 - 1.0 / memory
        self._shares = [1.0 / bins] * bins

    def observe(self, bin_index: int, now_s: float) -> bool:
        """Count an arrival. True when the total rate has jumped."""
        self._shares = [self._keep * share for share in self._shares]
        self._shares[bin_index] += 1.0 - self._keep
        return self.total.observe(now_s)

    @property
    def shares(self) -> tuple[float, ...]:
        """Of each bin, sum 1."""
        return tuple(self._shares)


class CompletionRate(Generic[T]):
    """Work completed per second of busy time, over the last `memory` completions. T : what was completed

    The seconds of what has ended are asked for as late as those of what waits. So both are told by the same forecasts
    and speeds, and an error that all of them have in common is none here.
    """

    def __init__(self, memory: int = 64) -> None:
        self._ends: deque[tuple[float, T]] = deque(maxlen=memory)

    def observe(self, now_s: float, completed: T) -> None:
        self._ends.append((now_s, completed))

    def idle(self) -> None:
        """Forget all completions, because nothing is left to run: the idle time must not count as busy."""
        self._ends.clear()

    def drain_time_s(self, work_s: float, seconds_of: Callable[[T], float], further: float = 0.0) -> float | None:
        """Predicted seconds until work has ended, and that of so many mean requests more; None before two distinct
        completion times. work_s : seconds of a slot.  seconds_of : likewise, of what was completed
        """
        ends = self._ends
        if len(ends) < 2 or ends[-1][0] <= ends[0][0]:
            return None
        completed_s = sum([seconds_of(completed) for _, completed in islice(ends, 1, None)])
        passed_s = ends[-1][0] - ends[0][0]
        rest = work_s / completed_s if completed_s > 0 else 0.0
        return (rest + further / (len(ends) - 1)) * passed_s


class ServiceTime:
    """Service times: mean seconds an output token and mean tokens an answer, with exponential decay.

    memory: completions after which an observation's weight has fallen to a third.
    seconds_per_token, tokens_mean: the means at the start.  answers: their weight; 0: a guess until the first answer.
    """

    def __init__(
        self,
        memory: int = 64,
        *,
        seconds_per_token: float = 0.02,
        tokens_mean: float = 256.0,
        answers: float = 0.0,
    ) -> None:
        self._keep = 1.0 - 1.0 / memory
        self._answers = answers
        self._tokens = answers * tokens_mean
        self._seconds = self._tokens * seconds_per_token
        self.seconds_per_token = seconds_per_token
        self.tokens_mean = tokens_mean

    @property
    def answers(self) -> float:
        """Weight of the answers so far."""
        return self._answers

    def observe(self, seconds: float, tokens: float) -> None:
        """Record one answer: its seconds on the engine and its tokens (> 0)."""
        self._seconds = self._keep * self._seconds + seconds
        self._tokens = self._keep * self._tokens + tokens
        self._answers = self._keep * self._answers + 1.0
        self.tokens_mean = self._tokens / self._answers
        if self._seconds > 0:
            self.seconds_per_token = self._seconds / self._tokens


class ItemRate:
    """Tokens a second of batch items that end, over the time in which some were in the queue; its weight decays."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._at_s: float | None = None

    def note(self, now_s: float, tokens: float, *, busy: bool) -> None:
        """Note an answer, or 0 tokens. busy : whether items are in the queue until the next note"""
        if self._at_s is not None:
            passed_s = now_s - self._at_s
            keep = math.exp(-passed_s / ITEM_RATE_S)
            self._tokens, self._seconds = keep * self._tokens, keep * self._seconds + passed_s
        self._tokens += tokens
        self._at_s = now_s if busy else None

    @property
    def seconds(self) -> float:
        """For how long the rate was observed, as far as that is remembered."""
        return self._seconds

    @property
    def tokens_per_s(self) -> float | None:
        """None before the first answer."""
        return self._tokens / self._seconds if self._tokens and self._seconds else None


class ItemService:
    """Items of batch jobs that took what others left: their times, their rate, and how many run."""

    def __init__(self) -> None:
        self.times, self.rate, self.running = ServiceTime(), ItemRate(), 0

    def answered(self, now_s: float, seconds: float, tokens: float) -> None:
        """Record an answer: its seconds on the engine and its tokens (> 0)."""
        self.times.observe(seconds, tokens)
        self.rate.note(now_s, tokens, busy=True)
