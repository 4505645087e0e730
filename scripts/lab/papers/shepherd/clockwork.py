"""Readings of Clockwork, which Shepherd describes in one sentence: earliest deadline first, centralised, no preemption.

llmserve's order `clockwork` is one reading: the next batch is for the earliest deadline that can still be met, with as
many requests of the same queue as this deadline allows. This module has two other readings.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmserve.scheduling.choice.orders import Candidate, Key, MomentOrder

SIZES = (1, 2, 4, 8, 16)  # batch sizes for which Clockwork compiles its models (Gujarati et al., OSDI 2020)


class LargestBatch(MomentOrder):
    """The model with the earliest deadline that can still be met goes next, with its largest batch in time.

    The request with that deadline is left behind if only a smaller batch could hold it.
    """

    def key(self, candidate: Candidate, now_s: float) -> Key:
        queue = candidate.queue
        return (queue.deadline_at(queue.first_at(now_s + candidate.batch_s[0])),)


@dataclass(frozen=True)
class Released(MomentOrder):
    """Clockwork as its authors released it.

    Each batch size for which a model has enough requests in time has a latest start: the latest time at which the batch
    meets the first deadline. The model with the earliest latest start goes next, with its largest such batch.
    Clockwork drops requests that this batch passes over; here a smaller batch may still serve them.

    sizes : of batches, ascending.  Source: src/clockwork/controller/infer5 (new_strategies, try_dequeue).
    """

    sizes: tuple[int, ...] = SIZES

    def compose(self, candidate: Candidate, now_s: float) -> bool:
        candidate.count = 0
        for size in self.sizes:
            if size > candidate.most or candidate.queue.in_time(now_s + candidate.batch_s[size - 1]) < size:
                break
            candidate.count = size
        return candidate.count > 0

    def key(self, candidate: Candidate, now_s: float) -> Key:
        """Return the earliest latest start of all sizes up to the batch."""
        queue, batch_s = candidate.queue, candidate.batch_s
        times_s = [batch_s[size - 1] for size in self.sizes if size <= candidate.count]
        return (min([queue.deadline_at(queue.first_at(now_s + time_s)) - time_s for time_s in times_s]),)
