"""The equations of a queue's policy, and the truncated model that checks them. bins/smdp.py has the queue."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from bins.average_cost import IteratedSolution as IteratedSolution
from bins.average_cost import NotConverged, Policy, SemiMarkov
from bins.service import Array

if TYPE_CHECKING:
    from bins.smdp import Queue

ITERATIONS_MAX = 60
TINY = 1e-12
SURVIVAL = 3  # numbers of arrivals up to this multiple of the truncated states are counted one by one
ROUNDING = 1e-12  # rounding error of a sum of probabilities
TIE = 1e-11  # of the largest relative value: an action must be better by more, or rounding could alternate without end
MS_PER_S = 1e3
OBJECTIVES = 5


class Unstable(ValueError):
    """More requests arrive than the engines can serve, so that the queue is unbounded."""


class QueueModel:
    """The equations of e over states 0 .. N. Beyond N, batches of `tail` are served. Costs are (OBJECTIVES, ...).

    Objectives: response time (s), power above idle (W), batches a second, engines at work, the batches' squared times.
    """

    def __init__(self, queue: Queue, tail: int, states: int) -> None:
        service = queue.service
        rate, sizes = queue.arrival_rate_per_s, service.sizes
        self.queue = queue
        self.states = states
        self.guard = max(1, (states - int(sizes[-1])) // 2)  # states just below N whose action never changes
        y = queue.occupied * service.mean_s  # (sizes,) time until the next decision
        y2 = queue.occupied**2 * service.second_moment_s2
        arrivals, arrivals2 = rate * y, rate * y + rate**2 * y2  # E[K], E[K^2]
        last = int(np.searchsorted(sizes, tail))
        drift = tail - arrivals[last]
        if not drift > 1e-9 * tail:
            raise Unstable(f"{rate:.6g} requests a second are more than batches of {tail} can serve")
        s = np.arange(states, dtype=float)
        # Costs of an action: entry 0 of `fixed` and `per_waiting` is to wait, the other entries serve `sizes`.
        above_idle = queue.energy_j - queue.idle_power_w * service.mean_s
        beyond = sizes * (service.mean_s - y) / rate  # response time after the next decision, for the batch still runs
        fixed = np.zeros((OBJECTIVES, sizes.size + 1))
        fixed[0, 1:] = y2 / 2 + beyond
        fixed[1, 1:] = above_idle
        fixed[2, 1:] = 1.0
        fixed[3, 1:] = service.mean_s
        fixed[4, 1:] = service.second_moment_s2
        per_waiting = np.concatenate([[1.0 / rate], y]) / rate  # for the response time only
        sojourn = np.concatenate([[1.0 / rate], y])
        moved = np.concatenate([[1.0], arrivals - sizes])  # E[next state] - s
        spread = np.concatenate([[1.0], sizes**2 - 2 * sizes * arrivals + arrivals2])  # E[(next state - s)^2]
        u = np.zeros(OBJECTIVES)
        u[0] = per_waiting[last + 1]
        q2 = u / (2 * drift)
        q1 = (fixed[:, last + 1] + q2 * spread[last + 1]) / drift  # without g
        q1_per_g = -sojourn[last + 1] / drift
        self.g_coefficient = q1_per_g * moved - sojourn  # (sizes + 1,): coefficient of g in the residual of e
        residual = fixed[:, :, None] + q2[:, None, None] * (2 * s * moved[:, None] + spread[:, None])
        residual += (q1[:, None] * moved)[:, :, None]
        residual[0] += per_waiting[:, None] * s
        self.residual = residual  # (OBJECTIVES, sizes + 1, states): c + E quad(next) - quad(s), without g
        # p is padded so that row m of the Toeplitz matrix of size a is a window of the padded array.
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

    def equations(self, policies: Sequence[Policy], share: float = 0.0) -> Equations:
        """The equations of a policy, or of a mixture of two that follows the second with probability `share`."""
        system, residual, g_coefficient = self._rows(policies[0])
        if len(policies) == 2:
            for mixed, other in zip((system, residual, g_coefficient), self._rows(policies[1]), strict=True):
                mixed += share * (other - mixed)
        overflow = np.maximum(system.sum(axis=1), 0.0)  # probability of a next state beyond N
        system[:, -1] -= overflow  # beyond N, e is taken as at N
        system[:, 0] = -g_coefficient  # g takes the place of e(0), which is 0, among the unknowns
        return Equations(system, residual, overflow, self._tail_size)

    def iterate(self, policy: Policy, energy_weight: float) -> tuple[Policy, Array, Array, float, int]:
        """Policy iteration. Raises NotConverged.

        Returns the policy, averages by objective, values of each action, the relative error of the average cost that
        the states near and beyond N may cause, and the number of iterations.
        """
        weights = np.array([MS_PER_S * self.queue.response_weight, energy_weight, 0.0, 0.0, 0.0])
        residual = np.tensordot(weights, self.residual, axes=1)  # (sizes + 1, states)
        free = self.states - self.guard
        for iterations in range(1, ITERATIONS_MAX + 1):
            equations = self.equations([policy])
            e, averages = equations.solve()
            weighted, average = weights @ e, float(weights @ averages)
            cost = residual + average * self.g_coefficient[:, None]
            q = cost + self._next(weighted)
            index = self._actions(policy)
            present = q[index, self._s]
            best, least = self._best(q, cost[0])
            gain = present - least
            better = (best != index) & (gain > TIE * (np.abs(present).max() + np.abs(weighted).max()))
            if not better[:free].any():
                error = float(equations.error(weighted[None])[0] + equations.visits[free:] @ gain[free:])
                return policy, averages, q, error / (abs(average) + TINY), iterations
            better[free:] = False
            index = np.where(better, best, index)
            policy = np.where(index > 0, index + self._first - 1, 0)
        solution = IteratedSolution(policy, average, weighted, ITERATIONS_MAX)
        raise NotConverged(f"the policy still changes after {ITERATIONS_MAX} iterations", solution)

    def _best(self, q: Array, wait_cost: Array) -> tuple[NDArray[np.intp], Array]:
        """(states,) index of the best action, and its value.

        Waiting is judged by the best end of the whole wait, not by the policy's action after one more arrival: else each
        iteration would extend a long wait by one state only.
        """
        best = np.argmin(q[1:], axis=0) + 1
        serve = q[best, self._s]
        waited = np.concatenate([[0.0], np.cumsum(wait_cost[:-1])])  # cost from state 0 to each state
        later = np.minimum.accumulate((serve + waited)[::-1])[::-1]  # of serving in this state or a later one
        wait = np.append(later[1:] - waited[:-1], np.inf)
        return np.where(wait < serve, 0, best), np.minimum(wait, serve)

    def _next(self, e: Array) -> Array:
        """(sizes + 1, states) E[e(next state)] of each action; inf for an action that is not feasible."""
        result = np.full((self.queue.service.sizes.size + 1, self.states), np.inf)
        result[0, :-1] = e[1:]
        padded = np.concatenate([e, np.zeros(self.states - 1)])
        step = padded.strides[0]
        hankel = as_strided(padded, (self.states, self.states), (step, step), writeable=False)  # its own transpose
        served, places = self._after
        result[1:][served] = (self.p @ hankel).ravel()[places]  # (sizes, requests that still wait)
        return result

    @cached_property
    def _after(self) -> tuple[NDArray[np.bool_], NDArray[np.intp]]:
        """(sizes, states) whether enough requests wait; where they do, the flat index of (size, still waiting)."""
        sizes = self.queue.service.sizes[:, None]
        served = self._s >= sizes
        places = np.arange(sizes.size)[:, None] * self.states + self._s - sizes
        return served, places[served]


class Equations:
    """For one policy: e(s) - sum_j m(j|s) e(j) = residual(s) + g g_coefficient(s), with e = 0 from N on."""

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
        """(states,) decisions a second in each state: the change of an average for a unit of residual there."""
        unit = np.zeros(self._overflow.size)
        unit[0] = 1.0
        return np.asarray(np.linalg.solve(self._system.T, unit), dtype=float)

    def error(self, e: Array) -> Array:
        """(objectives,) possible error of an average, because e beyond N is not zero but of the size of e before N."""
        largest: Array = np.abs(e[:, -self._tail :]).max(axis=1)
        return float(np.abs(self.visits) @ self._overflow) * largest


def responses(
    queue: Queue, policies: list[list[int]], arrived_s: Array, part: list[int], stretch: list[float], coins: list[int]
) -> Array:
    """Simulates one decision after the other. The i-th batch takes the i-th part and the i-th stretch."""
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
                if first + waiting >= count:  # no further request arrives, so the last requests need not wait
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


def truncated(queue: Queue, energy_weight: float, states_max: int, overflow_cost: float) -> SemiMarkov:
    service, rate = queue.service, queue.arrival_rate_per_s
    sizes = service.sizes
    if states_max < sizes[-1]:
        raise ValueError(f"s_max must be at least the largest batch, {sizes[-1]}, not {states_max}")
    if queue.occupied != 1.0:
        raise ValueError("the paper's model is of one engine that serves one queue")
    states = states_max + 2
    waiting = np.minimum(np.arange(states), states_max)  # the overflow state has s_max waiting requests
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
            remaining = waiting[state] - size
            reached = p[index - 1, : states_max + 1 - remaining]
            transition[index, state, remaining : states_max + 1] = reached
            beyond = p[index - 1, states_max + 1 - remaining :].sum()
            rest = 1.0 - reached.sum() - beyond  # the rest of heavy tails; else rounding, which may exceed `beyond`
            transition[index, state, -1] = beyond + (rest if rest > ROUNDING else 0.0)
    return SemiMarkov(cost, sojourn, transition)
