"""Rests of engines: an engine that has refused a request of a model (429, 503, no such model) gets none for a while.

A rest lasts as long as the engine asks, RESTS_S_MAX at most; without a Retry-After as long as the first pause of a
circuit, and twice as long after each further refusal. An answer resets the length of the next rest. A rest counts only
while another engine of the model works and does not rest. So if all engines refuse, or the only one does, no request is
held back: each request gets the refusal itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from llmserve.scheduling.circuit import PAUSE_GROWTH, PAUSES_MAX

RESTS_S_MAX = 60.0
"""However long an engine asks for: a request a minute costs nothing, and a wrong clock must not cost more."""


class Rest:
    """A rest from one model.

    began_s : the first refusal.  until_s : the end.  pause_s : the length if the engine asks for none
    """

    __slots__ = ("began_s", "pause_s", "until_s")

    def __init__(self, began_s: float, pause_s: float) -> None:
        self.began_s, self.until_s, self.pause_s = began_s, began_s, pause_s


class Rests:
    """The rests of one engine, by model. first_s : length of the first rest if the engine asks for none"""

    __slots__ = ("_by_model", "_first_s")

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._by_model: dict[str, Rest] = {}

    def __bool__(self) -> bool:
        return bool(self._by_model)

    def refused(self, model: str, asked_s: float, started_at_s: float, now_s: float) -> None:
        """Record a refusal. asked_s : how long the engine wants to rest; 0: it does not say.

        Requests that were sent before the rest began say nothing new: they do not make the next rest longer.
        """
        rest = self._by_model.get(model)
        if rest is None:
            rest = self._by_model[model] = Rest(now_s, self._first_s)
        elif started_at_s > rest.began_s:
            rest.pause_s = min(PAUSE_GROWTH * rest.pause_s, PAUSES_MAX * self._first_s)
            rest.began_s = now_s
        if asked_s > 0:
            rest.until_s = max(rest.until_s, now_s + min(asked_s, RESTS_S_MAX))
        elif rest.began_s == now_s:
            rest.until_s = max(rest.until_s, now_s + min(rest.pause_s, RESTS_S_MAX))

    def answered(self, model: str, started_at_s: float) -> None:
        """Record an answer to a request. A request sent before the rest began says nothing about the rest."""
        rest = self._by_model.get(model)
        if rest is not None and started_at_s > rest.began_s:
            del self._by_model[model]

    def until_s(self, model: str) -> float:
        """When the engine's rest from the model is over; 0 without one."""
        rest = self._by_model.get(model)
        return 0.0 if rest is None else rest.until_s

    def going_on(self, now_s: float) -> Iterable[tuple[str, float]]:
        """The models that the engine rests from, and until when."""
        return [(model, rest.until_s) for model, rest in self._by_model.items() if rest.until_s > now_s]
