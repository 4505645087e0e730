"""Shortest predicted first, with ageing: nothing starves, and long answers wait hardly longer than in turn.

A request's turn is its arrival plus an allowance that grows with its predicted service time s (seconds), less and less:

    allowance(s) = patience * m / 8 * ln(1 + 8 s / m),   m: the mean service time

For a short request that is patience * s, so of two that arrive together the shorter goes first, and (in batches of one)
none is overtaken by a request that arrives later than `patience` times its own predicted service after it. For a long
one it is far less: were it proportional, the longest answers, which need the most time anyway, would also wait the
longest, and the tail of the latency would be theirs. With patience 0 all go first come first served.

A turn is fixed when its batch forms (the mean over its requests): all who wait grow older alike, which never changes
their order.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from llmserve.scheduling.queues import FormedBatch, Ticket

BEND = 8.0  # service times of 1/8 of the mean and more are given less than their full patience


def turn(patience: float) -> Callable[[Ticket], float]:
    """When it is a request's turn, seconds. patience >= 0, in units of predicted service."""

    def turn_s(ticket: Ticket) -> float:
        mean_s = ticket.service_mean_s
        return ticket.arrived_at_s + patience * mean_s / BEND * math.log1p(BEND * ticket.service_s / mean_s)

    return turn_s


def shortest(patience: float) -> Callable[[FormedBatch], float]:
    turn_s = turn(patience)

    def turn_of_batch_s(batch: FormedBatch) -> float:
        return sum([turn_s(ticket) for ticket in batch.tickets.values()]) / len(batch.tickets)

    return turn_of_batch_s
