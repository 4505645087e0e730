"""`llmserve solve`: its numbers, its printed policy, and its errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from missing_modules import without

from bins.average_cost import policy_iteration
from bins.curve import Curve
from bins.profile import PROFILES, Profile
from llmserve.__main__ import main
from llmserve.commands.solve import Problem, chart, profile_of, queue_of, runs, solve
from llmserve.errors import ConfigError
from llmserve.runtime.installation import pip_install

ROOT = Path(__file__).resolve().parents[2]
ISSUE_FLAGS = (
    "--service deterministic --latency-ms 0.3051,1.0524 --energy-mj 19.899,19.603 --batch-min 1 --batch-max 32 "
    "--load 0.9 --energy-weight 1"
)
# The coefficients of the published averages.
UNROUNDED = "--latency-ms 0.305058,1.05244 --energy-mj 19.899,19.603"


@pytest.fixture
def lengths_file(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.csv"
    lengths = np.random.default_rng(0).lognormal(5.2, 0.8, 500).astype(int) + 1
    path.write_text("\n".join(["output_tokens", *map(str, lengths.tolist())]) + "\n")
    return path


def solved(capsys: pytest.CaptureFixture[str], flags: str) -> dict[str, Any]:
    assert main(["solve", *flags.split(), "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


# ---- the numbers ----


def test_the_published_scenario_has_its_average_cost(capsys: pytest.CaptureFixture[str]) -> None:
    """SMDP-J, Table II: 66.137 to 66.138, computed with coefficients that the paper prints rounded."""
    assert solved(capsys, f"{ISSUE_FLAGS}")["average_cost"] == pytest.approx(66.1374, rel=2e-4)
    answer = solved(capsys, f"{UNROUNDED} --load 0.9 --energy-weight 1")
    assert answer["average_cost"] == pytest.approx(66.1374, rel=2e-5)
    assert answer["average_cost"] == pytest.approx(answer["response_ms_mean"] + answer["power_w_mean"], rel=1e-12)
    assert answer["policy"][:34] == [0] * 7 + [*range(7, 33), 32]
    assert set(answer["policy"][34:]) == {32}
    assert answer["iterations"] < 10
    assert answer["solve_ms"] > 0
    assert answer["solver"] == "exact"
    assert answer["load"] == pytest.approx(0.9)
    assert answer["energy_weight"] == 1.0
    assert not {"target_met", "other_policy", "share", "response_ms_p50"} & set(answer)


def test_the_defaults_are_the_published_scenario_and_its_profile(capsys: pytest.CaptureFixture[str]) -> None:
    answers = [solved(capsys, flags) for flags in (ISSUE_FLAGS, "", "--profile p4-googlenet")]
    for answer in answers[1:]:
        assert answer["policy"] == answers[0]["policy"]
        for name in ("average_cost", "response_ms_mean", "power_w_mean", "arrival_rate_per_s"):
            assert answer[name] == pytest.approx(answers[0][name], rel=1e-12)


def test_the_command_runs_as_a_process() -> None:
    command = [sys.executable, "-m", "llmserve", "solve", *ISSUE_FLAGS.split(), "--json"]
    done = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["average_cost"] == pytest.approx(66.1374, rel=2e-4)


def test_value_iteration_finds_the_same_policy_in_the_published_number_of_iterations(
    capsys: pytest.CaptureFixture[str],
) -> None:
    exact = solved(capsys, UNROUNDED)
    by_values = solved(capsys, f"{UNROUNDED} --solver rvi --s-max 70 --overflow-cost 100 --epsilon 0.01")
    assert by_values["policy"] == exact["policy"][:71]
    assert by_values["average_cost"] == pytest.approx(exact["average_cost"], rel=1e-9)
    assert by_values["iterations"] == pytest.approx(1483, rel=0.01)
    assert by_values["solver"] == "rvi"


def test_percentiles_are_those_of_table_i(capsys: pytest.CaptureFixture[str]) -> None:
    answer = solved(capsys, f"{UNROUNDED} --load 0.7 --energy-weight 1.6 --percentiles --seed 3")
    percentiles_ms = [answer[f"response_ms_p{level}"] for level in (50, 90, 95)]
    assert percentiles_ms == pytest.approx([6.83, 9.23, 9.96], rel=0.015)
    assert answer["response_ms_p99"] > percentiles_ms[-1]
    assert answer == {**solved(capsys, f"{UNROUNDED} --load 0.7 --energy-weight 1.6 --percentiles --seed 3"),
                      "solve_ms": answer["solve_ms"]}  # fmt: skip


def test_where_small_batches_serve_more_than_full_ones_the_load_is_that_of_the_best_size(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Batches of 1 take 0.1 ms, batches of 32 93.1 ms: 10,000 requests a second can be served, as M/D/1."""
    flags = "--latency-ms 3,-2.9 --energy-mj 1,1"
    by_load, by_rate = (solved(capsys, f"{flags} {load}") for load in ("--load 0.5", "--arrival-rate-per-s 5000"))
    for answer in (by_load, by_rate):
        assert answer["load"] == pytest.approx(0.5)
        assert answer["arrival_rate_per_s"] == pytest.approx(5_000)
        assert answer["response_ms_mean"] == pytest.approx(0.15, rel=1e-8)
        assert answer["utilisation"] == pytest.approx(0.5)
    with pytest.raises(ConfigError, match=r"a load of 1.1: batches of 1 serve 10,000 per second"):
        solve(Problem(latency_ms=(3.0, -2.9), energy_mj=(1.0, 1.0), load=1.1))


def test_variable_times_of_large_batches_have_a_solution(capsys: pytest.CaptureFixture[str]) -> None:
    answer = solved(capsys, "--service hyperexponential --batch-max 128 --load 0.8 --energy-weight 0")
    assert answer["response_ms_mean"] == pytest.approx(57.70, rel=1e-3)
    assert answer["policy"][-1] == 128


def test_a_profile_that_misses_its_measurements_is_to_be_measured_again(
    tmp_path: Path, lengths_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "noisy.json"
    step_s = Curve.fit([1, 2, 4, 8], [0.01, 0.1, 0.01, 0.01])
    Profile.timed("noisy", step_s, slots_max=8, source="a test").save(path)
    flags = ["--profile", str(path), "--service", f"samples:{lengths_file}", "--batch-max", "8", "--energy-weight", "0"]
    assert main(["solve", *flags]) == 0
    assert "Measure again" in capsys.readouterr().err
    assert main(["solve"]) == 0
    assert capsys.readouterr().err == ""


def test_the_load_and_the_arrival_rate_are_equivalent(capsys: pytest.CaptureFixture[str]) -> None:
    by_load = solved(capsys, "--load 0.5")
    by_rate = solved(capsys, f"--arrival-rate-per-s {by_load['arrival_rate_per_s']!r}")
    assert by_rate["policy"] == by_load["policy"]
    assert by_rate["load"] == pytest.approx(0.5)


def test_idle_power_counts(capsys: pytest.CaptureFixture[str]) -> None:
    without, with_idle = (solved(capsys, f"--load 0.3 --energy-weight 0 --idle-power-w {idle_w}") for idle_w in (0, 20))
    added_w = 20 * (1 - without["utilisation"])
    assert with_idle["power_w_mean"] == pytest.approx(without["power_w_mean"] + added_w)


@pytest.mark.parametrize("service", ["deterministic", "erlang2", "exponential", "hyperexponential"])
def test_the_average_cost_is_that_of_a_queue_truncated_beyond_its_reach(service: str) -> None:
    """Policy iteration on SMDP-J's finite model, long enough that its end does not matter."""
    queue, _, answer = solve(Problem(service=service, batch_max=8, load=0.5))
    model = queue.truncated(1.0, states_max=250, overflow_cost=100.0)
    greedy = np.minimum(np.arange(252), 8)
    assert answer.average_cost == pytest.approx(policy_iteration(model, greedy).average_cost, rel=1e-9)


def test_more_variable_times_cost_more(capsys: pytest.CaptureFixture[str]) -> None:
    services = ("deterministic", "erlang2", "exponential", "hyperexponential")
    costs = [solved(capsys, f"--load 0.5 --service {service}")["average_cost"] for service in services]
    assert costs == sorted(costs)
    assert costs[-1] > 1.05 * costs[0]


# ---- batches as long as their longest answer ----


def test_a_batch_of_samples_lasts_as_its_longest_answer(lengths_file: Path) -> None:
    """A batch of 1 takes the mean length times a step; a batch of 32 the mean longest of 32."""
    problem = Problem(service=f"samples:{lengths_file}", profile="h100-llama-3.1-8b", load=0.5)
    queue, _, answer = solve(problem)
    profile = PROFILES["h100-llama-3.1-8b"]
    lengths = np.loadtxt(lengths_file, skiprows=1)
    assert queue.service.mean_s[0] == pytest.approx(lengths.mean() * float(profile.step_s.at(1)))
    assert queue.service.mean_s == pytest.approx(profile.latency_s([lengths], np.arange(1, 33))[0])
    assert queue.energy_j == pytest.approx(profile.energy_j([lengths], np.arange(1, 33))[0])
    assert queue.idle_power_w == profile.idle_w
    assert answer.power_w_mean > profile.idle_w
    assert answer.load == pytest.approx(0.5)


def test_latency_and_energy_are_per_step_for_samples(lengths_file: Path) -> None:
    problem = Problem(service=f"samples:{lengths_file}", latency_ms=(0.0, 10.0), energy_mj=(0.0, 3_000.0), batch_max=4)
    queue, _, _ = solve(problem)
    mean = np.loadtxt(lengths_file, skiprows=1).mean()
    assert queue.service.mean_s[0] == pytest.approx(0.01 * mean)
    assert queue.energy_j == pytest.approx(300 * queue.service.mean_s)


def test_a_profiles_idle_power_can_be_replaced(lengths_file: Path) -> None:
    problem = Problem(service=f"samples:{lengths_file}", profile="h100-llama-3.1-8b", idle_power_w=0.0)
    assert solve(problem)[0].idle_power_w == 0.0


def test_a_profile_without_energy_gives_only_times(tmp_path: Path, lengths_file: Path) -> None:
    path = tmp_path / "times.json"
    Profile.timed("box", Curve.affine(1e-4, 1e-2), source="a test").save(path)
    problem = Problem(service=f"samples:{lengths_file}", profile=str(path), batch_max=4, energy_weight=0.0)
    answer = solve(problem)[2]
    assert answer.power_w_mean is None
    assert answer.average_cost == answer.response_ms_mean
    for objective in (
        {"energy_weight": 1.0},
        {"energy_weight": None},
        {"energy_weight": None, "latency_target_ms": 1e5},
    ):
        with pytest.raises(ConfigError, match="profile box has no energy"):
            solve(msgspec.structs.replace(problem, **objective))


# ---- a latency target ----


def test_a_latency_target_is_met_with_a_mixture_of_two_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """rho = 0.3: a mixture of the steps at 4.88 ms (wait for 5) and at 5.72 ms (wait for 6), with less energy."""
    flags = f"{UNROUNDED} --load 0.3"
    below = solved(capsys, f"{flags} --energy-weight 1.2")
    answer = solved(capsys, f"{flags} --latency-target-ms 5")
    assert answer["target_met"] is True
    assert 4.99 < answer["response_ms_mean"] <= 5.0
    assert answer["power_w_mean"] < below["power_w_mean"]
    assert 0.05 < answer["share"] < 0.3
    assert answer["policy"][:6] == [0, 0, 0, 0, 0, 5]
    assert answer["other_policy"][:7] == [0, 0, 0, 0, 0, 0, 6]
    assert (answer["average_cost"], answer["energy_weight"]) == (None, None), "a target excludes a weight"


def test_an_unreachable_target_gives_the_fastest_policy_and_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    answer = solved(capsys, "--load 0.3 --latency-target-ms 1")
    fastest = solved(capsys, "--load 0.3 --energy-weight 0")
    assert answer["target_met"] is False
    assert answer["response_ms_mean"] == pytest.approx(fastest["response_ms_mean"])
    assert main(["solve", "--load", "0.3", "--latency-target-ms", "1"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "cannot be met" in out
    assert "average cost" not in out


def test_a_target_can_be_for_a_percentile(capsys: pytest.CaptureFixture[str]) -> None:
    """The target is met with no more slack than the search's samples cause."""
    answer = solved(capsys, "--load 0.3 --latency-target-ms 8 --latency-target-percentile 95 --percentiles")
    assert answer["target_met"] is True
    assert 0.94 * 8.0 < answer["response_ms_p95"] <= 8.0
    assert answer["power_w_mean"] < solved(capsys, "--load 0.3 --energy-weight 0")["power_w_mean"]


# ---- printed output ----


def test_a_policy_is_printed_in_ranges() -> None:
    assert runs([0, 0, 2, 3, 4, 4, 4]) == [
        ("0..1", "wait"),
        ("2..4", "serve all that wait"),
        ("5+", "serve 4"),
    ]
    assert runs([0, 1, 2, 2, 2, 3, 4, 4]) == [
        ("0", "wait"),
        ("1..2", "serve all that wait"),
        ("3..5", "serve 2 to 3"),
        ("6+", "serve 4"),
    ]
    assert runs([0, 1, 0, 0, 4, 3, 4]) == [
        ("0", "wait"),
        ("1", "serve all that wait"),
        ("2..3", "wait"),
        ("4", "serve all that wait"),
        ("5", "serve 3"),
        ("6+", "serve 4"),
    ]


def test_bars_are_as_high_as_the_batches() -> None:
    lines = chart([*[0] * 4, *range(4, 33), *[32] * 20], width=100)
    assert len(lines) == 5
    heights = [sum(" ▁▂▃▄▅▆▇█".index(row[5 + state]) for row in lines[:-1]) for state in range(32)]
    assert heights == [0] * 4 + list(range(4, 32))
    assert lines[-1].split() == ["0", "8", "16", "24", "32", "40"]


def test_a_bar_is_blank_only_where_nothing_is_served() -> None:
    """In a batch of 200, one request would be a sixth of the smallest block."""
    lines = chart([0, 0, *range(2, 201), 200], width=250)
    lowest = lines[3].removeprefix("   0 ")
    assert lowest.startswith("  ▁▁")
    assert " " not in lowest[2:]


def test_a_chart_fits_the_terminal_and_marks_the_cut() -> None:
    for width in (20, 40, 80):
        lines = chart([*range(101), 100], width)
        assert max(map(len, lines)) <= width
        assert lines[-1] == "cut: ends at 101"
    assert "cut" not in "".join(chart([*range(101), 100], 120))


def test_the_command_prints_the_problem_the_policy_and_the_averages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["solve", *ISSUE_FLAGS.split(), "--percentiles"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in (
        "deterministic batches of 1 to 32, load 0.9 (2,662.82 requests/s), energy weight 1 ms/W, solver exact ",
        "0..6 │ wait",
        "7..32 │ serve all that wait",
        "33+ │ serve 32",
        "average cost (ms) │ 66.13",
        "mean response time (ms) │ 9.76",
        "mean power (W) │ 56.36",
        "response time p99 (ms) │ 20.",
        "solved in (ms)",
    ):
        assert words in out


def test_the_title_names_the_source_of_times_and_energies(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, words in (
        ("", "batches of 1 to 32 with the times and energies of SMDP-J's basic scenario, load 0.9"),
        ("--service erlang2", "erlang2 batches of 1 to 32 with the times and energies of SMDP-J's basic scenario,"),
        ("--profile p4-googlenet", "batches of 1 to 32 with the times and energies of p4-googlenet, load 0.9"),
    ):
        assert main(["solve", *flags.split()]) == 0
        assert words in " ".join(capsys.readouterr().out.split())


def test_a_failure_to_draw_is_reported_after_the_solution(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def error_of(path: Path) -> str:
        assert main(["solve", "--json", "--plot", str(path)]) == 2
        out, error = capsys.readouterr()
        assert json.loads(out)["average_cost"] == pytest.approx(66.1374, rel=2e-4)
        assert error.count("\n") == 1
        return error

    assert "--plot: cannot draw" in error_of(tmp_path / "no-such-folder" / "policy.png")
    assert "--plot: cannot draw" in error_of(tmp_path / "policy.xyz")


def test_without_matplotlib_a_plot_is_refused_before_anything_is_solved(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "matplotlib")
    assert main(["solve", "--json", "--plot", "policy.png"]) == 2
    assert capsys.readouterr() == ("", f"llmserve: --plot needs matplotlib: {pip_install('plot')}\n")


def test_a_plot_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, flags in (("exact.png", "--latency-target-ms 5 --load 0.3"), ("rvi.png", "--solver rvi")):
        assert main(["solve", *flags.split(), "--json", "--plot", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    json.loads(capsys.readouterr().out.splitlines()[0])


# ---- invalid flags ----


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--load 1", "batches of 32 serve 2,958.69 per second"),
        ("--arrival-rate-per-s 4000", "4,000 requests per second are too many, a load of 1.352"),
        ("--load 0", "load"),
        ("--load 0.5 --arrival-rate-per-s 3", "arrival_rate_per_s cannot be given with load"),
        ("--latency-target-ms 5 --energy-weight 1", "energy_weight cannot be given with latency_target_ms"),
        ("--latency-target-percentile 95", "needs latency_target_ms"),
        ("--latency-target-ms 5 --solver rvi", "only the exact solver"),
        ("--profile p4-googlenet --latency-ms 1,1", "latency_ms cannot be given with profile"),
        ("--profile p4-googlent", "did you mean p4-googlenet"),
        ("--profile h100-llama-3.1-8b", "give --service samples:FILE"),
        ("--profile p4-googlenet --batch-max 64", "runs 32 sequences at once at most"),
        ("--profile p4-googlenet --batch-max 64 --service samples:LENGTHS", "runs 32 sequences at once at most"),
        ("--latency-ms 0.3", "latency_ms"),
        ("--latency-ms 0.3,fast", "latency_ms"),
        ("--latency-ms=-0.3,5 --energy-mj 1,1", "must not fall with the size"),
        ("--energy-mj 0,0 --latency-ms 1,1", "energy_mj: a curve must be positive"),
        ("--latency-ms 2,10", "latency_ms needs energy_mj"),
        ("--energy-mj 2,10", "energy_mj needs latency_ms"),
        ("--service samples:LENGTHS", "needs profile, or latency_ms and energy_mj"),
        ("--service samples:LENGTHS --latency-ms 2,10", "latency_ms needs energy_mj"),
        ("--batch-max 4097", "batch_max (the command line): expected a whole number, at least 1, at most 4096"),
        ("--solver rvi --s-max 5001", "s_max (the command line): expected a whole number, at least 1, at most 5000"),
        ("--solver rvi --s-max 5000", "s_max 5000 with batch_max 32: the transitions of 5002 states and 33 actions"),
        ("--service gaussian", "'gaussian' is not one of deterministic | erlang2"),
        ("--service samples:/nowhere.txt --profile h100-llama-3.1-8b", "no lengths file '/nowhere.txt'"),
        ("--batch-min 9 --batch-max 8", "9 is more than batch_max, 8"),
        ("--energy-weight -1", "energy_weight"),
        ("--solver rvi --batch-max 80", "s_max must be at least the largest batch, 80, not 70"),
        ("--solver rvi --overflow-cost 0", "the best policy lets the queue overflow"),
        ("--batch-maks 8", "did you mean --batch-max?"),
    ],
)
def test_invalid_flags_are_an_error_of_one_line(
    flags: str, message: str, lengths_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["solve", *flags.replace("LENGTHS", str(lengths_file)).split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_value_iteration_that_does_not_converge_is_a_failure_with_advice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = "--solver rvi --batch-max 4 --s-max 30 --epsilon 1e-300"
    assert main(["solve", *flags.split()]) == 1
    error = capsys.readouterr().err
    assert "after 10000 iterations" in error
    assert "--solver exact" in error


def test_a_queue_is_built_from_a_problem_alone() -> None:
    problem = Problem(batch_min=2, batch_max=4, load=0.5)
    queue = queue_of(problem, profile_of(problem), None)
    assert queue.service.sizes.tolist() == [2, 3, 4]
    with pytest.raises(ConfigError, match="too many"):
        queue_of(Problem(load=1.01), PROFILES["p4-googlenet"], None)
