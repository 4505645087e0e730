"""Average-cost semi-Markov decision processes with finitely many states and actions.

    s, a        state, action                                             indices
    c(s, a)     expected cost until the next decision                     `cost`        Puterman (1994), 11.4
    y(s, a)     expected time until the next decision                     `sojourn`
    m(j|s, a)   probability that the next decision is taken in state j    `transition`
    g           long-run average cost per unit time
    h           relative values: h(s) = min_a c(s, a) - g y(s, a) + sum_j m(j|s, a) h(j)

Two methods find an optimal policy: relative value iteration on the equivalent discrete-time process (SMDP-J, eq. 23 to
29), and policy iteration. The stationary distribution gives one policy's average cost. The module knows no queues.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Policy = NDArray[np.intp]

STEP_SHARE = 0.99  # of the largest time step that keeps probabilities in [0, 1]; larger steps converge sooner
TIE = 1e-11  # relative: an action must be better than the present action by more, for equal actions would alternate


class NotConverged(ArithmeticError):
    """An iteration reached its maximum number of rounds. `last` is the solution of the last round."""

    def __init__(self, message: str, last: IteratedSolution) -> None:
        super().__init__(message)
        self.last = last


class NotUnichain(ArithmeticError):
    """A policy's Markov chain has several recurrent classes, so that its average cost depends on the start."""


@dataclass(frozen=True)
class SemiMarkov:
    """cost, sojourn : (actions, states), cost inf where an action is not feasible; sojourn > 0.
    transition : (actions, states, states), rows sum to 1; rows of actions that are not feasible are not read.
    """

    cost: Array
    sojourn: Array
    transition: Array

    def __post_init__(self) -> None:
        actions, states = self.cost.shape
        if self.sojourn.shape != (actions, states) or self.transition.shape != (actions, states, states):
            raise ValueError(
                f"costs {self.cost.shape}, sojourns {self.sojourn.shape} and transitions {self.transition.shape} "
                "do not match; needed are (actions, states), the same, and (actions, states, states)"
            )
        if not np.isfinite(self.cost).any(axis=0).all():
            raise ValueError("every state needs a feasible action")
        if not (self.sojourn > 0).all():
            raise ValueError("times between decisions must be positive")

    def under(self, policy: Policy) -> tuple[Array, Array, Array]:
        """Costs (states,), sojourns (states,) and transitions (states, states) of one policy."""
        states = np.arange(policy.size)
        return self.cost[policy, states], self.sojourn[policy, states], self.transition[policy, states]


@dataclass(frozen=True)
class IteratedSolution:
    """policy : (states,) action of each state.  values : (states,) relative values.  span : in the last iteration."""

    policy: Policy
    average_cost: float
    values: Array
    iterations: int
    span: float = 0.0


# ---- relative value iteration -----------------------------------------------------------------------------------


def discretise(model: SemiMarkov, step: float | None = None) -> tuple[Array, Array, float]:
    """Costs per unit time (actions, states), transitions (actions, states, states) and step of the discrete process.

    Each policy has the same average cost in both processes (SMDP-J, eq. 23). step: the eta of eq. 24, below the least
    y / (1 - m(s|s, a)); by default nearly that bound. Raises ValueError when the step is too large.
    """
    feasible = np.isfinite(model.cost)
    staying = np.diagonal(model.transition, axis1=1, axis2=2)  # (actions, states)
    leaving = np.where(feasible, 1.0 - staying, 0.0)
    with np.errstate(divide="ignore"):
        bound = float(np.min(np.where(leaving > 0, model.sojourn / leaving, np.inf)))
    step = STEP_SHARE * bound if step is None else step
    if not 0 < step < bound:
        raise ValueError(f"the step must lie between 0 and {bound:.6g}, not be {step:.6g}")
    scale = step / model.sojourn
    transition = model.transition * scale[:, :, None]
    states = np.arange(model.cost.shape[1])
    transition[:, states, states] += 1.0 - scale
    return model.cost / model.sojourn, transition, step


def relative_value_iteration(
    model: SemiMarkov,
    *,
    epsilon: float = 0.01,
    iterations_max: int = 10_000,
    step: float | None = None,
    reference: int = 0,
) -> IteratedSolution:
    """A policy whose average cost is within epsilon of the least. Source: SMDP-J, Algorithm 1 (Puterman, 8.5.5).

    The iteration ends when the span of the difference of two iterations is below epsilon, and raises NotConverged,
    with the policy reached, after iterations_max. average_cost is the middle of the bounds that the span gives;
    `evaluate` gives the policy's exact cost.
    """
    cost, transition, step = discretise(model, step)
    actions, states = cost.shape
    flat = transition.reshape(actions * states, states)
    values, change, action_values = np.zeros(states), np.zeros(states), cost
    iterations = 0
    for iterations in range(1, iterations_max + 1):  # noqa: B007 (used after the loop)
        action_values = cost + (flat @ values).reshape(actions, states)
        raised = action_values.min(axis=0)
        renewed = raised - raised[reference]
        change = raised - values
        values = renewed
        if np.ptp(change) < epsilon:
            break
    solution = IteratedSolution(
        policy=np.argmin(action_values, axis=0),
        average_cost=float(change.max() + change.min()) / 2,
        values=values * step,
        iterations=iterations,
        span=float(np.ptp(change)),
    )
    if solution.span >= epsilon:
        raise NotConverged(f"value iteration has a span of {solution.span:.3g} after {iterations} iterations", solution)
    return solution


# ---- one policy -------------------------------------------------------------------------------------------------


def stationary(transition: Array) -> Array:
    """Stationary distribution of a unichain transition matrix.

    transition : (n, n) rows sum to 1.  Returns (n,) probabilities, zero for transient states.
    Uses state reduction without subtractions, so that small probabilities keep their relative accuracy. Raises
    NotUnichain. Source: Grassmann, Taksar, Heyman (1985).
    """
    p = np.array(transition, dtype=float)
    order = _recurrent_first(p)
    p = p[np.ix_(order, order)]
    for state in range(order.size - 1, 0, -1):
        down = p[state, :state].sum()
        p[:state, state] /= down
        p[:state, :state] += np.outer(p[:state, state], p[state, :state])
    weights = np.zeros(order.size)
    weights[0] = 1.0
    for state in range(1, order.size):
        weights[state] = weights[:state] @ p[:state, state]
    result = np.zeros(transition.shape[0])
    result[order] = weights / weights.sum()
    return result


def _recurrent_first(p: Array) -> NDArray[np.intp]:
    """The states of the only recurrent class, ordered so that each state reaches an earlier one; raises NotUnichain.

    The search goes backwards from a target that all states reach: a state is recurrent when the target reaches it.
    """
    linked = p > 0
    states = p.shape[0]
    target = 0
    for _ in range(states):  # move the target to a state that it reaches but cannot return from
        reaching = _breadth_first(linked.T, target)
        reached = _breadth_first(linked, target)
        outside = np.setdiff1d(reached, reaching, assume_unique=True)
        if not outside.size:
            break
        target = int(outside[0])
    if reaching.size < states:
        raise NotUnichain(f"only {reaching.size} of {states} states reach state {target}, which is never left")
    recurrent = np.zeros(states, dtype=bool)
    recurrent[reached] = True
    return reaching[recurrent[reaching]]  # breadth first backwards: each state has a step to an earlier one


def _breadth_first(linked: NDArray[np.bool_], start: int) -> NDArray[np.intp]:
    """States that can be reached from `start`, nearest first, `start` included."""
    visited = np.zeros(linked.shape[0], dtype=bool)
    visited[start] = True
    front = np.array([start])
    fronts = [front]
    while front.size:
        new = linked[front].any(axis=0) & ~visited
        front = np.flatnonzero(new)
        visited[front] = True
        fronts.append(front)
    return np.concatenate(fronts)


def evaluate(model: SemiMarkov, policy: Policy) -> float:
    """A policy's average cost, from its stationary distribution (SMDP-J, eq. 21). Raises NotUnichain."""
    cost, sojourn, transition = model.under(policy)
    weights = stationary(transition)
    return float(weights @ cost / (weights @ sojourn))


def relative_values(model: SemiMarkov, policy: Policy, reference: int = 0) -> tuple[float, Array]:
    """A policy's average cost g and relative values h, h(reference) = 0. Raises NotUnichain.

    Solves h = c - g y + P h directly, with g in the place of h(reference) (Puterman, 8.6.1).
    """
    cost, sojourn, transition = model.under(policy)
    _recurrent_first(transition)  # raises NotUnichain; rounding could hide that the equations are singular
    system = np.eye(cost.size) - transition
    system[:, reference] = sojourn
    try:
        values = np.asarray(np.linalg.solve(system, cost), dtype=float)
    except np.linalg.LinAlgError as error:
        raise NotUnichain(f"the policy's equations are singular: {error}") from error
    average_cost = float(values[reference])
    values[reference] = 0.0
    return average_cost, values


def policy_iteration(model: SemiMarkov, policy: Policy, *, iterations_max: int = 100) -> IteratedSolution:
    """The optimal policy. policy : any start. Raises NotConverged after iterations_max, NotUnichain.

    Source: Puterman (1994), 8.6 and 11.4.4. On a tie, the present action stays.
    """
    states = np.arange(model.cost.shape[1])
    solution: IteratedSolution | None = None
    for iterations in range(1, iterations_max + 1):
        average_cost, values = relative_values(model, policy)
        action_values = model.cost - average_cost * model.sojourn + model.transition @ values
        solution = IteratedSolution(policy, average_cost, values, iterations)
        best = np.argmin(action_values, axis=0)
        present = action_values[policy, states]
        better = action_values[best, states] < present - TIE * (1.0 + np.abs(present))
        if not better.any():
            return solution
        policy = np.where(better, best, policy)
    assert solution is not None, "iterations_max is at least 1"
    raise NotConverged(f"the policy still changes after {iterations_max} iterations", solution)
