"""Static batches formed from members that arrive separately, each over its own connection.

A member names its batch and the batch's size in two headers. `StaticBatches` gets arrivals, departures and the
time, and decides which batch runs next. `BatchQueue` wraps `StaticBatches` for asyncio.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from llmserve.wire.headers import BATCH_HEADER, BATCH_SIZE_HEADER

Member = TypeVar("Member")


@dataclass(frozen=True, slots=True)
class Seat:
    """A place in a batch: the batch's name and its number of members."""

    batch_id: str
    size: int


def seat_of(headers: Mapping[str, str], size_max: int) -> Seat | None:
    """Return the seat that a request's headers name; None (a batch of one) without headers. Raises ValueError."""
    batch_id, size_text = headers.get(BATCH_HEADER), headers.get(BATCH_SIZE_HEADER)
    if batch_id is None and size_text is None:
        return None
    if not batch_id or not size_text:
        raise ValueError(f"{BATCH_HEADER} and {BATCH_SIZE_HEADER} must be given together")
    if not size_text.isascii() or not size_text.isdigit() or int(size_text) < 1:
        raise ValueError(f"{BATCH_SIZE_HEADER} must be a positive integer, not {size_text!r}")
    if int(size_text) > size_max:
        raise ValueError(f"{BATCH_SIZE_HEADER} is {size_text}, but this engine runs at most {size_max} at once")
    return Seat(batch_id, int(size_text))


@dataclass(slots=True)
class _Gathering(Generic[Member]):
    """A batch that still waits for members."""

    size: int
    expected: int  # size, less the members that were removed or refused
    close_at_s: float
    members: list[Member] = field(default_factory=list)


class StaticBatches(Generic[Member]):
    """The waiting batches and their members. No I/O: time is an argument.

    A batch is formed when all expected members have arrived, or `gather_s` after the arrival of the first member.
    `take` returns batches in the order in which they were formed. A member that arrives after its batch was formed
    starts a new batch of the same name.
    """

    def __init__(self, gather_s: float) -> None:
        self._gather_s = gather_s
        self._gathering: dict[str, _Gathering[Member]] = {}  # oldest first, hence earliest close_at_s first
        self._formed: deque[list[Member]] = deque()

    def add(self, member: Member, seat: Seat | None, now_s: float) -> None:
        """Add a member to its batch. Raises ValueError when the waiting batch of that name has another size."""
        if seat is None:
            self._formed.append([member])
            return
        self._open(seat, now_s).members.append(member)
        self._form_if_complete(seat.batch_id)

    def cancel_seat(self, seat: Seat | None, now_s: float) -> None:
        """Stop waiting for the member of this seat: its request was refused."""
        if seat is None:
            return
        self._open(seat, now_s).expected -= 1
        self._form_if_complete(seat.batch_id)

    def remove(self, member: Member) -> bool:
        """Remove a member whose client has disconnected. Returns False when the member is not waiting."""
        for batch_id, gathering in self._gathering.items():
            if member in gathering.members:
                gathering.members.remove(member)
                gathering.expected -= 1
                self._form_if_complete(batch_id)
                return True
        for batch in self._formed:
            if member in batch:
                batch.remove(member)
                return True
        return False

    def take(self, now_s: float) -> list[Member] | None:
        """Remove and return the batch that runs next, never empty; None when no batch is ready."""
        while (due := next(iter(self._gathering), None)) is not None:
            if self._gathering[due].close_at_s > now_s:
                break
            self._form(due)
        while self._formed:
            if batch := self._formed.popleft():  # empty when all members were removed
                return batch
        return None

    def clear(self) -> list[Member]:
        """Remove and return all waiting members."""
        waiting = [member for gathering in self._gathering.values() for member in gathering.members]
        waiting += [member for batch in self._formed for member in batch]
        self._gathering.clear()
        self._formed.clear()
        return waiting

    @property
    def wake_at_s(self) -> float | None:
        """The time at which `take` may return another batch, without any arrival or departure."""
        first = next(iter(self._gathering.values()), None)
        return None if first is None else first.close_at_s

    def __len__(self) -> int:
        """Return the number of waiting members."""
        gathering = sum(len(batch.members) for batch in self._gathering.values())
        return gathering + sum(len(batch) for batch in self._formed)

    def _open(self, seat: Seat, now_s: float) -> _Gathering[Member]:
        gathering = self._gathering.get(seat.batch_id)
        if gathering is None:
            gathering = _Gathering(seat.size, seat.size, now_s + self._gather_s)
            self._gathering[seat.batch_id] = gathering
        if gathering.size != seat.size:
            raise ValueError(f"batch {seat.batch_id!r} has {gathering.size} members, not {seat.size}")
        return gathering

    def _form_if_complete(self, batch_id: str) -> None:
        gathering = self._gathering[batch_id]
        if len(gathering.members) >= gathering.expected:
            self._form(batch_id)

    def _form(self, batch_id: str) -> None:
        members = self._gathering.pop(batch_id).members
        if members:
            self._formed.append(members)


class BatchQueue(Generic[Member]):
    """`StaticBatches` for asyncio: the same methods with the event loop's clock, and a `take` that waits."""

    def __init__(self, gather_s: float) -> None:
        self._batches: StaticBatches[Member] = StaticBatches(gather_s)
        self._changed = asyncio.Event()

    def add(self, member: Member, seat: Seat | None) -> None:
        """See `StaticBatches.add`."""
        self._batches.add(member, seat, asyncio.get_running_loop().time())
        self._changed.set()

    def cancel_seat(self, seat: Seat | None) -> None:
        """See `StaticBatches.cancel_seat`. No effect when the seat's size contradicts its batch."""
        try:
            self._batches.cancel_seat(seat, asyncio.get_running_loop().time())
        except ValueError:
            return
        self._changed.set()

    def remove(self, member: Member) -> bool:
        """See `StaticBatches.remove`."""
        removed = self._batches.remove(member)
        self._changed.set()
        return removed

    def clear(self) -> list[Member]:
        """See `StaticBatches.clear`."""
        return self._batches.clear()

    def __len__(self) -> int:
        return len(self._batches)

    async def take(self) -> list[Member]:
        """Wait for the batch that runs next and remove it."""
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            if (batch := self._batches.take(loop.time())) is not None:
                return batch
            try:
                async with asyncio.timeout_at(self._batches.wake_at_s):
                    await self._changed.wait()
            except TimeoutError:
                continue
