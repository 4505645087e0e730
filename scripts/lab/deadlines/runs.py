"""What an order made of a round's requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from deadlines.ledger import ENDS, IN_TIME, Answer, Ledger, check
from deadlines.traffic import Setting, Stream


@dataclass(frozen=True)
class Count:
    """Of a stream's requests. ends : how many ended in each of ENDS, by the client's clock; those of the burst apart.
    latency_s_p50, latency_s_p99 : of those in time; None: there are none.
    """

    ends: dict[str, int]
    burst: dict[str, int]
    latency_s_p50: float | None
    latency_s_p99: float | None


@dataclass(frozen=True)
class Run:
    """What a policy made of a round's requests. Engine times in seconds, of all workers together.

    preempted  requests, by how they ended; by the journal's clock
    stops      batches that were stopped for others
    stopped_s  that these ran
    too_late_s of batches that ran to their end, and no answer of which was in time
    bars       (worker, stream, size, began_s, ended_s, stopped) of each batch, and
    missed     (stream, deadline_s) of each request that was not in time; counted from the beginning of the traffic
    """

    policy: str
    round: int
    counts: dict[str, Count]
    preempted: dict[str, int]
    stops: int
    stopped_s: float
    too_late_s: float
    busy_s: float
    bars: list[tuple[str, str, int, float, float, bool]]
    missed: list[tuple[str, float]]

    def share(self, stream: str | None = None, part: str = "all") -> float:
        """In time, over all that were asked. stream : None: of all.  part : "all", "burst", or "steady"."""
        counts = [count for name, count in self.counts.items() if stream in (None, name)]
        ends = sum([Counter(_part(count, part)) for count in counts], Counter())
        return ends[IN_TIME] / ends.total() if ends.total() else 1.0

    def goodput_per_s(self, setting: Setting) -> float:
        return sum(count.ends[IN_TIME] for count in self.counts.values()) / setting.seconds


def _part(count: Count, part: str) -> dict[str, int]:
    steady = {end: count.ends[end] - count.burst[end] for end in ENDS}
    return {"all": count.ends, "burst": count.burst, "steady": steady}[part]


def run_of(policy: str, number: int, setting: Setting, answers: Sequence[Answer], ledger: Ledger) -> Run:
    """Raises AssertionError: see check."""
    check(answers, ledger)
    first_s = min(course.arrived_s for course in ledger.courses.values()) - answers[0].asked.at_s
    ran = ledger.batches
    return Run(
        policy,
        number,
        {stream.name: _count(stream, setting, answers) for stream in setting.streams},
        _ends(course.end for course in ledger.courses.values() if course.preempted),
        stops=sum(each.stopped for each in ran),
        stopped_s=sum(each.ended_s - each.began_s for each in ran if each.stopped),
        too_late_s=sum(each.ended_s - each.began_s for each in ran if not each.stopped and not each.in_time),
        busy_s=sum(each.ended_s - each.began_s for each in ran),
        bars=[
            (each.worker, each.stream, each.size, each.began_s - first_s, each.ended_s - first_s, each.stopped)
            for each in ran
        ],
        missed=[
            (each.asked.stream.name, each.asked.at_s + each.asked.stream.slo_s)
            for each in answers
            if each.end != IN_TIME
        ],
    )


def _ends(ends: Iterable[str]) -> dict[str, int]:
    counted = Counter(ends)
    return {end: counted[end] for end in ENDS}


def _count(stream: Stream, setting: Setting, answers: Sequence[Answer]) -> Count:
    mine = [answer for answer in answers if answer.asked.stream == stream]
    latencies = [answer.latency_s for answer in mine if answer.end == IN_TIME]
    p50, p99 = np.percentile(latencies, (50, 99)).tolist() if latencies else (None, None)
    burst = _ends(answer.end for answer in mine if setting.in_burst(answer.asked.at_s))
    return Count(_ends(answer.end for answer in mine), burst, p50, p99)
