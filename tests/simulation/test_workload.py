"""Arrival times and answer lengths: files, distributions, and their theory."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from llmserve.errors import ConfigError
from llmserve.simulation import workload
from llmserve.simulation.workload import Bursts, Trace, bursty_arrivals, draw_arrivals, draw_lengths, replay_at


def test_lengths_come_from_a_column_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,5,100\n1,6,200\n")
    rng = np.random.default_rng(0)
    assert set(workload.draw_lengths(f"file:{path}", 50, rng)) == {100, 200}
    assert set(workload.draw_lengths(f"file:{path}:input_tokens", 50, rng)) == {5, 6}
    with pytest.raises(ConfigError, match="no column 'tokens'"):
        workload.draw_lengths(f"file:{path}:tokens", 1, rng)


def test_lengths_come_from_a_plain_list_of_numbers(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("3\n4\n")
    assert set(workload.draw_lengths(f"file:{path}", 50, np.random.default_rng(0))) == {3, 4}


def test_lengths_come_from_a_compressed_file_too(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv.gz"
    path.write_bytes(gzip.compress(b"output_tokens\n3\n4\n"))
    assert set(workload.draw_lengths(f"file:{path}", 50, np.random.default_rng(0))) == {3, 4}


@pytest.mark.parametrize("text", ["", "output_tokens\n", "output_tokens\nmany\n", "output_tokens\n-3\n"])
def test_a_file_without_usable_lengths_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match="lengths file"):
        workload.draw_lengths(f"file:{path}", 1, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("text", "mean"),
    [("uniform:1,20", 10.5), ("exponential:50", 50), ("lognormal:3,0.5", np.exp(3.125)), ("constant:7", 7)],
)
def test_distributions_have_their_means(text: str, mean: float) -> None:
    lengths = workload.draw_lengths(text, 100_000, np.random.default_rng(0))
    assert lengths.min() > 0
    assert lengths.mean() == pytest.approx(mean, rel=0.02)


@pytest.mark.parametrize(("text", "mean"), [("exponential:50,50", 50 * (1 - np.exp(-1))), ("lognormal:0,9,1e-9", 1e-6)])
def test_longer_answers_are_cut_off(text: str, mean: float) -> None:
    lengths = workload.draw_lengths(text, 100_000, np.random.default_rng(0))
    assert lengths.max() == pytest.approx(50 if mean > 1 else mean)
    assert lengths.mean() == pytest.approx(mean, rel=0.02)


@pytest.mark.parametrize(
    "text", ["constant:3,5", "exponential:5,0", "lognormal:1,2,3,4", "lognormal:1", "uniform:1,2,3"]
)
def test_an_invalid_cut_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="lengths"):
        workload.draw_lengths(text, 1, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("0.7*constant:5+0.3*constant:9", {5: 0.7, 9: 0.3}),
        ("7*constant:5+3*constant:9", {5: 0.7, 9: 0.3}),
        ("2*constant:1e+2+1*constant:3+1*constant:4", {100: 0.5, 3: 0.25, 4: 0.25}),
        ("1*constant:5", {5: 1.0}),
    ],
)
def test_lengths_of_several_models_are_as_frequent_as_their_weights(text: str, parts: dict[float, float]) -> None:
    drawn = draw_lengths(text, 40_000, np.random.default_rng(1))
    values, counts = np.unique(drawn, return_counts=True)
    assert dict(zip(values.tolist(), counts / drawn.size, strict=True)) == {
        value: pytest.approx(share, abs=4 * np.sqrt(0.25 / drawn.size)) for value, share in parts.items()
    }


def test_a_file_may_be_one_part_of_a_mixture_and_have_a_plus_in_its_name(tmp_path: Path) -> None:
    path = tmp_path / "c++.csv"
    path.write_text("3\n4\n")
    assert set(draw_lengths(f"1*constant:9+2*file:{path}", 200, np.random.default_rng(0))) == {3, 4, 9}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0*constant:5+1*constant:6", "weights above 0"),
        ("1.2.3*constant:5", "weights above 0"),
        ("1*constant:5+2*gaussian:3", "'gaussian:3' is not one of"),
        ("constant:5+2*constant:3", "is not one of"),
    ],
)
def test_an_invalid_mixture_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        draw_lengths(text, 10, np.random.default_rng(0))


# ---- arrivals ----


def test_poisson_arrivals_have_their_rate_and_an_infinite_rate_is_all_at_once() -> None:
    arrivals_s = workload.poisson_arrivals(4.0, 40_000, np.random.default_rng(0))
    assert arrivals_s[-1] == pytest.approx(10_000, rel=0.02)
    assert np.diff(arrivals_s).std() == pytest.approx(0.25, rel=0.03)
    assert not workload.poisson_arrivals(np.inf, 5, np.random.default_rng(0)).any()


def test_constant_arrivals_are_evenly_spaced() -> None:
    assert draw_arrivals("constant", 4.0, 3, np.random.default_rng(0)).tolist() == [0.25, 0.5, 0.75]


@pytest.mark.parametrize("text", ["poisson", "constant", "mmpp:3,10"])
def test_an_infinite_rate_is_all_at_once_for_every_distribution(text: str) -> None:
    assert not draw_arrivals(text, np.inf, 5, np.random.default_rng(0)).any()


def dispersion(bursts: Bursts, window_s: float) -> tuple[float, float]:
    """Mean rate, and variance over mean of the arrivals in a window (Heffes and Lucantoni, 1986).

    The rate's autocovariance is (a - b)^2 p q exp(-r u) at lag u, with p and q the shares of the time in the two states
    and r the sum of their rates of change.
    """
    (a, b), (high_s, low_s) = bursts.rates_per_s, bursts.sojourns_s
    p, r = high_s / (high_s + low_s), 1 / high_s + 1 / low_s
    mean = p * a + (1 - p) * b
    x = r * window_s
    return mean, 1 + 2 * (a - b) ** 2 * p * (1 - p) / (mean * r) * (1 - (1 - np.exp(-x)) / x)


@pytest.mark.parametrize(
    ("ratio", "high_s", "low_s"), [(1.0, 5.0, 5.0), (4.0, 5.0, 5.0), (10.0, 2.0, 8.0), (np.inf, 3.0, 6.0)]
)
@pytest.mark.parametrize("window_s", [1.0, 20.0])
def test_bursts_have_their_mean_rate_and_their_index_of_dispersion(
    ratio: float, high_s: float, low_s: float, window_s: float
) -> None:
    bursts = Bursts.of(3.0, ratio, high_s, low_s)
    mean, index = dispersion(bursts, window_s)
    assert mean == pytest.approx(3.0)
    arrivals_s = bursty_arrivals(bursts, 600_000, np.random.default_rng(7))
    assert (np.diff(arrivals_s) >= 0).all()
    _, in_the_long_run = dispersion(bursts, 1e9)
    assert arrivals_s.size / arrivals_s[-1] == pytest.approx(3.0, rel=4 * np.sqrt(in_the_long_run / arrivals_s.size))
    counts = np.bincount((arrivals_s / window_s).astype(int))[:-1]  # the last window is cut short
    assert counts.var() / counts.mean() == pytest.approx(index, rel=0.06)


def test_bursts_are_written_with_their_mean_rate_ratio_and_sojourns() -> None:
    arrivals_s = draw_arrivals("mmpp:10,2,8", 3.0, 1_000, np.random.default_rng(4))
    assert (
        arrivals_s.tolist() == bursty_arrivals(Bursts.of(3.0, 10.0, 2.0, 8.0), 1_000, np.random.default_rng(4)).tolist()
    )
    alike = draw_arrivals("mmpp:10,2", 3.0, 1_000, np.random.default_rng(4))
    assert alike.tolist() == draw_arrivals("mmpp:10,2,2", 3.0, 1_000, np.random.default_rng(4)).tolist()


@pytest.mark.parametrize(
    "text",
    [
        "gamma:2",
        "poisson:3",
        "mmpp",
        "mmpp:3",
        "mmpp:0.5,10",
        "mmpp:3,0",
        "mmpp:3,1,inf",
        "mmpp:3,1,2,4",
        "mmpp:3,1e-9",
    ],
)
def test_invalid_arrivals_are_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="arrivals"):
        draw_arrivals(text, 1.0, 10, np.random.default_rng(0))


# ---- traces ----

TRACE = "arrival_s,model,output_tokens,input_tokens\n0.5,m,100,7\n2.5,m,50,0\n2.5,m,10,9\n"


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return str(path)


def test_a_compressed_trace_gives_the_same_as_the_plain_one(trace: str, tmp_path: Path) -> None:
    (tmp_path / "trace.csv.gz").write_bytes(gzip.compress(TRACE.encode()))
    plain, compressed = workload.read_trace(trace), workload.read_trace(f"{trace}.gz")
    for column in ("arrivals_s", "input_tokens", "output_tokens"):
        assert getattr(plain, column).tolist() == getattr(compressed, column).tolist()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no rows; a trace has the columns of one of these forms: arrival_s, input_tokens, output_tokens"),
        (
            "arrival_s,output_tokens\n1,2\n",
            "line 2: no column input_tokens of arrival_s, .*; it has arrival_s, output_t",
        ),
        ("arrival_s,input_tokens,output_tokens\n", "no rows"),
        ("arrival_s,input_tokens,output_tokens\n0,1,5\n1,1,many\n", "line 3: output_tokens must be a number"),
        ("arrival_s,input_tokens,output_tokens\n0,1\n", "line 2: output_tokens must be a number"),
        ("arrival_s,input_tokens,output_tokens\n0,1,2,3\n", "line 2: more cells than there are columns"),
        ("arrival_s,input_tokens,output_tokens\n0,1,0\n", "no request with an answer"),
        ("arrival_s,input_tokens,output_tokens\n0,-1,3\n", "line 2: input_tokens must be finite and at least 0"),
        ("arrival_s,input_tokens,output_tokens\nnan,1,3\n", "line 2: arrival_s must be finite"),
    ],
)
def test_a_malformed_trace_is_an_error_that_names_its_file_and_row(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        workload.read_trace(str(path))
    assert str(path) in str(error.value)


def test_a_damaged_compressed_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv.gz"
    path.write_bytes(gzip.compress(TRACE.encode(), mtime=0)[:-12])
    with pytest.raises(ConfigError, match=r"the trace: cannot read .*bad\.csv\.gz"):
        workload.read_trace(str(path))
    with pytest.raises(ConfigError, match=r"the lengths file: cannot read .*bad\.csv\.gz"):
        workload.draw_lengths(f"file:{path}", 1, np.random.default_rng(0))


def test_a_file_that_is_called_compressed_but_is_not_is_read(tmp_path: Path) -> None:
    path = tmp_path / "unpacked-by-the-browser.csv.gz"
    path.write_text(TRACE)
    assert workload.read_trace(str(path)).output_tokens.tolist() == [100, 50, 10]


def test_a_trace_is_replayed_at_any_rate_with_its_gaps_in_proportion() -> None:
    trace = Trace(np.array([1.0, 2.0, 5.0]), np.ones(3), np.zeros(3))
    replayed = replay_at(trace, 6.0)
    assert replayed.rate_per_s == pytest.approx(6.0)
    assert np.diff(replayed.arrivals_s) == pytest.approx(np.array([1.0, 3.0]) * 0.5 / 6.0), "2 gaps of 2 s on average"
    assert not replay_at(trace, np.inf).arrivals_s.any()


def test_a_trace_whose_requests_all_arrive_at_once_has_no_rate_to_scale() -> None:
    with pytest.raises(ConfigError, match="no rate to scale"):
        replay_at(Trace(np.ones(3), np.ones(3), np.zeros(3)), 6.0)


def test_a_byte_order_mark_is_no_part_of_a_column(tmp_path: Path) -> None:
    path = tmp_path / "from-a-spreadsheet.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,5,7\n", encoding="utf-8-sig")
    assert workload.read_trace(str(path)).arrivals_s.tolist() == [0.0]
    assert workload.read_lengths(str(path)).tolist() == [7.0]
