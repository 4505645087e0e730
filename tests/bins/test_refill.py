"""When an idle refill engine should start: known results of queueing theory, and a simulated process."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import t as student

from bins.refill import RefillEngine
from bins.service import Array
from bins.smdp_model import Unstable

H100_S, H100_J = (0.0790e-3, 6.54e-3), (0.0665, 3.162)  # a step of n sequences: slope n + intercept


def h100(rate_per_s: float, slots: int = 16, tokens_mean: float = 211.0) -> RefillEngine:
    n = np.arange(1, slots + 1)
    return RefillEngine(rate_per_s, tokens_mean, H100_S[0] * n + H100_S[1], H100_J[0] * n + H100_J[1], 90.0)


def constant(rate_per_s: float, slots: int, service_s: float, power_w: float = 300.0) -> RefillEngine:
    """Every answer takes the same time whatever runs beside it: a step takes 1 s, always at the same power."""
    step_s = np.ones(slots)
    return RefillEngine(rate_per_s, service_s, step_s, power_w * step_s, 100.0)


# ---- known answers ----


@pytest.mark.parametrize("load", [0.1, 0.5, 0.9, 0.99])
def test_one_slot_is_an_m_m_1_queue(load: float) -> None:
    """W = 1 / (mu - lambda), and the engine is busy rho of the time."""
    response_s, power_w = constant(load / 2.0, 1, 2.0).thresholds()
    assert response_s == pytest.approx([1.0 / (0.5 - load / 2.0)])
    assert power_w == pytest.approx([100.0 + load * 200.0])


def test_many_independent_slots_are_an_m_m_infinity_queue() -> None:
    """W is the mean service time; some request is present 1 - exp(-lambda S) of the time."""
    response_s, power_w = constant(1.5, 64, 2.0).thresholds()
    assert response_s[0] == pytest.approx(2.0, rel=1e-12)
    assert power_w[0] == pytest.approx(100.0 + 200.0 * (1.0 - np.exp(-3.0)), rel=1e-12)


@pytest.mark.parametrize(("slots", "load"), [(2, 0.6), (4, 0.9), (10, 0.3)])
def test_some_independent_slots_are_an_m_m_c_queue(slots: int, load: float) -> None:
    """Erlang's C: W = S + C / (c mu - lambda)."""
    offered = load * slots  # at a mean service of 1 s
    terms = np.cumprod(np.concatenate([[1.0], offered / np.arange(1, slots + 1)]))
    waits = terms[-1] / (1 - load) / (terms[:-1].sum() + terms[-1] / (1 - load))
    response_s, _ = constant(offered, slots, 1.0).thresholds()
    assert response_s[0] == pytest.approx(1.0 + waits / (slots - offered), rel=1e-9)


def test_one_slot_with_a_threshold_is_an_m_m_1_queue_with_an_n_policy() -> None:
    """With a threshold of N, W = 1 / (mu - lambda) + (N - 1) / (2 lambda) (Yadin and Naor), here for
    engines of a constant speed, whatever the number of requests.
    """
    slots, rate_per_s, mean_s = 6, 0.3, 2.0
    n = np.arange(1, slots + 1)
    engine = RefillEngine(rate_per_s, mean_s, 1.0 * n, 300.0 * n, 100.0)  # as one server: mu(n) = 1 / mean_s
    response_s, power_w = engine.thresholds()
    assert response_s == pytest.approx(1.0 / (1.0 / mean_s - rate_per_s) + (n - 1) / (2 * rate_per_s))
    assert power_w == pytest.approx([100.0 + rate_per_s * mean_s * 200.0] * slots)


# ---- effects of thresholds ----


@pytest.mark.parametrize("rate_per_s", [0.2, 1.0, 4.0])
def test_a_larger_threshold_draws_less_power_and_takes_longer(rate_per_s: float) -> None:
    response_s, power_w = h100(rate_per_s).thresholds()
    assert response_s.shape == power_w.shape == (16,)
    assert (np.diff(power_w) < 0).all()
    assert (np.diff(response_s) > 0).all()
    assert (power_w > 90.0).all()


def test_the_best_threshold_costs_least_at_its_weight_and_grows_with_it() -> None:
    engine = h100(1.0)
    response_s, power_w = engine.thresholds()
    best_thresholds = []
    for weight in (0.0, 2.0, 10.0, 50.0, 1e6):
        threshold, own_s, own_w, met = engine.best(weight)
        assert (own_s, own_w, met) == (response_s[threshold - 1], power_w[threshold - 1], True)
        assert 1e3 * own_s + weight * own_w == pytest.approx((1e3 * response_s + weight * power_w).min())
        best_thresholds.append(threshold)
    assert best_thresholds == sorted(best_thresholds)
    assert (best_thresholds[0], best_thresholds[-1]) == (1, 16)
    assert len(set(best_thresholds)) > 3


def test_within_a_target_the_threshold_of_least_power_is_taken() -> None:
    engine = h100(1.0)
    response_s, _ = engine.thresholds()
    for threshold in (1, 5, 16):
        best_threshold, own_s, _, met = engine.best(0.0, float(response_s[threshold - 1]) * (1 + 1e-9))
        assert (best_threshold, met) == (threshold, True)
        assert own_s == response_s[threshold - 1]


def test_a_target_that_no_threshold_meets_gives_the_fastest_and_is_reported() -> None:
    engine = h100(1.0)
    assert engine.best(0.0, 0.5) == (1, engine.thresholds()[0][0], engine.thresholds()[1][0], False)


def test_more_arrivals_than_the_slots_serve_are_unstable() -> None:
    capacity_per_s = 16 / (211.0 * (16 * H100_S[0] + H100_S[1]))
    h100(0.999 * capacity_per_s).thresholds()
    with pytest.raises(Unstable, match="more than 16 slots can serve"):
        h100(1.001 * capacity_per_s).thresholds()


# ---- the simulated process ----


def simulated(engine: RefillEngine, threshold: int, arrivals: int, rng: np.random.Generator) -> tuple[float, float]:
    """Mean response time and mean power of the birth-death process, event by event. Lengths are exponential; the
    number of requests present, running or waiting, is integrated over time (Little).
    """
    rate, slots = engine.arrival_rate_per_s, engine.step_s.size
    present, running, arrived = 0, False, 0
    present_s, elapsed_s, energy_j = 0.0, 0.0, 0.0
    exponential = rng.exponential(size=3 * arrivals).tolist()
    coins = rng.random(3 * arrivals).tolist()
    while arrived < arrivals:
        n = min(present, slots) if running else 0
        ends_per_s = n / (engine.tokens_mean * engine.step_s[n - 1]) if n else 0.0
        power_w = engine.step_j[n - 1] / engine.step_s[n - 1] if n else engine.idle_power_w
        stays_s = exponential.pop() / (rate + ends_per_s)
        present_s, elapsed_s, energy_j = (
            present_s + present * stays_s,
            elapsed_s + stays_s,
            energy_j + power_w * stays_s,
        )
        if coins.pop() * (rate + ends_per_s) < rate:
            present, arrived = present + 1, arrived + 1
            running = running or present >= threshold
        else:
            present -= 1
            running = present > 0
    return present_s / arrived, energy_j / elapsed_s


@pytest.mark.parametrize(("rate_per_s", "threshold"), [(0.5, 1), (1.5, 4), (4.5, 3)])
def test_the_averages_are_those_of_the_simulated_process(rate_per_s: float, threshold: int) -> None:
    """Within the 99.9 % confidence interval of twelve runs; the slots serve 7.6 requests a second at most."""
    engine = h100(rate_per_s, slots=12)
    response_s, power_w = engine.thresholds()
    rng = np.random.default_rng(7)
    runs = np.array([simulated(engine, threshold, 6_000, rng) for _ in range(12)])
    half: Array = student.ppf(0.9995, 11) * runs.std(axis=0, ddof=1) / np.sqrt(12)
    exact = np.array([response_s[threshold - 1], power_w[threshold - 1]])
    assert (np.abs(runs.mean(axis=0) - exact) < half).all()
    assert (half < 0.03 * exact).all(), "the interval must be narrow"
