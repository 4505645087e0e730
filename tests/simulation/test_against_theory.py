"""The simulated scheduler agrees with bins/smdp.py in response time and power, by 99 % intervals."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import t

from bins.dispatch import DispatchPlan, DispatchTable, Observed
from bins.service import ServiceTimes
from bins.smdp import Queue
from llmserve.request import Batch, EngineInfo, Request
from llmserve.scheduling.messages import Action, BatchEnded, Event, StartBatch
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.cluster import SimulatedCluster
from llmserve.simulation.report import Recorder

SIZES = np.arange(1, 9)
MEAN_S = 0.3 * SIZES + 1.0
ENERGY_J = 20.0 * SIZES + 20.0
GROUPS = 40  # groups of successive requests, whose means are almost independent


class RandomEngine:
    """A barrier engine whose batches take random times, independent of their answers."""

    def __init__(self, service: ServiceTimes, rng: np.random.Generator) -> None:
        self.info = EngineInfo("e", int(SIZES[-1]), True)
        self._service, self._rng = service, rng
        self._batch: Batch | None = None
        self.next_end_s: float | None = None

    def start(self, batch: Batch, now_s: float) -> None:
        self._batch = batch
        self.next_end_s = now_s + float(self._service.draw(len(batch.requests), 1, self._rng)[0])

    def abort(self, request_id: int, now_s: float) -> None:
        raise AssertionError("nobody leaves")

    def end(self, now_s: float) -> Event:
        assert self._batch is not None
        self.next_end_s = None
        return BatchEnded("e", self._batch.id, {request.id: 1.0 for request in self._batch.requests})


class Fixed:
    """Answers every question with the same policy."""

    def __init__(self, queue: Queue) -> None:
        actions = tuple(queue.solve(10.0).policy[: SIZES.size + 1].tolist())
        table = DispatchTable(actions, (), (), (1.0,) * SIZES.size, (1.0,) * SIZES.size, wait_s_max=1e9)
        self.plan = DispatchPlan((0,), (table,), response_s_mean=1.0)

    def solve(self, observed: Observed) -> DispatchPlan:
        return self.plan


def run(queue: Queue, release: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Response times (count,) in order of arrival, and each request's share (count,) of its batch's energy."""
    rng = np.random.default_rng(5)
    recorder, energy = Recorder(count), np.zeros(count)

    def listen(now_s: float, event: Event, actions: list[Action]) -> None:
        recorder(now_s, event, actions)
        for action in actions:
            if isinstance(action, StartBatch):
                ids = [request.id for request in action.batch.requests]
                energy[ids] = ENERGY_J[len(ids) - 1] / len(ids)

    config = SchedulingConfig(
        bins=1, batch_size=int(SIZES[-1]), release=release, order="fffs", queue_requests_max=10**9
    )
    solver = Fixed(queue) if release == "table" else None
    cluster = SimulatedCluster(
        config.scheduler(),
        [RandomEngine(queue.service, rng)],
        solver=solver,  # type: ignore[arg-type]
        on_step=listen,
    )
    arrivals = np.cumsum(rng.exponential(1 / queue.arrival_rate_per_s, count)).tolist()
    cluster.run((at_s, Request(request_id)) for request_id, at_s in enumerate(arrivals))
    return np.array(recorder.ended_s) - np.array(recorder.arrived_s), energy


def interval(values: np.ndarray) -> tuple[float, float]:
    """99 % confidence interval of the mean, from the means of groups."""
    means = values.reshape(GROUPS, -1).mean(axis=1)
    half = t.ppf(0.995, GROUPS - 1) * means.std(ddof=1) / math.sqrt(GROUPS) + 1e-9 * means.mean()  # rounding
    return means.mean() - half, means.mean() + half


@pytest.mark.parametrize("release", ["greedy", "static:4", "table"])
@pytest.mark.parametrize(
    "times",
    [ServiceTimes.deterministic, ServiceTimes.erlang, ServiceTimes.exponential, ServiceTimes.hyperexponential],
    ids=["deterministic", "erlang", "exponential", "hyperexponential"],
)
def test_simulated_response_time_and_power_are_those_of_the_decision_process(
    times: Callable[..., ServiceTimes], release: str
) -> None:
    service = times(MEAN_S)
    queue = Queue(0.5 * SIZES[-1] / MEAN_S[-1], service, ENERGY_J)
    policy = {"greedy": queue.greedy(), "static:4": queue.static(4), "table": queue.solve(10.0).policy}[release]
    exact = queue.evaluate(policy)
    response_s, energy_j = run(queue, release, 16_000)
    low, high = interval(response_s)
    assert low <= exact.response_s_mean <= high
    low, high = interval(energy_j * queue.arrival_rate_per_s)
    assert low <= exact.power_w_mean <= high
