"""Service times of batches: arrivals meanwhile, moments, longest answers, draws."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bins.service import Array, ServiceTimes, longest_slices

MEAN_S = (0.3051 * np.arange(1, 33) + 1.0524) / 1e3  # the basic scenario of SMDP-J
SQUARED_COV = {"deterministic": 0.0, "erlang": 0.5, "exponential": 1.0, "hyperexponential": 2.0}
RATE_PER_S = 2_000.0
COUNT = 2_000  # more arrivals have no weight
LENGTHS = np.random.default_rng(0).lognormal(5.0, 0.8, 300)


def of_kind(kind: str, mean_s: Array = MEAN_S) -> ServiceTimes:
    construct: Callable[[Array], ServiceTimes] = getattr(ServiceTimes, kind)
    return construct(mean_s)


def of_lengths(parts: int = 32) -> ServiceTimes:
    return ServiceTimes.longest_of(LENGTHS, 1e-5 * (1 + 0.1 * np.arange(1, 33)), prefill_s=0.002, parts=parts)


EVERY_KIND = {**{kind: of_kind(kind) for kind in SQUARED_COV}, "longest of lengths": of_lengths()}


# ---- arrivals during a batch ----


@pytest.mark.parametrize("service", EVERY_KIND.values(), ids=EVERY_KIND)
def test_arrivals_sum_to_one_with_the_mean_and_variance_of_a_poisson_process(service: ServiceTimes) -> None:
    """E[K] = lambda E[G] and Var[K] = lambda E[G] + lambda^2 Var[G]."""
    p, k = service.arrivals(RATE_PER_S, COUNT), np.arange(COUNT)
    assert (p >= 0).all()
    assert p.sum(axis=1) == pytest.approx(np.ones(32), rel=1e-13)
    mean = RATE_PER_S * service.mean_s
    assert p @ k == pytest.approx(mean, rel=1e-9)
    variance_s2 = service.second_moment_s2 - service.mean_s**2
    assert p @ k**2 - (p @ k) ** 2 == pytest.approx(mean + RATE_PER_S**2 * variance_s2, rel=1e-7)


def geometric(k: Array, mean: Array) -> Array:
    return np.exp(k * np.log(mean / (1 + mean)) - np.log(1 + mean))


@pytest.mark.parametrize(
    ("kind", "law"),
    [
        ("deterministic", stats.poisson.pmf),
        ("erlang", lambda k, mean: stats.nbinom.pmf(k, 2, 2 / (2 + mean))),
        ("exponential", geometric),
        ("hyperexponential", lambda k, mean: 2 / 3 * geometric(k, mean / 2) + 1 / 3 * geometric(k, 2 * mean)),
    ],
)
def test_arrivals_have_their_laws(kind: str, law: Callable[[Array, Array], Array]) -> None:
    """Fixed times: Poisson; Erlang: negative binomial; exponential: geometric; hyperexponential: a mixture of those."""
    k = np.arange(200)
    expected = law(k, RATE_PER_S * MEAN_S[:, None])
    assert of_kind(kind).arrivals(RATE_PER_S, 200) == pytest.approx(expected, rel=1e-10, abs=1e-100)


def test_arrivals_of_a_long_batch_neither_overflow_nor_vanish() -> None:
    """A mean of 5,000, whose factorial is no float."""
    p = ServiceTimes.deterministic([5.0]).arrivals(1_000.0, 10_000)
    assert p[0, 5_000] == pytest.approx(stats.poisson.pmf(5_000, 5_000), rel=1e-9)
    assert p.sum() == pytest.approx(1.0, rel=1e-9)
    assert p[0, 0] == 0.0


@pytest.mark.parametrize("service", EVERY_KIND.values(), ids=EVERY_KIND)
@pytest.mark.parametrize("rate_per_s", [0.1, RATE_PER_S, 20 * RATE_PER_S])
def test_more_arrivals_than_the_bound_are_improbable_and_the_bound_is_not_far(
    service: ServiceTimes, rate_per_s: float
) -> None:
    bound = service.arrivals_max(rate_per_s, 1e-12)
    beyond = 1 - service.arrivals(rate_per_s, bound).sum(axis=1)
    assert beyond.max() < 1e-11
    assert service.arrivals(rate_per_s, 2 * bound // 3)[-1].sum() < 1 - 1e-12


@pytest.mark.parametrize("kind", SQUARED_COV)
@pytest.mark.parametrize("load", [0.5, 0.9, 0.98])
def test_the_decay_of_long_queues_solves_its_equation(kind: str, load: float) -> None:
    service = of_kind(kind)
    rate_per_s = load * 32 / float(service.mean_s[-1])
    eta = service.tail_decay(rate_per_s, 32)
    p = service.arrivals(rate_per_s, service.arrivals_max(rate_per_s, 1e-100) + 1)[-1]
    assert eta > 0
    assert p @ np.exp(eta * (np.arange(p.size) - 32)) == pytest.approx(1.0, rel=1e-6)


def test_the_decay_of_single_exponential_services_is_the_logarithm_of_the_load() -> None:
    assert ServiceTimes.exponential([1.0]).tail_decay(0.6, 1) == pytest.approx(-np.log(0.6))


def test_arrivals_can_be_as_few_as_one_state() -> None:
    assert of_kind("exponential").arrivals(RATE_PER_S, 1)[:, 0] == pytest.approx(1 / (1 + RATE_PER_S * MEAN_S))


# ---- moments ----


@pytest.mark.parametrize(("kind", "squared_cov"), SQUARED_COV.items())
def test_kinds_have_their_means_and_coefficients_of_variation(kind: str, squared_cov: float) -> None:
    """SMDP-J's CoV is the square of the usual coefficient."""
    service = of_kind(kind)
    assert service.mean_s == pytest.approx(MEAN_S, rel=1e-14)
    assert service.second_moment_s2 / MEAN_S**2 - 1 == pytest.approx(np.full(32, squared_cov), abs=1e-13)


@pytest.mark.parametrize("shape", [1, 3, 10])
def test_erlang_of_any_shape(shape: int) -> None:
    service = ServiceTimes.erlang(MEAN_S, batch_min=4, shape=shape)
    assert service.second_moment_s2 / service.mean_s**2 - 1 == pytest.approx(np.full(32, 1 / shape))
    assert service.sizes.tolist() == list(range(4, 36))


# ---- the longest of a batch ----


def test_the_longest_of_two_lengths_by_hand() -> None:
    """1 or 3, equally likely: the longest of b is 1 with probability 2^-b; steps of 0.1 b s."""
    service = ServiceTimes.longest_of([3.0, 1.0], [0.1, 0.2, 0.3], parts=8)
    assert service.parts_s[0] == pytest.approx([0.1] * 4 + [0.3] * 4)
    assert service.parts_s[1] == pytest.approx([0.2] * 2 + [0.6] * 6)
    assert service.parts_s[2] == pytest.approx([0.3] * 1 + [0.9] * 7)
    assert service.mean_s == pytest.approx([0.2, 0.5, 0.3 * (1 + 7 * 3) / 8])
    assert service.second_moment_s2[0] == pytest.approx((0.01 + 0.09) / 2)


def test_a_slice_that_spans_two_lengths_is_their_mean_by_share() -> None:
    """The longest of two is 1 with probability 1/4: half of the first of two slices, and no part of the second."""
    assert longest_slices([1.0, 3.0], [2], 2) == pytest.approx(np.array([[2.0, 3.0]]))


@pytest.mark.parametrize("parts", [1, 2, 32, 1_000])
def test_the_mean_of_the_longest_is_exact(parts: int) -> None:
    """prefill + step * sum over i of x_(i) ((i / n)^b - ((i - 1) / n)^b)."""
    ordered, n = np.sort(LENGTHS), LENGTHS.size
    i = np.arange(1, n + 1)
    service = of_lengths(parts)
    for size, mean_s in zip(service.sizes.tolist(), service.mean_s.tolist(), strict=True):
        longest = float(ordered @ ((i / n) ** size - ((i - 1) / n) ** size))
        assert mean_s == pytest.approx(0.002 + 1e-5 * (1 + 0.1 * size) * longest, rel=1e-12)


def test_more_parts_approach_the_second_moment_from_below() -> None:
    ordered, n, size = np.sort(LENGTHS), LENGTHS.size, 8
    i = np.arange(1, n + 1)
    exact = float(ordered**2 @ ((i / n) ** size - ((i - 1) / n) ** size))
    second_moments = [float(np.mean(longest_slices(LENGTHS, [size], parts) ** 2)) for parts in (1, 8, 32, 512)]
    assert second_moments == sorted(second_moments)
    assert second_moments[-1] <= exact * (1 + 1e-12)
    assert second_moments[2] == pytest.approx(exact, rel=0.01)
    assert second_moments[3] == pytest.approx(exact, rel=0.001)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.5, 1e4), min_size=1, max_size=60), st.integers(1, 64), st.integers(1, 40))
def test_longest_slices_ascend_within_the_sample_and_never_fall_with_the_size(
    lengths: list[float], size: int, parts: int
) -> None:
    slices = longest_slices(lengths, [size, size + 1], parts)
    tiny = 1e-6 * max(lengths)
    assert (np.diff(slices, axis=1) >= -tiny).all()
    assert (np.diff(slices, axis=0) >= -tiny).all()
    assert slices.min() >= min(lengths) - tiny
    assert slices.max() <= max(lengths) + tiny


# ---- draws ----


@pytest.mark.parametrize("service", EVERY_KIND.values(), ids=EVERY_KIND)
def test_draws_have_the_moments(service: ServiceTimes) -> None:
    """Both within a 99.9 % confidence interval; a fixed time is drawn exactly."""
    draws = service.draw(8, 100_000, np.random.default_rng(4))
    for power, expected in ((1, service.mean_s[7]), (2, service.second_moment_s2[7])):
        sample = draws**power
        half_width = stats.norm.ppf(0.9995) * sample.std() / np.sqrt(sample.size)
        assert sample.mean() == pytest.approx(expected, abs=half_width + 1e-12 * expected)


def test_drawing_does_not_change_the_service() -> None:
    service = of_kind("exponential")
    parts_s_before = service.parts_s.copy()
    service.draw(3, 100, np.random.default_rng(0))
    assert (service.parts_s == parts_s_before).all()


# ---- invalid values ----


@pytest.mark.parametrize(
    ("construct", "message"),
    [
        (lambda: ServiceTimes.deterministic([0.1, 0.0]), "positive and finite"),
        (lambda: ServiceTimes.exponential([0.1, np.inf]), "positive and finite"),
        (lambda: ServiceTimes.deterministic([0.1, np.nan]), "positive and finite"),
        (lambda: ServiceTimes.deterministic([]), "must be consecutive and start at 1"),
        (lambda: ServiceTimes.deterministic([0.1], batch_min=0), "must be consecutive and start at 1"),
        (lambda: ServiceTimes(np.array([1, 3]), np.ones((2, 1)), np.ones(1)), "must be consecutive"),
        (lambda: ServiceTimes(np.array([1, 2]), np.ones((2, 3)), np.ones(1)), r"must have shape \(2, 1\)"),
        (lambda: ServiceTimes.longest_of([], [0.1]), "there must be some"),
        (lambda: ServiceTimes.longest_of([5.0, 0.0], [0.1]), "lengths must be positive"),
        (lambda: ServiceTimes.longest_of([5.0, np.inf], [0.1]), "lengths must be positive"),
    ],
)
def test_an_invalid_service_is_an_error(construct: Callable[[], ServiceTimes], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        construct()
