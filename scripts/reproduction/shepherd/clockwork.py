"""Readings of Clockwork, which Shepherd describes in a sentence: earliest deadline first, centralised, no preemption.

llmserve's order `clockwork` is one: the request whose deadline is the earliest that can still be met goes next, with as
many of its queue as leave it in time. These are others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmserve.scheduling.direct import Pick, Waiting

SIZES = (1, 2, 4, 8, 16)  # for which Clockwork has its models compiled (Gujarati et al., OSDI 2020)


@dataclass(frozen=True, slots=True)
class LargestBatch:
    """The model whose request has the earliest deadline that can still be met goes next, with its largest batch that
    is in time: that request is left behind if only a smaller batch could hold it.
    """

    preemption_factor: float | None = None
    only_if_needed: bool = False

    def pick(self, waiting: Sequence[Waiting], engine: str, now_s: float) -> Pick | None:
        best: Pick | None = None
        best_s = 0.0
        for each in waiting:
            first = each.queue.first_at(now_s + each.batch_s[0])
            if first == len(each.queue):
                continue
            deadline_s = each.queue.deadline_at(first)
            if best is None or deadline_s < best_s:
                best, best_s = Pick(each, each.largest(now_s)), deadline_s
        return best

    def wake_at_s(self, engine: str, now_s: float) -> float | None:
        return None


@dataclass(frozen=True, slots=True)
class Released:
    """As Clockwork is released: of each model and batch size for which there are enough requests that such a batch
    leaves in time, when it must begin at the latest for the first of them; the model goes next for which that is the
    earliest, with its largest such batch.

    What is passed over by that is given up there, and may still be served here if a smaller batch leaves it in time.

    sizes : of batches, ascending.  Source: src/clockwork/controller/infer5 (new_strategies, try_dequeue).
    """

    sizes: tuple[int, ...] = SIZES
    preemption_factor: float | None = None
    only_if_needed: bool = False

    def pick(self, waiting: Sequence[Waiting], engine: str, now_s: float) -> Pick | None:
        best: Pick | None = None
        best_s = 0.0
        for each in waiting:
            size, begin_s = self._of(each, now_s)
            if size and (best is None or begin_s < best_s):
                best, best_s = Pick(each, size), begin_s
        return best

    def _of(self, waiting: Waiting, now_s: float) -> tuple[int, float]:
        """The largest batch, and when the most urgent of all sizes must begin; (0, inf): there is none."""
        largest, least_s = 0, float("inf")
        for size in self.sizes:
            if size > waiting.most:
                break
            batch_s = waiting.batch_s[size - 1]
            first = waiting.queue.first_at(now_s + batch_s)
            if len(waiting.queue) - first < size:
                break
            largest, least_s = size, min(least_s, waiting.queue.deadline_at(first) - batch_s)
        return largest, least_s

    def wake_at_s(self, engine: str, now_s: float) -> float | None:
        return None
