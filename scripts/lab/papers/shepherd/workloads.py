"""The workloads of Shepherd's evaluation: the Azure Functions trace, stable and bursty, and two synthetic cases.

Random numbers come from the generator that the caller passes.
"""

from __future__ import annotations

import numpy as np

from llmserve.simulation.workload import Bursts
from papers.shepherd.models import EVALUATED, TABLE_4
from papers.shepherd.streams import Arrivals, Streams, Traffic, draw_requests

SLO_S = 0.25  # Section 7's default

# The paper's bursty trace is "similar to [9]" (MArk), without numbers. Assumed: bursts last 0.5 s on average, twice the
# SLO, with 4.5 s between bursts; the request rate in a burst is ten times the rate outside, so that half of all
# requests come in bursts. The streams of one model burst together. At 3,000 requests a second, the counts of quarter
# seconds then vary by 40 % (standard deviation over mean), and by 4 % in the stable trace. With separate bursts for
# each function, the counts would vary by 20 %, because few functions send much of the trace; with common bursts, by
# 125 %.
BURSTS = Bursts.of(1.0, ratio=10.0, high_s=0.5, low_s=4.5)

MICRO = ("ResNet18", "ResNeSt269")  # Section 7.2's streams A and B
BURST_REQUESTS, BURST_FIRST_MS, BURST_EVERY_MS = 1_024, 5, 120  # of A
ALONE_MS = 80  # B sends for so long beside an isolated burst: a request of B takes 79 ms

OVERLOAD_PER_S, OVERLOAD_SLO_S, OVERLOAD_GPUS = 6_000.0, 0.1, 2
OVERLOADED = tuple(TABLE_4.values())[:6]  # assumed: no source names the six models


def stable(traffic: Traffic, rate_per_s: float, rng: np.random.Generator, *, slo_s: float = SLO_S) -> Arrivals:
    """MAF-stable: functions call the models in turn, with Poisson arrivals in each minute and this total mean rate."""
    return draw_requests(traffic.at_rate(rate_per_s), _in_turn(traffic, slo_s), rng)


def bursty(traffic: Traffic, rate_per_s: float, rng: np.random.Generator, *, slo_s: float = SLO_S) -> Arrivals:
    """MAF-bursty: as MAF-stable, with bursts in each minute."""
    return draw_requests(traffic.at_rate(rate_per_s), _in_turn(traffic, slo_s), rng, bursts=BURSTS)


def _in_turn(traffic: Traffic, slo_s: float) -> Streams:
    return Streams.round_robin(traffic.streams, [model.name for model in EVALUATED], slo_s)


def steady_bursts(slo_s: float, periods: int) -> Arrivals:
    """Section 7.2: 1,024 requests of A at 5, 125, 245, ... ms, and one request of B at every whole ms from 0 on.

    periods : of 120 ms, >= 1.
    """
    return _a_and_b(slo_s, BURST_FIRST_MS + BURST_EVERY_MS * np.arange(periods), periods * BURST_EVERY_MS)


def isolated_burst(slo_s: float) -> Arrivals:
    """Section 7.2's first burst of A, beside requests of B that come until one of these can have been served.

    At an SLO of 90 ms no request of B that begins after A's deadline can be in time: only the burst counts.
    """
    return _a_and_b(slo_s, np.array([BURST_FIRST_MS]), ALONE_MS)


def _a_and_b(slo_s: float, bursts_ms: np.ndarray, singles: int) -> Arrivals:
    """bursts_ms : times of A's bursts.  singles : requests of B, each before a burst of the same time."""
    times_ms = np.concatenate([np.arange(singles), np.repeat(bursts_ms, BURST_REQUESTS)])
    stream = np.repeat([1, 0], [singles, bursts_ms.size * BURST_REQUESTS])
    return Arrivals.of(Streams.round_robin(("A", "B"), MICRO, slo_s), times_ms / 1e3, stream)


def overload(rng: np.random.Generator, requests: float) -> Arrivals:
    """Poisson arrivals at 6,000 a second, spread evenly over six models, with an SLO of 100 ms, for two GPUs.

    requests : expected. Full batches of the six models keep two GPUs busy at about a third of that rate.
    """
    names = [model.name for model in OVERLOADED]
    duration_s = requests / OVERLOAD_PER_S
    traffic = Traffic.constant(names, OVERLOAD_PER_S / len(names), duration_s)
    return draw_requests(traffic, Streams.round_robin(names, names, OVERLOAD_SLO_S), rng)
