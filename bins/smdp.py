"""When a bin's queue should wait and when it should go: batching as a semi-Markov decision process.

    s          requests that wait at a decision: an engine has become free, or a request has come while one is
    a          requests to serve now, 0 (wait) or B_min .. min(s, B_max)
    lambda     arrivals a second, Poisson                                              `arrival_rate_per_s`
    G_b, l(b)  service time of a batch of b, its mean, s                               `service`
    zeta(b)    energy of a batch of b, J                                               `energy_j`
    p_k^[b]    probability of k arrivals while a batch of b is served                  SMDP-J, eq. 4 and 6
    w          milliseconds of mean response time that one watt is worth               `energy_weight`
    g          average cost, ms: mean response time W (ms) + w * mean power P (W)       SMDP-J, eq. 2

The paper truncates the queue and iterates (`truncated`, with its abstract cost c_o). Here the infinite queue is solved:
beyond some N, a full batch B = B_max always goes, and then, with K arrivals during it and d = B - lambda l > 0, the
relative values are a parabola,

    h(s) = q2 s^2 + q1 s + const,   q2 = u / (2 d),   q1 = (v - g l + q2 E[(K - B)^2]) / d,   c(s, B) = u s + v,

up to terms that do not grow. Policy iteration on e(s) = h(s) - (q2 s^2 + q1 s), taken as zero beyond N, therefore needs
no tolerance to be chosen: N grows until what lies beyond it is visited too seldom to matter to g.

Energy counts above idle: a batch is charged zeta(b) - P_idle l(b), and P_idle is added once.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import ArrayLike, NDArray

from bins.average_cost import NotConverged, Policy, SemiMarkov
from bins.average_cost import Solution as IteratedSolution
from bins.service import Array, ServiceTimes

ITERATIONS_MAX = 60
STATES_MAX = 1 << 13  # of the part of the queue that is not a parabola
TINY = 1e-12
SURVIVAL = 3  # times the truncated states: so many arrivals are counted one by one
ROUNDING = 1e-12  # of a sum of probabilities
TIE = 1e-11  # of the largest relative value: an action must be better by more, or rounding would go on for ever
MS_PER_S = 1e3


class Unstable(ValueError):
    """More requests arrive than batches of the largest size can serve, so that no policy bounds the queue."""


@dataclass(frozen=True)
class Evaluation:
    """What a policy comes to, in the long run.

    response_s_mean  from arrival to the end of its batch
    power_w_mean     idle power included
    batch_size_mean  requests a batch
    utilisation      batches that run, over the engines
    residual_s       what is left on average of a batch that somebody finds running
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

    policy        (states,) requests to serve in each state; in all later ones as in the last, which is the batch size
                  of most throughput
    average_cost  ms; response time + energy_weight * power
    evaluation    of the policy
    values        (sizes + 1, states) ms s: relative cost of each action (0, B_min .. B_max) in each state, and of the
                  optimum after it; inf where it is not feasible
    iterations    policies evaluated
    """

    policy: Policy
    average_cost: float
    evaluation: Evaluation
    values: Array
    iterations: int


@dataclass(frozen=True)
class Queue:
    """One bin's queue. All its batches are served by `engines` equal engines.

    energy_j         (sizes,) joules of a batch, by size, all that is drawn while it runs
    idle_power_w     what each engine draws while nothing runs on it
    engines          several engines serve like one that is free again after 1/engines of a batch's time, while
                     answers still take all of it
    busy_elsewhere   share of the engines' time that goes to other queues: so much later they are free again
    response_weight  of the mean response time in the cost: this queue's share of all requests
    error_max        relative, of an average: what the states beyond N may contribute
    """

    arrival_rate_per_s: float
    service: ServiceTimes
    energy_j: Array
    idle_power_w: float = 0.0
    engines: int = 1
    busy_elsewhere: float = 0.0
    response_weight: float = 1.0
    error_max: float = 1e-9
    _models: dict[tuple[int, int], _Model] = field(default_factory=dict, repr=False, compare=False)
    _solved: dict[float, Solution] = field(default_factory=dict, repr=False, compare=False)

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
        """Time until the engines can take the next batch, over a batch's own."""
        return 1.0 / (self.engines * (1.0 - self.busy_elsewhere))

    def beside(self, busy_elsewhere: float) -> Queue:
        """This queue with so much of the engines' time taken by others."""
        return replace(self, busy_elsewhere=busy_elsewhere, _models={}, _solved={})

    @property
    def load(self) -> float:
        """rho: arrivals over what batches of the best size can serve, in this queue's part of the engines' time."""
        service = self.service
        return float(self.arrival_rate_per_s * self.occupied * (service.mean_s / service.sizes).min())

    def evaluate(self, policy: ArrayLike, other: ArrayLike | None = None, share: float = 0.0) -> Evaluation:
        """What a policy comes to, exactly; or one that follows `other` in that share of its decisions.

        policy : (states,) requests to serve; later states as the last. Raises Unstable when it cannot keep up,
        ValueError when an action is not feasible.
        """
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"a share of decisions lies between 0 and 1, not {share}")
        policies = [self._checked(policy)]
        if other is not None:
            policies.append(self._checked(other))
        tail = int(policies[0][-1])
        if tail == 0 or any(int(each[-1]) != tail for each in policies):
            raise ValueError("a policy must end in serving, and a mixture in serving the same batch")
        beyond = _first_beyond(tail)
        while True:
            model = self._model(tail, max([tail, *(each.size for each in policies)]) + beyond)
            equations = model.equations([_extended(each, model.states) for each in policies], share)
            e, averages = equations.solve()
            if (equations.error(e[:2]) <= self.error_max * (np.abs(averages[:2]) + TINY)).all():
                return self._evaluation(averages)
            beyond = _doubled(beyond)

    def solve(self, energy_weight: float, start: ArrayLike | None = None) -> Solution:
        """The policy of least average cost. start: a policy to begin from; by default greedy.

        energy_weight: ms of mean response time that a watt is worth, >= 0. Raises Unstable, NotConverged.
        """
        if not (energy_weight >= 0 and np.isfinite(energy_weight)):
            raise ValueError(f"the energy weight must be finite and not negative, not {energy_weight}")
        largest, tail = int(self.service.sizes[-1]), self._best_size
        policy = np.append(_extended(self.greedy() if start is None else self._checked(start), largest + 1), tail)
        beyond = _first_beyond(largest)
        done = 0
        while True:
            model = self._model(tail, largest + beyond)
            policy, averages, q, error, iterations = model.iterate(_extended(policy, model.states), energy_weight)
            done += iterations
            if error <= self.error_max:
                break
            beyond = _doubled(beyond)
        evaluation = self._evaluation(averages)
        average_cost = self.response_weight * evaluation.response_s_mean * MS_PER_S
        average_cost += energy_weight * evaluation.power_w_mean
        return Solution(policy, average_cost, evaluation, q, done)

    def draw_responses(
        self,
        policy: ArrayLike,
        count: int,
        rng: np.random.Generator,
        other: ArrayLike | None = None,
        share: float = 0.0,
    ) -> Array:
        """(count,) response times, seconds, of requests that come one after the other to an empty queue.

        For what the exact solution does not tell: percentiles. It samples this model; the scheduler itself is simulated
        by `llmserve simulate`.
        """
        policies = [self._checked(each).tolist() for each in (policy, other) if each is not None]
        arrived_s = np.cumsum(rng.exponential(1.0 / self.arrival_rate_per_s, count))
        part = rng.choice(self.service.weights.size, size=count, p=self.service.weights)
        shape = self.service.shape
        stretch = np.ones(count) if np.isinf(shape) else rng.gamma(shape, 1.0 / shape, count)
        coins = (rng.random(count) < share).astype(int)
        return _responses(self, policies, arrived_s, part.tolist(), stretch.tolist(), coins.tolist())

    def greedy(self) -> Policy:
        """As many as wait, as soon as an engine is free (SMDP-J, eq. 16, and nothing below B_min)."""
        states = np.arange(int(self.service.sizes[-1]) + 1)
        return np.where(states >= self.service.sizes[0], states, 0)

    def static(self, batch_size: int) -> Policy:
        """Always so many (SMDP-J, eq. 15)."""
        states = np.arange(batch_size + 1)
        return np.where(states >= batch_size, batch_size, 0)

    def threshold(self, least: int) -> Policy:
        """Wait for so many, then all that fit into a batch: a Q-policy, or control limit (SMDP-J, eq. 31)."""
        policy = self.greedy()
        policy[:least] = 0
        return policy

    def truncated(self, energy_weight: float, *, states_max: int, overflow_cost: float) -> SemiMarkov:
        """The paper's finite model: states 0 .. s_max and one for all beyond (SMDP-J, eq. 18 and 19).

        overflow_cost: c_o, ms, added to the cost rate of the overflow state. Actions are 0, B_min .. B_max.
        """
        return _truncated(self, energy_weight, states_max, overflow_cost)

    def _checked(self, policy: ArrayLike) -> Policy:
        actions = np.asarray(policy, dtype=np.intp)
        sizes = self.service.sizes
        served = actions[actions != 0]
        if actions.ndim != 1 or actions.size == 0:
            raise ValueError("a policy is one action for each state")
        if (actions > np.arange(actions.size)).any() or (served < sizes[0]).any() or (served > sizes[-1]).any():
            raise ValueError(f"an action is 0 or from {sizes[0]} to {sizes[-1]}, and at most as many as wait")
        return actions

    @property
    def _best_size(self) -> int:
        """That serves most a second; the largest when several do."""
        throughput = self.service.sizes / self.service.mean_s
        return int(self.service.sizes[np.flatnonzero(throughput >= (1 - TIE) * throughput.max())[-1]])

    def _model(self, tail: int, states: int) -> _Model:
        key = (tail, states)
        if key not in self._models:
            self._models[key] = _Model(self, tail, states)
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
    """A policy over so many states; what is beyond its own is as its last."""
    if policy.size >= states:
        return policy[:states]
    return np.concatenate([policy, np.full(states - policy.size, policy[-1])])


def _first_beyond(batch_size: int) -> int:
    """States beyond a full batch to begin with: arrivals during one vary by its root."""
    return 6 * math.isqrt(batch_size) + 12


def _doubled(beyond: int) -> int:
    if 2 * beyond > STATES_MAX:
        raise Unstable(f"the queue has not settled within {beyond} states: the load is too near to 1")
    return 2 * beyond


# Response time (s), power above idle (W), batches a second, engines at work, and the batches' squared times (s).
OBJECTIVES = 5


class _Model:
    """The equations of e over states 0 .. N, beyond which batches of `tail` go. Costs are (OBJECTIVES, ...)."""

    def __init__(self, queue: Queue, tail: int, states: int) -> None:
        service = queue.service
        rate, sizes = queue.arrival_rate_per_s, service.sizes
        self.queue = queue
        self.states = states
        self.guard = max(1, (states - int(sizes[-1])) // 2)  # states just below the end that keep serving as they do
        y = queue.occupied * service.mean_s  # (sizes,) time until the next decision
        y2 = queue.occupied**2 * service.second_moment_s2
        arrivals, arrivals2 = rate * y, rate * y + rate**2 * y2  # E[K], E[K^2]
        last = int(np.searchsorted(sizes, tail))
        drift = tail - arrivals[last]
        if not drift > 1e-9 * tail:
            raise Unstable(f"{rate:.6g} requests a second are more than batches of {tail} can serve")
        s = np.arange(states, dtype=float)
        # Rewards of an action: row 0 of `fixed` and `per_waiting` is to wait, the others serve `sizes`.
        above_idle = queue.energy_j - queue.idle_power_w * service.mean_s
        beyond = sizes * (service.mean_s - y) / rate  # answers take all of a batch's time, whenever the next may go
        fixed = np.zeros((OBJECTIVES, sizes.size + 1))
        fixed[0, 1:] = y2 / 2 + beyond
        fixed[1, 1:] = above_idle
        fixed[2, 1:] = 1.0
        fixed[3, 1:] = service.mean_s
        fixed[4, 1:] = service.second_moment_s2
        per_waiting = np.concatenate([[1.0 / rate], y]) / rate  # of the response time only
        sojourn = np.concatenate([[1.0 / rate], y])
        moved = np.concatenate([[1.0], arrivals - sizes])  # E[next state] - s
        spread = np.concatenate([[1.0], sizes**2 - 2 * sizes * arrivals + arrivals2])  # E[(next state - s)^2]
        u = np.zeros(OBJECTIVES)
        u[0] = per_waiting[last + 1]
        q2 = u / (2 * drift)
        q1 = (fixed[:, last + 1] + q2 * spread[last + 1]) / drift  # without g
        q1_per_g = -sojourn[last + 1] / drift
        self.g_coefficient = q1_per_g * moved - sojourn  # (sizes + 1,): of g in the residual of e
        residual = fixed[:, :, None] + q2[:, None, None] * (2 * s * moved[:, None] + spread[:, None])
        residual += (q1[:, None] * moved)[:, :, None]
        residual[0] += per_waiting[:, None] * s
        self.residual = residual  # (OBJECTIVES, sizes + 1, states): c + E quad(next) - quad(s), without g
        # p padded so that row m of the Toeplitz matrix of size a is a window of it.
        p = service.arrivals(rate * queue.occupied, states)  # (sizes, states)
        self.p = p
        padded = np.concatenate([np.zeros((sizes.size, states)), p], axis=1)
        rows, columns = padded.strides
        self._toeplitz = as_strided(padded, (sizes.size, states + 1, states), (rows, columns, columns), writeable=False)
        self._first = int(sizes[0])
        self._s = np.arange(states)
        self._tail_size = tail

    def _actions(self, policy: Policy) -> NDArray[np.intp]:
        """Index of each action among 0 (wait), B_min .. B_max."""
        return np.where(policy > 0, policy - self._first + 1, 0)

    def _rows(self, policy: Policy) -> tuple[Array, Array, Array]:
        """I - P (states, states), residuals (OBJECTIVES, states) and coefficients of g (states,) of a policy."""
        index = self._actions(policy)
        system = np.zeros((self.states, self.states))
        served = np.flatnonzero(index)
        system[served] = -self._toeplitz[index[served] - 1, self.states - (served - policy[served])]
        waits = np.flatnonzero(index == 0)
        system[waits, waits + 1] = -1.0
        system[self._s, self._s] += 1.0
        return system, self.residual[:, index, self._s], self.g_coefficient[index]

    def equations(self, policies: Sequence[Policy], share: float = 0.0) -> _Equations:
        """Of a policy, or of two mixed."""
        system, residual, g_coefficient = self._rows(policies[0])
        if len(policies) == 2:
            for mixed, other in zip((system, residual, g_coefficient), self._rows(policies[1]), strict=True):
                mixed += share * (other - mixed)
        overflow = np.maximum(system.sum(axis=1), 0.0)  # probability to leave for what lies beyond N
        system[:, -1] -= overflow  # where e is as at N
        system[:, 0] = -g_coefficient  # relative to e(0), whose place g takes among the unknowns
        return _Equations(system, residual, overflow, self._tail_size)

    def iterate(self, policy: Policy, energy_weight: float) -> tuple[Policy, Array, Array, float, int]:
        """Policy iteration.

        Returns the policy, averages by objective, values of each action, the relative error of the average cost that
        the states near and beyond N may make, and the iterations.
        """
        weights = np.array([MS_PER_S * self.queue.response_weight, energy_weight, 0.0, 0.0, 0.0])
        residual = np.tensordot(weights, self.residual, axes=1)  # (sizes + 1, states)
        free = self.states - self.guard
        for iterations in range(1, ITERATIONS_MAX + 1):
            equations = self.equations([policy])
            e, averages = equations.solve()
            weighted, average = weights @ e, float(weights @ averages)
            q = residual + average * self.g_coefficient[:, None] + self._next(weighted)
            index = self._actions(policy)
            present = q[index, self._s]
            best = np.argmin(q, axis=0)
            gain = present - q[best, self._s]
            better = gain > TIE * (np.abs(present).max() + np.abs(weighted).max())
            if not better[:free].any():
                error = float(equations.error(weighted[None])[0] + equations.visits[free:] @ gain[free:])
                return policy, averages, q, error / (abs(average) + TINY), iterations
            better[free:] = False
            index = np.where(better, best, index)
            policy = np.where(index > 0, index + self._first - 1, 0)
        solution = IteratedSolution(policy, average, weighted, ITERATIONS_MAX)
        raise NotConverged(f"the policy still changes after {ITERATIONS_MAX} iterations", solution)

    def _next(self, e: Array) -> Array:
        """(sizes + 1, states) E[e(next state)] of each action, inf where it is not feasible."""
        result = np.full((self.queue.service.sizes.size + 1, self.states), np.inf)
        result[0, :-1] = e[1:]
        padded = np.concatenate([e, np.zeros(self.states - 1)])
        step = padded.strides[0]
        hankel = as_strided(padded, (self.states, self.states), (step, step), writeable=False)  # its own transpose
        served, left = self._after
        result[1:][served] = (self.p @ hankel).ravel()[left]  # (sizes, left behind)
        return result

    @cached_property
    def _after(self) -> tuple[NDArray[np.bool_], NDArray[np.intp]]:
        """Where as many wait as a size serves, (sizes, states), and the flat places (sizes, left behind) of these."""
        sizes = self.queue.service.sizes[:, None]
        served = self._s >= sizes
        places = np.arange(sizes.size)[:, None] * self.states + self._s - sizes
        return served, places[served]


class _Equations:
    """e(s) - sum_j m(j|s) e(j) = residual(s) + g g_coefficient(s), e = 0 from N on, for one policy."""

    def __init__(self, system: Array, residual: Array, overflow: Array, tail: int) -> None:
        self._system = system
        self._residual = residual
        self._overflow = overflow
        self._tail = tail

    def solve(self) -> tuple[Array, Array]:
        """e (objectives, states) and the averages g (objectives,)."""
        solved = np.asarray(np.linalg.solve(self._system, self._residual.T), dtype=float).T
        averages = solved[:, 0].copy()
        solved[:, 0] = 0.0
        return solved - solved[:, -1:], averages

    @cached_property
    def visits(self) -> Array:
        """(states,) decisions a second in each state: by how much a residual there moves an average."""
        unit = np.zeros(self._overflow.size)
        unit[0] = 1.0
        return np.asarray(np.linalg.solve(self._system.T, unit), dtype=float)

    def error(self, e: Array) -> Array:
        """(objectives,) what an average may be off by, because e is not zero beyond N but like what it is before it."""
        largest: Array = np.abs(e[:, -self._tail :]).max(axis=1)
        return float(np.abs(self.visits) @ self._overflow) * largest


def _responses(
    queue: Queue, policies: list[list[int]], arrived_s: Array, part: list[int], stretch: list[float], coins: list[int]
) -> Array:
    """One decision after the other; the i-th batch takes the i-th draw of each kind."""
    times, parts_s = arrived_s.tolist(), queue.service.parts_s.tolist()
    first_size, size_max = int(queue.service.sizes[0]), int(queue.service.sizes[-1])
    count, first, now_s, decision = len(times), 0, 0.0, 0
    ends_s: list[float] = []
    served: list[int] = []
    while first < count:
        waiting = bisect_right(times, now_s, first) - first
        size = 0
        while not size:
            policy = policies[coins[decision % count] if len(policies) > 1 else 0]
            decision += 1
            size = policy[min(waiting, len(policy) - 1)]
            if not size:
                if first + waiting >= count:  # the last ones would wait for others that do not come
                    size = min(waiting, size_max)
                    break
                now_s = max(now_s, times[first + waiting])
                waiting += 1
        batch = len(ends_s)
        takes_s = parts_s[max(size, first_size) - first_size][part[batch]] * stretch[batch]
        ends_s.append(now_s + takes_s)
        served.append(min(size, count - first))
        now_s += queue.occupied * takes_s
        first += size
    return np.repeat(ends_s, served) - arrived_s


def _truncated(queue: Queue, energy_weight: float, states_max: int, overflow_cost: float) -> SemiMarkov:
    service, rate = queue.service, queue.arrival_rate_per_s
    sizes = service.sizes
    if states_max < sizes[-1]:
        raise ValueError(f"s_max must be at least the largest batch, {sizes[-1]}, not {states_max}")
    if queue.occupied != 1.0:
        raise ValueError("the paper's model is of one engine that serves one queue")
    states = states_max + 2
    waiting = np.minimum(np.arange(states), states_max)  # the overflow state counts as s_max
    actions = np.concatenate([[0], sizes])
    y, y2 = service.mean_s, service.second_moment_s2
    sojourn = np.broadcast_to(np.concatenate([[1.0 / rate], y])[:, None], (actions.size, states)).copy()
    w1 = MS_PER_S * queue.response_weight
    cost = w1 * waiting / rate * sojourn
    above_idle = queue.energy_j - queue.idle_power_w * y
    cost[1:] += (energy_weight * above_idle + w1 * y2 / 2)[:, None]
    cost += energy_weight * queue.idle_power_w * sojourn
    cost[:, -1] += overflow_cost * sojourn[:, -1]
    cost[actions[:, None] > waiting] = np.inf
    p = service.arrivals(rate, SURVIVAL * states)  # (sizes, arrivals)
    transition = np.zeros((actions.size, states, states))
    transition[0, np.arange(states_max + 1), np.arange(states_max + 1) + 1] = 1.0
    transition[0, -1, -1] = 1.0
    for index, size in enumerate(sizes, start=1):
        for state in range(int(size), states):
            left = waiting[state] - size
            reached = p[index - 1, : states_max + 1 - left]
            transition[index, state, left : states_max + 1] = reached
            beyond = p[index - 1, states_max + 1 - left :].sum()
            rest = 1.0 - reached.sum() - beyond  # of heavy tails; else rounding, larger than what is beyond
            transition[index, state, -1] = beyond + (rest if rest > ROUNDING else 0.0)
    return SemiMarkov(cost, sojourn, transition)
