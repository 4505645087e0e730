"""A profile that is wrong by a factor of three is detected from real batch times, and corrected."""

from __future__ import annotations

import numpy as np
import pytest

from bins.profile import StepTimes
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import Action, BatchEnded, Event, FailRequest
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.cluster import SimulatedCluster
from llmserve.simulation.engine_model import Costs, StepEngine

SIZES, TOKENS, SLO_S = 8, 100.0, 4.0
TRUE = StepTimes(0.05, tuple([0.008 + 0.001 * size for size in range(1, SIZES + 1)]))


def declared(factor: float) -> StepTimes:
    return StepTimes(factor * TRUE.prefill_s, tuple([factor * step_s for step_s in TRUE.step_s]))


class Goodput:
    """Requests in time, among those that arrive after a number of batches have ended."""

    def __init__(self, deadlines_s: dict[int, float], batches: int) -> None:
        self.in_time = self.judged = 0
        self._deadlines_s = deadlines_s
        self._batches = batches
        self._after: set[int] | None = None

    def see(self, now_s: float, event: Event, actions: list[Action]) -> None:
        if isinstance(event, BatchEnded):
            self._batches -= 1
            if self._after is None and self._batches <= 0:
                self._after = {id_ for id_, due_s in self._deadlines_s.items() if due_s - SLO_S > now_s}
            self._count([id_ for id_ in event.output_tokens if now_s <= self._deadlines_s[id_]], event.output_tokens)
        self._count([], [action.request_id for action in actions if isinstance(action, FailRequest)])

    def _count(self, in_time: list[int], ended: object) -> None:
        if self._after is not None:
            self.in_time += sum(id_ in self._after for id_ in in_time)
            self.judged += sum(id_ in self._after for id_ in ended)  # type: ignore[attr-defined]


def share_in_time(factor: float, order: str, seed: int) -> float:
    """The share among requests after 50 batches, for a profile of `factor` times the true durations."""
    rng = np.random.default_rng(seed)
    count, rate_per_s = 3_000, 2.2
    arrivals_s = np.cumsum(rng.exponential(1 / rate_per_s, count)).tolist()
    lengths = rng.lognormal(np.log(TOKENS), 0.4, count).tolist()
    requests = [
        Request(number, length, at_s + SLO_S)
        for number, (at_s, length) in enumerate(zip(arrivals_s, lengths, strict=True))
    ]
    config = SchedulingConfig(order=order, bins=2, batch_size=SIZES).resolved(barrier=True)  # type: ignore[arg-type]
    info = EngineInfo("gpu", SIZES, True, speeds={"": declared(factor)})
    engine = StepEngine(info, lengths, Costs([0.0, *TRUE.step_s], [0.0] * (SIZES + 1), TRUE.prefill_s, metered=False))
    goodput = Goodput({request.id: request.deadline_s or 0.0 for request in requests}, 50)
    cluster = SimulatedCluster(config.scheduler(lengths[:500]), [engine], on_step=goodput.see)
    cluster.run(iter(zip(arrivals_s, requests, strict=True)))
    assert goodput.judged > 2_000
    return goodput.in_time / goodput.judged


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
@pytest.mark.parametrize("order", ["flex", "clockwork"])
def test_after_50_batches_a_wrong_profile_costs_at_most_a_twentieth_of_the_goodput(order: str, factor: float) -> None:
    right = np.mean([share_in_time(1.0, order, seed) for seed in (1, 2)])
    wrong = np.mean([share_in_time(factor, order, seed) for seed in (1, 2)])
    assert 0.5 < right < 0.99, "otherwise the profile makes no difference"
    assert wrong >= 0.95 * right
