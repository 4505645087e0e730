"""Waiting items of batch jobs, apart from the queues of online requests: by model, and by the ends of their windows."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping

from llmserve.request import Request
from llmserve.scheduling.fair import FairShares
from llmserve.scheduling.queues.model_queues import ModelQueues

ITEM_S_LEAST = 1e-3  # an item's time counts as this at least

Row = list[tuple[float, int, Request]]  # (end of the window, number of the arrival, item), ascending


class PreemptibleQueue:
    """The items that wait, and may be preempted once they run.

    waiting  by id: (end of the window, number of the arrival, item)
    rows     by model; none is empty
    starved  models whose items need more than they get
    surplus  the share of items that run on slots that nobody else wants
    """

    def __init__(self) -> None:
        self.waiting: dict[int, tuple[float, int, Request]] = {}
        self.rows: dict[str, Row] = {}
        self.starved: set[str] = set()
        self.surplus = FairShares().of("", 1.0)
        self._arrivals = 0

    def add(self, item: Request, *, first: bool = False) -> float:
        """Let an item wait. first : before the others of its window. Returns the end of its window; inf without one."""
        self._arrivals += 1
        ends_s = math.inf if item.deadline_s is None else item.deadline_s
        entry = ends_s, -self._arrivals if first else self._arrivals, item
        self.waiting[item.id] = entry
        insort(self.rows.setdefault(item.model, []), entry, key=_place)
        return ends_s

    def remove(self, request_id: int) -> Request | None:
        """Take an item out; None: it does not wait here."""
        entry = self.waiting.pop(request_id, None)
        if entry is None:
            return None
        model = entry[2].model
        row = self.rows[model]
        del row[bisect_left(row, entry[:2], key=_place)]
        if not row:
            del self.rows[model]
            self.starved.discard(model)
        return entry[2]

    def revise(self, changes: Mapping[int, Callable[[Request], Request]]) -> None:
        """Give items new forecasts."""
        for request_id in changes.keys() & self.waiting.keys():
            ends_s, number, item = self.waiting[request_id]
            entry = ends_s, number, changes[request_id](item)
            row = self.rows[item.model]
            self.waiting[request_id] = row[bisect_left(row, entry[:2], key=_place)] = entry

    def by_window(self) -> list[tuple[str, Row]]:
        """The rows, with their models, by the first end of a window."""
        return sorted(self.rows.items(), key=lambda named: _place(named[1][0]))

    def ended(self, now_s: float) -> Iterator[Request]:
        """Items whose window has closed. The caller must remove each before it asks for the next."""
        for row in list(self.rows.values()):
            while row and row[0][0] <= now_s:
                yield row[0][2]

    def item_s(self, queues: ModelQueues) -> float:
        """Mean seconds that an item takes: of those that have ended; before the first, of those that wait."""
        service = queues.items.times
        if service.answers:
            return max(ITEM_S_LEAST, service.tokens_mean * service.seconds_per_token)
        row = self.rows[queues.model]
        tokens = sum([forecast_tokens(queues, item) for *_, item in row]) / len(row)
        return max(ITEM_S_LEAST, tokens * queues.service.seconds_per_token)


def forecast_tokens(queues: ModelQueues, item: Request) -> float:
    """Forecast output tokens of an item."""
    return queues.binning.forecast(item) or queues.service.tokens_mean


def most_tokens(queues: ModelQueues, item: Request) -> float:
    """Tokens that the item takes at most, as far as its forecast tells."""
    tokens = forecast_tokens(queues, item)
    return max(tokens, item.quantiles[-1]) if item.quantiles and queues.binning.trust.trusted else tokens


def _place(entry: tuple[float, int, Request]) -> tuple[float, int]:
    return entry[:2]
