"""One model's requests: how they wait, and what is known of how long its answers are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from bins.edges import OnlineEdges
from bins.risk import longest_shares, risk
from llmserve.request import Request
from llmserve.scheduling.lengths import LEVELS, SeenLengths
from llmserve.scheduling.planner import Planner
from llmserve.scheduling.queues import BinQueue, FormedBatch, FormedQueue, Place, Ticket
from llmserve.scheduling.rates import ServiceTime
from llmserve.scheduling.release import Release
from llmserve.scheduling.trust import Trust

ANSWERS_BETWEEN = 64  # after which lengths are looked at again; sooner while few have been seen


@dataclass(frozen=True, slots=True)
class Tokens:
    """Output tokens of a bin's answers: of the longest of 1, 2, ... on average; of the shortest there are."""

    longest: tuple[float, ...]
    least: float


@lru_cache(maxsize=8)
def _longest_of(batch_size: int) -> NDArray[np.float64]:
    """(LEVELS, sizes) weights of equally likely lengths in the mean of the longest of 1, 2, ..., batch_size."""
    return np.array([longest_shares(LEVELS, size) for size in range(1, batch_size + 1)]).T


class Lane:
    """All times are seconds on the scheduler's clock.

    model       whose requests these are
    release     when a bin lets a batch go (scheduling/release.py)
    order       key of a formed batch; the smallest runs next (scheduling/order/)
    edges       bins over the predictions' risk or median, fitted again as requests come in
    batch_size  largest batch that a bin forms
    trust       whether predictions rank answers; while they do not, one bin serves
    by_risk     bins by what a request does to its batch (bins/risk.py), not by its median
    planner     asks for plans, where the release follows one
    seen        is told how long answers became, for edges, plans and batch times that go by it
    queue       of a bin, by its index: which of those that wait a batch takes
    """

    def __init__(
        self,
        model: str,
        *,
        release: Release,
        order: Callable[[FormedBatch], float],
        edges: OnlineEdges,
        batch_size: int,
        trust: Trust,
        planner: Planner | None = None,
        seen: SeenLengths | None = None,
        queue: Callable[[int], BinQueue] = BinQueue,
        by_risk: bool = True,
    ) -> None:
        self.model = model
        self.release = release
        self.edges = edges
        self.trust = trust
        self.planner = planner
        self.seen = seen
        self.service = ServiceTime()
        self.bins = [queue(index) for index in range(edges.bins)]
        self.formed = FormedQueue(order)
        self.waiting = 0  # requests in bins and in formed batches
        # Of the engines that serve it, kept by the scheduler:
        self.ready = 0
        self.slots = 0  # of the ready one that has least
        self.helpless_since_s: float | None = 0.0  # None while one is ready and its circuit closed
        # and of its waiting:
        self.due_s: float | None = None  # when the next bin's release is due by time alone
        self.look_again_at_s: float | None = None  # when its first batch may fit an engine's memory
        self._batch_size = batch_size
        self._by_risk = by_risk
        self._tokens: list[Tokens] = []  # by bin, until answers have become others; []: to be looked at
        self._answers = 0  # since these were looked at
        self._look_after = 1  # answers

    @property
    def others(self) -> int:
        """Ready engines but one."""
        return max(0, self.ready - 1)

    # ---- arrivals ----

    def admit(self, request: Request, now_s: float) -> tuple[Ticket, BinQueue]:
        """A request that has come now waits in its bin from now on."""
        score = self._score_of(request)
        queue = self.bins[self._queue_for(self._bin_of(score), now_s)]
        service = self.service
        expected = request.expected_tokens if self.trust.trusted else None
        tokens = service.tokens_mean if expected is None else expected
        ticket = Ticket(
            request,
            queue.index,
            now_s,
            score,
            tokens=tokens,
            service_s=tokens * service.seconds_per_token,
            service_mean_s=service.tokens_mean * service.seconds_per_token,
        )
        ticket.alike = self._alike(ticket)
        queue.append(ticket)
        self.waiting += 1
        return ticket, queue

    def take_back(self, ticket: Ticket) -> BinQueue:
        """A request that ran, or waited elsewhere, waits in its bin again, as long as it has waited already."""
        index = self._index_of(ticket)
        ticket.place, ticket.engine, ticket.formed = Place.BIN, "", None
        ticket.bin = index
        ticket.alike = self._alike(ticket)
        self.bins[index].append(ticket)
        self.waiting += 1
        return self.bins[index]

    def _score_of(self, request: Request) -> float | None:
        """What its bin goes by, tokens."""
        if self._by_risk and request.quantiles:
            return risk(request.quantiles, self._batch_size)
        return request.predicted_tokens

    def _alike(self, ticket: Ticket) -> float:
        """What its neighbours in a window go by, tokens; of all the same while predictions are not trusted."""
        if not self.trust.trusted:
            return 0.0
        return ticket.expected_tokens if ticket.score is None else ticket.score

    def _bin_of(self, score: float | None) -> int:
        if score is None:
            return 0
        self.edges.observe(score)
        return self.edges.bin_of(score)

    def _queue_for(self, bin_index: int, now_s: float) -> int:
        """Where a request that arrives in a bin waits; while predictions are not trusted, all wait together."""
        if self.planner is not None:
            self.planner.arrived(bin_index, now_s)
        if not self.trust.trusted:
            return 0
        return bin_index if self.planner is None else self.planner.queue_of(bin_index)

    def _index_of(self, ticket: Ticket) -> int:
        """The queue that it would wait in had it come now."""
        index = self.edges.bin_of(ticket.score) if ticket.score is not None and self.trust.trusted else 0
        return index if self.planner is None else self.planner.queue_of(index)

    def sort_into_queues(self) -> None:
        """Who waits in a bin goes to where it would wait had it come now, first come first served."""
        waiting = sorted(
            [ticket for queue in self.bins for ticket in queue.take_all()],
            key=lambda ticket: (ticket.arrived_at_s, ticket.request.id),
        )
        for ticket in waiting:
            ticket.bin = self._index_of(ticket)
            ticket.alike = self._alike(ticket)
            self.bins[ticket.bin].append(ticket)

    # ---- leaving ----

    def leave(self, ticket: Ticket) -> None:
        """A request that waits waits no more."""
        if ticket.place is Place.BIN:
            self.bins[ticket.bin].remove(ticket)
        else:
            self.formed.remove(ticket)
        self.waiting -= 1

    def see_answer(self, ticket: Ticket, output_tokens: float, ran_s: float) -> bool:
        """How long an answer became, and how long that took; True when it changed whether predictions are trusted."""
        self.service.observe(ran_s, output_tokens)
        if self.seen is not None:
            self.seen.observe(ticket.score, output_tokens)
        if self.planner is not None:
            self.planner.answered()
        self._answers += 1
        changed = ticket.score is not None and self.trust.observe(ticket.request, ticket.score, output_tokens)
        if changed:
            self._tokens = []  # bins hold other answers now
        return changed

    # ---- how long they are ----

    def tokens(self, bin_index: int) -> Tokens:
        """Of the answers to a bin's requests, as far as they have been seen; zeros before the first."""
        if not self._tokens or self._answers >= self._look_after:
            if self._answers >= self._look_after:
                self._look_after = min(2 * self._look_after, ANSWERS_BETWEEN)
            self._answers = 0
            self._tokens = self._look_at_tokens()
        return self._tokens[min(bin_index, len(self._tokens) - 1)]

    def _look_at_tokens(self) -> list[Tokens]:
        seen = self.seen
        if not seen:
            return [Tokens((0.0,) * self._batch_size, 0.0)]
        trusted = self.trust.trusted
        bins = seen.by_bin(self.edges.edges if trusted else (), len(self.bins) if trusted else 1)
        weights = _longest_of(self._batch_size)
        return [Tokens(tuple((np.array(lengths) @ weights).tolist()), lengths[0]) for lengths in bins]
