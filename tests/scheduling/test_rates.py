"""Arrival rates estimated with a bounded memory: they converge, forget old rates, and raise few false alarms."""

from __future__ import annotations

import math

import numpy as np
import pytest

from llmserve.scheduling.rates import JUMP_ARRIVALS, ArrivalRate, Arrivals

MEMORY = 128


def observe(rate: ArrivalRate, gaps_s: np.ndarray, start_s: float = 0.0) -> tuple[float, list[int]]:
    """Observe arrivals after these gaps; return the time of the last, and the indices of those that showed a jump."""
    times_s = start_s + np.cumsum(gaps_s)
    jumps = [index for index, now_s in enumerate(times_s.tolist()) if rate.observe(now_s)]
    return float(times_s[-1]), jumps


def poisson(per_s: float, count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).exponential(1.0 / per_s, count)


# ---- the rate of arrivals ----


def test_before_two_arrivals_no_rate_is_known() -> None:
    rate = ArrivalRate()
    assert rate.per_s(5.0) is None
    rate.observe(5.0)
    assert rate.per_s(6.0) is None
    rate.observe(7.0)
    assert rate.per_s(7.0) == pytest.approx(0.5)


def test_arrivals_at_one_moment_have_no_bounded_rate() -> None:
    rate = ArrivalRate()
    for _ in range(20):
        assert not rate.observe(3.0)
    assert rate.per_s(3.0) == math.inf
    assert rate.per_s(5.0) == pytest.approx(rate.per_s(4.0) / 2)  # type: ignore[operator]


def test_the_rate_of_even_arrivals_is_exact() -> None:
    rate = ArrivalRate(MEMORY)
    now_s, jumps = observe(rate, np.full(1_000, 0.25))
    assert rate.per_s(now_s) == pytest.approx(4.0, rel=1e-12)
    assert jumps == []


def test_the_rate_of_poisson_arrivals_is_within_the_error_of_the_memory() -> None:
    """The estimate is a mean of gaps with weights keep^i, whose effective number is (1 + keep) / (1 - keep) = 255."""
    estimates = []
    for seed in range(200):
        rate = ArrivalRate(MEMORY)
        now_s, _ = observe(rate, poisson(10.0, 1_500, seed))
        estimates.append(1.0 / (rate.per_s(now_s) or math.nan))
    gaps = (2 - 1 / MEMORY) * MEMORY
    # Three standard errors of the mean of 200 runs, and of their spread. False alarms shorten the memory of a few runs.
    assert np.mean(estimates) == pytest.approx(0.1, rel=3 / math.sqrt(200 * gaps))
    assert np.std(estimates) / 0.1 == pytest.approx(1 / math.sqrt(gaps), rel=0.3)


@pytest.mark.parametrize("factor", [10.0, 30.0, 0.05, 0.02])
def test_a_jump_up_or_down_is_seen_and_the_old_rate_forgotten_within_twenty_arrivals(factor: float) -> None:
    """A memory of 128 without forgetting would still be 7 times too low after a jump by 10, and 13 times after 30."""
    errors = []
    for seed in range(100):
        rate = ArrivalRate(MEMORY)
        now_s, _ = observe(rate, poisson(10.0, 400, seed))
        now_s, jumps = observe(rate, poisson(10.0 * factor, JUMP_ARRIVALS + 12, 1_000 + seed), now_s)
        assert jumps
        errors.append(abs(math.log((rate.per_s(now_s) or math.nan) / (10.0 * factor))))
    assert np.quantile(errors, 0.95) < math.log(2.5)


def test_a_doubled_rate_is_no_jump_but_is_followed() -> None:
    rate = ArrivalRate(MEMORY)
    now_s, _ = observe(rate, np.full(500, 0.2))
    now_s, jumps = observe(rate, np.full(MEMORY, 0.1), now_s)
    assert jumps == []
    keep = 1.0 - 1.0 / MEMORY
    fresh = (1.0 - keep**MEMORY) / (1.0 - keep ** (MEMORY + 499))  # share of the new gaps' weights
    assert 1.0 / (rate.per_s(now_s) or math.nan) == pytest.approx(0.2 - 0.1 * fresh, rel=1e-9)


def test_false_alarms_are_rare() -> None:
    """The bounds are exceeded once in some thousand arrivals; alarms come in pairs, as the way back is a jump again."""
    counts = [len(observe(ArrivalRate(), poisson(7.0, 20_000, seed))[1]) for seed in range(3)]
    assert max(counts) < 20


def test_the_arrivals_of_a_jump_show_no_second_jump() -> None:
    rate = ArrivalRate()
    now_s, _ = observe(rate, np.full(100, 1.0))
    gaps_s = np.concatenate([np.full(40, 0.01), np.full(40, 1.0)])
    _, jumps = observe(rate, gaps_s, now_s)
    assert len(jumps) >= 2
    assert min(np.diff(jumps)) > JUMP_ARRIVALS


def test_the_rate_falls_in_a_silence_that_is_longer_than_the_mean_gap() -> None:
    rate = ArrivalRate()
    now_s, _ = observe(rate, np.full(4, 0.5))  # three gaps
    keep = 1 - 1 / 128
    gaps = 1 + keep + keep**2
    assert rate.per_s(now_s + 0.5) == pytest.approx(2.0)
    for silence_s in (0.6, 5.0, 1_000.0):
        assert rate.per_s(now_s + silence_s) == pytest.approx((gaps + 1) / (0.5 * gaps + silence_s))


def test_the_time_at_which_a_silence_lowers_the_rate_below_a_limit_is_known() -> None:
    rate = ArrivalRate()
    now_s, _ = observe(rate, poisson(10.0, 300, seed=4))
    for below_per_s in (8.0, 1.0, 1e-3):
        at_s = rate.below_at_s(below_per_s)
        assert (rate.per_s(at_s) or math.nan) < below_per_s
        assert (rate.per_s(now_s + 0.99 * (at_s - now_s)) or math.nan) > below_per_s


# ---- shares ----


def test_shares_of_bins_sum_to_one_and_follow_the_last_arrivals() -> None:
    arrivals, rng = Arrivals(3, memory=64), np.random.default_rng(0)
    assert arrivals.shares == pytest.approx([1 / 3] * 3)
    for index, bin_index in enumerate(rng.choice(3, size=2_000, p=[0.7, 0.3, 0.0]).tolist()):
        arrivals.observe(bin_index, 0.1 * index)
        assert sum(arrivals.shares) == pytest.approx(1.0, abs=1e-12)
    assert arrivals.shares == pytest.approx([0.7, 0.3, 0.0], abs=0.15)
    assert arrivals.shares[2] < 1e-9
    assert arrivals.total.per_s(199.9) == pytest.approx(10.0)
