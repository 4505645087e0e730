"""When a bin's queue should wait or serve: published numbers, queueing theory, and proof that no policy is better."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import t as student

import bins.smdp_model
from bins.average_cost import (
    NotConverged,
    SemiMarkov,
    evaluate,
    policy_iteration,
    relative_value_iteration,
    stationary,
)
from bins.service import Array, ServiceTimes
from bins.smdp import Queue
from bins.smdp_model import Unstable

KINDS = ("deterministic", "erlang", "exponential", "hyperexponential")
SQUARED_COV = dict(zip(KINDS, (0.0, 0.5, 1.0, 2.0), strict=True))
# The basic scenario of SMDP-J, Section VII, with the coefficients behind its rounded ones.
SIZES = np.arange(1, 33)
LATENCY_S = (0.305058 * SIZES + 1.05244) * 1e-3
ENERGY_J = (19.899 * SIZES + 19.603) * 1e-3


def basic(load: float, kind: str = "deterministic", batch_max: int = 32, **options: float) -> Queue:
    latency_s = LATENCY_S[:batch_max]
    construct: Callable[[Array], ServiceTimes] = getattr(ServiceTimes, kind)
    return Queue(load * batch_max / latency_s[-1], construct(latency_s), ENERGY_J[:batch_max], **options)  # type: ignore[arg-type]


def singles(rate_per_s: float, service: ServiceTimes, **options: float) -> Queue:
    """Requests served singly, for 0.05 J each."""
    return Queue(rate_per_s, service, np.array([0.05]), **options)  # type: ignore[arg-type]


# ---- the published numbers ----


def test_averages_of_table_i() -> None:
    """rho = 0.7: watts and milliseconds of static batches of 8 and of the optimum at two weights."""
    queue = basic(0.7)
    for evaluation, power_w, response_ms in (
        (queue.evaluate(queue.static(8)), 46.27, 6.85),
        (queue.solve(1.6).evaluation, 44.96, 6.90),
        (queue.solve(2.2).evaluation, 44.41, 7.81),
    ):
        assert evaluation.power_w_mean == pytest.approx(power_w, rel=0.002)
        assert evaluation.response_s_mean * 1e3 == pytest.approx(response_ms, rel=0.002)


def test_percentiles_of_table_i() -> None:
    queue, rng = basic(0.7), np.random.default_rng(1)
    for policy, percentiles_ms in (
        (queue.static(8), [6.51, 9.85, 11.34]),
        (queue.solve(1.6).policy, [6.83, 9.23, 9.96]),
        (queue.solve(2.2).policy, [7.72, 10.45, 11.24]),
    ):
        drawn_s = queue.draw_responses(policy, 200_000, rng)
        assert np.percentile(drawn_s, [50, 90, 95]) * 1e3 == pytest.approx(percentiles_ms, rel=0.015)


def test_average_cost_of_table_ii() -> None:
    assert basic(0.9).solve(1.0).average_cost == pytest.approx(66.1374, rel=1e-4)


def test_average_cost_of_table_iii() -> None:
    """The table's 42.53 for two other algorithms is the cost of greedy."""
    queue = basic(0.5)
    assert queue.solve(1.0).average_cost == pytest.approx(38.86, abs=0.005)
    assert queue.evaluate(queue.greedy()).cost_ms(1.0) == pytest.approx(42.53, abs=0.005)


def overflow_cost_of(model: SemiMarkov, policy: NDArray[np.intp]) -> float:
    """Delta: the overflow state's part of the average cost (SMDP-J, eq. 22)."""
    cost, sojourn, transition = model.under(policy)
    weights = stationary(transition)
    return float(weights[-1] * cost[-1] / (weights @ sojourn))


@pytest.mark.parametrize(("overflow_cost", "states_max"), [(10_000.0, 89), (1_000.0, 78), (100.0, 70)])
def test_least_acceptable_truncations_of_table_ii(overflow_cost: float, states_max: int) -> None:
    """Delta < 1e-3 at the printed s_max and not at one less, with the printed g and about the printed iterations."""
    queue = basic(0.9)
    iterations = {89: 1847, 78: 1635, 70: 1483}[states_max]
    for states, acceptable in ((states_max, True), (states_max - 1, False)):
        model = queue.truncated(1.0, states_max=states, overflow_cost=overflow_cost)
        solution = relative_value_iteration(model, epsilon=0.01)
        assert (overflow_cost_of(model, solution.policy) < 1e-3) is acceptable
        assert evaluate(model, solution.policy) == pytest.approx(66.1374, rel=1e-4)
        assert solution.iterations == pytest.approx(iterations, rel=0.02)


@pytest.mark.parametrize(("overflow_cost", "states_max"), [(10.0, 150), (0.0, 177)])
def test_truncations_whose_overflow_is_cheap_need_more_states(overflow_cost: float, states_max: int) -> None:
    """With fewer states it is cheapest to overflow endlessly, at s_max / lambda + c_o < 66.137 ms. The 161 and 192 of
    the table are where its ten thousand iterations ended."""
    queue = basic(0.9)
    for states, acceptable in ((states_max, True), (states_max - 1, False)):
        model = queue.truncated(1.0, states_max=states, overflow_cost=overflow_cost)
        solution = policy_iteration(model, np.minimum(np.arange(states + 2), 32))
        assert (overflow_cost_of(model, solution.policy) < 1e-3) is acceptable
        assert solution.policy[-1] == (32 if acceptable else 0)
        forever_ms = 1e3 * states / queue.arrival_rate_per_s + overflow_cost
        assert (forever_ms > 66.137) == acceptable
    with pytest.raises(NotConverged, match="after 1000 iterations"):
        relative_value_iteration(model, epsilon=0.01, iterations_max=1_000)


def test_response_time_is_a_staircase_of_the_weight() -> None:
    """rho = 0.3: 4.88 ms, the step below a target of 5 ms, for all weights between 1.006 and 1.503."""
    queue = basic(0.3)

    def response_ms(energy_weight: float) -> float:
        return queue.solve(energy_weight).evaluation.response_s_mean * 1e3

    assert [response_ms(weight) for weight in (1.006, 1.01, 1.2, 1.4, 1.502)] == pytest.approx([4.88129] * 5, rel=1e-6)
    assert response_ms(1.005) == pytest.approx(4.06419, rel=1e-6)
    assert response_ms(1.504) == pytest.approx(5.72481, rel=1e-6)


def test_static_batches_of_8_are_unstable_from_their_capacity_on() -> None:
    """8 / l(8) requests a second: rho = 0.774."""
    capacity = 8 / LATENCY_S[7] / (32 / LATENCY_S[31])
    assert capacity == pytest.approx(0.774, abs=5e-5)
    stable = basic(0.773)
    assert stable.evaluate(stable.static(8)).utilisation == pytest.approx(0.773 / capacity, rel=1e-9)
    for load in (capacity * (1 + 1e-9), 0.7741, 0.9):
        queue = basic(load)
        with pytest.raises(Unstable, match="more than batches of 8 can serve"):
            queue.evaluate(queue.static(8))


def test_a_least_batch_above_1_breaks_the_control_limit() -> None:
    """SMDP-J, Appendix E, Case 4: B_min = 5 and B_max = 8, times that do not depend on the size, rho = 0.1. States
    beyond a full batch serve less than a full batch, so that the rest soon forms a batch of 5."""
    latency_s = np.full(8, 2.4252e-3)
    for batch_min, is_control_limit in ((1, True), (5, False)):
        service = ServiceTimes.deterministic(latency_s[batch_min - 1 :], batch_min)
        queue = Queue(0.1 * 8 / 2.4252e-3, service, ENERGY_J[batch_min - 1 : 8])
        for energy_weight in (0.0, 0.5, 1.0):
            policy = queue.solve(energy_weight).policy
            assert (policy[8:14] == 8).all() == is_control_limit
            assert (policy[5:9] == [5, 6, 7, 8]).all()


# ---- queueing theory ----


@pytest.mark.parametrize("load", [0.01, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("kind", KINDS)
def test_single_requests_wait_as_pollaczek_and_khinchine_say(kind: str, load: float) -> None:
    """W = l + lambda E[G^2] / (2 (1 - rho)): M/D/1, M/E2/1, M/M/1, M/H2/1."""
    mean_s = 0.02
    service: ServiceTimes = getattr(ServiceTimes, kind)([mean_s])
    queue = singles(load / mean_s, service)
    evaluation = queue.evaluate(queue.greedy())
    waiting_s = load * mean_s * (1 + SQUARED_COV[kind]) / (2 * (1 - load))
    assert evaluation.response_s_mean == pytest.approx(mean_s + waiting_s, rel=1e-8)
    assert evaluation.power_w_mean == pytest.approx(0.05 * load / mean_s, rel=1e-8)
    assert evaluation.utilisation == pytest.approx(load, rel=1e-8)
    assert evaluation.batch_size_mean == pytest.approx(1.0, rel=1e-8)


def test_a_lone_request_takes_its_own_time_and_energy() -> None:
    queue = basic(1e-6)
    evaluation = queue.evaluate(queue.greedy())
    assert evaluation.response_s_mean == pytest.approx(LATENCY_S[0], rel=1e-5)
    assert evaluation.power_w_mean == pytest.approx(queue.arrival_rate_per_s * ENERGY_J[0], rel=1e-5)


def test_unlimited_batches_of_constant_time_have_a_known_waiting_time() -> None:
    """Greedy batches of exponential times without a size limit: requests at an idle engine (probability p) take a time
    l; the others wait for the rest of the running batch, again l on average, and take another l."""
    mean_s, rate_per_s = 0.05, 40.0
    queue = Queue(rate_per_s, ServiceTimes.exponential(np.full(64, mean_s)), np.ones(64))
    evaluation = queue.evaluate(queue.greedy())
    assert evaluation.response_s_mean == pytest.approx(mean_s * (1 + evaluation.utilisation), rel=1e-6)


def test_idle_power_is_drawn_while_nothing_runs() -> None:
    for policy in (basic(0.5).greedy(), basic(0.5).static(8), basic(0.5).threshold(20)):
        without, with_idle = (basic(0.5, idle_power_w=idle_w).evaluate(policy) for idle_w in (0.0, 30.0))
        assert with_idle.power_w_mean == pytest.approx(without.power_w_mean + 30.0 * (1 - without.utilisation))
        assert with_idle.response_s_mean == without.response_s_mean


def test_idle_power_makes_waiting_less_worthwhile() -> None:
    """Waiting can only save a batch's cost above idle."""
    without, with_idle = (basic(0.3, idle_power_w=idle_w).solve(1.5) for idle_w in (0.0, 15.0))
    assert with_idle.evaluation.response_s_mean < 0.9 * without.evaluation.response_s_mean


@pytest.mark.parametrize("kind", KINDS)
def test_two_engines_free_the_queue_after_half_a_batch_and_answers_take_all_of_it(kind: str) -> None:
    """M/G/1 of half the time, plus the other half; the idle power of both engines."""
    mean_s, rate_per_s = 0.02, 70.0
    service: ServiceTimes = getattr(ServiceTimes, kind)([mean_s])
    queue = singles(rate_per_s, service, engines=2, idle_power_w=3.0)
    evaluation = queue.evaluate(queue.greedy())
    load = rate_per_s * mean_s / 2
    waiting_s = load * mean_s / 2 * (1 + SQUARED_COV[kind]) / (2 * (1 - load))
    assert queue.load == pytest.approx(load)
    assert evaluation.response_s_mean == pytest.approx(mean_s + waiting_s, rel=1e-8)
    assert evaluation.utilisation == pytest.approx(load, rel=1e-8)
    assert evaluation.power_w_mean == pytest.approx(0.05 * rate_per_s + 2 * 3.0 * (1 - load), rel=1e-8)


def test_an_engine_that_is_half_busy_elsewhere_is_free_again_after_twice_the_time() -> None:
    mean_s, rate_per_s = 0.02, 20.0
    queue = singles(rate_per_s, ServiceTimes.deterministic([mean_s]), busy_elsewhere=0.5)
    load = rate_per_s * 2 * mean_s
    waiting_s = load * 2 * mean_s / (2 * (1 - load))
    assert queue.load == pytest.approx(load)
    assert queue.evaluate(queue.greedy()).response_s_mean == pytest.approx(mean_s + waiting_s, rel=1e-8)


def test_more_engines_lower_the_response_time_down_to_that_of_a_lone_batch() -> None:
    responses_s = []
    for engines in (1, 2, 4, 1_000):
        queue = basic(0.8, "exponential", engines=engines)
        responses_s.append(queue.evaluate(queue.greedy()).response_s_mean)
    assert responses_s == sorted(responses_s, reverse=True)
    assert responses_s[-1] == pytest.approx(LATENCY_S[0], rel=0.02)


def test_the_response_weight_is_the_share_of_this_queue_in_the_cost() -> None:
    """Half the share of all responses equals a double energy weight."""
    whole, half = basic(0.5).solve(2.0), basic(0.5, response_weight=0.5).solve(1.0)
    assert half.policy.tolist() == whole.policy.tolist()
    assert half.average_cost == pytest.approx(whole.average_cost / 2, rel=1e-12)


# ---- no policy is better ----


@pytest.mark.parametrize("load", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("kind", ["deterministic", "exponential", "hyperexponential"])
def test_no_greedy_static_or_threshold_policy_is_better(kind: str, load: float) -> None:
    queue = basic(load, kind)
    rivals = [queue.greedy(), *(queue.threshold(least) for least in range(2, 33))]
    capacity = SIZES / LATENCY_S / (32 / LATENCY_S[-1])  # as a load, by size
    rivals += [queue.static(size) for size in (8, 16, 32) if load < capacity[size - 1]]
    evaluations = [queue.evaluate(rival) for rival in rivals]
    for energy_weight in (0.0, 0.3, 1.0, 3.0, 15.0):
        solution = queue.solve(energy_weight)
        least = min(evaluation.cost_ms(energy_weight) for evaluation in evaluations)
        assert solution.average_cost <= least * (1 + 1e-9)
        evaluated = queue.evaluate(solution.policy)
        assert evaluated.cost_ms(energy_weight) == pytest.approx(solution.average_cost, rel=1e-8)
        assert solution.evaluation.cost_ms(energy_weight) == pytest.approx(solution.average_cost, rel=1e-12)


@pytest.mark.parametrize(("kind", "least_loss"), [("exponential", 0.08), ("hyperexponential", 0.14)])
def test_variable_times_make_batches_of_all_waiting_requests_a_bad_rule(kind: str, least_loss: float) -> None:
    """rho = 0.7, response time alone: smaller batches beat the best threshold by this much."""
    queue = basic(0.7, kind)
    best = min(queue.evaluate(queue.threshold(threshold)).cost_ms(0.0) for threshold in range(1, 17))
    assert best > (1 + least_loss) * queue.solve(0.0).average_cost


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("load", [0.2, 0.5])
def test_the_solution_is_that_of_value_iteration_on_a_long_truncated_model(kind: str, load: float) -> None:
    queue = basic(load, kind, batch_max=8, idle_power_w=5.0)
    exact = queue.solve(1.0)
    model = queue.truncated(1.0, states_max=200, overflow_cost=100.0)
    solution = relative_value_iteration(model, epsilon=1e-6, iterations_max=100_000)
    assert evaluate(model, solution.policy) == pytest.approx(exact.average_cost, rel=1e-6)
    visited = np.flatnonzero(stationary(model.under(solution.policy)[2])[:200] > 1e-7)
    assert visited.size > 8
    expected = exact.policy[np.minimum(visited, exact.policy.size - 1)]  # actions 0, 1, ..., 8 are their own indices
    assert solution.policy[visited].tolist() == expected.tolist()


def free_states(queue: Queue, policy: NDArray[np.intp]) -> int:
    """Number of states with a free choice: up to half of those beyond a full batch."""
    largest = int(queue.service.sizes[-1])
    return int(policy.size - max(1, (policy.size - largest) // 2))


@st.composite
def queues(draw: st.DrawFn) -> tuple[Queue, float]:
    """Any increasing times and energies, batches of B_min to B_max, any rate up to 0.8 of capacity, any weight."""
    batch_min = draw(st.integers(1, 6))
    sizes = draw(st.integers(1, 10))
    rises = st.lists(st.floats(0.0, 2.0), min_size=sizes, max_size=sizes)
    latency_s = 1e-3 * (draw(st.floats(0.1, 5.0)) + np.cumsum(draw(rises)))
    energy_j = 1e-2 * (draw(st.floats(0.1, 5.0)) + np.cumsum(draw(rises)))
    kind = draw(st.sampled_from(KINDS))
    construct: Callable[..., ServiceTimes] = getattr(ServiceTimes, kind)
    rate_per_s = draw(st.floats(0.02, 0.8)) * (batch_min + sizes - 1) / latency_s[-1]
    return Queue(rate_per_s, construct(latency_s, batch_min), energy_j), draw(st.floats(0.0, 20.0))


@settings(max_examples=60, deadline=None)
@given(queues())
def test_no_action_improves_in_any_state_with_a_free_choice(drawn: tuple[Queue, float]) -> None:
    queue, energy_weight = drawn
    solution = queue.solve(energy_weight)
    states = min(free_states(queue, solution.policy), solution.values.shape[1])
    index = np.where(solution.policy > 0, solution.policy - queue.service.sizes[0] + 1, 0)[:states]
    chosen = solution.values[index, np.arange(states)]
    scale = np.abs(chosen).max() + 1e-9
    assert (solution.values[:, :states].min(axis=0) >= chosen - 1e-8 * scale).all()


@settings(max_examples=60, deadline=None)
@given(queues(), st.data())
def test_a_different_action_in_one_state_never_lowers_the_average_cost(
    drawn: tuple[Queue, float], data: st.DataObject
) -> None:
    queue, energy_weight = drawn
    solution = queue.solve(energy_weight)
    sizes = queue.service.sizes
    state = data.draw(st.integers(0, free_states(queue, solution.policy) - 1))
    feasible = [0, *(size for size in sizes.tolist() if size <= state)]
    changed = solution.policy.copy()
    changed[state] = data.draw(st.sampled_from(feasible))
    assert queue.evaluate(changed).cost_ms(energy_weight) >= solution.average_cost * (1 - 1e-8)


@settings(max_examples=30, deadline=None)
@given(queues())
def test_the_first_policy_does_not_matter(drawn: tuple[Queue, float]) -> None:
    queue, energy_weight = drawn
    largest = int(queue.service.sizes[-1])
    from_greedy, from_static = queue.solve(energy_weight), queue.solve(energy_weight, start=queue.static(largest))
    assert from_static.average_cost == pytest.approx(from_greedy.average_cost, rel=1e-8)


def test_a_long_wait_is_found_in_few_iterations() -> None:
    """Of times that grow with the logarithm of the size, it is best to serve one or two requests, or from about half a
    batch on to wait for a full batch."""
    sizes = np.arange(1, 257)
    latency_s = 1e-3 * (1.08 + 4.33 * np.log(sizes) / np.log(256))
    queue = Queue(0.9 * 256 / latency_s[-1], ServiceTimes.erlang(latency_s), np.ones(256))
    solution = queue.solve(0.0)
    assert solution.policy[100] == 1
    assert not solution.policy[150:256].any()
    assert solution.average_cost == pytest.approx(19.2597688, rel=1e-8)
    assert solution.iterations <= 30


def test_where_the_largest_batch_is_not_the_fastest_smaller_ones_carry_the_load() -> None:
    """Batches of 3 serve 2.5 requests a ms, batches of 4 only 0.67: 1 a ms is more than batches of 4 can serve."""
    service = ServiceTimes.deterministic(np.array([1.0, 1.1, 1.2, 6.0]) / 1e3)
    queue = Queue(1_000.0, service, np.ones(4))
    assert queue.load == pytest.approx(0.4)
    solution = queue.solve(0.0)
    assert set(solution.policy.tolist()) <= {0, 1, 2, 3}
    assert solution.average_cost <= 1e3 * queue.evaluate(queue.threshold(3)[:4]).response_s_mean
    with pytest.raises(Unstable):
        queue.evaluate(queue.static(4))


# ---- size-independent exponential times: the control limit in closed form ----


def control_limit(queue: Queue, energy_weight: float, fixed_j: float) -> tuple[int, float]:
    """Q of SMDP-J, Proposition 4 (eq. 32), and the relative distance from 0 of the D_q that decided it."""
    largest = queue.service.sizes.size
    chi = float(queue.arrival_rate_per_s * queue.service.mean_s[0])
    # (1 - psi) xi^(B + 1) - xi + psi = 0 divided by its root at 1.
    xi = brentq(lambda x: np.polyval(np.ones(largest + 1), x) / (1 + chi) - 1, 0.0, 1.0, xtol=1e-16, rtol=1e-15)
    r = xi / (1 - xi)
    q = np.arange(1, largest + 1)
    energy = energy_weight * fixed_j * queue.arrival_rate_per_s**2 / 1e3  # w2 / w1 in seconds of response time
    terms = np.stack([q * ((q + 1) / 2 + chi - r), -(r**2) * xi**q, r * (r - chi) + 0 * q, -energy + 0 * q])
    d = terms.sum(axis=0)
    nearness = float(np.min(np.abs(d) / np.abs(terms).max(axis=0)))
    return int(q[d >= 0][0]) if (d >= 0).any() else largest, nearness


def test_the_control_limit_is_that_of_proposition_4() -> None:
    """200 random cases without exception. Where some D_q is 0 up to rounding, either limit is right, and a new case is
    drawn."""
    rng = np.random.default_rng(8)
    limits, undecided = [], 0
    while len(limits) < 200:
        largest, mean_s = int(rng.integers(1, 25)), 10 ** rng.uniform(-4, 0)
        fixed_j, per_request_j = rng.uniform(0, 1, 2)
        rate_per_s = rng.uniform(0.05, 0.9) * largest / mean_s
        energy_j = per_request_j * np.arange(1, largest + 1) + fixed_j
        queue = Queue(rate_per_s, ServiceTimes.exponential(np.full(largest, mean_s)), energy_j)
        worth_j = 1e3 * (largest / rate_per_s) ** 2 / fixed_j  # with this weight the energy term is B^2
        energy_weight = worth_j * 10 ** rng.uniform(-3, 0.3)
        expected, nearness = control_limit(queue, energy_weight, fixed_j)
        if nearness < 1e-7:
            undecided += 1
            continue
        policy = queue.solve(energy_weight).policy
        full = np.minimum(np.arange(policy.size), largest)
        assert policy.tolist() == np.where(np.arange(policy.size) < expected, 0, full).tolist()
        limits.append(expected)
    assert undecided <= 2
    assert len(set(limits)) > 10


# ---- mixtures of two policies ----


def test_a_mixture_is_between_its_policies_and_equals_them_at_its_ends() -> None:
    queue = basic(0.3)
    fast, slow = queue.solve(1.2), queue.solve(1.6)
    assert queue.evaluate(fast.policy, slow.policy, 0.0) == queue.evaluate(fast.policy)
    at_one = queue.evaluate(fast.policy, slow.policy, 1.0)
    assert at_one.response_s_mean == pytest.approx(slow.evaluation.response_s_mean, rel=1e-9)
    assert at_one.power_w_mean == pytest.approx(slow.evaluation.power_w_mean, rel=1e-9)
    mixed = [queue.evaluate(fast.policy, slow.policy, share) for share in np.linspace(0, 1, 6)]
    responses_s, powers_w = (
        [evaluation.response_s_mean for evaluation in mixed],
        [evaluation.power_w_mean for evaluation in mixed],
    )
    assert (np.diff(responses_s) > 0).all()
    assert (np.diff(powers_w) < 0).all()


def test_a_mixture_equals_the_mean_of_its_draws() -> None:
    queue = basic(0.3)
    fast, slow = queue.solve(1.2).policy, queue.solve(1.6).policy
    drawn_s = queue.draw_responses(fast, 200_000, np.random.default_rng(2), other=slow, share=0.4)
    assert within_batch_means(drawn_s, queue.evaluate(fast, slow, 0.4).response_s_mean)


def test_at_a_breakpoint_both_steps_and_all_their_mixtures_cost_the_same() -> None:
    queue = basic(0.3)
    fast, slow = queue.solve(1.2), queue.solve(1.6)
    saved_w = fast.evaluation.power_w_mean - slow.evaluation.power_w_mean
    breakpoint = 1e3 * (slow.evaluation.response_s_mean - fast.evaluation.response_s_mean) / saved_w
    assert breakpoint == pytest.approx(1.503, abs=1e-3)
    least_cost = queue.solve(breakpoint).average_cost
    for share in (0.0, 0.3, 0.7, 1.0):
        mixed = queue.evaluate(fast.policy, slow.policy, share)
        assert mixed.cost_ms(breakpoint) == pytest.approx(least_cost, rel=1e-8)


# ---- draws ----


def within_batch_means(drawn: Array, expected: float, batches: int = 40) -> bool:
    """Whether a mean lies in the 99.9 % confidence interval of a stationary series, by the method of batch means.

    The interval must be narrow: at most a tenth of the mean to each side.
    """
    means = drawn[: drawn.size // batches * batches].reshape(batches, -1).mean(axis=1)
    half_width = student.ppf(0.9995, batches - 1) * means.std(ddof=1) / np.sqrt(batches)
    assert half_width < 0.1 * expected
    return bool(abs(means.mean() - expected) <= half_width)


@pytest.mark.parametrize("kind", KINDS)
def test_draws_have_the_exact_mean(kind: str) -> None:
    queue = basic(0.3, kind)
    for policy in (queue.solve(1.0).policy, queue.threshold(12)):
        drawn_s = queue.draw_responses(policy, 300_000, np.random.default_rng(3))
        assert within_batch_means(drawn_s, queue.evaluate(policy).response_s_mean)


def test_draws_of_the_longest_answer_and_of_two_engines_have_the_exact_mean() -> None:
    lengths = np.random.default_rng(0).lognormal(5.0, 0.8, 500)
    service = ServiceTimes.longest_of(lengths, 0.006 + 0.0001 * np.arange(1, 17), batch_min=2)
    queue = Queue(0.6 * 2 * 17 / service.mean_s[-1], service, service.mean_s * 300.0, engines=2, idle_power_w=90.0)
    policy = queue.solve(5.0).policy
    drawn_s = queue.draw_responses(policy, 200_000, np.random.default_rng(5))
    assert within_batch_means(drawn_s, queue.evaluate(policy).response_s_mean)


def test_every_request_of_a_draw_is_answered_even_in_a_last_incomplete_batch() -> None:
    queue = basic(0.5)
    for count in (1, 3, 8, 33, 1_001):
        for policy in (queue.static(8), np.array([0] * 40 + [32])):
            drawn_s = queue.draw_responses(policy, count, np.random.default_rng(count))
            assert drawn_s.shape == (count,)
            assert (drawn_s >= LATENCY_S[0] - 1e-12).all()


def test_the_same_seed_draws_the_same() -> None:
    queue = basic(0.5, "erlang")
    first, second = (queue.draw_responses(queue.greedy(), 500, np.random.default_rng(7)) for _ in range(2))
    assert (first == second).all()


# ---- invalid values ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arrival_rate_per_s": 0.0}, "arrival rate must be positive and finite"),
        ({"arrival_rate_per_s": np.nan}, "arrival rate must be positive and finite"),
        ({"arrival_rate_per_s": np.inf}, "arrival rate must be positive and finite"),
        ({"energy_j": np.ones(31)}, "batch sizes differ"),
        ({"engines": 0}, "at least one engine"),
        ({"busy_elsewhere": 1.0}, "must be left for this queue"),
        ({"busy_elsewhere": -0.1}, "must be left for this queue"),
    ],
)
def test_an_invalid_queue_is_an_error(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(basic(0.5), **change)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ([], "one action for each state"),
        ([[0, 1]], "one action for each state"),
        ([0, 2, 2], "at most as many as wait"),
        ([0, -1, 2], "0 or from 1 to 32"),
        ([*range(33), 33], "0 or from 1 to 32"),
        ([0, 1, 0], "must end in serving"),
    ],
)
def test_an_invalid_policy_is_an_error(policy: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        basic(0.5).evaluate(policy)


def test_a_batch_below_the_least_is_an_error() -> None:
    queue = Queue(10.0, ServiceTimes.deterministic([0.1, 0.1], batch_min=3), np.ones(2))
    assert queue.greedy().tolist() == [0, 0, 0, 3, 4]
    with pytest.raises(ValueError, match="0 or from 3 to 4"):
        queue.evaluate([0, 1, 2, 3, 4])


def test_an_unsolvable_queue_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = basic(0.5)
    for energy_weight in (-1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="energy weight must be finite and not negative"):
            queue.solve(energy_weight)
    with pytest.raises(ValueError, match="a mixture in serving the same batch"):
        queue.evaluate(queue.greedy(), queue.static(8), 0.5)
    for load in (1.0, 1.5):
        with pytest.raises(Unstable, match="more than batches of 32 can serve"):
            basic(load).solve(1.0)
    monkeypatch.setattr(bins.smdp_model, "ITERATIONS_MAX", 1)
    with pytest.raises(NotConverged, match="after 1 iterations") as raised:
        queue.solve(1.0)
    assert raised.value.last.policy[-1] == 32


def test_the_papers_model_is_of_one_engine_and_at_least_a_full_batch() -> None:
    with pytest.raises(ValueError, match="at least the largest batch, 32, not 31"):
        basic(0.5).truncated(1.0, states_max=31, overflow_cost=100.0)
    with pytest.raises(ValueError, match="one engine that serves one queue"):
        basic(0.5, engines=2).truncated(1.0, states_max=70, overflow_cost=100.0)
