"""Several seeds and settings: intervals, comparisons, and processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from scipy import stats
from server_process import all_ended

from llmserve.__main__ import main
from llmserve.commands.simulate import swept
from llmserve.errors import ConfigError, LLMServeError
from llmserve.simulation.estimates import Estimate, Repeated, estimate, student_quantile
from llmserve.simulation.many import in_processes

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "simulate --requests 300 --barrier --bins 2 --load 0.5"


def run_command(capsys: pytest.CaptureFixture[str], flags: str) -> object:
    assert main([*COMMAND.split(), *flags.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# ---- intervals ----


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 9, 10, 99])
@pytest.mark.parametrize("level", [0.9, 0.975, 0.995])
def test_the_quantile_is_students(degrees: int, level: float) -> None:
    assert student_quantile(degrees, level) == pytest.approx(stats.t.ppf(level, degrees), rel=1e-12)


def test_an_interval_is_students_around_the_mean() -> None:
    """For 1, 2, 3: 4.3027 times the standard error, 1 / sqrt(3)."""
    interval = estimate([1.0, 2.0, 3.0])
    assert interval.mean == 2.0
    assert interval.half_width == pytest.approx(4.3027 / np.sqrt(3), rel=1e-4)
    assert interval.low == pytest.approx(2.0 - interval.half_width)
    assert estimate([7.0]) == Estimate(7.0, None, None), "a single run has no interval"


@pytest.mark.parametrize(
    ("mean", "half_width", "text"),
    [(4.33123, 0.2441, "4.331 ± 0.24"), (242.31, 112.4, "242.3 ± 112"), (31_104.9, 20.4, "31,105 ± 20")],
)
def test_an_interval_is_written_in_plain_numbers(mean: float, half_width: float, text: str) -> None:
    interval = Estimate(mean, mean - half_width, mean + half_width)
    assert Repeated((1, 2), {"latency_s_mean": interval}, ()).cell("latency_s_mean", ".3f") == text


def test_intervals_cover_the_mean_as_often_as_their_level() -> None:
    rng = np.random.default_rng(0)
    intervals = [estimate(values) for values in rng.normal(3.0, 2.0, (2_000, 5)).tolist()]
    covered = np.mean([interval.low < 3.0 < interval.high for interval in intervals])  # type: ignore[operator]
    assert covered == pytest.approx(0.95, abs=4 * np.sqrt(0.95 * 0.05 / 2_000))


# ---- seeds ----


def test_each_seed_gives_the_same_run_as_alone(capsys: pytest.CaptureFixture[str]) -> None:
    several = run_command(capsys, "--seeds 3 --seed 4")
    alone = [run_command(capsys, f"--seed {seed}") for seed in (4, 5, 6)]
    assert several["seeds"] == [4, 5, 6]
    assert several["runs"] == alone
    latency = several["estimates"]["latency_s_mean"]
    mean = np.mean([run["latency_s_mean"] for run in alone])
    assert latency["mean"] == pytest.approx(mean)
    assert latency["low"] < mean < latency["high"]
    assert "energy_j" not in several["estimates"]


def test_two_processes_give_the_results_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--seeds 2 --sweep bins=1,2"
    assert run_command(capsys, f"{flags} --jobs 2") == run_command(capsys, flags)


def test_a_table_of_several_seeds_has_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND.split(), "--seeds", "3"]) == 0
    output = capsys.readouterr()
    assert "3 seeds: means and 95 % confidence intervals" in " ".join(output.out.split())
    assert "±" in output.out
    assert output.err.splitlines() == [f"{number} of 3 runs are done" for number in (1, 2, 3)]


# ---- comparisons ----


def test_every_combination_of_swept_values_is_a_case(capsys: pytest.CaptureFixture[str]) -> None:
    command = "simulate --requests 300 --barrier --sweep arrival-rate=1,inf --sweep bins=1,4 --json"
    assert main(command.split()) == 0
    cases = json.loads(capsys.readouterr().out)
    assert [case["settings"] for case in cases] == [
        {"arrival_rate": rate, "bins": bins} for rate in ("1", "inf") for bins in ("1", "4")
    ]
    at_once = [case["estimates"]["throughput_per_s"]["mean"] for case in cases[2:]]
    assert at_once[1] > 1.2 * at_once[0]


def test_values_with_commas_are_separated_by_semicolons() -> None:
    assert swept(["lengths=lognormal:5,0.8;constant:7"]) == [{"lengths": "lognormal:5,0.8"}, {"lengths": "constant:7"}]
    assert swept([]) == [{}]


def test_a_comparison_is_a_table_with_a_row_per_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND.split(), "--sweep", "predictions=oracle;neighbour:2,0.3;none"]) == 0
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if line.startswith("│")]
    assert [row.split()[1] for row in rows] == ["oracle", "neighbour:2,0.3", "none"]
    assert "requests/s" in out
    assert "2 bins, batches of 8, release greedy, order fffs, 1 barrier engine" in " ".join(out.split())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--sweep lod=1,2", "unknown setting lod; did you mean load?"),
        ("--sweep load=", "FIELD=VALUE,VALUE,..."),
        ("--sweep load=0.1 --sweep load=0.2", "at most 2 different fields"),
        ("--sweep load=0.1 --sweep bins=1 --sweep slots=1", "at most 2 different fields"),
        ("--sweep bins=1,0", "bins"),
        ("--seeds 0", "seeds"),
        ("--jobs 0", "jobs"),
        ("--seeds 2 --journal j", "journal: only for a single run"),
        ("--seeds 2 --step-s 0", "no finite capacity"),
        ("--seeds 2 --jobs 2 --step-s 0", "no finite capacity"),
    ],
)
def test_invalid_flags_are_an_error_of_one_line(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND.split(), *flags.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


# ---- processes ----


def test_results_come_with_the_index_of_their_task() -> None:
    assert dict(in_processes(abs, [-3, 4, -5], 2)) == {0: 3, 1: 4, 2: 5}


def test_an_error_of_a_task_is_raised_and_leaves_no_process() -> None:
    children_before = psutil.Process().children()
    with pytest.raises(ConfigError, match="gaussian"):
        list(in_processes(_fails, [1, 2, 3], 2))
    children_left = [child for child in psutil.Process().children() if child not in children_before]
    assert all("resource_tracker" in " ".join(child.cmdline()) for child in children_left)


def _fails(number: int) -> int:
    raise ConfigError(f"gaussian {number}")


def test_a_process_that_dies_is_an_error_and_not_an_endless_wait() -> None:
    with pytest.raises(LLMServeError, match="has died"):
        list(in_processes(os._exit, [1, 1, 1], 2))


@pytest.mark.parametrize(
    ("number", "status", "message"),
    [(signal.SIGINT, 130, "llmserve: interrupted\n"), (signal.SIGKILL, -signal.SIGKILL, None)],
)
def test_an_interrupted_command_leaves_no_process(number: signal.Signals, status: int, message: str | None) -> None:
    """Ctrl-C is reported in one line; workers do not outlive a parent that was killed."""
    flags = ["simulate", "--requests", "500000", "--arrival-rate", "inf", "--seeds", "4", "--jobs", "2"]
    command = [sys.executable, "-m", "llmserve", *flags]
    # Shells make background commands ignore Ctrl-C, which children would inherit.
    heeds = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **heeds) as process:  # type: ignore[call-overload]
        children = _workers(process.pid, 2)
        process.send_signal(number)
        error = process.communicate(timeout=30)[1]
    assert len(children) == 2
    assert process.returncode == status
    assert message is None or error == message
    assert all_ended(children)


def test_a_search_that_is_killed_leaves_no_process() -> None:
    words = [sys.executable, str(ROOT / "scripts" / "worlds"), "--hours", "1", "--jobs", "2"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        children = _workers(process.pid, 2)
        process.kill()
    assert len(children) == 2
    assert all_ended(children)


def _workers(pid: int, count: int) -> list[psutil.Process]:
    """The simulating processes, once `count` of them run."""
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        workers = [child for child in psutil.Process(pid).children() if "spawn_main" in " ".join(child.cmdline())]
        if len(workers) == count and all(worker.cpu_times().user > 1.0 for worker in workers):
            return workers
        time.sleep(0.1)
    return []


def test_a_reader_that_closes_the_pipe_is_no_error() -> None:
    command = [sys.executable, "-m", "llmserve", "simulate", "--requests", "20", "--seeds", "2", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()
        assert process.wait() == 141
