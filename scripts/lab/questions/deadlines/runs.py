"""A run: how the requests of a round ended under one policy, and what the engines ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from questions.deadlines.ledger import ENDS, IN_TIME, Answer, Ledger, check
from questions.deadlines.traffic import Setting, Stream


@dataclass(frozen=True)
class Count:
    """Requests of one stream.

    ends           number of requests by end (ENDS), by the client's clock
    burst          the same for the requests of the burst
    latency_s_p50  of the answers in time, and so is latency_s_p99; None: no answer was in time
    """

    ends: dict[str, int]
    burst: dict[str, int]
    latency_s_p50: float | None
    latency_s_p99: float | None


@dataclass(frozen=True)
class Run:
    """A policy's run over the requests of a round. Engine times are seconds, summed over all workers.

    preempted   number of preempted requests by end, by the journal's clock
    stops       number of batches that were preempted
    stopped_s   engine time of the preempted batches
    too_late_s  engine time of the batches that ran to their end without an answer in time
    bars        (worker, stream, size, began_s, ended_s, stopped) of each batch
    missed      (stream, deadline_s) of each request that was not in time
                Times in bars and missed are seconds since the beginning of the traffic.
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
        """Requests in time over all requests. stream : None: all streams.  part : "all", "burst", or "steady" """
        counts = [count for name, count in self.counts.items() if stream in (None, name)]
        ends = sum([Counter(_part(count, part)) for count in counts], Counter())
        return ends[IN_TIME] / ends.total() if ends.total() else 1.0

    def goodput_per_s(self, setting: Setting) -> float:
        return sum(count.ends[IN_TIME] for count in self.counts.values()) / setting.seconds


def _part(count: Count, part: str) -> dict[str, int]:
    steady = {end: count.ends[end] - count.burst[end] for end in ENDS}
    return {"all": count.ends, "burst": count.burst, "steady": steady}[part]


def run_of(policy: str, number: int, setting: Setting, answers: Sequence[Answer], ledger: Ledger) -> Run:
    """Raises AssertionError where `check` does."""
    check(answers, ledger)
    first_s = min(history.arrived_s for history in ledger.histories.values()) - answers[0].arrival.at_s
    batches = ledger.batches
    return Run(
        policy,
        number,
        {stream.name: _count(stream, setting, answers) for stream in setting.streams},
        _ends(history.end for history in ledger.histories.values() if history.preempted),
        stops=sum(batch.stopped for batch in batches),
        stopped_s=sum(batch.ended_s - batch.began_s for batch in batches if batch.stopped),
        too_late_s=sum(batch.ended_s - batch.began_s for batch in batches if not batch.stopped and not batch.in_time),
        busy_s=sum(batch.ended_s - batch.began_s for batch in batches),
        bars=[
            (batch.worker, batch.stream, batch.size, batch.began_s - first_s, batch.ended_s - first_s, batch.stopped)
            for batch in batches
        ],
        missed=[
            (answer.arrival.stream.name, answer.arrival.at_s + answer.arrival.stream.slo_s)
            for answer in answers
            if answer.end != IN_TIME
        ],
    )


def _ends(ends: Iterable[str]) -> dict[str, int]:
    counted = Counter(ends)
    return {end: counted[end] for end in ENDS}


def _count(stream: Stream, setting: Setting, answers: Sequence[Answer]) -> Count:
    own = [answer for answer in answers if answer.arrival.stream == stream]
    latencies = [answer.latency_s for answer in own if answer.end == IN_TIME]
    p50, p99 = np.percentile(latencies, (50, 99)).tolist() if latencies else (None, None)
    burst = _ends(answer.end for answer in own if setting.in_burst(answer.arrival.at_s))
    return Count(_ends(answer.end for answer in own), burst, p50, p99)
