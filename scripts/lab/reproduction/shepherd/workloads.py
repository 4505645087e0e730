"""What Shepherd's evaluation serves: the Azure Functions trace, stable and bursty, and two made-up cases.

What is random is drawn from the generator that is passed in.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmserve.simulation.workload import Bursts
from reproduction.shepherd.models import EVALUATED, TABLE_4, Model
from reproduction.shepherd.streams import Arrivals, Phases, Streams, Traffic, draw_requests

SLO_S = 0.25  # Section 7's default

# The paper's bursty trace is "similar to [9]" (MArk), and no more is said. Assumed: bursts of half a second on average,
# twice the SLO, with four and a half seconds between them, bring ten times as many requests a second as come between
# them: half of all.
BURSTS = Bursts.of(1.0, ratio=10.0, high_s=0.5, low_s=4.5)
# Nor is it said which streams burst together: assumed are those of one model. At 3,000 requests a second, the counts of
# quarter seconds then vary by 40 % (standard deviation over mean); the stable trace's by 4 %. With a phase for each
# function they would vary by 20 %, for a few functions bring much of the trace; with one for all, by 125 %.
PHASES: Phases = "model"

MICRO = ("ResNet18", "ResNeSt269")  # Section 7.2's streams A and B
BURST_REQUESTS, BURST_FIRST_MS, BURST_EVERY_MS = 1_024, 5, 120  # of A
ALONE_MS = 80  # that B sends beside an isolated burst: one of its requests is served in 79

OVERLOAD_PER_S, OVERLOAD_SLO_S, OVERLOAD_GPUS = 6_000.0, 0.1, 2
OVERLOADED = tuple(TABLE_4.values())[:6]  # which six is not said


def stable(
    traffic: Traffic,
    rate_per_s: float,
    rng: np.random.Generator,
    *,
    models: Sequence[Model] = EVALUATED,
    slo_s: float = SLO_S,
) -> Arrivals:
    """MAF-stable: functions ask the models in turn, Poisson arrivals within each minute, this mean rate in all."""
    return draw_requests(traffic.at_rate(rate_per_s), _in_turn(traffic, models, slo_s), rng)


def bursty(
    traffic: Traffic,
    rate_per_s: float,
    rng: np.random.Generator,
    *,
    models: Sequence[Model] = EVALUATED,
    slo_s: float = SLO_S,
    bursts: Bursts = BURSTS,
    phases: Phases = PHASES,
) -> Arrivals:
    """MAF-bursty: the same, but in bursts within each minute."""
    return draw_requests(
        traffic.at_rate(rate_per_s), _in_turn(traffic, models, slo_s), rng, bursts=bursts, phases=phases
    )


def _in_turn(traffic: Traffic, models: Sequence[Model], slo_s: float) -> Streams:
    return Streams.round_robin(traffic.streams, [model.name for model in models], slo_s)


def steady_bursts(slo_s: float, periods: int) -> Arrivals:
    """Section 7.2: 1,024 requests of A at 5, 125, 245, ... ms, beside one of B at every whole ms from 0 on.

    periods : of 120 ms, >= 1.
    """
    return _a_and_b(slo_s, BURST_FIRST_MS + BURST_EVERY_MS * np.arange(periods), periods * BURST_EVERY_MS)


def isolated_burst(slo_s: float) -> Arrivals:
    """Section 7.2's first burst of A, beside requests of B that go on coming until one of them can have been served.

    At 90 ms none of B's that begins after A's deadline can be in time: only what happens to the burst is counted.
    """
    return _a_and_b(slo_s, np.array([BURST_FIRST_MS]), ALONE_MS)


def _a_and_b(slo_s: float, bursts_ms: np.ndarray, singles: int) -> Arrivals:
    """bursts_ms : of A.  singles : of B. A request of B that comes with a burst comes before it."""
    times_ms = np.concatenate([np.arange(singles), np.repeat(bursts_ms, BURST_REQUESTS)])
    stream = np.repeat([1, 0], [singles, bursts_ms.size * BURST_REQUESTS])
    return Arrivals.of(Streams.round_robin(("A", "B"), MICRO, slo_s), times_ms / 1e3, stream)


def overload(rng: np.random.Generator, requests: float, models: Sequence[Model] = OVERLOADED) -> Arrivals:
    """Poisson arrivals at 6,000 a second, of each model as many; to be answered in 100 ms, by two GPUs.

    requests : expected. Full batches of the six models keep two GPUs busy at about a third of that rate.
    """
    names = [model.name for model in models]
    duration_s = requests / OVERLOAD_PER_S
    traffic = Traffic.constant(names, OVERLOAD_PER_S / len(names), duration_s)
    return draw_requests(traffic, Streams.round_robin(names, names, OVERLOAD_SLO_S), rng)
