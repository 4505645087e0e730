"""When a bin's queue should wait and when it should be served: batching as a semi-Markov decision process.

    s          waiting requests at a decision: an engine has become free, or a request has arrived while one is free
    a          requests to serve now, 0 (wait) or B_min .. min(s, B_max)
    lambda     arrivals a second, Poisson                                              `arrival_rate_per_s`
    G_b, l(b)  service time of a batch of b, its mean, s                               `service`
    zeta(b)    energy of a batch of b, J                                               `energy_j`
    p_k^[b]    probability of k arrivals while a batch of b is served                  SMDP-J, eq. 4 and 6
    w          milliseconds of mean response time that one watt is worth               `energy_weight`
    g          average cost, ms: mean response time W (ms) + w * mean power P (W)       SMDP-J, eq. 2

The paper truncates the queue and iterates (`truncated`, with its abstract cost c_o). This module solves the infinite
queue: beyond some N, a full batch B = B_max is always served. With K arrivals during that batch and
d = B - lambda l > 0, the relative values there are a parabola,

    h(s) = q2 s^2 + q1 s + const,   q2 = u / (2 d),   q1 = (v - g l + q2 E[(K - B)^2]) / d,   c(s, B) = u s + v,

up to terms that do not grow. Policy iteration works on e(s) = h(s) - (q2 s^2 + q1 s), taken as zero beyond N. A small N
is tried first. Variable times of large batches need an N of up to some ten thousand states, for the best policy serves
less than a full batch up to there. Then e is computed at some hundred nodes (bins/state_grid.py), and the policy's
averages are corrected until they hold for all states (bins/visits.py). So no tolerance has to be chosen.

Energy counts above idle: a batch is charged zeta(b) - P_idle l(b), and P_idle is added once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike

from bins.average_cost import IteratedSolution, NotConverged, Policy, SemiMarkov
from bins.service import Array, ServiceTimes
from bins.smdp_model import MS_PER_S, TIE, QueueModel, responses, truncated
from bins.state_grid import StateGrid
from bins.visits import MATTERING, TINY

DENSE_MAX = 700  # largest number of states that are all nodes
GROWTH = 0.2  # of panels, on the first grid
GRIDS = 6
REACH = 1e-3  # probability of states beyond the grid, over the error that is allowed
STATES_MAX = 1 << 16  # states beyond a full batch on the first grid; each finer grid has twice as many
NEGLIGIBLE = 1e-15  # probability of more arrivals than are counted
BLOCK = 32  # batch sizes whose arrivals are computed at once


@dataclass(frozen=True)
class Evaluation:
    """Long-run averages of a policy.

    response_s_mean  from arrival to the end of the request's batch
    power_w_mean     idle power included
    batch_size_mean  requests a batch
    utilisation      mean number of running batches over the number of engines
    residual_s       mean rest of the running batch, seen by an arrival while a batch runs
    """

    response_s_mean: float
    power_w_mean: float
    batch_size_mean: float
    utilisation: float
    residual_s: float

    def cost_ms(self, energy_weight: float) -> float:
        return MS_PER_S * self.response_s_mean + energy_weight * self.power_w_mean


@dataclass(frozen=True)
class Solution:
    """An optimal policy.

    policy        (states,) requests to serve in each state; later states serve as the last, which is the batch size of
                  highest throughput
    average_cost  ms; response time + energy_weight * power
    evaluation    long-run averages of the policy
    values        (sizes + 1, states) ms s: relative cost of each action (0, B_min .. B_max) in each of the first states
                  with the optimum afterwards; inf for an action that is not feasible
    iterations    number of policies evaluated
    """

    policy: Policy
    average_cost: float
    evaluation: Evaluation
    values: Array
    iterations: int


@dataclass(frozen=True)
class Queue:
    """One bin's queue, served by `engines` equal engines.

    energy_j         (sizes,) joules of a batch by size, idle power included
    idle_power_w     watts of each idle engine
    engines          modelled as one engine that is free again after 1/engines of a batch's time, while answers take the
                     whole time
    busy_elsewhere   share of the engines' time that other queues use; the engines are free again later by this share
    response_weight  weight of the mean response time in the cost: this queue's share of all requests
    error_max        relative error of the mean response time and the mean power that the approximations may cause
    """

    arrival_rate_per_s: float
    service: ServiceTimes
    energy_j: Array
    idle_power_w: float = 0.0
    engines: int = 1
    busy_elsewhere: float = 0.0
    response_weight: float = 1.0
    error_max: float = 5e-9
    _models: dict[tuple[int, int, float], QueueModel] = field(default_factory=dict, repr=False, compare=False)
    _arrivals: dict[int, Array] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not (self.arrival_rate_per_s > 0 and np.isfinite(self.arrival_rate_per_s)):
            raise ValueError(f"the arrival rate must be positive and finite, not {self.arrival_rate_per_s}")
        if self.energy_j.shape != (self.service.sizes.size,):
            raise ValueError(f"energies {self.energy_j.shape} and {self.service.sizes.size} batch sizes differ")
        if not np.isfinite(self.energy_j).all():
            raise ValueError("a batch's energy must be finite")
        if self.engines < 1 or not 0 <= self.busy_elsewhere < 1:
            raise ValueError("at least one engine, and some of its time, must be left for this queue")

    @property
    def occupied(self) -> float:
        """Time until the engines can take the next batch, over the time of a batch."""
        return 1.0 / (self.engines * (1.0 - self.busy_elsewhere))

    def beside(self, busy_elsewhere: float) -> Queue:
        """This queue with that share of the engines' time used by other queues."""
        return replace(self, busy_elsewhere=busy_elsewhere, _models={}, _arrivals={})

    @property
    def load(self) -> float:
        """rho: arrival rate over the highest throughput of all batch sizes, in this queue's part of the engines."""
        service = self.service
        return float(self.arrival_rate_per_s * self.occupied * (service.mean_s / service.sizes).min())

    def evaluate(self, policy: ArrayLike, other: ArrayLike | None = None, share: float = 0.0) -> Evaluation:
        """Exact long-run averages of a policy, or of a mixture that follows `other` in that share of its decisions.

        policy : (states,) requests to serve; later states as the last. Raises Unstable when the queue grows without
        bound, ValueError when an action is not feasible, NotConverged when the averages are not exact enough.
        """
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"a share of decisions lies between 0 and 1, not {share}")
        policies = [self._checked(policy)]
        if other is not None:
            policies.append(self._checked(other))
        tail = int(policies[0][-1])
        if tail == 0 or any(int(actions[-1]) != tail for actions in policies):
            raise ValueError("a policy must end in serving, and a mixture in serving the same batch")
        shares = [1.0] if other is None else [1.0 - share, share]
        for model in self._models_of(tail, max([tail, *(actions.size for actions in policies)])):
            extended = [_extended(actions, model.grid.states) for actions in policies]
            averages, errors = model.evaluate(list(zip(extended, shares, strict=True)), self.error_max)
            if (errors <= self.error_max * (np.abs(averages) + TINY))[:MATTERING].all():
                break
        else:
            error = float((errors / (np.abs(averages) + TINY))[:MATTERING].max())
            raise NotConverged(self._inexact(error), IteratedSolution(extended[0], float(averages[0]), errors, 0))
        return self._evaluation(averages)

    def solve(self, energy_weight: float, start: ArrayLike | None = None) -> Solution:
        """The policy of least average cost. start: the first policy; default: greedy.

        energy_weight: ms of mean response time that one watt is worth, >= 0. Raises Unstable, NotConverged.
        """
        if not (energy_weight >= 0 and np.isfinite(energy_weight)):
            raise ValueError(f"the energy weight must be finite and not negative, not {energy_weight}")
        largest, tail = int(self.service.sizes[-1]), self._best_size
        policy = np.append(_extended(self.greedy() if start is None else self._checked(start), largest + 1), tail)
        iterations_total = 0
        for model in self._models_of(tail, largest):
            policy = _extended(policy, model.grid.states)
            policy, averages, q, error, iterations = model.iterate(policy, energy_weight, self.error_max)
            iterations_total += iterations
            if error <= self.error_max:
                break
        else:
            raise NotConverged(self._inexact(error), IteratedSolution(policy, float(averages[0]), q, iterations_total))
        changes = np.flatnonzero(policy != tail)
        policy = policy[: max(largest + _first_beyond(largest), int(changes[-1]) + 2)]
        evaluation = self._evaluation(averages)
        average_cost = self.response_weight * evaluation.response_s_mean * MS_PER_S
        average_cost += energy_weight * evaluation.power_w_mean
        return Solution(policy, average_cost, evaluation, q, iterations_total)

    def draw_responses(
        self,
        policy: ArrayLike,
        count: int,
        rng: np.random.Generator,
        other: ArrayLike | None = None,
        share: float = 0.0,
    ) -> Array:
        """(count,) response times, seconds, of successive requests, the first of which finds an empty queue.

        For percentiles, which the exact solution does not give. Samples this model; `llmserve simulate` simulates the
        scheduler itself.
        """
        policies = [self._checked(actions).tolist() for actions in (policy, other) if actions is not None]
        arrived_s = np.cumsum(rng.exponential(1.0 / self.arrival_rate_per_s, count))
        part = rng.choice(self.service.weights.size, size=count, p=self.service.weights)
        shape = self.service.shape
        stretch = np.ones(count) if np.isinf(shape) else rng.gamma(shape, 1.0 / shape, count)
        coins = (rng.random(count) < share).astype(int)
        return responses(self, policies, arrived_s, part.tolist(), stretch.tolist(), coins.tolist())

    def greedy(self) -> Policy:
        """Serve all waiting requests that fit as soon as an engine is free, from B_min on (SMDP-J, eq. 16)."""
        states = np.arange(int(self.service.sizes[-1]) + 1)
        return np.where(states >= self.service.sizes[0], states, 0)

    def static(self, batch_size: int) -> Policy:
        """Always serve batches of `batch_size` (SMDP-J, eq. 15)."""
        states = np.arange(batch_size + 1)
        return np.where(states >= batch_size, batch_size, 0)

    def threshold(self, least: int) -> Policy:
        """Wait for `least` requests, then serve all that fit: a Q-policy, or control limit (SMDP-J, eq. 31)."""
        policy = self.greedy()
        policy[:least] = 0
        return policy

    def truncated(self, energy_weight: float, *, states_max: int, overflow_cost: float) -> SemiMarkov:
        """The paper's finite model: states 0 .. s_max and one overflow state beyond (SMDP-J, eq. 18 and 19).

        overflow_cost: c_o, ms, added to the cost rate of the overflow state. Actions are 0, B_min .. B_max.
        """
        return truncated(self, energy_weight, states_max, overflow_cost)

    def arrivals(self, states: int) -> Array:
        """(sizes, arrivals) p_k^[b] of fewer arrivals than `states`, and only of those that are not negligible."""
        service, rate = self.service, self.arrival_rate_per_s * self.occupied
        if states <= DENSE_MAX:
            return service.arrivals(rate, states)
        count = min(states, service.arrivals_max(rate, NEGLIGIBLE))
        if count not in self._arrivals:
            p = np.zeros((service.sizes.size, count))
            for begin in range(0, service.sizes.size, BLOCK):
                rows = slice(begin, begin + BLOCK)
                block = replace(service, sizes=service.sizes[rows], parts_s=service.parts_s[rows])
                least = min(count, block.arrivals_max(rate, NEGLIGIBLE))
                p[rows, :least] = block.arrivals(rate, least)
            self._arrivals[count] = p
        return self._arrivals[count]

    def _checked(self, policy: ArrayLike) -> Policy:
        actions = np.asarray(policy, dtype=np.intp)
        sizes = self.service.sizes
        served = actions[actions != 0]
        if actions.ndim != 1 or actions.size == 0:
            raise ValueError("a policy must have one action for each state")
        if (actions > np.arange(actions.size)).any() or (served < sizes[0]).any() or (served > sizes[-1]).any():
            raise ValueError(f"an action must be 0 or from {sizes[0]} to {sizes[-1]}, and at most as many as wait")
        return actions

    @property
    def _best_size(self) -> int:
        """The batch size of highest throughput; the largest of several."""
        throughput = self.service.sizes / self.service.mean_s
        return int(self.service.sizes[np.flatnonzero(throughput >= (1 - TIE) * throughput.max())[-1]])

    def _models_of(self, tail: int, least: int) -> Iterator[QueueModel]:
        """Ever more exact models, of more than `least` states.

        First those states and a few more. Then as many as are visited, all of them while they are few, else a grid that
        becomes finer.
        """
        beyond = _first_beyond(tail)
        if least + beyond <= DENSE_MAX:
            yield self._model(tail, least + beyond, 0.0)
        eta = self.service.tail_decay(self.arrival_rate_per_s * self.occupied, tail)
        for finer in range(GRIDS):
            reach = min(math.log(1.0 / (REACH * self.error_max)) / eta, STATES_MAX)
            states = least + int(2**finer * reach) + beyond
            yield self._model(tail, states, 0.0 if states <= DENSE_MAX else GROWTH / 2**finer)

    def _inexact(self, error: float) -> str:
        return f"the averages are only exact to {error:.1g}, not to {self.error_max:.1g}; the load is {self.load:.4g}"

    def _model(self, tail: int, states: int, growth: float) -> QueueModel:
        key = (tail, states, growth)
        if key not in self._models:
            full_batch = int(self.service.sizes[-1])
            self._models[key] = QueueModel(self, tail, StateGrid(states, full_batch, growth))
        return self._models[key]

    def _evaluation(self, averages: Array) -> Evaluation:
        response, power, batches, busy, busy2 = averages.tolist()
        return Evaluation(
            response_s_mean=response,
            power_w_mean=power + self.engines * self.idle_power_w,
            batch_size_mean=float(self.arrival_rate_per_s) / batches,
            utilisation=busy / self.engines,
            residual_s=busy2 / (2 * busy),
        )


def _extended(policy: Policy, states: int) -> Policy:
    """A policy cut or extended to `states` states; added states repeat its last action."""
    if policy.size >= states:
        return policy[:states]
    return np.concatenate([policy, np.full(states - policy.size, policy[-1])])


def _first_beyond(batch_size: int) -> int:
    """First number of states beyond a full batch. The number of arrivals during a batch varies by about its root."""
    return 6 * math.isqrt(batch_size) + 12
