"""FLEX: the largest batch that can be in time runs next, and stops what runs when that is far smaller.

Source: Shepherd (NSDI 2023), Section 5.2 and Appendix C. Of all queues the one with the largest feasible batch is
served; among equals the one that takes least time (the greatest value density), then the one whose deadline is
earliest. A batch that runs is preempted for one of at least `preemption_factor` times its size: 3.03 gives the
competitive ratio of 12.62 K of Theorem 5.2.

The paper's models take as long whatever the request. An LLM's batch takes as long as its longest answer, so a model's
requests wait in bins by predicted length, and a batch of one bin is filled up with shorter ones: more bins make batches
shorter, never smaller.

As printed, Algorithm 2 tests a request's deadline at the size of the batch before the request joins it, which makes
those before it late; `printed` keeps that, for comparison. Else batches are truly feasible
(scheduling/deadline_queue.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmserve.scheduling.direct import Pick, Waiting

PREEMPTION_FACTOR = 3.03


@dataclass(frozen=True, slots=True)
class Flex:
    """preemption_factor : None: nothing is preempted.  only_if_needed : nor is it where what waits would still be in
    time after what runs. At low load that saves nearly all preemptions, and loses nothing; a burst that comes one by
    one is seen for what it is a little later.
    """

    preemption_factor: float | None = PREEMPTION_FACTOR
    printed: bool = False
    only_if_needed: bool = False

    def pick(self, waiting: Sequence[Waiting], engine: str, now_s: float) -> Pick | None:
        best: Pick | None = None
        best_turn = (0, 0.0, 0.0)
        for each in waiting:
            if min(each.count, each.most) < best_turn[0]:
                continue
            picked = self._printed(each, now_s) if self.printed else _feasible(each, now_s)
            if picked is None:
                continue
            turn = (picked.count, -each.batch_s[picked.count - 1], -each.queue.earliest_deadline_s)
            if best is None or turn > best_turn:
                best, best_turn = picked, turn
        return best

    def wake_at_s(self, engine: str, now_s: float) -> float | None:
        return None

    def _printed(self, waiting: Waiting, now_s: float) -> Pick | None:
        ids = waiting.queue.as_printed(now_s, waiting.empty_s, waiting.batch_s, waiting.most, waiting.besides)
        if not ids:
            return None
        running = {ticket.request.id for ticket in waiting.besides}
        return Pick(waiting, len(ids), [request_id for request_id in ids if request_id not in running])


def _feasible(waiting: Waiting, now_s: float) -> Pick | None:
    count = waiting.largest(now_s)
    return Pick(waiting, count) if count else None
