"""The requests: two streams with different deadlines, and a burst of one stream."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Stream:
    """Requests of one application.

    tokens       (least, most) output tokens of an answer, uniformly distributed
    burst_per_s  rate of additional requests during the burst
    """

    name: str
    model: str
    slo_s: float
    rate_per_s: float
    tokens: tuple[int, int]
    burst_per_s: float = 0.0


@dataclass(frozen=True)
class Setting:
    """Traffic of `seconds`, with a burst from burst_s[0] to burst_s[1]. batch_size : largest batch of every engine"""

    streams: tuple[Stream, ...]
    seconds: float
    burst_s: tuple[float, float]
    batch_size: int

    def in_burst(self, at_s: float) -> bool:
        return self.burst_s[0] <= at_s < self.burst_s[1]


@dataclass(frozen=True)
class Arrival:
    """A request. at_s : since the beginning of the traffic.  tokens : of the answer"""

    at_s: float
    stream: Stream
    tokens: int


def draw(setting: Setting, seed: int) -> list[Arrival]:
    """The requests of a round, in order of arrival. Each stream is a Poisson process, also in the burst."""
    rng = np.random.default_rng(seed)
    arrivals = []
    for stream in setting.streams:
        spans = ((0.0, setting.seconds, stream.rate_per_s), (*setting.burst_s, stream.burst_per_s))
        for from_s, to_s, rate_per_s in spans:
            count = rng.poisson(rate_per_s * (to_s - from_s))
            times_s = rng.uniform(from_s, to_s, count)
            lengths = rng.integers(stream.tokens[0], stream.tokens[1], count, endpoint=True)
            arrivals += [Arrival(*fields) for fields in zip(times_s, [stream] * count, lengths.tolist(), strict=True)]
    return sorted(arrivals, key=lambda arrival: arrival.at_s)
