"""Long prompts: an engine computes one of them at a time, and between two of them starts those who have waited.

An engine computes prompts in the order of arrival, in chunks beside the answers that it writes. While it computes a
prompt of a whole context, no prompt behind it gets a first token. Two such prompts in a row cost the others twice the
time, so a long prompt starts where no other long one is being computed, and shorter requests pass it meanwhile.

    long   what the engine does not have in its cache takes LONG times the mean of prompts, and FELT of a mean answer
    turn   once a long prompt is computed, as many requests start as wait at the next free slot, then the next long one

Those who came while the long prompt was computed and found no slot would otherwise wait for the second one, too. The
number is fixed at that slot, so shorter requests that come later hold no long prompt up, and where no other request can
start, the long one starts at once. A prompt is computed when its answer begins; if no event says when, after LATE times
the expected seconds.
"""

from __future__ import annotations

LONG = 4.0  # of exponential times, one in 55 is more than so many times the mean, as in orders.py
FELT = 0.05  # of an answer: nobody notices a shorter delay
LATE = 2.0


class Prefills:
    """The long prompts that one engine computes.

    turn_at  number of starts after which the next may start (EnginePool.starts); None: nobody has looked since the last
             was computed
    """

    __slots__ = ("_ends_s", "_over_s", "turn_at")

    def __init__(self) -> None:
        self.turn_at: int | None = None
        self._ends_s: dict[int, float] = {}  # by request id: when the prompt is expected to be computed
        self._over_s: dict[int, float] = {}  # when it counts as computed in any case

    def __len__(self) -> int:
        return len(self._ends_s)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._ends_s

    def start(self, request_id: int, seconds: float, now_s: float) -> None:
        """A long prompt has been sent to the engine, behind the others."""
        begins_s = max(now_s, max(self._ends_s.values(), default=now_s))
        self._ends_s[request_id] = begins_s + seconds
        self._over_s[request_id] = begins_s + LATE * seconds
        self.turn_at = None

    def end(self, request_id: int) -> None:
        """The answer has begun, or the request has left the engine."""
        if self._ends_s.pop(request_id, None) is not None:
            del self._over_s[request_id]

    def over_s(self, now_s: float) -> float | None:
        """When the last of the prompts counts as computed in any case; None: none is being computed."""
        if not self._ends_s:
            return None
        for request_id in [request_id for request_id, at_s in self._over_s.items() if at_s <= now_s]:
            self.end(request_id)
        return max(self._over_s.values(), default=None)

    def left_s(self, now_s: float) -> float:
        """Seconds until all prompts are computed, as expected."""
        return max(0.0, max(self._ends_s.values()) - now_s) if self._ends_s else 0.0


def is_long(prefill_s: float, mean_s: float, answer_s: float) -> bool:
    """Whether a prompt is long. prefill_s : of what is not cached; mean_s : of prompts.  answer_s : of a mean answer"""
    return prefill_s > LONG * mean_s and prefill_s > FELT * answer_s and mean_s > 0.0
