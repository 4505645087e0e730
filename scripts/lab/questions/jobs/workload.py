"""The workload of llm-d-batch-gateway#491, scaled to one engine: bursts of online requests, and three jobs beside them.

In the issue an engine near its capacity gets 15 requests a second for 60 to 120 s, then 1 a second for as long, several
times, the first of which does not count; three jobs of 1,000 lines are there from the beginning. Here a burst is
BURST_LOAD of the engine's slots, and the windows end after a third, two thirds and all of what the jobs need alone
beside the online requests, and more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmserve.request import Request
from llmserve.simulation.engine_model import Costs

SLOTS = 128
TOKENS_MEAN, SPREAD = 128.0, 0.7  # of answers, log-normal
FORECAST_ERROR = 0.4  # standard deviation of a forecast's logarithm
STEP_S, STEP_MORE_S, PREFILL_S = 0.03, 0.0001, 0.1
BURST_S, IDLE_S, CYCLES = 60.0, 60.0, 4  # the first cycle teaches the reserve, and does not count
BURST_LOAD, IDLE_SHARE = 0.75, 1.0 / 15.0
JOBS, LINES = 3, 3_000
LINE = 1_000_000  # ids of lines begin here


@dataclass(frozen=True)
class Workload:
    """online : (arrival, request) in order.  lengths : real output tokens by id.  jobs : lines of each job, by end of
    its window
    """

    online: list[tuple[float, Request]]
    lengths: dict[int, float]
    jobs: list[tuple[float, list[Request]]]

    @property
    def online_ids(self) -> set[int]:
        return {request.id for _, request in self.online}


def costs() -> Costs:
    step_s = [STEP_S + STEP_MORE_S * count for count in range(SLOTS + 1)]
    return Costs(step_s, [0.0] * (SLOTS + 1), PREFILL_S, metered=False)


def slot_s() -> float:
    """Mean seconds of an answer while all slots are in use."""
    return costs().slot_s(TOKENS_MEAN, SLOTS)


def is_burst(at_s: float) -> bool:
    return at_s % (BURST_S + IDLE_S) < BURST_S


def counts(at_s: float) -> bool:
    """Whether the time is in a cycle that is measured."""
    return BURST_S + IDLE_S <= at_s < CYCLES * (BURST_S + IDLE_S)


def draw(seed: int, *, online: bool = True, jobs: int = JOBS, cycles: int = 4 * CYCLES) -> Workload:
    """The workload of a seed. Online requests go on for `cycles` cycles, so that all jobs can end beside them."""
    rng = np.random.default_rng(seed)
    lengths: dict[int, float] = {}
    arrivals, at_s, number = [], 0.0, 0
    most_per_s = BURST_LOAD * SLOTS / slot_s()
    while online and (at_s := at_s + float(rng.exponential(1.0 / most_per_s))) < cycles * (BURST_S + IDLE_S):
        if is_burst(at_s) or rng.random() < IDLE_SHARE:
            arrivals.append((at_s, _request(rng, number, lengths)))
            number += 1
    work_s = jobs * LINES * slot_s() / SLOTS
    idle = 1.0 - (BURST_LOAD * (1.0 + IDLE_SHARE) / 2.0 if online else 0.0)
    windows_s = [2.0 * work_s * (index + 1) / jobs / idle for index in range(jobs)]
    lines = [
        [_request(rng, LINE * (index + 1) + line, lengths, windows_s[index]) for line in range(LINES)]
        for index in range(jobs)
    ]
    return Workload(arrivals, lengths, list(zip(windows_s, lines, strict=True)))


def _request(
    rng: np.random.Generator, number: int, lengths: dict[int, float], window_s: float | None = None
) -> Request:
    mean = np.log(TOKENS_MEAN) - 0.5 * SPREAD**2
    length = lengths[number] = float(np.ceil(rng.lognormal(mean, SPREAD)))
    forecast = length * float(rng.lognormal(0.0, FORECAST_ERROR))
    quantiles = tuple([forecast * factor for factor in (0.5, 0.75, 1.0, 1.35, 2.0)])
    share = "" if window_s is None else "jobs"
    return Request(number, forecast, window_s, quantiles, share=share, background=window_s is not None)
