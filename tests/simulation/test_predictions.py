"""Simulated predictions: errors of a known distribution, mistakes in bins, and a predictor's real errors."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from bins.edges import equal_mass_edges, index_of
from llmserve.commands.simulate import Scenario, prepare, run
from llmserve.errors import ConfigError
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.predictions import neighbour_mistakes, predict, read_confusion
from llmserve.simulation.report import BatchRecorder
from llmserve.simulation.workload import Trace, requests

LENGTHS = np.random.default_rng(3).lognormal(5.2, 0.8, 40_000)


def medians(text: str, lengths: np.ndarray = LENGTHS, **options: object) -> np.ndarray:
    predictions = predict(text, lengths, np.random.default_rng(0), **options)  # type: ignore[arg-type]
    assert predictions is not None
    return predictions.medians


def shares(real: np.ndarray, predicted: np.ndarray, bins: int) -> np.ndarray:
    """(bins, bins) number of requests of each real bin (rows) by predicted bin."""
    counts = np.zeros((bins, bins))
    np.add.at(counts, (real, predicted), 1)
    return counts / counts.sum(axis=1, keepdims=True)


# ---- known errors ----


def test_predicted_quantiles_have_the_spread_of_the_medians_errors() -> None:
    """The true length is below the quantile of level p in a share p of the cases, up to the spread of the lengths."""
    lengths = np.full(40_000, 100.0)
    predictions = predict("quantiles:0.5", lengths, np.random.default_rng(0))
    assert predictions is not None
    assert predictions.quantiles is not None
    assert np.std(np.log(predictions.medians / 100)) == pytest.approx(0.5, rel=0.02)
    below = (lengths[:, None] <= predictions.quantiles).mean(axis=0)
    assert below == pytest.approx((np.arange(15) + 0.5) / 15, abs=0.01)


def test_requests_carry_their_quantiles_around_their_median() -> None:
    trace = Trace(np.array([1.0, 2.0]), np.array([100.0, 10.0]), np.array([5.0, 6.0]))
    predictions = predict("quantiles:0.3", trace.output_tokens, np.random.default_rng(0))
    assert predictions is not None
    for (at_s, request), arrival_s in zip(requests(trace, predictions), (1.0, 2.0), strict=True):
        assert at_s == arrival_s
        assert len(request.quantiles) == 15
        assert request.quantiles[7] == request.predicted_tokens == predictions.medians[request.id]
        assert list(request.quantiles) == sorted(request.quantiles)
        assert request.prompt_tokens == 5 + request.id


# ---- mistakes in bins ----


def test_each_neighbour_of_the_right_bin_is_predicted_with_the_papers_probability() -> None:
    """Multi-Bin's p_e: the outer bins have a single neighbour, and so half as many mistakes."""
    assert neighbour_mistakes(4, 0.1).tolist() == [
        [0.9, 0.1, 0, 0],
        [0.1, 0.8, 0.1, 0],
        [0, 0.1, 0.8, 0.1],
        [0, 0, 0.1, 0.9],
    ]
    edges = equal_mass_edges(LENGTHS, 4)
    measured = shares(index_of(edges, LENGTHS), index_of(edges, medians("neighbour:4,0.1")), 4)
    assert measured == pytest.approx(neighbour_mistakes(4, 0.1), abs=4 * np.sqrt(0.25 / 10_000))
    assert measured[neighbour_mistakes(4, 0.1) == 0].max() == 0


@pytest.mark.parametrize("text", ["neighbour:4,0", "neighbour:1,0.5", "lognormal:0", "oracle"])
def test_no_mistakes_are_the_oracle(text: str) -> None:
    assert medians(text).tolist() == LENGTHS.tolist()


def test_a_mistaken_prediction_is_a_length_of_the_wrong_bin_and_the_others_are_exact() -> None:
    edges = equal_mass_edges(LENGTHS, 8)
    predicted = medians("neighbour:8,0.25")
    right = index_of(edges, LENGTHS) == index_of(edges, predicted)
    assert (predicted[right] == LENGTHS[right]).all()
    assert set(predicted[~right]) <= set(LENGTHS)


@pytest.mark.parametrize("edges", [None, (100.0, 180.0, 330.0)], ids=["refit off", "fixed edges"])
def test_the_schedulers_bins_have_exactly_the_papers_mistakes(edges: tuple[float, ...] | None) -> None:
    """With as many bins as the scheduler has, no mistake is lost or doubled by its edges."""
    scenario = Scenario(requests=20_000, arrival_rate=np.inf, predictions="neighbour:4,0.1", barrier=True, seed=2)
    config = SchedulingConfig(
        bins=4, batch_size=8, release="full", edges=edges, edges_refit_every=0, queue_requests_max=10**9
    ).resolved(barrier=True)
    work = prepare(scenario, config)
    recorder = BatchRecorder(len(work))
    run(scenario, config, work, recorder=recorder)
    bins = np.zeros(len(work), int)
    for start in recorder.starts:
        bins[list(start.request_ids)] = start.bin
    real = index_of(
        config.scheduler(work.scores, work.lengths).queues("").binning.edges.edges, work.trace.output_tokens
    )
    measured = shares(real, bins, 4)
    assert measured == pytest.approx(neighbour_mistakes(4, 0.1), abs=4 * np.sqrt(0.25 / 4_000))
    assert measured[neighbour_mistakes(4, 0.1) == 0].max() == 0
    if edges is None:
        assert np.bincount(real) / real.size == pytest.approx(0.25, abs=0.03)


COUNTS = [[80, 20, 0], [10, 80, 10], [30, 30, 60]]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("matrix.json", json.dumps(COUNTS)),
        ("evaluation.json", json.dumps({"confusion": {"3": COUNTS}, "bin_edges": {"3": [5, 9]}, "seed": 0})),
        ("matrix.csv", "80,20,0\n10,80,10\n30,30,60\n"),
        ("shares.csv", "0.8,0.2,0\n0.1,0.8,0.1\n0.25,0.25,0.5\n"),
    ],
)
def test_bins_are_confused_with_the_shares_of_an_evaluation(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    expected = np.array([[0.8, 0.2, 0], [0.1, 0.8, 0.1], [0.25, 0.25, 0.5]])
    assert read_confusion(str(path)) == pytest.approx(expected)
    edges = equal_mass_edges(LENGTHS, 3)
    predicted = medians(f"confusion:{path}")
    measured = shares(index_of(edges, LENGTHS), index_of(edges, predicted), 3)
    assert measured == pytest.approx(expected, abs=4 * np.sqrt(0.25 / 13_000))
    assert measured[0, 2] == 0


def test_an_evaluation_with_several_numbers_of_bins_needs_a_choice(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    path.write_text(json.dumps({"confusion": {"2": [[3, 1], [1, 3]], "3": COUNTS}}))
    assert read_confusion(f"{path}:2").tolist() == [[0.75, 0.25], [0.25, 0.75]]
    with pytest.raises(ConfigError, match=r"metrics\.json'?: choose one of 2, 3 bins"):
        read_confusion(str(path))
    with pytest.raises(ConfigError, match="choose one of 2, 3 bins"):
        read_confusion(f"{path}:8")


def test_the_demo_predictors_evaluation_can_be_used(tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "docs" / "results" / "demo-predictor.json"
    mistakes = read_confusion(f"{path}:8")
    assert mistakes.shape == (8, 8)
    assert mistakes.sum(axis=1) == pytest.approx(1.0)
    assert (mistakes.argmax(axis=1) == np.arange(8)).all()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "a.json"),
        ("a.json", "[[1, 2]]", "a matrix of K x K numbers"),
        ("a.json", '[["x"]]', "a.json"),
        ("a.csv", "1,-2\n3,4\n", "counts or shares"),
        ("a.csv", "1,2\n0,0\n", "a positive sum in every row"),
        ("a.csv", "1,2\n3\n", "a.csv"),
    ],
)
def test_a_file_without_a_confusion_is_an_error_that_names_it(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_confusion(str(tmp_path / name))


# ---- a predictor's residuals ----


def test_residuals_of_one_ratio_are_that_ratio(tmp_path: Path) -> None:
    path = tmp_path / "residuals.csv"
    path.write_text("prompt,predicted_tokens,output_tokens\n" + "".join(f"p,{2 * n},{n}\n" for n in range(1, 100)))
    assert medians(f"residuals:{path}") == pytest.approx(2 * LENGTHS)


def test_residuals_are_drawn_among_answers_of_similar_length(tmp_path: Path) -> None:
    """A predictor that doubles short and halves long answers, as compressed JSON lines with the alternative names."""
    rows = [{"actual": n, "predicted": 2 * n if n <= 500 else n / 2} for n in range(1, 1001)]
    path = tmp_path / "residuals.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    lengths = np.linspace(1, 1000, 5_000)
    ratios = medians(f"residuals:{path}", lengths) / lengths
    assert (ratios[lengths < 470] == 2).all()
    assert (ratios[lengths > 530] == 0.5).all()
    assert 0.3 < (ratios[(lengths > 490) & (lengths < 510)] == 2).mean() < 0.7


def test_resampled_residuals_have_the_spread_of_the_predictors_residuals(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    actual = rng.lognormal(5.2, 0.8, 4_000)
    predicted = actual * rng.lognormal(0.1, 0.4, actual.size)
    path = tmp_path / "residuals.csv"
    rows = (f"{left},{right}\n" for left, right in zip(predicted, actual, strict=True))
    path.write_text("predicted_tokens,output_tokens\n" + "".join(rows))
    logs = np.log(medians(f"residuals:{path}") / LENGTHS)
    assert logs.mean() == pytest.approx(0.1, abs=0.03)
    assert logs.std() == pytest.approx(0.4, rel=0.05)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("predicted,actual\n", "no rows"),
        ("predicted,actual\n3,4\n3,0\n", "line 3: output_tokens must be above 0"),
        ("predicted,tokens\n3,4\n", "line 2: output_tokens must be above 0, not None"),
        ("predicted,actual\nmany,4\n", "line 2: predicted_tokens must be above 0, not 'many'"),
    ],
)
def test_unusable_residuals_are_an_error_that_names_the_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "residuals.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        medians(f"residuals:{path}")
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("neighbour:4", "neighbour:K,P with"),
        ("neighbour:0,0.1", "neighbour:K,P with"),
        ("neighbour:4,0.6", "neighbour:K,P with"),
        ("confusion:", "is not one of"),
        ("residuals:", "is not one of"),
        ("residuals:/nowhere.csv", "no residuals file"),
        ("confusion:/nowhere.csv", "no confusion file"),
        ("predictor:folder", "is not one of"),
    ],
)
def test_invalid_predictions_are_an_error(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        medians(text)


def test_equal_lengths_permit_no_mistakes_in_bins() -> None:
    with pytest.raises(ConfigError, match="too much alike"):
        medians("neighbour:2,0.1", np.full(10, 5.0))


def test_first_edges_are_those_of_the_predictions() -> None:
    """Predictions with a lognormal error spread wider than the lengths."""

    def spread(predictions: str) -> float:
        scenario = Scenario(barrier=True, requests=10, lengths="lognormal:5,0.5", predictions=predictions)
        work = prepare(scenario, SchedulingConfig(bins=4).resolved(barrier=True))
        return float(np.std(np.log(work.scores)))

    assert spread("oracle") == spread("neighbour:4,0.2") == pytest.approx(0.5, rel=0.05)
    assert spread("lognormal:1.2") == pytest.approx(1.3, rel=0.05)
