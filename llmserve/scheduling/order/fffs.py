"""First formed, first served: the order of Multi-Bin Batching (its central queue)."""

from __future__ import annotations

from llmserve.scheduling.queues import FormedBatch, Ticket


def fffs(batch: FormedBatch) -> float:
    """Batches are numbered as they form; one that comes back from a lost engine keeps its number."""
    return batch.id


def arrival(ticket: Ticket) -> float:
    """Of requests that no batch holds yet, the first come is the first."""
    return ticket.arrived_at_s
