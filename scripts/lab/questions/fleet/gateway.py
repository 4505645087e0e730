"""A gateway: it holds the clients' connections, and sends each request to a group of its pool.

Of two groups at random the gateway takes the one with less load for each slot, by the groups' last reports and what the
gateway has sent since (the power of two choices: Mitzenmacher, 2001). So many gateways with equally old reports do not
all send to the group that was best.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from questions.fleet.group import Report
from questions.fleet.traffic import Sent

ATTEMPTS_MAX = 20  # groups that a gateway asks for one request


@dataclass(slots=True)
class Board:
    """What gateways know of groups, by their last reports.

    up     groups that serve, by pool
    load   requests by group; slots : by group
    """

    up: list[list[int]]
    load: list[int]
    slots: list[int]

    @classmethod
    def of(cls, reports: Sequence[Report], pool_of: Sequence[int], pools: int) -> Board:
        """reports : of all groups, in their order"""
        up: list[list[int]] = [[] for _ in range(pools)]
        for report in reports:
            if report.slots:
                up[pool_of[report.group]].append(report.group)
        return cls(up, [report.present for report in reports], [report.slots for report in reports])


@dataclass(slots=True)
class Held:
    """A request that has not ended. sent : as it arrived.  groups : number of groups that had it.  last : of them"""

    sent: Sent
    groups: int = 0
    last: int = -1


@dataclass(slots=True)
class Gateway:
    """random_ : its own.  held : requests by id.  routed : decisions so far"""

    random_: random.Random
    held: dict[int, Held] = field(default_factory=dict)
    routed: int = 0
    _since: dict[int, int] = field(default_factory=dict)  # requests by group, since its last report

    def begin_round(self) -> None:
        self._since = {}

    def take(self, sent: Sent) -> None:
        assert sent.request.id not in self.held, f"request {sent.request.id} arrived twice"
        self.held[sent.request.id] = Held(sent)

    def route(self, request_id: int, board: Board) -> int | None:
        """The group for a request; None: no group of its pool is up."""
        held = self.held[request_id]
        self.routed += 1
        up = board.up[held.sent.pool]
        if held.last in up and len(up) > 1:
            up = [group for group in up if group != held.last]
        if not up:
            return None
        one, other = (up[int(self.random_.random() * len(up))] for _ in range(2))
        since = self._since
        if (board.load[other] + since.get(other, 0)) / board.slots[other] < (
            board.load[one] + since.get(one, 0)
        ) / board.slots[one]:
            one = other
        since[one] = since.get(one, 0) + 1
        held.groups, held.last = held.groups + 1, one
        return one

    def gives_up(self, request_id: int) -> bool:
        return self.held[request_id].groups >= ATTEMPTS_MAX

    def end(self, request_id: int) -> Held:
        """Forget a request that has ended. Each ends once: AssertionError otherwise."""
        held = self.held.pop(request_id, None)
        assert held is not None, f"request {request_id} ended twice"
        return held


def again_at(sent: Sent, at_s: float) -> Sent:
    """The same request, sent to another group at a later time."""
    return msgspec.structs.replace(sent, at_s=at_s)


Routed = Mapping[int, list[Sent]]
"""The requests of a round by group, in the order of their times."""
