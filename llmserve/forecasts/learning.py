"""Learns from the lengths of answers on the event loop, between other work, in a bounded share of its time.

An answer teaches its template and its application, which is cheap, and its words, which costs several times more. So
under load only a sample of the answers teaches templates, and only a sample of these teaches words:

    c   seconds that the templates, or the words, of an answer take
    g   seconds between two answers that may be in the sample
    s   TEMPLATES_SHARE or WORDS_SHARE
    p   share of these answers that are in the sample, min(1, s g / c): this takes the share s of the time

The answers of a sample are spread evenly, so they are a fair sample even of a batch that ends as a whole, in order of
length. Each counts as one answer: the window of examples then covers a longer time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from llmserve.calls.in_flight import InFlightCall
from llmserve.calls.log_fields import about
from llmserve.forecasts.lengths import Taught

# Some 200 answers a second, more than a large model gives on one GPU, are all learnt in these shares.
TEMPLATES_SHARE = 0.01
WORDS_SHARE = 0.02
SLICE_S = 0.0005  # others run after it
WAITING_MAX = 1_000  # answers that wait to be learnt
COST_S_MAX = 0.001  # a longer time was not the learner's
GAP_S_MAX = 1.0  # a longer silence says nothing about the next burst
MEMORY = 256  # answers after which an observation's weight has fallen to a third

log = logging.getLogger("llmserve")


class Sample:
    """Decides which answers teach. share : of the time that teaching may take"""

    def __init__(self, share: float) -> None:
        self._share = share
        self._gap_s, self._cost_s = GAP_S_MAX, 0.0  # means, g and c
        self._last_s: float | None = None
        self._due = 0.0  # sum of p, less the answers of the sample

    def includes(self, now_s: float) -> bool:
        """Whether the next answer teaches. now_s : when it is learnt"""
        if self._last_s is not None:
            self._gap_s += (min(now_s - self._last_s, GAP_S_MAX) - self._gap_s) / MEMORY
        self._last_s = now_s
        self._due += min(1.0, self._share * self._gap_s / self._cost_s) if self._cost_s else 1.0
        if self._due < 1.0:
            return False
        self._due -= 1.0
        return True

    def took(self, seconds: float) -> None:
        """Count an answer that taught. seconds : that it took, >= 0"""
        seconds = min(seconds, COST_S_MAX)
        self._cost_s += (seconds - self._cost_s) / MEMORY if self._cost_s else seconds


class Learning:
    """Learns from answers, in slices, after the tasks that were ready before.

    learn   learns from an answer's tokens what it teaches. True when other forecasts may change now
    learnt  called after each such answer
    clock   seconds
    """

    def __init__(
        self,
        learn: Callable[[InFlightCall, float, Taught], bool],
        learnt: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._learn, self._learnt, self._clock = learn, learnt, clock
        self._templates, self._words = Sample(TEMPLATES_SHARE), Sample(WORDS_SHARE)
        self._answers: deque[tuple[InFlightCall, float, Taught]] = deque()
        self._next: asyncio.Handle | None = None

    def answered(self, in_flight: InFlightCall, output_tokens: float) -> None:
        """Learn from the answer of a call soon, if it is in a sample."""
        taught = self._taught()
        if taught == "nothing":
            self._teach(in_flight, output_tokens, taught)
            return
        self._answers.append((in_flight, output_tokens, taught))
        if len(self._answers) > WAITING_MAX:
            self._one()
        if self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._some)

    def close(self) -> None:
        """Learn from all answers that wait."""
        if self._next is not None:
            self._next.cancel()
        while self._answers:
            self._one()

    def _some(self) -> None:
        ends_s = self._clock() + SLICE_S
        while self._answers and self._clock() < ends_s:
            self._one()
        self._next = asyncio.get_running_loop().call_soon(self._some) if self._answers else None

    def _one(self) -> None:
        in_flight, output_tokens, taught = self._answers.popleft()
        began_s = self._clock()
        self._teach(in_flight, output_tokens, taught)
        sample = self._words if taught == "words" else self._templates
        sample.took(self._clock() - began_s)

    def _taught(self) -> Taught:
        now_s = self._clock()
        if not self._templates.includes(now_s):
            return "nothing"
        return "words" if self._words.includes(now_s) else "templates"

    def _teach(self, in_flight: InFlightCall, output_tokens: float, taught: Taught) -> None:
        try:
            if self._learn(in_flight, output_tokens, taught):
                self._learnt()
        except Exception:  # the request has ended, whether or not its length was learnt
            log.exception("a length was not learnt", extra=about(in_flight))
