"""The watch over one engine's answers: which of them the engine has lost, although it goes on with others.

silence.py judges. Here is what it is shown: each running answer once an interval, with the last sign of it, and what
is certain and likely of its length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from llmserve.calls.in_flight import Answering, InFlightCall
from llmserve.engines.dialects import Told
from llmserve.engines.engine import EngineError
from llmserve.live.known_models import Listed
from llmserve.live.silence import NEWER, Run, Silences


class _Watched:
    """A running answer. attempt : of its call"""

    __slots__ = ("attempt", "in_flight", "run")

    def __init__(self, in_flight: InFlightCall, run: Run) -> None:
        self.in_flight, self.run, self.attempt = in_flight, run, in_flight.attempts

    def note_end(self) -> None:
        """Take note of how an answer has ended that runs no more."""
        in_flight, run = self.in_flight, self.run
        counts = in_flight.measured.counts
        run.complete = counts is not None and in_flight.attempts == self.attempt
        if counts is not None and counts.completion_tokens is not None:
            run.tokens = counts.completion_tokens / in_flight.request.sequences


class Watchdog:
    """The watch over one engine's answers."""

    def __init__(self) -> None:
        self.silences = Silences()
        self._watched: dict[Answering, _Watched] = {}

    def look(
        self, now_s: float, running: Iterable[InFlightCall], models: Listed, *, probed: bool, told: Told | None = None
    ) -> Mapping[Answering, str]:
        """Look at the engine's answers; return those that it has lost, with the reason.

        now_s   of the event loop's clock.  models : of the engine
        probed  whether the engine has just answered a probe
        told    what it has told of itself then
        """
        before, self._watched = self._watched, {}
        for in_flight in running:
            answering = in_flight.answering
            if answering is None:
                continue
            watched = before.pop(answering, None) or _Watched(in_flight, _run(in_flight, answering, models))
            self._watched[answering] = watched
            heard_s, usage, run = answering.heard_s, in_flight.measured.usage, watched.run
            run.heard_s = now_s if heard_s is None else heard_s
            if usage is not None:
                run.began, run.tokens = usage.began, usage.output_tokens / in_flight.request.sequences
        for watched in before.values():
            watched.note_end()
        runs = [watched.run for watched in self._watched.values()]
        lost = self.silences.look(
            now_s, runs, [watched.run for watched in before.values()], probed=probed, told=_has(told)
        )
        if not lost:
            return {}
        return {answering: _reason(one.run) for answering, one in self._watched.items() if one.run in lost}

    def may_be_busy(self, now_s: float) -> bool:
        """Whether the engine may be busy with answers that are not streamed, although it answers no probe."""
        return self.silences.may_be_busy(now_s, [watched.run for watched in self._watched.values()])


def lost_error(name: str, reason: str) -> EngineError:
    return EngineError(f"engine {name} {reason}", code="engine_lost", lost=True)


def _has(told: Told | None) -> int | None:
    """The requests that an engine has by its own word; None: it does not say."""
    if told is None or told.running is None or told.waiting is None:
        return None
    return told.running + told.waiting


def _reason(run: Run) -> str:
    if run.missed_s > 0.0:
        return (
            f"has told for {run.missed_s:.0f} s that it has fewer requests than it was sent, and is silent on this one"
        )
    silence = f"sent nothing of this one for {run.silent_s:.0f} s"
    if run.overtaken >= NEWER:
        return f"has begun {run.overtaken} newer answers, but {silence}"
    return f"goes on with other answers and probes, but {silence}"


def _run(in_flight: InFlightCall, answering: Answering, models: Listed) -> Run:
    call, request = in_flight.call, in_flight.request
    bounds, model = call.bounds, models.get(call.model)
    bound = math.inf
    if not bounds.choices:
        bound = 0.0
    elif bounds.output_tokens_max is not None:
        bound = float(bounds.output_tokens_max)
    elif model is not None and model.context_tokens is not None:
        bound = float(model.context_tokens)
    likely = request.quantiles[-1] if request.quantiles else request.predicted_tokens or 0.0
    return Run(
        request.model,
        is_stream=call.wire.stream,
        prompt_tokens=request.prompt_tokens,
        likely=likely,
        bound=bound,
        turn=answering.turn,
    )
