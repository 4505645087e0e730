"""Several models' streams: what a trace tells, what is drawn within its windows, and what theory says of bursts."""

import gzip
import math
from pathlib import Path

import numpy as np
import pytest
from dispersion import index_of_dispersion
from hypothesis import given
from hypothesis import strategies as st
from papers.shepherd.streams import (
    Arrivals,
    Streams,
    Traffic,
    draw_requests,
    read_traffic,
)

from llmserve.errors import ConfigError
from llmserve.request import Request
from llmserve.simulation.workload import Bursts

BURSTS = Bursts.of(1.0, ratio=10.0, high_s=0.5, low_s=4.5)


def alone(rate_per_s: float, duration_s: float) -> tuple[Traffic, Streams]:
    """One stream of one model."""
    return Traffic.constant(["a"], rate_per_s, duration_s), Streams.round_robin(["a"], ["m"], 0.25)


def many(count: int, requests: list[float]) -> tuple[Traffic, Streams]:
    """Streams of three models, all of as many requests in these minutes."""
    names = tuple(f"s{index}" for index in range(count))
    return Traffic(names, np.tile(requests, (count, 1))), Streams.round_robin(names, "ABC", 0.25)


# ---- traces ----

SAMPLE = "fn_idx,fn_hash8,app_hash8,total,m1,m2,m3\n0,f0,a0,6,1,2,3\n1,f1,a1,4,0,4,0\n"
ORIGINAL = "HashOwner,HashApp,HashFunction,Trigger,1,2,3\no,a,f0,http,1,2,3\no,a,f1,timer,0,4,0\n"


@pytest.mark.parametrize("text", [SAMPLE, ORIGINAL], ids=["sample", "original"])
@pytest.mark.parametrize("compressed", [False, True])
def test_calls_in_each_minute_are_read_by_function(tmp_path: Path, text: str, compressed: bool) -> None:
    path = tmp_path / ("trace.csv.gz" if compressed else "trace.csv")
    path.write_bytes(gzip.compress(text.encode()) if compressed else text.encode())
    traffic = read_traffic(str(path))
    assert traffic.streams == ("f0", "f1")
    assert traffic.expected.tolist() == [[1, 2, 3], [0, 4, 0]]
    assert traffic.duration_s == 180
    assert traffic.rate_per_s == pytest.approx(10 / 180)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "row 0: there is no column fn_hash8 or HashFunction"),
        ("function,m1\nf,1\n", "row 1: there is no column fn_hash8 or HashFunction"),
        ("fn_hash8,total\nf,1\n", "row 1: there are no columns m1, m2, ..."),
        ("fn_hash8,m1,m3\nf,1,2\n", "row 1: the columns m1, m2, ... must stand side by side"),
        ("fn_hash8,m2,m3\nf,1,2\n", "row 1: the columns m1, m2, ... must stand side by side"),
        ("m1,fn_hash8,m2\n1,f,2\n", "row 1: the columns m1, m2, ... must stand side by side"),
        ("fn_hash8,m1,m2\n", "has no rows"),
        ("fn_hash8,m1,m2\nf,1,2\ng,1\n", "row 3: 1 minutes, where the header names 2"),
        ("fn_hash8,m1,m2\nf,1,many\n", "row 2: could not convert string to float: 'many'"),
        ("fn_hash8,m1,m2\nf,1,\n", "row 2: could not convert string to float: ''"),
        ("fn_hash8,m1,m2\nf,1,-2\n", "row 2: calls in a minute must be finite and at least 0"),
        ("fn_hash8,m1,m2\nf,1,nan\n", "row 2: calls in a minute must be finite and at least 0"),
    ],
)
def test_a_trace_that_cannot_be_used_is_an_error_naming_it_and_the_row(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_traffic(str(path))
    assert str(path) in str(error.value)
    assert message in str(error.value)


def test_a_trace_that_is_missing_or_broken_is_an_error_naming_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no trace 'nowhere\.csv'"):
        read_traffic("nowhere.csv")
    path = tmp_path / "cut.csv.gz"
    path.write_bytes(gzip.compress(SAMPLE.encode() * 1_000)[:-20])
    with pytest.raises(ConfigError, match=r"cut\.csv\.gz"):
        read_traffic(str(path))


def test_minutes_are_picked_and_scaled_to_a_rate_keeping_their_shares() -> None:
    traffic = Traffic(("a", "b"), np.array([[9.0, 1.0, 2.0], [9.0, 3.0, 4.0]]))
    part = traffic.part(1, 2).at_rate(1.0)
    assert part.expected == pytest.approx(np.array([[12.0, 24.0], [36.0, 48.0]]))
    assert part.rate_per_s == pytest.approx(1.0)
    assert part.streams == traffic.streams


@pytest.mark.parametrize(("first", "windows"), [(-1, 1), (0, 0), (0, 4), (3, 1)])
def test_minutes_that_are_not_there_cannot_be_picked(first: int, windows: int) -> None:
    with pytest.raises(ConfigError, match="there are 3"):
        Traffic(("a",), np.ones((1, 3))).part(first, windows)


def test_what_has_no_rate_or_is_to_have_none_cannot_be_scaled() -> None:
    with pytest.raises(ConfigError, match="without a request"):
        Traffic(("a",), np.zeros((1, 3))).at_rate(1.0)
    for rate_per_s in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="must be positive and finite"):
            Traffic(("a",), np.ones((1, 3))).at_rate(rate_per_s)


@pytest.mark.parametrize(
    ("names", "rates_per_s", "duration_s"),
    [([], 1.0, 1.0), (["a"], -1.0, 1.0), (["a"], math.inf, 1.0), (["a"], 1.0, 0.0), (["a"], 1.0, math.inf)],
)
def test_constant_traffic_needs_streams_rates_and_a_duration(
    names: list[str], rates_per_s: float, duration_s: float
) -> None:
    with pytest.raises(ConfigError, match="constant traffic"):
        Traffic.constant(names, rates_per_s, duration_s)


# ---- streams ----


def test_streams_ask_the_models_in_turn() -> None:
    found = Streams.round_robin("abcde", ["x", "y"], 0.25)
    assert found.model_of.tolist() == [0, 1, 0, 1, 0]
    assert found.slo_s.tolist() == [0.25] * 5


@pytest.mark.parametrize(
    ("names", "models", "model_of", "slo_s", "message"),
    [
        ("", "x", [], 1.0, "there must be streams"),
        ("ab", "", [0, 0], 1.0, "there must be streams"),
        ("ab", "x", [0], 1.0, "one model for each stream"),
        ("ab", "x", [0, 1], 1.0, "must be one of the 1"),
        ("ab", "x", [0, -1], 1.0, "must be one of the 1"),
        ("ab", "x", [0, 0], 0.0, "slo_s must be above 0"),
        ("ab", "x", [0, 0], [1.0, math.nan], "slo_s must be above 0"),
        ("ab", "x", [0, 0], [1.0, 1.0, 1.0], "one for each stream"),
    ],
)
def test_streams_that_make_no_sense_are_an_error(
    names: str, models: str, model_of: list[int], slo_s: float, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Streams.of(names, models, model_of, slo_s)


# ---- arrivals ----


def test_requests_come_in_order_with_deadline_model_and_stream() -> None:
    two = Streams.of(["s", "t"], ["x", "y"], [1, 0], [0.5, math.inf])
    arrivals = Arrivals.of(two, [3.0, 1.0, 2.0, 1.0], [0, 0, 1, 1])
    assert len(arrivals) == 4
    assert arrivals.times_s.tolist() == [1.0, 1.0, 2.0, 3.0]
    assert arrivals.stream.tolist() == [0, 1, 1, 0]  # of one instant as they were given
    assert arrivals.model.tolist() == [1, 0, 0, 1]
    assert arrivals.deadlines_s.tolist() == [1.5, math.inf, math.inf, 3.5]
    assert list(arrivals.requests()) == [
        (1.0, Request(0, predicted_tokens=1.0, deadline_s=1.5, model="y", stream="s")),
        (1.0, Request(1, predicted_tokens=1.0, model="x", stream="t")),
        (2.0, Request(2, predicted_tokens=1.0, model="x", stream="t")),
        (3.0, Request(3, predicted_tokens=1.0, deadline_s=3.5, model="y", stream="s")),
    ]


@pytest.mark.parametrize("bursts", [None, BURSTS], ids=["poisson", "bursts"])
def test_each_stream_has_in_each_minute_as_many_as_were_asked_for(bursts: Bursts | None) -> None:
    """Poisson counts: within five standard deviations in each cell, and none where there are to be none."""
    expected = np.array([[4_000.0, 0.0, 100.0], [0.0, 900.0, 2_500.0], [50.0, 50.0, 0.0]])
    names = ("a", "b", "c")
    arrivals = draw_requests(
        Traffic(names, expected),
        Streams.round_robin(names, ["x", "y"], [0.1, 0.2, 0.3]),
        np.random.default_rng(4),
        bursts=bursts,
    )
    minute = (arrivals.times_s // 60).astype(int)
    counts = np.zeros((3, 3))
    np.add.at(counts, (arrivals.stream, minute), 1)
    assert (np.abs(counts - expected) <= 5 * np.sqrt(expected)).all()
    assert (np.diff(arrivals.times_s) >= 0).all()
    slo_s = np.array([0.1, 0.2, 0.3])[arrivals.stream]
    assert arrivals.deadlines_s == pytest.approx(arrivals.times_s + slo_s, abs=1e-12)


@given(st.integers(0, 2**32), st.floats(1.0, 1e6), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_bursts_of_any_kind_leave_each_request_in_its_window(
    seed: int, ratio: float, high_s: float, low_s: float
) -> None:
    """Alternate windows are empty: what left its own would be found there."""
    traffic = Traffic(("a",), np.array([[30.0, 0.0, 30.0, 0.0, 30.0]]), window_s=2.0)
    bursts = Bursts.of(1.0, ratio, high_s, low_s)
    arrivals = draw_requests(
        traffic, Streams.round_robin(["a"], ["m"], 1.0), np.random.default_rng(seed), bursts=bursts
    )
    assert len(arrivals) > 0
    assert (arrivals.times_s % 4.0 <= 2.0 + 1e-9).all()
    assert arrivals.times_s[0] >= 0
    assert arrivals.times_s[-1] <= 10.0


def test_arrivals_without_bursts_are_poisson() -> None:
    """Gaps of mean and standard deviation 1 / rate; the variance of counts is their mean."""
    arrivals = draw_requests(*alone(200.0, 300.0), np.random.default_rng(1))
    gaps_s = np.diff(arrivals.times_s)
    assert gaps_s.mean() == pytest.approx(1 / 200, rel=0.02)
    assert gaps_s.std() == pytest.approx(1 / 200, rel=0.02)
    assert index_of_dispersion(arrivals.times_s, 0.1, 300.0) == pytest.approx(1.0, abs=5 * math.sqrt(2 / 3_000))


def test_bursts_have_the_dispersion_of_a_markov_modulated_poisson_process() -> None:
    """1 + 2 v / (m r) (1 - (1 - exp(-r t)) / (r t)), with r the sum of the states' rates of leaving, m and v the mean
    and the variance of the rate. Source: Fischer and Meier-Hellstern (1993), The MMPP cookbook.

    In the longest windows are 10,000 independent counts, nearly: their variance is known to sqrt(2 / 10,000).
    """
    rate_per_s, duration_s = 100.0, 20_000.0
    bursts = Bursts.of(rate_per_s, ratio=10.0, high_s=0.5, low_s=1.5)
    high, low = bursts.rates_per_s
    variance = 0.25 * 0.75 * (high - low) ** 2
    leaving = 1 / 0.5 + 1 / 1.5
    times_s = draw_requests(*alone(rate_per_s, duration_s), np.random.default_rng(2), bursts=bursts).times_s
    for window_s in (0.1, 0.5, 2.0):
        spread = 1 - (1 - math.exp(-leaving * window_s)) / (leaving * window_s)
        found = index_of_dispersion(times_s, window_s, duration_s)
        assert found == pytest.approx(1 + 2 * variance / (rate_per_s * leaving) * spread, rel=0.05)


def test_only_the_ratio_of_a_bursts_rates_matters() -> None:
    slow, fast = (Bursts.of(rate, 10.0, 0.5, 1.5) for rate in (1.0, 700.0))
    drawn = [draw_requests(*alone(50.0, 60.0), np.random.default_rng(3), bursts=each) for each in (slow, fast)]
    assert drawn[0].times_s == pytest.approx(drawn[1].times_s)


def test_bursts_of_a_ratio_of_one_are_none() -> None:
    even = Bursts.of(1.0, 1.0, 0.5, 4.5)
    rng, same = np.random.default_rng(5), np.random.default_rng(5)
    assert draw_requests(*alone(50.0, 60.0), rng, bursts=even).times_s == pytest.approx(
        draw_requests(*alone(50.0, 60.0), same).times_s
    )


def test_the_more_models_burst_on_their_own_the_smoother_is_the_sum_of_all_streams() -> None:
    traffic, _ = many(60, [600.0, 600.0, 600.0])
    dispersions = []
    for models in (60, 3, 1):
        assigned = Streams.round_robin(traffic.streams, [f"m{index}" for index in range(models)], 0.25)
        arrivals = draw_requests(traffic, assigned, np.random.default_rng(6), bursts=BURSTS)
        dispersions.append(index_of_dispersion(arrivals.times_s, 0.25, 180.0))
    assert 1.5 < dispersions[0] < dispersions[1] / 5
    assert dispersions[1] < dispersions[2] / 1.5
    even = draw_requests(traffic, assigned, np.random.default_rng(6))
    assert index_of_dispersion(even.times_s, 0.25, 180.0) == pytest.approx(1.0, abs=5 * math.sqrt(2 / 720))


def test_streams_of_one_phase_burst_together_and_others_do_not() -> None:
    """Correlation of the counts of two streams in quarters of a second: of one model, and of two."""
    names = ("a", "b", "c")
    assigned = Streams.of(names, ["x", "y"], [0, 1, 0], 0.25)
    traffic = Traffic.constant(names, 200.0, 600.0)
    arrivals = draw_requests(traffic, assigned, np.random.default_rng(7), bursts=BURSTS)
    counts = [np.histogram(arrivals.times_s[arrivals.stream == index], 2_400, (0, 600))[0] for index in range(3)]
    correlation = np.corrcoef(counts)
    assert correlation[0, 2] > 0.8
    assert abs(correlation[0, 1]) < 0.2


@pytest.mark.parametrize("bursts", [None, BURSTS], ids=["poisson", "bursts"])
def test_the_same_seed_gives_the_same_requests_and_another_gives_others(bursts: Bursts | None) -> None:
    traffic, assigned = many(6, [50.0, 20.0])
    a, b, other = (draw_requests(traffic, assigned, np.random.default_rng(seed), bursts=bursts) for seed in (8, 8, 9))
    assert a.times_s.tolist() == b.times_s.tolist()
    assert a.stream.tolist() == b.stream.tolist()
    assert a.times_s.tolist() != other.times_s.tolist()


def test_traffic_without_requests_brings_none() -> None:
    names = ("a", "b")
    traffic = Traffic(names, np.zeros((2, 3)))
    arrivals = draw_requests(traffic, Streams.round_robin(names, ["m"], 1.0), np.random.default_rng(0), bursts=BURSTS)
    assert len(arrivals) == 0
    assert list(arrivals.requests()) == []


def test_streams_other_than_the_traffics_are_an_error() -> None:
    traffic, _ = alone(1.0, 1.0)
    with pytest.raises(ConfigError, match="not that of these streams"):
        draw_requests(traffic, Streams.round_robin(["b"], ["m"], 1.0), np.random.default_rng(0))


def test_more_requests_than_can_be_kept_are_an_error_before_they_are_drawn() -> None:
    with pytest.raises(ConfigError, match=r"1e\+12 requests are more than the 50,000,000"):
        draw_requests(*alone(1e12, 1.0), np.random.default_rng(0))


@pytest.mark.parametrize(
    ("bursts", "message"),
    [
        (Bursts.of(1.0, math.inf, 1.0, 1.0), "both rates must be above 0"),
        (Bursts.of(math.inf, 2.0, 1.0, 1.0), "above 0 and finite"),
        (Bursts.of(1.0, 2.0, 1e-9, 1e-9), "states are too short"),
    ],
)
def test_bursts_that_cannot_be_drawn_are_an_error(bursts: Bursts, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        draw_requests(*alone(1.0, 100.0), np.random.default_rng(0), bursts=bursts)


def test_dispersion_is_variance_over_mean_in_whole_windows() -> None:
    times_s = np.array([0.1, 0.2, 0.3, 1.5, 2.5, 2.6, 3.2])  # 3, 1, 2 and, in half a window, 1
    assert index_of_dispersion(times_s, 1.0, 3.5) == pytest.approx(1.0 / 2.0)


def test_three_windows_of_a_tenth_are_in_three_tenths() -> None:
    """0.3 / 0.1 is below 3 in floating point: the last window counts all the same."""
    assert index_of_dispersion(np.array([0.05, 0.15, 0.25, 0.26]), 0.1, 0.3) == pytest.approx((1 / 3) / (4 / 3))
