"""FLEX exactly as Shepherd's Algorithm 2: a deadline is tested at the batch size before the request joins, so that
earlier requests may become late. llmserve's order `flex` forms batches in which every request is in time.

Which statement follows `else` when a request fails the test (line 13) is not known: the text at hand lacks the line.
Here the request is passed over. To stop there, as an `else` at the end of a loop suggests, would leave a batch empty
while the most urgent request is too late. It would not find the "largest feasible batch" of the algorithm's comment
either: requests come by ascending deadline, so those after the failing one may still be in time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from llmserve.scheduling.choice.orders import Candidate, Flex
from llmserve.scheduling.queues.deadline_queue import ROUNDING_S, DeadlineQueue
from llmserve.scheduling.queues.waiting import QueuedRequest


@dataclass(frozen=True)
class PrintedFlex(Flex):
    """The batch has requests of one bin, by deadline: each would be in time at the size before it joined."""

    def compose(self, candidate: Candidate, now_s: float) -> bool:
        running_s = sorted([run.queued.deadline_s for run in candidate.running])
        candidate.count, places = as_printed(candidate.queue, now_s, candidate.batch_s, candidate.most, running_s)
        candidate.queue, candidate.place = Chosen(candidate.queue, places), 0
        return candidate.count > 0


class Chosen(DeadlineQueue):
    """Some requests of a queue. A request that is taken from this view leaves the queue."""

    def __init__(self, queue: DeadlineQueue, places: Sequence[int]) -> None:
        super().__init__(queue.index)
        self._queue = queue
        self._places = places

    @property
    def earliest_deadline_s(self) -> float:
        """Earliest deadline of the whole queue: of equal batches, FLEX runs the one from the most urgent queue."""
        return self._queue.earliest_deadline_s

    def at(self, place: int) -> QueuedRequest:
        return self._queue.at(self._places[place])

    def take_at(self, start: int, count: int) -> list[QueuedRequest]:
        places = self._places[start : start + count]
        requests = [self._queue.take_at(place, 1)[0] for place in reversed(places)]  # last first: places stay valid
        return requests[::-1]


def as_printed(
    queue: DeadlineQueue, now_s: float, batch_s: Sequence[float], most: int, running_s: Sequence[float] = ()
) -> tuple[int, list[int]]:
    """Return the size of the batch of Algorithm 2, and the queue places of its waiting requests. Some may be late.

    batch_s    T(1), T(2), ...; T(0) is extrapolated from T(1) and T(2)
    running_s  ascending deadlines of running requests that the batch would contain
    """
    times_s = [max(0.0, 2 * batch_s[0] - batch_s[min(1, len(batch_s) - 1)]), *batch_s]
    places: list[int] = []
    count = place = run = 0
    while count < most:
        ends_s = now_s + times_s[count]
        place = max(place, queue.first_at(ends_s))
        run = max(run, bisect_left(running_s, ends_s - ROUNDING_S))
        if run < len(running_s) and (place == len(queue) or running_s[run] <= queue.deadline_at(place)):
            run += 1
        elif place < len(queue):
            places.append(place)
            place += 1
        else:
            break
        count += 1
    return count, places
