"""Queues whose best policy reaches far: variable times, large batches, high loads. Solved on a grid of states."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bins.average_cost import NotConverged, Policy
from bins.service import Array, ServiceTimes
from bins.smdp import Queue
from bins.smdp_model import QueueModel
from bins.state_grid import DEGREE, StateGrid

NODES_MAX = 1_000  # of any grid below; its equations take the time of the cube of this


def variable(kind: str, batch_max: int, load: float, **options: float) -> Queue:
    """SMDP-J's basic scenario with larger batches."""
    sizes = np.arange(1, batch_max + 1)
    latency_s, energy_j = (0.305058 * sizes + 1.05244) * 1e-3, (19.899 * sizes + 19.603) * 1e-3
    construct: Callable[[Array], ServiceTimes] = getattr(ServiceTimes, kind)
    return Queue(load * batch_max / latency_s[-1], construct(latency_s), energy_j, **options)  # type: ignore[arg-type]


def of_all_states(queue: Queue, policy: Policy, states: int) -> Array:
    """Averages of a policy by the equations of so many states, each of them a node."""
    tail = int(queue.service.sizes[-1])
    extended = np.concatenate([policy, np.full(states - policy.size, tail)])
    averages, errors = QueueModel(queue, tail, StateGrid(states)).evaluate([(extended, 1.0)], 0.0)
    assert (errors[:2] <= 1e-11 * averages[:2]).all()
    return averages


# ---- solutions ----


@pytest.mark.parametrize(
    ("kind", "batch_max", "load", "states"),
    [("hyperexponential", 32, 0.9, 720), ("exponential", 64, 0.8, 1_000), ("erlang", 64, 0.95, 1_000)],
)
@pytest.mark.parametrize("energy_weight", [0.0, 5.0])
def test_averages_on_a_grid_are_those_of_all_states(
    kind: str, batch_max: int, load: float, states: int, energy_weight: float
) -> None:
    queue = variable(kind, batch_max, load)
    solution = queue.solve(energy_weight)
    averages = of_all_states(queue, solution.policy, states)
    assert solution.evaluation.response_s_mean == pytest.approx(averages[0], rel=1e-8)
    assert solution.evaluation.power_w_mean == pytest.approx(averages[1], rel=1e-8)
    assert queue.evaluate(solution.policy).response_s_mean == pytest.approx(averages[0], rel=1e-8)


@pytest.mark.parametrize(
    ("kind", "batch_max", "load", "cost_ms"),
    [
        ("hyperexponential", 128, 0.8, 57.7051306),
        ("exponential", 128, 0.9, 101.4667370),
        ("hyperexponential", 256, 0.6, 16.1729857),
    ],
)
def test_variable_times_of_large_batches_are_solved_with_few_nodes(
    kind: str, batch_max: int, load: float, cost_ms: float
) -> None:
    """The costs are those of five times as many nodes."""
    queue = variable(kind, batch_max, load)
    solution = queue.solve(0.0)
    assert solution.average_cost == pytest.approx(cost_ms, rel=1e-8)
    assert solution.iterations <= 30
    assert max(model.grid.nodes.size for model in queue._models.values()) <= NODES_MAX


def test_the_best_policy_of_variable_times_serves_less_than_a_full_batch_up_to_thousands_of_waiting_requests() -> None:
    """Serving full batches from a quarter of the way on costs more, and so do batches of two requests more or less."""
    queue = variable("hyperexponential", 128, 0.8)
    solution = queue.solve(0.0)
    policy, last = solution.policy, int(np.flatnonzero(solution.policy != 128)[-1])
    assert last > 3_000
    assert (np.diff(policy[128:]) >= 0).all()
    cost_ms = 1e3 * queue.evaluate(policy).response_s_mean
    assert cost_ms == pytest.approx(solution.average_cost, rel=1e-8)
    full_early = policy.copy()
    full_early[last // 4 :] = 128
    assert 1e3 * queue.evaluate(full_early).response_s_mean > cost_ms * (1 + 1e-5)
    for first in (150, 500, 1_500):
        for change in (-2, 2):
            changed = policy.copy()
            changed[first : first + 200] += change
            assert 1e3 * queue.evaluate(changed).response_s_mean > cost_ms * (1 + 1e-9)


def test_a_policy_that_never_settles_is_solved() -> None:
    """Where all sizes have nearly the same throughput, single requests are best in any state that is visited."""
    sizes = np.arange(1, 65)
    service = ServiceTimes.exponential((sizes + 1e-9) * 1e-3)
    queue = Queue(0.8 * 1e3, service, np.ones(64))
    solution = queue.solve(0.0)
    assert set(solution.policy[1:100].tolist()) == {1}
    singles = Queue(0.8 * 1e3, ServiceTimes.exponential(service.mean_s[:1]), np.ones(1))
    assert solution.average_cost == pytest.approx(singles.solve(0.0).average_cost, rel=1e-8)


@pytest.mark.parametrize("energy_weight", [1e2, 1e8])
@pytest.mark.parametrize("kind", ["deterministic", "hyperexponential"])
def test_the_response_time_of_a_solution_is_exact_at_any_energy_weight(kind: str, energy_weight: float) -> None:
    queue = variable(kind, 32, 0.7)
    solution = queue.solve(energy_weight)
    exact_s = of_all_states(queue, solution.policy, 900)[0]
    assert solution.evaluation.response_s_mean == pytest.approx(exact_s, rel=1e-8)


def test_a_mixture_on_a_grid_lies_between_its_policies() -> None:
    queue = variable("exponential", 128, 0.8)
    fast, slow = queue.solve(0.0).policy, queue.threshold(100)
    responses_s = [queue.evaluate(fast, slow, share).response_s_mean for share in (0.0, 0.3, 1.0)]
    assert responses_s == sorted(responses_s)
    assert responses_s[0] == pytest.approx(queue.evaluate(fast).response_s_mean, rel=1e-8)
    assert responses_s[2] == pytest.approx(queue.evaluate(slow).response_s_mean, rel=1e-8)


@pytest.mark.parametrize("load", [0.999, 0.9999999])
def test_a_load_just_below_1_is_solved(load: float) -> None:
    """Near a load of 1, the response time grows as 1 / (1 - load)."""
    queue = variable("exponential", 32, load)
    response_s = queue.solve(0.0).evaluation.response_s_mean
    halved_s = variable("exponential", 32, (1 + load) / 2).solve(0.0).evaluation.response_s_mean
    assert halved_s == pytest.approx(2 * response_s, rel=1e-2)


def test_a_policy_that_saves_energy_with_slower_batches_than_the_fastest_has_the_longer_tail_and_is_solved() -> None:
    """Batches of 2 serve most, so the first grids are made for their tail; batches of 10 take the least energy."""
    latency_s = 1e-3 * np.array([0.5, 0.5, 1.5, 1.5, 2.5, 2.5, 2.5, 3.5, 3.5, 3.5])
    queue = Queue(1e4 / 7, ServiceTimes.hyperexponential(latency_s), np.array([0.01, *[0.03] * 9]))
    assert queue.load == pytest.approx(0.357, abs=0.001)
    evaluation = queue.solve(4.0).evaluation
    assert evaluation.batch_size_mean == pytest.approx(10.0, rel=1e-8)
    assert evaluation.utilisation == pytest.approx(0.5, rel=1e-8)


def test_averages_that_cannot_be_exact_enough_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bins.smdp.GRIDS", 0)
    queue = variable("hyperexponential", 32, 0.9)
    with pytest.raises(NotConverged, match=r"averages are only exact to 0.01, not to 5e-09; the load is 0.9"):
        queue.solve(0.0)
    with pytest.raises(NotConverged, match="averages are only exact to"):
        queue.evaluate(queue.greedy())


# ---- the grid ----


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5_000), st.integers(1, 300), st.floats(0.03, 0.4))
def test_a_grid_interpolates_polynomials_exactly(states: int, full_batch: int, growth: float) -> None:
    grid = StateGrid(states, full_batch, growth)
    assert grid.states >= states
    assert (np.diff(grid.nodes) >= 1).all()
    assert (grid.nodes[[0, -1]] == [0, grid.states - 1]).all()
    s = np.arange(grid.states) / grid.states
    values = np.stack([np.polynomial.chebyshev.chebval(2 * s - 1, [0] * k + [1]) for k in range(DEGREE + 1)])
    assert grid.everywhere(values[:, grid.nodes]) == pytest.approx(values, abs=1e-11)
    rows = np.repeat(np.arange(DEGREE + 1), 7)
    some = np.random.default_rng(0).integers(0, grid.states, rows.size)
    assert grid.at(values[:, grid.nodes], rows, some) == pytest.approx(values[rows, some], abs=1e-11)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3_000), st.floats(0.03, 0.4), st.integers(0, 99))
def test_weights_put_onto_nodes_give_interpolated_functions_the_same_sum(states: int, growth: float, seed: int) -> None:
    grid, rng = StateGrid(states, 20, growth), np.random.default_rng(seed)
    values, weights = rng.normal(size=grid.nodes.size), rng.random((2, grid.states))
    assert grid.onto_nodes(weights) @ values == pytest.approx(weights @ grid.everywhere(values), abs=1e-9)


def test_far_panels_have_few_nodes() -> None:
    assert StateGrid(1 << 20, 100, 0.2).nodes.size < 700
    assert StateGrid(500).nodes.size == 500
