"""Earliest deadline first, by the earliest deadline in the batch.

A request without a deadline takes its turn as if it were due `UNDATED_S` after its arrival, so that a stream of
requests with deadlines does not starve it. (It is never failed for being late.)
"""

from __future__ import annotations

from llmserve.scheduling.queues import FormedBatch, Ticket

UNDATED_S = 60.0


def due_at_s(ticket: Ticket) -> float:
    deadline_s = ticket.request.deadline_s
    return ticket.arrived_at_s + UNDATED_S if deadline_s is None else deadline_s


def edf(batch: FormedBatch) -> float:
    return min([due_at_s(ticket) for ticket in batch.tickets.values()])
