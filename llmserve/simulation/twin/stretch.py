"""Which stretch of the past looks like the present, and how to make a longer one of it.

Traffic changes. `latest_alike` keeps the last minutes over which it has not: it doubles a stretch backwards while the
time before it had as many arrivals, and answers as long, but for chance. A short stretch says little about waiting:
queues have no time to build up. So `repeated` appends copies of it, in which blocks of requests have changed places.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from llmserve.simulation.twin.past import PastRequest, Recording

FIRST_S = 60.0  # the stretch that is always kept
CHANCE = 4.0  # standard deviations; smaller differences count as chance
ALIKE_LEAST = 30  # requests on both sides of a comparison
BLOCK = 50  # requests that stay together, so that bursts and their lengths stay what they are


def latest_alike(recording: Recording) -> Recording:
    """The requests that arrived while the traffic was as it is at the end."""
    requests = recording.requests
    if not requests:
        return recording
    span_s, first_s = FIRST_S, requests[0].arrived_s
    while recording.until_s - span_s > first_s:
        later = _between(requests, recording.until_s - span_s, math.inf)
        earlier = _between(requests, recording.until_s - 2.0 * span_s, recording.until_s - span_s)
        # The earlier part may be cut off by the begin of the recording.
        share = min(1.0, (recording.until_s - span_s - first_s) / span_s)
        if len(later) >= ALIKE_LEAST and len(earlier) >= ALIKE_LEAST and _differ(earlier, later, share):
            break
        span_s *= 2.0
    since_s = recording.until_s - span_s
    return msgspec.structs.replace(recording, requests=tuple(_between(requests, since_s, math.inf)))


def _between(requests: Sequence[PastRequest], from_s: float, to_s: float) -> list[PastRequest]:
    return [past for past in requests if from_s <= past.arrived_s < to_s]


def _differ(earlier: Sequence[PastRequest], later: Sequence[PastRequest], share: float) -> bool:
    """Whether numbers of arrivals, or the logarithms of the lengths, differ by more than chance.

    share : length of the earlier time over that of the later
    """
    expected = share * len(later)
    if abs(len(earlier) - expected) > CHANCE * math.sqrt(len(earlier) + share * expected):
        return True
    before, after = _logarithms(earlier), _logarithms(later)
    if min(before.size, after.size) < ALIKE_LEAST:
        return False
    deviation = math.sqrt(before.var() / before.size + after.var() / after.size)
    return abs(float(before.mean() - after.mean())) > CHANCE * deviation


def _logarithms(requests: Sequence[PastRequest]) -> np.ndarray:
    """Of the forecast lengths, which are known from the arrival on; of the real ones where there is no forecast."""
    lengths = [past.request.expected_tokens or past.tokens for past in requests]
    return np.log([max(1.0, length) for length in lengths if length is not None])


def repeated(recording: Recording, least: int) -> list[tuple[float, int]]:
    """(arrival, index of the request) of the recording's requests, and of copies of them up to `least` in all.

    The copies are the same for the same recording.
    """
    requests = recording.requests
    arrivals_s = np.array([past.arrived_s for past in requests])
    count = len(requests)
    gaps_s = np.diff(arrivals_s, prepend=arrivals_s[0])
    gaps_s[0] = max(0.0, recording.until_s - float(arrivals_s[-1]))  # the time after the last arrival belongs to a copy
    result = [(float(at_s), index) for index, at_s in enumerate(arrivals_s)]
    rng = np.random.default_rng(0)
    starts = np.arange(0, count, BLOCK)
    at_s = float(arrivals_s[-1])
    while len(result) < least:
        order = np.concatenate([np.arange(start, min(start + BLOCK, count)) for start in rng.permutation(starts)])
        times_s = at_s + np.cumsum(gaps_s[order])
        result += zip(times_s.tolist(), order.tolist(), strict=True)
        at_s = float(times_s[-1])
    return result[: max(least, count)]
