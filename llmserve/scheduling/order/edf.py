"""Earliest deadline first, by the earliest deadline in the batch.

A request without a deadline takes its turn as if it were due `UNDATED_S` after its arrival, so that a stream of
requests with deadlines does not starve it. (It is never failed for being late.)
"""

from __future__ import annotations

from llmserve.scheduling.queues import FormedBatch

UNDATED_S = 60.0


def edf(batch: FormedBatch) -> float:
    return min(
        [
            ticket.arrived_at_s + UNDATED_S if ticket.request.deadline_s is None else ticket.request.deadline_s
            for ticket in batch.tickets.values()
        ]
    )
