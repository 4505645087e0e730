"""Longest waiting first: an example of an order that preempts."""

from __future__ import annotations

from llmserve.scheduling.choice.orders import Candidate, Key, MomentOrder, Running


class LongestWaiting(MomentOrder):
    """The batch whose oldest request has waited longest runs next, whatever its length. Where no engine is free, it
    preempts the running batch that started last, if all requests of the running batch arrived later.
    """

    preempts = True

    def key(self, candidate: Candidate, now_s: float) -> Key:
        return (candidate.queue.oldest_at_s,)

    def victim_key(self, running: Running) -> Key:
        return (-running.runs[0].started_at_s,)

    def stops(self, candidate: Candidate, running: Running, now_s: float) -> bool:
        return candidate.queue.oldest_at_s < min(run.queued.arrived_at_s for run in running.runs)
