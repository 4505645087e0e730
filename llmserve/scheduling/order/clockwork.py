"""Earliest deadline first over whole queues, without preemption, as Shepherd describes Clockwork (Section 7).

The request with the earliest deadline that can still be met runs next, with as many of its queue as leave it in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmserve.scheduling.direct import Pick, Waiting


@dataclass(frozen=True, slots=True)
class Clockwork:
    preemption_factor: float | None = None
    only_if_needed: bool = False

    def pick(self, waiting: Sequence[Waiting], engine: str, now_s: float) -> Pick | None:
        best: Pick | None = None
        best_s = 0.0
        for each in waiting:
            start, count = each.queue.around_first(now_s, each.batch_s, each.most)
            if not count:
                continue
            deadline_s = each.queue.deadline_at(start)
            if best is None or deadline_s < best_s:
                best, best_s = Pick(each, count, each.queue.ids(start, count)), deadline_s
        return best

    def wake_at_s(self, engine: str, now_s: float) -> float | None:
        return None
