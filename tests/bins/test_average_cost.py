"""Average-cost semi-Markov decision processes: three solution methods agree, and the figures of a single policy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from bins.average_cost import (
    Array,
    NotConverged,
    NotUnichain,
    SemiMarkov,
    discretise,
    evaluate,
    policy_iteration,
    relative_value_iteration,
    relative_values,
    stationary,
)

SEEDS = range(12)


def random_model(seed: int, states: int = 5, actions: int = 3) -> SemiMarkov:
    """All transition probabilities are positive; the first action is always feasible, some others are not."""
    rng = np.random.default_rng(seed)
    cost = rng.uniform(0, 10, (actions, states))
    cost[1:][rng.random((actions - 1, states)) < 0.2] = np.inf
    transition = rng.dirichlet(np.full(states, 0.5), (actions, states))
    return SemiMarkov(cost, rng.uniform(0.2, 3.0, (actions, states)), transition)


def first_policy(model: SemiMarkov) -> np.ndarray:
    return np.zeros(model.cost.shape[1], dtype=np.intp)


def least_cost_by_linear_programme(model: SemiMarkov) -> float:
    """min sum c x over x(s, a) >= 0 that balance each state and last one unit of time (Puterman, 11.4.5: the dual)."""
    action, state = np.nonzero(np.isfinite(model.cost))
    states = model.cost.shape[1]
    balance = np.eye(states)[state].T - model.transition[action, state].T  # (states, pairs)
    equalities = np.vstack([balance, model.sojourn[action, state]])
    right = np.concatenate([np.zeros(states), [1.0]])
    optimum = linprog(model.cost[action, state], A_eq=equalities, b_eq=right, method="highs")
    assert optimum.success, optimum.message
    return float(optimum.fun)


# ---- three solution methods ----


def test_a_machine_that_may_be_repaired_at_once_or_later() -> None:
    """The machine works for a mean of 10 h at no cost. Then it is repaired in 1 h for 5; or it is used, broken, for 4 h
    at 2 an hour and then repaired: (0 + 5) / 11 or (0 + 8 + 5) / 15 an hour."""
    good, broken, worn = 0, 1, 2
    transition = np.zeros((2, 3, 3))
    transition[:, good, broken] = 1.0
    transition[0, broken, good] = transition[1, broken, worn] = 1.0
    transition[:, worn, good] = 1.0
    sojourn = np.array([[10.0, 1.0, 1.0], [10.0, 4.0, 1.0]])
    cost = np.array([[0.0, 5.0, 5.0], [np.inf, 8.0, np.inf]])
    model = SemiMarkov(cost, sojourn, transition)
    solution = policy_iteration(model, np.array([0, 1, 0]))
    assert solution.policy.tolist() == [0, 0, 0]
    assert solution.average_cost == pytest.approx(5 / 11, rel=1e-12)
    assert evaluate(model, np.array([0, 1, 0])) == pytest.approx(13 / 15, rel=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_value_iteration_policy_iteration_and_linear_programme_agree(seed: int) -> None:
    model = random_model(seed)
    by_policies = policy_iteration(model, first_policy(model))
    by_values = relative_value_iteration(model, epsilon=1e-9)
    assert by_policies.average_cost == pytest.approx(least_cost_by_linear_programme(model), rel=1e-8)
    assert by_values.policy.tolist() == by_policies.policy.tolist()
    assert by_values.average_cost == pytest.approx(by_policies.average_cost, abs=1e-9)
    assert by_values.values == pytest.approx(by_policies.values, abs=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_policy_iteration_ends_at_the_same_cost_from_every_first_policy(seed: int) -> None:
    model = random_model(seed)
    rng = np.random.default_rng(seed)
    start = np.array([rng.choice(np.flatnonzero(np.isfinite(column))) for column in model.cost.T])
    solution = policy_iteration(model, start)
    assert solution.average_cost == pytest.approx(policy_iteration(model, first_policy(model)).average_cost, rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 7), st.integers(1, 4))
def test_the_optimality_equation_holds(seed: int, states: int, actions: int) -> None:
    """h(s) = min over the feasible actions of c - g y + m h, in every state."""
    model = random_model(seed, states, actions)
    solution = policy_iteration(model, first_policy(model))
    action_values = model.cost - solution.average_cost * model.sojourn + model.transition @ solution.values
    assert action_values.min(axis=0) == pytest.approx(solution.values, abs=1e-9)


@pytest.mark.parametrize("epsilon", [1.0, 0.1, 0.01])
def test_value_iteration_is_within_epsilon_of_the_least_cost(epsilon: float) -> None:
    for seed in SEEDS:
        model = random_model(seed)
        least_cost = policy_iteration(model, first_policy(model)).average_cost
        solution = relative_value_iteration(model, epsilon=epsilon)
        assert solution.span < epsilon
        assert least_cost <= evaluate(model, solution.policy) + 1e-12 < least_cost + epsilon
        assert abs(solution.average_cost - least_cost) <= epsilon / 2 + 1e-12


def test_value_iteration_that_reaches_its_cap_raises_and_carries_the_last_policy() -> None:
    model = random_model(0)
    with pytest.raises(NotConverged, match="after 3 iterations") as raised:
        relative_value_iteration(model, epsilon=1e-9, iterations_max=3)
    last = raised.value.last
    assert last.iterations == 3
    assert last.span >= 1e-9
    assert np.isfinite(model.cost[last.policy, np.arange(5)]).all()


def test_policy_iteration_that_reaches_its_cap_raises_and_carries_the_last_policy() -> None:
    model = random_model(1)
    needed = policy_iteration(model, first_policy(model))
    assert needed.iterations > 1
    with pytest.raises(NotConverged, match="after 1 iterations") as raised:
        policy_iteration(model, first_policy(model), iterations_max=1)
    assert raised.value.last.policy.tolist() == first_policy(model).tolist()
    assert raised.value.last.average_cost > needed.average_cost


def test_rows_of_actions_that_are_not_feasible_are_ignored() -> None:
    model = random_model(2)
    forbidden = ~np.isfinite(model.cost)
    assert forbidden.any()
    transition, sojourn = model.transition.copy(), model.sojourn.copy()
    transition[forbidden], sojourn[forbidden] = 7.0, 1e-3
    other = SemiMarkov(model.cost, sojourn, transition)
    for solved in (lambda m: policy_iteration(m, first_policy(m)), lambda m: relative_value_iteration(m, epsilon=1e-9)):
        assert solved(other).average_cost == solved(model).average_cost


# ---- the discrete process ----


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_the_discrete_process_has_the_same_costs_under_every_policy(share: float) -> None:
    """SMDP-J, eq. 23: costs c / y, transitions eta (m - 1) / y + 1."""
    model = random_model(3)
    bound = discretise(model)[2] / 0.99
    cost, transition, step = discretise(model, share * bound)
    discrete = SemiMarkov(cost, np.ones_like(cost), transition)
    assert step == share * bound
    feasible = np.isfinite(model.cost)
    assert transition[feasible].min() >= 0
    assert transition[feasible].sum(axis=1) == pytest.approx(np.ones(feasible.sum()))
    for first in np.flatnonzero(feasible[:, 0]):
        policy = first_policy(model)
        policy[0] = first
        assert evaluate(discrete, policy) == pytest.approx(evaluate(model, policy), rel=1e-12)


@pytest.mark.parametrize("step", [0.0, -1.0, 1e3])
def test_a_step_outside_its_bounds_is_an_error(step: float) -> None:
    with pytest.raises(ValueError, match="step must lie between 0 and"):
        discretise(random_model(0), step)


# ---- one policy ----


@pytest.mark.parametrize("seed", SEEDS)
def test_the_stationary_distribution_is_that_of_the_balance_equations(seed: int) -> None:
    states = 8
    transition = np.random.default_rng(seed).dirichlet(np.full(states, 0.3), states)
    balance = np.vstack([transition.T - np.eye(states), np.ones(states)])
    direct = np.linalg.lstsq(balance, np.concatenate([np.zeros(states), [1.0]]))[0]
    assert stationary(transition) == pytest.approx(direct, rel=1e-8, abs=1e-12)


def test_small_probabilities_keep_their_relative_accuracy() -> None:
    """Birth and death with births of 1e-12: pi(s) = pi(0) (births / deaths)^s, down to 1e-60 and below."""
    birth, death, states = 1e-12, 0.5, 6
    transition = np.zeros((states, states))
    for state in range(states):
        transition[state, min(state + 1, states - 1)] += birth
        transition[state, max(state - 1, 0)] += death
        transition[state, state] += 0.5 - birth
    expected = (birth / death) ** np.arange(states)
    assert expected[-1] < 1e-58
    assert stationary(transition) / (expected / expected.sum()) == pytest.approx(np.ones(states), rel=1e-12)


def test_a_link_of_1e_12_decides_between_two_halves() -> None:
    """Two halves with links of 1e-12 and 3e-12 between them hold 3/4 and 1/4, to full precision."""
    transition = np.full((4, 4), 0.0)
    transition[:2, :2] = transition[2:, 2:] = 0.5
    transition[0, 0], transition[0, 2] = 0.5 - 1e-12, 1e-12
    transition[2, 2], transition[2, 0] = 0.5 - 3e-12, 3e-12
    assert stationary(transition) == pytest.approx([3 / 8, 3 / 8, 1 / 8, 1 / 8], rel=1e-11)


def test_transient_states_get_zero() -> None:
    transition = np.array([[0.2, 0.5, 0.3], [0.0, 0.4, 0.6], [0.0, 0.3, 0.7]])
    assert stationary(transition).tolist() == pytest.approx([0.0, 1 / 3, 2 / 3])
    assert stationary(transition)[0] == 0.0


def test_a_periodic_chain_has_a_stationary_distribution() -> None:
    assert stationary(np.array([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])) == pytest.approx([1 / 3] * 3)


def two_classes(rng: np.random.Generator) -> Array:
    """States 0 to 2 and states 3 to 5 do not communicate; state 6 leads to both."""
    transition = np.zeros((7, 7))
    transition[:3, :3] = rng.dirichlet(np.ones(3), 3)
    transition[3:6, 3:6] = rng.dirichlet(np.ones(3), 3)
    transition[6] = rng.dirichlet(np.ones(7))
    return transition


@pytest.mark.parametrize("seed", SEEDS)
def test_two_recurrent_classes_are_an_error_whatever_the_rounding(seed: int) -> None:
    rng = np.random.default_rng(seed)
    transition = two_classes(rng)
    model = SemiMarkov(rng.random((1, 7)), 1.0 + rng.random((1, 7)), transition[None])
    for call in (
        lambda: stationary(transition),
        lambda: evaluate(model, first_policy(model)),
        lambda: relative_values(model, first_policy(model)),
        lambda: policy_iteration(model, first_policy(model)),
    ):
        with pytest.raises(NotUnichain):
            call()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("reference", [0, 3])
def test_the_average_cost_is_that_of_the_relative_values(seed: int, reference: int) -> None:
    model = random_model(seed)
    average_cost, values = relative_values(model, first_policy(model), reference)
    assert average_cost == pytest.approx(evaluate(model, first_policy(model)), rel=1e-11)
    assert values[reference] == 0.0
    cost, sojourn, transition = model.under(first_policy(model))
    assert cost - average_cost * sojourn + transition @ values == pytest.approx(values, abs=1e-10)


# ---- invalid processes ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sojourn": np.ones((1, 5))}, "do not match"),
        ({"transition": np.ones((3, 5, 4))}, "do not match"),
        ({"cost": np.full((3, 5), np.inf)}, "every state needs a feasible action"),
        ({"sojourn": np.zeros((3, 5))}, "must be positive"),
    ],
)
def test_an_invalid_process_is_an_error(change: dict[str, Array], message: str) -> None:
    model = random_model(0)
    parts = {"cost": model.cost, "sojourn": model.sojourn, "transition": model.transition, **change}
    with pytest.raises(ValueError, match=message):
        SemiMarkov(**parts)
