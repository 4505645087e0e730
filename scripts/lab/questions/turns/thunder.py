"""ThunderAgent's admission of programs, as its router decides (github.com/ThunderAgent-org/ThunderAgent, a7eef77).

A program is paused, or it is active on an engine: then its requests go there at once. Its tokens are those of its last
request, with the answer once that is complete, whether it runs (reasoning) or its tools do (acting). What an engine has
left is its cache without the tokens of its programs and BUFFER_TOKENS for each; what they share counts each time.

* A new program becomes active on the engine with the fewest tokens of those that have enough left, if no program is
  paused; else it is paused.
* Every TICK_S paused programs are resumed as far as all engines together have room: those that wait with a later step
  first, then new ones, then those whose tools run; the smallest first. The largest of them are placed first, each on
  the engine that has most left.
* Then every engine that has less than nothing left pauses acting programs, the smallest first. If these are not enough,
  all its other programs are marked, and paused after their answers.
* Who has waited for FORCED_S is resumed, room or not.

The end of a turn counts as the release that a client of ThunderAgent has to ask for; a chat is a program of one step.
Engines still compute one long prompt at a time, as under all other policies of llmserve.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from llmserve.scheduling.engines import EngineState
from llmserve.scheduling.programs.programs import Programs
from llmserve.scheduling.queues.waiting import QueuedRequest

TICK_S = 5.0
BUFFER_TOKENS = 100
FORCED_S = 1_800.0


class _Known:
    """A program. engine : where it is active; "": it is paused.  last_engine : where it was before"""

    __slots__ = ("acts", "engine", "is_marked", "last_engine", "steps", "tokens", "waits_from_s")

    def __init__(self) -> None:
        self.tokens = 0.0
        self.steps = 0
        self.acts = self.is_marked = False
        self.engine = self.last_engine = ""
        self.waits_from_s = math.inf

    @property
    def required(self) -> float:
        return self.tokens + BUFFER_TOKENS

    @property
    def rank(self) -> int:
        if self.steps == 1:
            return 1
        return 2 if self.acts else 0


class ThunderAgent(Programs):
    """caches : tokens of each engine's cache, by name"""

    def __init__(self, caches: Mapping[str, int]) -> None:
        super().__init__(patience=0.0)
        self.active_until_s = math.inf
        self._caches = caches
        self._known: dict[int, _Known] = {}
        self._ticked_s = 0.0

    # ---- requests ----

    def arrived(self, queued: QueuedRequest, times: Any, now_s: float) -> bool:
        self._tick_until(now_s)
        sorts = super().arrived(queued, times, now_s)
        key = _key(queued)
        known = self._known.get(key)
        is_new = known is None
        if known is None:
            known = _Known()
        known.steps += 1
        known.tokens, known.acts, known.waits_from_s = queued.request.prompt_tokens, False, now_s
        if is_new and all(other.engine for other in self._known.values()):
            left = {name: self._left(name) for name in self._caches}
            open_ = [name for name in left if left[name] >= known.required]
            known.engine = max(open_, key=lambda name: left[name] - self._caches[name], default="")
        self._known[key] = known
        return sorts

    def started(self, queued: QueuedRequest, engine: EngineState, now_s: float) -> None:
        self._known[_key(queued)].waits_from_s = math.inf

    def answered(
        self,
        queued: QueuedRequest,
        engine: EngineState,
        times: Any,
        output_tokens: float,
        tools: tuple[str, ...],
        now_s: float,
    ) -> None:
        self._tick_until(now_s)
        if not tools:
            del self._known[_key(queued)]
            return
        known = self._known[_key(queued)]
        known.acts, known.tokens = True, queued.request.prompt_tokens + output_tokens
        if known.is_marked:
            self._pause(known)

    def gone(self, queued: QueuedRequest) -> None:
        self._known.pop(_key(queued), None)

    # ---- room ----

    def home(self, queued: QueuedRequest, engines: Sequence[EngineState]) -> Sequence[EngineState]:
        return engines

    def fits(self, queued: QueuedRequest, engine: EngineState, now_s: float) -> bool:
        self._tick_until(now_s)
        return self._known[_key(queued)].engine == engine.info.name

    def passes(self, queued: QueuedRequest, engine: EngineState) -> bool:
        return True

    def next_room_s(self, engine: EngineState, now_s: float) -> float | None:
        return self._ticked_s + TICK_S

    # ---- ticks ----

    def _tick_until(self, now_s: float) -> None:
        """The ticks up to now: whatever a program does is told between them."""
        while self._ticked_s + TICK_S <= now_s:
            self._ticked_s += TICK_S
            self._resume()
            for name in self._caches:
                self._relieve(name)

    def _left(self, engine: str) -> float:
        used = sum([known.required for known in self._known.values() if known.engine == engine])
        return self._caches[engine] - used

    def _resume(self) -> None:
        paused = [known for known in self._known.values() if not known.engine]
        for known in paused:
            if self._ticked_s - known.waits_from_s >= FORCED_S:
                known.engine = known.last_engine or min(self._caches, key=self._programs_on)
        left = {name: room for name in self._caches if (room := self._left(name)) > BUFFER_TOKENS}
        room, chosen = sum(left.values()), []
        for known in sorted([one for one in paused if not one.engine], key=lambda one: (one.rank, one.tokens)):
            if known.required <= room:
                room -= known.required
                chosen.append(known)
        for known in sorted(chosen, key=lambda one: -one.tokens):
            best = max(left, key=lambda name: left[name])
            if known.required <= left[best]:
                known.engine = best
                left[best] -= known.required

    def _programs_on(self, engine: str) -> int:
        return sum([known.engine == engine for known in self._known.values()])

    def _relieve(self, engine: str) -> None:
        """Pause programs of an engine until it has room for the others."""
        own = sorted([one for one in self._known.values() if one.engine == engine], key=lambda one: one.tokens)
        left = self._left(engine)
        for known in [one for one in own if one.acts]:
            if left >= 0.0:
                return
            self._pause(known)
            left += known.required
        if left < 0.0:
            for known in own:
                known.is_marked |= not known.acts

    def _pause(self, known: _Known) -> None:
        known.last_engine, known.engine, known.is_marked = known.engine, "", False


def _key(queued: QueuedRequest) -> int:
    return queued.request.program or -queued.request.id
