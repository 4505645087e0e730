"""Learning and revising on the event loop, in slices between other work.

What is learnt is lengths.py's, which answers teach is sample.py's, and which forecasts are revised is revisions.py's.
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
from llmserve.forecasts.revisions import Revisions
from llmserve.forecasts.sample import TEMPLATES_SHARE, WORDS_SHARE, Sample
from llmserve.scheduling.messages import ForecastsRevised

LEARN_SLICE_S = 0.0005  # others run after it
WAITING_MAX = 1_000  # answers that wait to be learnt
REVISE_SLICE_S = 0.0002  # forecasts are revised for this time; then the scheduler gets them
REVISE_PAUSE = 4  # in units of a slice and its step: revising takes at most a fifth of the event loop

log = logging.getLogger("llmserve")


class LearningLoop:
    """Learning from answers, in slices, each after the tasks that were ready before.

    learn   learns from an answer's tokens what it teaches. True when other forecasts may change now
    learnt  called after each such answer
    clock   seconds.  processor : seconds of the processor that this thread has used
    """

    def __init__(
        self,
        learn: Callable[[InFlightCall, float, Taught], bool],
        learnt: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
        processor: Callable[[], float] = time.thread_time,
    ) -> None:
        self._learn, self._learnt, self._clock, self._processor = learn, learnt, clock, processor
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
        ends_s = self._clock() + LEARN_SLICE_S
        while self._answers and self._clock() < ends_s:
            self._one()
        self._next = asyncio.get_running_loop().call_soon(self._some) if self._answers else None

    def _one(self) -> None:
        in_flight, output_tokens, taught = self._answers.popleft()
        began_s = self._processor()
        self._teach(in_flight, output_tokens, taught)
        sample = self._words if taught == "words" else self._templates
        sample.took(self._processor() - began_s)

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


class RevisionLoop:
    """Rounds of revisions, in slices of less than a millisecond.

    revisions : what to revise.  step : gives the scheduler an event
    """

    def __init__(self, revisions: Revisions, step: Callable[[ForecastsRevised], None]) -> None:
        self._revisions = revisions
        self._step = step
        self._next: asyncio.Handle | None = None

    def learnt(self) -> None:
        """Count a learnt answer, and begin a round if enough has been learnt."""
        self._revisions.learnt()
        if self._next is None and self._revisions.pending:
            self._next = asyncio.get_running_loop().call_soon(self._revise)

    def close(self) -> None:
        if self._next is not None:
            self._next.cancel()

    def _revise(self) -> None:
        """Revise one slice, and come back after a pause while the round goes on.

        The pause is in units of the processor's time: others who use the processor must not make pauses longer, too.
        """
        began_s, used_s = time.perf_counter(), time.thread_time()
        self._next = None
        try:
            revised = self._revisions.some(lambda: time.perf_counter() < began_s + REVISE_SLICE_S)
        except Exception:  # requests keep the forecasts that they have
            log.exception("the forecasts of waiting requests were not revised")
            self._revisions.give_up()
            return
        if revised:
            self._step(ForecastsRevised(revised))
        if self._revisions.pending:
            pause_s = REVISE_PAUSE * (time.thread_time() - used_s)
            self._next = asyncio.get_running_loop().call_later(pause_s, self._revise)
