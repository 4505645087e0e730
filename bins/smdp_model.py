"""The equations of a queue's policy, and the truncated model that checks them. bins/smdp.py has the queue."""

from __future__ import annotations

import math
from bisect import bisect_right
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from bins.average_cost import IteratedSolution as IteratedSolution
from bins.average_cost import NotConverged, Policy, SemiMarkov
from bins.service import Array, ServiceTimes
from bins.state_grid import TERMS, StateGrid
from bins.visits import MATTERING, TINY, Mixture, exact_averages

ITERATIONS_MAX = 60
SURVIVAL = 3  # numbers of arrivals up to this multiple of the truncated states are counted one by one
ROUNDING = 1e-12  # rounding error of a sum of probabilities
TIE = 1e-11  # of the largest relative value: an action must be better by more, or rounding could alternate without end
MS_PER_S = 1e3
OBJECTIVES = 5
ROWS = 64  # rows of a matrix that are computed at once


class Unstable(ValueError):
    """More requests arrive than the engines can serve, so that the queue is unbounded."""


class Queue(Protocol):
    """What the equations need to know of a queue; bins/smdp.py documents each quantity."""

    @property
    def arrival_rate_per_s(self) -> float: ...

    @property
    def service(self) -> ServiceTimes: ...

    @property
    def energy_j(self) -> Array: ...

    @property
    def idle_power_w(self) -> float: ...

    @property
    def response_weight(self) -> float: ...

    @property
    def occupied(self) -> float: ...

    def arrivals(self, states: int) -> Array: ...


class QueueModel:
    """The equations of e at the nodes of a grid of states 0 .. N. Beyond N, batches of `tail` are served.

    Costs are (OBJECTIVES, ...): response time (s), power above idle (W), batches a second, engines at work, squared
    times of batches. An action is an index: 0 to wait, then the batch sizes. Policies are given for all states.
    """

    def __init__(self, queue: Queue, tail: int, grid: StateGrid) -> None:
        service = queue.service
        rate, sizes = queue.arrival_rate_per_s, service.sizes
        self.grid = grid
        self._sizes = sizes
        self._response_weight = queue.response_weight
        y = queue.occupied * service.mean_s  # (sizes,) time until the next decision
        y2 = queue.occupied**2 * service.second_moment_s2
        arrivals, arrivals2 = rate * y, rate * y + rate**2 * y2  # E[K], E[K^2]
        last = int(np.searchsorted(sizes, tail))
        drift = tail - arrivals[last]
        if not drift > 1e-9 * tail:
            raise Unstable(f"{rate:.6g} requests a second are more than batches of {tail} can serve")
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
        # The residual of e, c + E quad(next) - quad(s), is constant + slope * s + g * g_coefficient.
        self.g_coefficient = q1_per_g * moved - sojourn  # (sizes + 1,)
        self.constant = fixed + q2[:, None] * spread + q1[:, None] * moved  # (OBJECTIVES, sizes + 1)
        self.slope = 2 * q2[:, None] * moved
        self.slope[0] += per_waiting
        self.p = queue.arrivals(grid.states)  # (sizes, arrivals)
        self._counts = self.p.shape[1] - np.argmax(self.p[:, ::-1] > 0, axis=1)  # (sizes,) without the zeros at the end
        self._p_nodes = grid.onto_nodes(self.p)  # (sizes, nodes): weights of e(x + node) in E[e(x + K)]
        self._p_nodes = self._p_nodes[:, : int(np.flatnonzero(self._p_nodes.any(axis=0))[-1]) + 1]
        self._first = int(sizes[0])
        self._tail = tail

    def actions(self, policy: Policy) -> NDArray[np.intp]:
        """Actions of numbers of requests to serve."""
        return np.where(policy > 0, policy - self._first + 1, 0)

    def served(self, action: NDArray[np.intp]) -> Policy:
        """Numbers of requests that actions serve."""
        return np.where(action > 0, action + self._first - 1, 0)

    # ---- one policy ----

    def evaluate(self, mixture: Mixture, error_max: float) -> tuple[Array, Array]:
        """Averages (objectives,) of a mixture of policies, and their possible errors.

        error_max : relative error at which the averages are exact enough; it may be missed.
        """
        nodes = self.grid.nodes
        system, residual, g_coefficient = np.eye(nodes.size), np.zeros((OBJECTIVES, nodes.size)), np.zeros(nodes.size)
        for policy, share in mixture:
            action = self.actions(policy[nodes])
            system -= share * self._transitions(nodes, action)
            residual += share * (self.constant[:, action] + self.slope[:, action] * nodes)
            g_coefficient += share * self.g_coefficient[action]
        equations = Equations(system, residual, g_coefficient)
        e, averages = equations.solve()
        return self._exact(mixture, equations, e, averages, error_max)

    def _transitions(self, nodes: NDArray[np.intp], action: NDArray[np.intp]) -> Array:
        """(given nodes, nodes) weights of e at all nodes in E[e(next state)], for one action at each given node."""
        grid = self.grid
        result = np.zeros((nodes.size, grid.nodes.size))
        serves = np.flatnonzero(action)
        left = (nodes - self.served(action))[serves]  # still waiting
        p = self._p_nodes[action[serves] - 1]
        result[serves, : grid.dense] = self._windows[action[serves] - 1, grid.dense - np.minimum(left, grid.dense)]
        waits = np.flatnonzero(action == 0)
        near = waits[nodes[waits] + 1 < grid.dense]
        result[near, nodes[near] + 1] = 1.0
        if grid.panels:
            reached = grid.nodes[: p.shape[1]]
            for begin in range(0, serves.size, ROWS):
                rows = slice(begin, begin + ROWS)
                _add_interpolated(grid, result, serves[rows], left[rows, None] + reached, p[rows])
            _add_interpolated(grid, result, waits, nodes[waits, None] + 1, np.ones((waits.size, 1)))
        return result

    @cached_property
    def _windows(self) -> NDArray[np.float64]:
        """(sizes, dense + 1, dense) p by the next state: entry [b, dense - x] after x requests are left."""
        dense = self.grid.dense
        padded = np.zeros((self.p.shape[0], 2 * dense))
        near = self._p_nodes[:, :dense]
        padded[:, dense : dense + near.shape[1]] = near
        return sliding_window_view(padded, dense, axis=1)

    def _after(self, e: Array) -> Array:
        """(sizes, nodes) E[e(node + K)], K arrivals during a batch of each size; e is 0 beyond N."""
        result: Array = self._p_nodes @ np.take(self.grid.everywhere(e), self._sums).T
        return result

    @cached_property
    def _sums(self) -> NDArray[np.intp]:
        """(nodes, nodes that arrivals reach from 0) sums of two nodes, at most N."""
        nodes = self.grid.nodes
        sums: NDArray[np.intp] = nodes[:, None] + nodes[: self._p_nodes.shape[1]]
        return np.minimum(sums, self.grid.states - 1, out=sums)

    def _exact(
        self, mixture: Mixture, equations: Equations, e: Array, averages: Array, error_max: float
    ) -> tuple[Array, Array]:
        """Averages, and their possible errors, of the states between nodes and of those beyond N."""
        error = equations.error(e[:, self.grid.nodes >= self.grid.states - self._tail])
        if not self.grid.panels:
            return averages, error
        averages, rest = exact_averages(self, mixture, equations, e, averages, error_max / 2)
        return averages, error + rest

    def costs(self, mixture: Mixture) -> tuple[Array, Array]:
        """In all states, residuals of e = 0 without g (objectives, states), and coefficients of -g (states,)."""
        s = np.arange(self.grid.states)
        cost, time = np.zeros((OBJECTIVES, s.size)), np.zeros(s.size)
        for policy, share in mixture:
            action = self.actions(policy)
            cost += share * (self.constant[:, action] + self.slope[:, action] * s)
            time -= share * self.g_coefficient[action]
        return cost, time

    def next_after(self, size: int) -> Array:
        """Probabilities of the next states, from `size` below the present state on. size : 0 to wait."""
        if not size:
            return np.array([0.0, 1.0])
        row = size - self._first
        return np.asarray(self.p[row, : self._counts[row]])

    # ---- the best policy ----

    def iterate(
        self, policy: Policy, energy_weight: float, error_max: float
    ) -> tuple[Policy, Array, Array, float, int]:
        """Policy iteration. Raises NotConverged.

        Returns the policy, averages by objective, values (sizes + 1, dense states) of each action, the largest relative
        error that the approximations may cause in the response time, the power and the average cost, and the number of
        iterations.
        """
        grid, nodes = self.grid, self.grid.nodes
        rows = np.arange(nodes.size)
        weights = np.array([MS_PER_S * self._response_weight, energy_weight, 0.0, 0.0, 0.0])
        fixed, per_waiting = weights @ self.constant, weights @ self.slope
        largest = int(self._sizes[-1])
        free = nodes < largest + (grid.states - largest + 1) // 2  # near N, the action never changes
        action = self.actions(policy[nodes])
        transitions = self._transitions(nodes, action)
        before = math.inf
        for iterations in range(1, ITERATIONS_MAX + 1):  # noqa: B007 (used after the loop)
            residual = self.constant[:, action] + self.slope[:, action] * nodes
            equations = Equations(np.eye(nodes.size) - transitions, residual, self.g_coefficient[action])
            e, averages = equations.solve()
            weighted, average = weights @ e, float(weights @ averages)
            cost = (fixed + average * self.g_coefficient)[:, None] + per_waiting[:, None] * nodes
            after = self._after(weighted)
            q = cost + self._next(weighted, after)
            present = q[action, rows]
            best, least = _best(q, cost[0], largest)
            gain = present - least
            better = free & (best != action) & (gain > TIE * (np.abs(present).max() + np.abs(weighted).max()))
            # On a grid, interpolation decides in states that are hardly visited; their actions may alternate forever.
            if not better.any() or (grid.panels and abs(average - before) <= error_max / 10 * abs(average)):
                break
            before = average
            action = np.where(better, best, action)
            transitions[better] = self._transitions(nodes[better], action[better])
        else:
            solution = IteratedSolution(policy, average, weighted, ITERATIONS_MAX)
            raise NotConverged(f"the policy still changes after {ITERATIONS_MAX} iterations", solution)
        policy = self._everywhere(action, after, fixed + average * self.g_coefficient, per_waiting)
        averages, errors = self._exact([(policy, 1.0)], equations, e, averages, error_max)
        average = float(weights @ averages)
        undecided = float(equations.visits[~free] @ np.maximum(gain[~free], 0.0))
        error = (weights @ errors + undecided) / (abs(average) + TINY)
        relative = errors[:MATTERING] / (np.abs(averages[:MATTERING]) + TINY)
        return policy, averages, q[:, : grid.dense], float(max(error, *relative)), iterations

    def _next(self, e: Array, after: Array) -> Array:
        """(sizes + 1, nodes) E[e(next state)] of each action; inf for an action that is not feasible."""
        grid = self.grid
        result = np.full((self._sizes.size + 1, grid.nodes.size), np.inf)
        result[0, :-1] = grid.everywhere(e)[grid.nodes[:-1] + 1]
        for row, size in enumerate(self._sizes.tolist()):
            result[row + 1, size : grid.dense] = after[row, : max(0, grid.dense - size)]
        if grid.panels:
            rows, left = self._left_in_panels
            result[1:, grid.dense :] = grid.at(after, rows, left).reshape(self._sizes.size, -1)
        return result

    @cached_property
    def _left_in_panels(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """For each size and each node in a panel: the index of the size, and the number of requests that are left."""
        left = self.grid.nodes[self.grid.dense :] - self._sizes[:, None]
        return np.repeat(np.arange(left.shape[0]), left.shape[1]), left.ravel()

    def _everywhere(self, action: NDArray[np.intp], after: Array, fixed: Array, per_waiting: Array) -> Policy:
        """The policy of all states. Between two nodes of different actions, the best of both and some halfway between.

        fixed, per_waiting : (sizes + 1,) of the weighted residual.
        """
        grid = self.grid
        if not grid.panels:
            return self.served(action)
        right = np.searchsorted(grid.nodes, np.arange(grid.states))
        everywhere = action[right]
        s = np.flatnonzero(action[np.maximum(right - 1, 0)] != everywhere)
        s = s[s > grid.nodes[right[s] - 1]]
        right = right[s]
        first, second = action[right - 1], action[right]
        part = (s - grid.nodes[right - 1]) / (grid.nodes[right] - grid.nodes[right - 1])
        middle = np.round(first + part * (second - first)).astype(np.intp)
        tried = np.clip(np.stack([first, second, middle - 1, middle, middle + 1]), 1, fixed.size - 1)
        values = [
            fixed[each] + per_waiting[each] * s + grid.at(after, each - 1, s - self.served(each)) for each in tried
        ]
        everywhere[s] = np.take_along_axis(tried, np.argmin(values, axis=0)[None], axis=0)[0]
        everywhere[grid.nodes] = action
        return self.served(everywhere)


class Equations:
    """For one policy, at the nodes: e(s) - sum_j m(j|s) e(j) = residual(s) + g g_coefficient(s), with e = 0 from N on.

    system : (nodes, nodes) I - m.
    """

    def __init__(self, system: Array, residual: Array, g_coefficient: Array) -> None:
        self._residual = residual
        self._overflow = np.maximum(system.sum(axis=1), 0.0)  # probability of a next state beyond N
        system[:, -1] -= self._overflow  # beyond N, e is taken as at N
        system[:, 0] = -g_coefficient  # g takes the place of e(0), which is 0, among the unknowns
        self._system = system

    def solve(self) -> tuple[Array, Array]:
        """e (objectives, nodes) and the averages g (objectives,)."""
        solved = np.asarray(np.linalg.solve(self._system, self._residual.T), dtype=float).T
        averages = solved[:, 0].copy()
        solved[:, 0] = 0.0
        return solved - solved[:, -1:], averages

    @cached_property
    def visits(self) -> Array:
        """(nodes,) decisions a second in each state: the change of an average for a unit of residual there."""
        unit = np.zeros(self._overflow.size)
        unit[0] = 1.0
        return np.asarray(np.linalg.solve(self._system.T, unit), dtype=float)

    def balance(self, surplus: Array) -> Array:
        """(nodes,) change of the visits that takes up a surplus of moved over present visits."""
        wanted = surplus.copy()
        wanted[0] = 0.0
        return np.asarray(np.linalg.solve(self._system.T, wanted), dtype=float)

    def error(self, e_last: Array) -> Array:
        """(objectives,) possible error of an average, because e beyond N is not zero but of the size of e before N.

        e_last : (objectives, ...) e in the last states.
        """
        largest: Array = np.abs(e_last).max(axis=1)
        return float(np.abs(self.visits) @ self._overflow) * largest


def _best(q: Array, wait_cost: Array, largest: int) -> tuple[NDArray[np.intp], Array]:
    """(nodes,) the best action, and its value. Waiting in more than `largest` states is judged as any action.

    Below, waiting is judged by the best end of the whole wait, not by the policy's action after one more arrival: else
    each iteration would extend a long wait by one state only.
    """
    rows = np.arange(q.shape[1])
    best = np.argmin(q[1:], axis=0) + 1
    serve = q[best, rows]
    wait = q[0].copy()
    waited = np.concatenate([[0.0], np.cumsum(wait_cost[:largest])])  # cost from state 0 to each state
    later = np.minimum.accumulate((serve[: largest + 1] + waited)[::-1])[
        ::-1
    ]  # of serving in this state or a later one
    wait[:largest] = later[1:] - waited[:-1]
    return np.where(wait < serve, 0, best), np.minimum(wait, serve)


def _add_interpolated(
    grid: StateGrid, result: Array, rows: NDArray[np.intp], states: NDArray[np.intp], weights: Array
) -> None:
    """Add weights (rows, n) of e in states (rows, n), ascending, to rows of a matrix (..., nodes), through the nodes.

    Only states in panels count: dense states and those beyond N are left out.
    """
    row, column = np.nonzero((states >= grid.dense) & (states < grid.states))
    if not row.size:
        return
    at = states[row, column]
    first = grid.start[at]
    terms = weights[row, column, None] * grid.weights[at]  # (entries, TERMS)
    begins = np.flatnonzero(np.diff(row * result.shape[1] + first, prepend=-1))
    sums = np.add.reduceat(terms, begins, axis=0)
    row, first = rows[row[begins]], first[begins]
    for term in range(TERMS):
        result[row, first + term] += sums[:, term]


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
