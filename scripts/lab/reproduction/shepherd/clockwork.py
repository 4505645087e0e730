"""Readings of Clockwork, which Shepherd describes in a sentence: earliest deadline first, centralised, no preemption.

llmserve's order `clockwork` is one: the request whose deadline is the earliest that can still be met goes next, with as
many of its queue as leave it in time. These are others.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmserve.scheduling.orders import Candidate, Key, MomentOrder

SIZES = (1, 2, 4, 8, 16)  # for which Clockwork has its models compiled (Gujarati et al., OSDI 2020)


class LargestBatch(MomentOrder):
    """The model whose request has the earliest deadline that can still be met goes next, with its largest batch that
    is in time: that request is left behind if only a smaller batch could hold it.
    """

    def key(self, candidate: Candidate, now_s: float) -> Key:
        queue = candidate.queue
        return (queue.deadline_at(queue.first_at(now_s + candidate.batch_s[0])),)


@dataclass(frozen=True)
class Released(MomentOrder):
    """As Clockwork is released: of each model and batch size for which there are enough requests that such a batch
    leaves in time, when it must begin at the latest for the first of them; the model goes next for which that is the
    earliest, with its largest such batch.

    What is passed over by that is given up there, and may still be served here if a smaller batch leaves it in time.

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
        """When the most urgent of all sizes up to the largest must begin."""
        queue, batch_s = candidate.queue, candidate.batch_s
        times_s = [batch_s[size - 1] for size in self.sizes if size <= candidate.count]
        return (min([queue.deadline_at(queue.first_at(now_s + time_s)) - time_s for time_s in times_s]),)
