"""Decides which jobs are in memory with their lines: a few that run, and more that are parked. Pure.

Seats go to the keys in turn. The most urgent job of each key runs even when no seat is free, so that a key with many
jobs cannot keep the others out. A parked job keeps its seat until another job needs it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

SEATS, PARKED_SEATS = 16, 48  # of jobs that run, and of jobs that are parked
UNSEATED_S = 30.0  # a parked job that gave its seat away waits so long for another


class Seated(NamedTuple):
    """A job with a seat. is_parked : no line may start.  is_idle : parked, and no line is in flight"""

    id: str
    key: str
    expires_at: float
    is_parked: bool = False
    is_idle: bool = False


class Seeking(NamedTuple):
    """A job without a seat. Jobs that gave a seat away while parked, and so have a later `not_before`, come last."""

    not_before: float
    expires_at: float
    id: str
    key: str


def deal(seated: Iterable[Seated], seeking: Iterable[Seeking]) -> tuple[list[str], list[str]]:
    """Deal the seats. Returns the ids of idle jobs that lose theirs, and of the jobs that get one, both in order."""
    taken = list(seated)
    by_key = Counter([job.key for job in taken])
    running = [job for job in taken if not job.is_parked]
    idle = [job.id for job in taken if job.is_idle]
    first_s: dict[str, float] = {}
    for job in running:
        first_s[job.key] = min(job.expires_at, first_s.get(job.key, math.inf))
    waiting: dict[str, list[Seeking]] = {}  # of each key; the next job is the last
    for seeker in sorted(seeking, reverse=True):
        waiting.setdefault(seeker.key, []).append(seeker)
    lost, given, run, count = list[str](), list[str](), len(running), len(taken)
    while waiting:
        key = min(waiting, key=lambda key: (by_key[key], waiting[key][-1]))
        seeker = waiting[key].pop()
        is_full = count >= SEATS + PARKED_SEATS
        is_first = seeker.expires_at < first_s.get(key, math.inf)
        if (run >= SEATS or (is_full and not idle)) and not is_first:
            del waiting[key]  # the other jobs of the key are less urgent
            continue
        if is_full and idle:
            lost.append(idle.pop(0))
            count -= 1
        given.append(seeker.id)
        run, count = run + 1, count + 1
        by_key[key] += 1
        first_s[key] = min(seeker.expires_at, first_s.get(key, math.inf))
        if not waiting[key]:
            del waiting[key]
    return lost, given
