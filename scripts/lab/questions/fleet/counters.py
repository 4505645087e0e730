"""What keys were served, exchanged between the groups of a pool once a second.

Each group reports the weighted tokens of each key since its last report; the controller adds them up, and tells each
group what the other groups of its pool served. So each scheduler's counter of a key grows with the service of the
whole pool, at most one interval late.
"""

from __future__ import annotations

from collections.abc import Sequence

from questions.fleet.group import Report

Served = dict[str, float]


class Controller:
    """rows : (group, key) numbers sent so far.  behind : weighted tokens by which a group was behind for a key, each
    time that it was told of them
    """

    def __init__(self, pool_of: Sequence[int], pools: int) -> None:
        self._pool_of, self._pools = pool_of, pools
        self.rows = 0
        self.behind: list[float] = []

    def exchange(self, reports: Sequence[Report]) -> list[Served]:
        """What each group is told, by group. reports : of all groups, in their order"""
        totals: list[Served] = [{} for _ in range(self._pools)]
        for report in reports:
            total = totals[self._pool_of[report.group]]
            for key, tokens in report.served.items():
                total[key] = total.get(key, 0.0) + tokens
        told = []
        for report in reports:
            own, up = report.served, report.slots > 0
            total = totals[self._pool_of[report.group]] if up else {}
            rest = {key: tokens - own.get(key, 0.0) for key, tokens in total.items()}
            told.append({key: tokens for key, tokens in rest.items() if tokens > 0})
            self.rows += len(told[-1]) + len(own)
            self.behind += told[-1].values()
        return told
