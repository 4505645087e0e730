"""Which requests may wait; and the slots that batch items leave free for online requests, learned from arrivals."""

from __future__ import annotations

from collections.abc import Callable

from llmserve.request import Request
from llmserve.scheduling.circuit import Faults
from llmserve.scheduling.fair import FairShares
from llmserve.scheduling.group import Forming, Group
from llmserve.scheduling.limits import Limits
from llmserve.scheduling.messages import FailReason
from llmserve.scheduling.queues.model_queues import ModelQueues
from llmserve.scheduling.queues.waiting import QueuedRequest
from llmserve.scheduling.request_book import RequestBook
from llmserve.scheduling.reserve import Reserve


class Admission:
    """The entrance to the queues.

    awaits    whether an engine that is down, and may serve the model, is expected
    limits    batch items have a limit of their own, as large as the limit of online requests
    reserves  by the shares that compete for the engines
    """

    def __init__(
        self,
        group: Group,
        book: RequestBook,
        awaits: Callable[[str], bool],
        forming: Forming,
        faults: Faults,
        limits: Limits,
    ) -> None:
        self._group, self._book, self._awaits = group, book, awaits
        self._forming, self._faults, self._limits = forming, faults, limits
        self.reserves: dict[FairShares, Reserve] = {}

    def refusal(self, request: Request, waiting: int) -> FailReason | None:
        """Why a request cannot wait; None: it can, in queues that are made if need be.

        waiting : requests of its kind that wait. A full queue makes room if a share holds more of it than this one.
        A step of a program whose tokens an engine keeps is not refused: its turn would have been in vain.
        """
        group, awaits = self._group, self._awaits
        queues = group.queues.get(request.model)
        if queues is None and (group.pool.serving(request.model) or awaits(request.model)):
            queues = group.queues_of(request.model, self._book.now_s)  # others get no queues: clients invent names
        if self._forming.draining:
            return "draining"
        if queues is None or not (queues.engines or awaits(request.model)):
            return "no_engine"
        if request.deadline_s is not None and request.deadline_s <= self._book.now_s:
            return "deadline_exceeded"
        full = waiting >= self._limits.queue_requests_max and not group.programs.keeps(request)
        if full and (request.background or not refuse_holder(request, group, self._book)):
            return "queue_full"
        return None

    def adopt(self, request: Request) -> QueuedRequest:
        """Count a request that runs already, and never waits in a queue."""
        group, book = self._group, self._book
        queues, now_s = group.queues_of(request.model, book.now_s), book.now_s
        queued = queues.queued_apart(request, queues.fair.of(request.share, request.weight), now_s)
        queued.share.wait()  # until it counts as started
        if request.program or now_s < group.programs.active_until_s:
            group.programs.arrived(queued, queues, now_s)
        book.by_id[request.id] = queued
        group.enter(queues)
        if request.background:
            queues.count_items(1)
        return queued

    def enter(self, request: Request) -> None:
        """Let a request wait that was not refused."""
        group, book = self._group, self._book
        queues, programs, now_s = group.queues[request.model], group.programs, book.now_s
        cached_tokens = group.pool.residency.most_tokens(request) if request.blocks else 0.0
        queued, queue = queues.admit(request, now_s, cached_tokens)
        of_programs = request.program or now_s < programs.active_until_s
        if of_programs and programs.arrived(queued, queues, now_s) and queues.load is not None:
            queues.keys_changed()
        queued.suspect = request.sender in self._faults.suspects
        book.by_id[request.id] = queued
        book.enter(queued, queues)
        self._learn(queues)
        self._forming.take_in(queues, queue, queued, now_s)
        if group.needs_dispatch or group.tally.items:
            book.touch()

    def held(self, queues: ModelQueues) -> tuple[int, int]:
        """Slots of the model's engines that online requests want, and slots that batch items hold.

        A barrier engine gives all its slots to one batch.
        """
        if queues.engines and queues.engines[0].info.barrier:
            running = [[run.queued.request.background for run in e.running.values()] for e in queues.engines]
            items = sum([all(of_items) for of_items in running if of_items])
            online = sum([not all(of_items) for of_items in running if of_items])
            return online * queues.slots, items * queues.slots
        present, items = queues.present, queues.items.running
        if len(self._group.queues) > 1:
            for member in self._group.queues.values():
                if member.fair is queues.fair and member is not queues:
                    present += member.present
                    items += member.items.running
        return present - items, items

    def _learn(self, queues: ModelQueues) -> None:
        """Learn the reserve from an online request that waits from now on."""
        engines, (wanted, _) = queues.engines, self.held(queues)
        if engines and engines[0].info.barrier:
            wanted += queues.slots  # it wants an engine of its own
        reserve = self.reserves.get(queues.fair)
        if reserve is None:
            reserve = self.reserves[queues.fair] = Reserve(self._limits.item_stops)
        reserve.arrived(self._book.now_s, wanted)


def refuse_holder(request: Request, group: Group, book: RequestBook) -> bool:
    """Refuse the last request of the share that holds most of a full queue by its weight, and so make room for another.

    False: the request's own share holds most, with this request.
    """
    held = {request.share: 1.0 / request.weight}
    for fair in dict.fromkeys([queues.fair for queues in group.queues.values()]):  # in the order of their making
        for share in fair:
            held[share.name] = held.get(share.name, 0.0) + share.waiting / share.weight
    most = max(held, key=lambda name: (held[name], name == request.share))
    if most == request.share:
        return False
    for queued in reversed(book.by_id.values()):
        if queued.request.share == most and queued.run is None:
            book.touch()  # one share may wait alone now, and its batches form early
            book.queues_of(queued).leave(queued)
            book.fail(queued, "queue_full")
            return True
    return False
