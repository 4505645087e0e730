"""When freed slots are handed over. Decides without I/O."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class GroupedSlots:
    """The slots of an engine. Freed slots are handed over in groups, to requests in their order of arrival.

    Freed slots stay empty until `group` of them are free; then all free slots are handed over. If fewer requests wait,
    as many free slots are enough, so that no request waits for a request that has not arrived. group 1 refills every
    slot at once.
    """

    count: int
    group: int
    running: int = 0
    waiting: deque[int] = field(default_factory=deque)

    def arrived(self, *requests: int) -> list[int]:
        """Returns the requests to send now."""
        self.waiting.extend(requests)
        return self._handed_over()

    def ended(self) -> list[int]:
        """A running request has ended. Returns the requests to send now."""
        assert self.running > 0
        self.running -= 1
        return self._handed_over()

    def _handed_over(self) -> list[int]:
        free = self.count - self.running
        if free < min(self.group, len(self.waiting)):
            return []
        sent = [self.waiting.popleft() for _ in range(min(free, len(self.waiting)))]
        self.running += len(sent)
        return sent
