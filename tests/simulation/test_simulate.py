"""The simulated body: known answers of the theory, laws of every run, and the command."""

import json
from pathlib import Path

import numpy as np
import pytest

from llmserve.__main__ import main
from llmserve.cluster import journal
from llmserve.errors import ConfigError
from llmserve.scheduling.messages import StartBatch
from llmserve.scheduling.policies import SchedulingConfig
from llmserve.simulate import Scenario, simulate
from llmserve.simulation import workload

ISSUE_COMMAND = (
    "simulate --bins 8 --batch-size 8 --arrival-rate 5 --requests 10000 --lengths lognormal:5.2,0.8 --step-s 0.01 "
    "--engines 2 --barrier --predictions oracle --seed 1"
)


def scheduling(**values: object) -> SchedulingConfig:
    return SchedulingConfig(**{"release": "full", "queue_requests_max": 10**9, **values})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bins", "throughput_per_s"), [(1, 6.4475), (2, 8.4342), (4, 9.9703), (8, 10.9692)], ids=lambda value: str(value)
)
def test_saturated_throughput_is_that_of_theorem_4_2(bins: int, throughput_per_s: float) -> None:
    """Uniform service on [1, 20], B = 128: B / E[t_service,k] of Multi-Bin's eq. 17, to the paper's own 1 %."""
    scenario = Scenario(
        requests=64_000,
        arrival_rate=np.inf,
        lengths="uniform:1,20",
        step_s=1.0,
        barrier=True,
        last_batch="drop",
        seed=3,
    )
    summary = simulate(scenario, scheduling(bins=bins, batch_size=128, edges_refit_every=0))
    assert summary.throughput_per_s == pytest.approx(throughput_per_s, rel=0.01)


def test_one_slot_with_exponential_service_is_an_m_m_1_queue() -> None:
    """Mean latency 1 / (mu - lambda) = 2 s at mu = 1, lambda = 0.5; its standard error at this size is about 1 %."""
    scenario = Scenario(requests=200_000, arrival_rate=0.5, lengths="exponential:1", step_s=1.0, slots=1, seed=5)
    summary = simulate(scenario, scheduling(bins=1, batch_size=1, release="greedy", order="fffs"))
    assert summary.latency_s_mean == pytest.approx(2.0, rel=0.04)
    assert summary.utilisation == pytest.approx(0.5, rel=0.02)


def test_one_slot_with_constant_service_is_an_m_d_1_queue() -> None:
    """Mean waiting rho / (2 mu (1 - rho)) = 0.5 s at mu = 1, lambda = 0.5 (Pollaczek-Khinchine)."""
    scenario = Scenario(requests=200_000, arrival_rate=0.5, lengths="constant:1", step_s=1.0, slots=1, seed=6)
    summary = simulate(scenario, scheduling(bins=1, batch_size=1, release="greedy"))
    assert summary.waiting_s_mean == pytest.approx(0.5, rel=0.04)


def test_littles_law_holds(tmp_path: Path) -> None:
    """Mean number present = arrival rate x mean latency, exactly, over a run that starts and ends empty."""
    path = tmp_path / "journal.jsonl"
    scenario = Scenario(requests=2_000, arrival_rate=3.0, barrier=True, engines=2, step_s=0.005, seed=2)
    summary = simulate(scenario, scheduling(bins=4), journal_path=path)
    _, steps = journal.read(path)
    scheduler = journal.read(path)[0].scheduler()
    present_s, last_s, present = 0.0, 0.0, 0
    for step in steps:
        present_s += present * (step.now_s - last_s)
        scheduler.handle(step.event, step.now_s)
        last_s, present = step.now_s, len(scheduler.requests)
    assert present_s == pytest.approx(summary.latency_s_mean * scenario.requests, rel=1e-9)


def test_same_seed_gives_the_same_journal_byte_for_byte(tmp_path: Path) -> None:
    scenario = Scenario(requests=500, barrier=True, engines=2, predictions="lognormal:0.5", seed=9)
    for name in ("a", "b"):
        simulate(scenario, scheduling(release="timeout", batch_wait_s=2.0), journal_path=tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("release", ["full", "timeout", "greedy"])
@pytest.mark.parametrize("barrier", [True, False])
def test_a_journal_replays_to_itself(tmp_path: Path, release: str, barrier: bool) -> None:
    path = tmp_path / "journal.jsonl"
    scenario = Scenario(requests=600, arrival_rate=4.0, barrier=barrier, engines=2, predictions="lognormal:0.4", seed=4)
    simulate(scenario, scheduling(release=release, batch_wait_s=1.0, edges_refit_every=50), journal_path=path)
    header, steps = journal.read(path)
    assert sum(isinstance(action, StartBatch) for step in steps for action in step.actions) > 50
    assert journal.replay(header, steps) == steps


def test_a_journal_of_other_decisions_does_not_replay(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    simulate(Scenario(requests=100, barrier=True), scheduling(batch_size=4), journal_path=path)
    header, steps = journal.read(path)
    other = journal.Header(scheduling(batch_size=5).resolved(barrier=True), header.lengths)
    assert journal.replay(other, steps) != steps


def test_a_partial_last_batch_is_flushed_or_dropped_as_asked() -> None:
    config = scheduling(bins=1, batch_size=8)
    for last_batch, completed in (("flush", 20), ("drop", 16)):
        scenario = Scenario(requests=20, arrival_rate=np.inf, barrier=True, last_batch=last_batch)  # type: ignore[arg-type]
        assert simulate(scenario, config).completed == completed


def test_timeout_release_bounds_the_wait_in_a_bin() -> None:
    scenario = Scenario(requests=300, arrival_rate=0.5, lengths="constant:1", step_s=0.001, engines=4, barrier=True)
    summary = simulate(scenario, scheduling(release="timeout", batch_wait_s=3.0, batch_size=64))
    assert 2.0 < summary.waiting_s_p99 <= 3.0 + 1e-9


def test_bins_gain_on_a_barrier_engine_and_cost_nothing_on_a_refill_engine() -> None:
    def throughput(bins: int, barrier: bool) -> float:
        scenario = Scenario(requests=4_000, arrival_rate=np.inf, barrier=barrier, seed=1)
        return simulate(scenario, scheduling(bins=bins)).throughput_per_s

    assert throughput(8, True) > 1.5 * throughput(1, True)
    assert throughput(8, False) > 0.98 * throughput(1, False)


# ---- the command ----


def test_the_command_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ISSUE_COMMAND.split(), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["completed"] == 10_000
    for key in ("throughput_per_s", "latency_s_mean", "latency_s_p50", "latency_s_p95", "latency_s_p99", "elapsed_s"):
        assert summary[key] > 0
    assert 0 < summary["batch_fill_mean"] <= 1
    assert 0 < summary["utilisation"] <= 1


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ISSUE_COMMAND.split()) == 0
    out = capsys.readouterr().out
    assert "requests/s" in out
    assert "waiting (s)" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lengths gaussian:3", "'gaussian:3' is not one of"),
        ("--lengths uniform:9,3", "LO <= HI"),
        ("--lengths lognormal:5.2", "is not one of"),
        ("--lengths lognormal:5.2,-1", "SIGMA at least 0"),
        ("--lengths constant:-5", "above 0"),
        ("--predictions lognormal:nan", "is not one of"),
        ("--batch-wait-s inf", "finite"),
        ("--edges 10,nan --bins 3", "finite"),
        ("--lengths file:/nowhere.csv", "no lengths file"),
        ("--predictions psychic", "'psychic' is not one of"),
        ("--arrival-rate 0", "arrival_rate"),
        ("--bins 0", "bins"),
        ("--batch-size 0", "batch_size"),
        ("--requests 0", "requests"),
        ("--edges 5,5 --bins 3", "strictly increasing"),
        ("--batch-sise 4", "did you mean --batch-size?"),
    ],
)
def test_what_makes_no_sense_is_said_in_one_line(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--requests", "10", *flags.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


# ---- workloads ----


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


def test_poisson_arrivals_have_their_rate_and_infinite_means_all_at_once() -> None:
    arrivals_s = workload.poisson_arrivals(4.0, 40_000, np.random.default_rng(0))
    assert arrivals_s[-1] == pytest.approx(10_000, rel=0.02)
    assert np.diff(arrivals_s).std() == pytest.approx(0.25, rel=0.03)
    assert not workload.poisson_arrivals(np.inf, 5, np.random.default_rng(0)).any()
