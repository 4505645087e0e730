"""The exchange with servers once a second: keys' limits allocated to gateways, served shares told between groups."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence

from llmserve.machines.peers import FromServer, ToServer
from llmserve.machines.quotas import Quotas
from llmserve.machines.served_shares import ServedShares

FORGOTTEN_AFTER = 10  # exchanges that a gateway has not answered: its parts of limits are free

Received = Mapping[str, FromServer]


class PeerSync:
    """tell : one server by its name; None: the server does not answer

    wanted : engines by model, of all groups that answered
    """

    def __init__(self, tell: Callable[[str, ToServer], Awaitable[FromServer | None]]) -> None:
        self.wanted: dict[str, int] = {}
        self._tell_one = tell
        self._quotas, self._shares = Quotas(), ServedShares()
        self._unanswered: dict[str, int] = {}  # exchanges in a row that a gateway has not answered

    async def round(self, gateways: Sequence[str], groups: Sequence[str]) -> tuple[Received, Received]:
        """What the gateways, and what the groups told, by name.

        What a group has served reaches the others at once, not with the next round.
        """
        parts = self._quotas.allocate(gateways)
        of_gateways, of_groups = await asyncio.gather(
            self._tell({name: ToServer(parts[name]) for name in gateways}),
            self._tell(dict.fromkeys(groups, ToServer())),
        )
        self.wanted = dict(sum((Counter(server.wanted) for server in of_groups.values()), Counter()))
        self._count(gateways, of_gateways)
        for name, server in of_groups.items():
            self._shares.received(name, server.served)
        elsewhere = self._shares.take_elsewhere()
        await self._tell({name: ToServer(elsewhere=rows) for name, rows in elsewhere.items() if rows})
        return of_gateways, of_groups

    async def _tell(self, told: Mapping[str, ToServer]) -> Received:
        answers = await asyncio.gather(*(self._tell_one(name, what) for name, what in told.items()))
        return {name: answer for name, answer in zip(told, answers, strict=True) if answer is not None}

    def _count(self, gateways: Sequence[str], received: Received) -> None:
        """Note the use of limits, and forget gateways that are gone."""
        for name in gateways:
            self._unanswered[name] = 0 if name in received else self._unanswered.get(name, 0) + 1
        for name, server in received.items():
            self._quotas.received(name, server.asked, server.parts)
        for name in [
            name for name, times in self._unanswered.items() if times > FORGOTTEN_AFTER or name not in gateways
        ]:
            self._quotas.forget(name)
            del self._unanswered[name]
        self._quotas.decay()
