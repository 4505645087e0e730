"""The theory of bins as a script: its recommendation, and that its numbers agree with the theory."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from questions.bins.theory import BinsRow, Question, advise, main, recommend

from bins.capacity import batch_time, throughput_max
from bins.edges import index_of, optimal_edges
from llmserve import __main__ as command
from llmserve.errors import ConfigError

UNIFORM = "--lengths uniform:1,20 --batch-size 128 --step-s 1"
LOGNORMAL = "--lengths lognormal:5.2,0.8 --batch-size 8 --step-s 0.01"


@pytest.fixture
def lengths_file(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.csv"
    lengths = np.random.default_rng(0).lognormal(5.2, 0.8, 2_000).astype(int) + 1
    path.write_text("\n".join(["output_tokens", *map(str, lengths.tolist())]) + "\n")
    return path


def advice(capsys: pytest.CaptureFixture[str], flags: str) -> dict[str, Any]:
    assert main([*flags.split(), "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def row(bins: int, throughput_per_s: float, latency_s: float, rate_per_s: float) -> BinsRow:
    return BinsRow(
        bins=bins,
        edges=tuple(range(1, bins)),
        throughput_per_s=throughput_per_s,
        gain=0.0,
        throughput_per_s_equal_mass=throughput_per_s,
        gain_equal_mass=0.0,
        forming_s=1.0,
        forming_s_rarest=1.0,
        batch_s=latency_s - 1.0,
        latency_s=latency_s,
        utilisation=rate_per_s / throughput_per_s,
    )


def rows(rate_per_s: float) -> list[BinsRow]:
    """Latency falls, then rises; throughput rises with the bins."""
    return [
        row(1, 5, 9, rate_per_s),
        row(2, 8, 7, rate_per_s),
        row(3, 10, 8, rate_per_s),
        row(4, 10.05, 10, rate_per_s),
    ]


# ---- the numbers ----


def test_uniform_lengths_have_the_throughput_of_theorem_4_2(capsys: pytest.CaptureFixture[str]) -> None:
    answer = advice(capsys, f"{UNIFORM} --arrival-rate 5 --bins-max 8")
    assert [row["bins"] for row in answer["rows"]] == list(range(1, 9))
    for bins, published in ((1, 6.4475), (2, 8.4342), (4, 9.9703), (8, 10.9692)):
        row = answer["rows"][bins - 1]
        assert row["throughput_per_s"] == pytest.approx(published, rel=0.01)
        assert row["throughput_per_s_equal_mass"] == pytest.approx(published, rel=0.01)
        assert row["forming_s"] == pytest.approx(bins * 127 / 10)
        assert row["latency_s"] == pytest.approx(row["forming_s"] + row["batch_s"])
        assert row["utilisation"] == pytest.approx(5 / row["throughput_per_s"])
    assert answer["throughput_per_s_max"] == pytest.approx(12.19, rel=0.01)


def test_gains_on_lognormal_lengths_are_over_one_bin_and_optimal_edges_gain_more(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = advice(capsys, f"{LOGNORMAL} --arrival-rate 4 --bins-max 4 --engines 3")
    first, _, _, fourth = answer["rows"]
    assert first["gain"] == first["gain_equal_mass"] == 0
    assert fourth["gain"] == pytest.approx(first["batch_s"] / fourth["batch_s"] - 1)
    assert (1 + fourth["gain"]) / (1 + fourth["gain_equal_mass"]) == pytest.approx(1.13, abs=0.02)
    assert fourth["throughput_per_s"] == pytest.approx(3 * 8 / fourth["batch_s"])
    assert answer["window"] == 256
    assert answer["window_gain"] == pytest.approx(1.28, abs=0.05)


def test_a_file_s_lengths_are_each_used_once_and_edges_are_fitted_to_all(
    capsys: pytest.CaptureFixture[str], lengths_file: Path
) -> None:
    lengths = np.loadtxt(lengths_file, skiprows=1)
    for place in (f"{lengths_file}", f"file:{lengths_file}", f"{lengths_file}:output_tokens"):
        answer = advice(capsys, f"--lengths {place} --arrival-rate 4 --bins-max 3")
        assert answer["lengths"] == 2_000
        assert answer["length_mean"] == pytest.approx(lengths.mean())
        third = answer["rows"][2]
        assert tuple(third["edges"]) == pytest.approx(optimal_edges(lengths, 3, 8))
        assert third["batch_s"] == pytest.approx(0.01 * batch_time(lengths, third["edges"], 8), rel=0.02)
        share = np.bincount(index_of(third["edges"], lengths)).min() / lengths.size
        assert third["forming_s_rarest"] == pytest.approx(7 / (2 * 4 * share))


def test_reported_gains_are_nearer_to_the_true_ones_than_gains_on_the_fitted_lengths(
    tmp_path: Path,
) -> None:
    """500 lengths, 8 bins, batches of 32, ten times: the reported gain, the true one, that on the fitted lengths."""
    fresh_lengths = np.random.default_rng(99).lognormal(5.2, 0.8, 100_000)
    reported, true, seeming = [], [], []
    for seed in range(10):
        lengths = np.random.default_rng(seed).lognormal(5.2, 0.8, 500)
        path = tmp_path / f"{seed}.csv"
        path.write_text("\n".join(map(str, lengths)))
        answer, _ = advise(Question(lengths=str(path), arrival_rate=4.0, batch_size=32, bins_max=8))
        reported.append(answer.rows[7].gain)
        for gains, judge in ((true, fresh_lengths), (seeming, lengths)):
            gains.append(batch_time(judge, (), 32) / batch_time(judge, answer.rows[7].edges, 32) - 1)
    assert abs(np.mean(reported) - np.mean(true)) < abs(np.mean(seeming) - np.mean(true)) / 2


def test_three_lengths_reach_no_more_than_the_limit_without_padding_and_cause_a_warning(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Their halves have two lengths and one: the one length must not count as much as the two."""
    path = tmp_path / "three.csv"
    path.write_text("1\n2\n6\n")
    for seed in range(6):
        answer = advice(capsys, f"--lengths {path} --arrival-rate 4 --batch-size 1 --seed {seed}")
        throughputs = [row["throughput_per_s"] for row in answer["rows"]]
        assert throughputs == pytest.approx([answer["throughput_per_s_max"]] * 3)
    assert main(["--lengths", str(path), "--arrival-rate", "4"]) == 0
    assert "With 3 lengths the figures are rough" in capsys.readouterr().out


def test_windows_are_judged_on_the_same_halves_as_one_bin(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Each half has one length, so that there is no gain; a window over both halves would mix lengths, and lose."""
    path = tmp_path / "two.csv"
    path.write_text("1\n1000\n")
    answer = advice(capsys, f"--lengths {path} --arrival-rate 4")
    assert answer["window_gain"] == pytest.approx(0, abs=1e-9)
    assert answer["window_throughput_per_s"] == pytest.approx(answer["rows"][0]["throughput_per_s"])


def test_a_profile_gives_the_time_of_steps(capsys: pytest.CaptureFixture[str]) -> None:
    answer = advice(capsys, "--lengths constant:100 --batch-size 32 --arrival-rate 4 --profile h100-llama-3.1-8b")
    step_s = 6.54e-3 + 32 * 0.0790e-3
    assert answer["step_s"] == pytest.approx(step_s)
    assert [row["bins"] for row in answer["rows"]] == [1]  # all lengths are equal
    assert answer["rows"][0]["batch_s"] == pytest.approx(100 * step_s)
    assert answer["throughput_per_s_max"] == pytest.approx(throughput_max(32, 100 * step_s))


def test_the_same_seed_gives_the_same_answer(capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{LOGNORMAL} --arrival-rate 4 --bins-max 3"
    first, repeated, other_seed = (advice(capsys, f"{flags} --seed {seed}") for seed in (1, 1, 2))
    assert first == repeated != other_seed


# ---- the recommendation ----


@pytest.mark.parametrize(
    ("rate_per_s", "target_s", "bins", "reason"),
    [
        (1.0, None, 2, "the least latency, 7 s"),
        (7.5, None, 3, "the least latency, 8 s"),  # 2 bins would be busy 94 % of their time
        (9.0, None, 3, "the highest throughput, 10 requests/s; 2 engines would suffice"),
        (30.0, None, 3, "no number of bins keeps up with 30 requests/s, so the highest throughput"),
        (1.0, 8.5, 3, "the highest throughput with a latency within 8.5 s"),
        (1.0, 7.5, 2, "the highest throughput with a latency within 7.5 s"),
        (1.0, 6.0, 2, "none has a latency within 6 s; this is the least, 7 s"),
        (30.0, 8.0, 3, "as a latency within 8 s requires"),
    ],
)
def test_no_more_throughput_than_arrivals_need_is_recommended(
    rate_per_s: float, target_s: float | None, bins: int, reason: str
) -> None:
    question = Question(lengths="uniform:1,20", arrival_rate=rate_per_s, latency_target_s=target_s)
    chosen, explanation = recommend(rows(rate_per_s), question, rate_per_s)
    assert (chosen.bins, reason in explanation) == (bins, True), explanation


def test_at_low_load_one_bin_is_recommended_and_at_a_higher_one_more(capsys: pytest.CaptureFixture[str]) -> None:
    few, many = (advice(capsys, f"{LOGNORMAL} --arrival-rate {rate} --engines 9") for rate in (0.5, 8))
    assert few["bins"] == 1
    assert few["edges"] == []
    assert many["bins"] > 1
    assert many["edges"] == many["rows"][many["bins"] - 1]["edges"]


# ---- printed output ----


def test_the_table_fits_a_terminal_and_gives_a_recommendation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LOGNORMAL.split(), "--arrival-rate", "4", "--bins-max", "9"]) == 0
    output = capsys.readouterr().out
    table = [line for line in output.splitlines() if line.startswith("│")]
    assert [int(line.split("│")[1]) for line in table] == [1, 2, 3, 4, 5, 6, 8, 9]
    assert all("overloaded" in line for line in table)
    assert "Recommended: 9 bins: no number of bins keeps up with 4 requests/s" in output
    assert "Edges, in tokens: " in output
    assert "--release window" in output
    assert "continuous batching" in output


def test_the_suggested_command_runs_and_reaches_the_reported_throughput(
    capsys: pytest.CaptureFixture[str], lengths_file: Path
) -> None:
    flags = ["--lengths", str(lengths_file), "--arrival-rate", "10", "--bins-max", "4"]
    assert main([*flags]) == 0
    trial = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("To try it: "))
    words = trial.removeprefix("To try it: llmserve ").split()
    assert command.main([*words, "--requests", "4000", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)["throughput_per_s"]
    promised = advice(capsys, " ".join(flags))["rows"][3]["throughput_per_s"]
    assert measured == pytest.approx(promised, rel=0.03)


def test_the_command_for_windows_runs_and_reaches_at_least_the_reported_throughput(
    capsys: pytest.CaptureFixture[str], lengths_file: Path
) -> None:
    flags = ["--lengths", str(lengths_file), "--arrival-rate", "10", "--bins-max", "2"]
    assert main([*flags]) == 0
    note = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("--release window"))
    words = note.partition("To try it: llmserve ")[2].split()
    assert command.main([*words, "--requests", "4000", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)["throughput_per_s"]
    assert 0.97 < measured / advice(capsys, " ".join(flags))["window_throughput_per_s"] < 1.06


def test_a_figure_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for bins_max in (1, 6):
        path = tmp_path / f"{bins_max}.png"
        assert main([*LOGNORMAL.split(), *f"--arrival-rate 1 --bins-max {bins_max} --plot {path}".split()]) == 0
        assert path.read_bytes().startswith(b"\x89PNG")
    assert "Recommended" in capsys.readouterr().out


# ---- errors ----


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--arrival-rate 4", "lengths is required"),
        ("--lengths uniform:1,20", "arrival_rate is required"),
        ("--lengths uniform:1,20 --arrival-rate inf", "arrival_rate: the number must be finite"),
        ("--lengths uniform:1,20 --arrival-rate 0", "arrival_rate (the command line)"),
        ("--lengths nowhere.csv --arrival-rate 4", "there is no lengths file 'nowhere.csv'"),
        ("--lengths nowhere.csv:tokens --arrival-rate 4", "there is no lengths file 'nowhere.csv'"),
        ("--lengths normal:1,20 --arrival-rate 4", "lengths 'normal:1,20' is not one of"),
        ("--lengths uniform:1,20 --arrival-rate 4 --step-s 1 --profile p4-googlenet", "step_s cannot be given"),
        ("--lengths uniform:1,20 --arrival-rate 4 --profile nothing", "profile: 'nothing'"),
        (
            "--lengths uniform:1,20 --arrival-rate 4 --batch-size 64 --profile p4-googlenet",
            "covers up to 32 sequences, not 64",
        ),
        ("--lengths uniform:1,20 --arrival-rate 4 --plot a.nothing", "--plot: cannot draw a.nothing"),
    ],
)
def test_an_invalid_question_is_an_error_that_says_what_is_wrong(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        main(flags.split())


def test_one_length_is_too_few(tmp_path: Path) -> None:
    path = tmp_path / "one.csv"
    path.write_text("12\n")
    with pytest.raises(ConfigError, match="at least two are required"):
        main(["--lengths", str(path), "--arrival-rate", "4"])
