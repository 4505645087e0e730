"""The twin replays what happened, and what would have happened under other orders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from llmserve import __main__ as command
from llmserve.commands.simulate import Scenario, simulate
from llmserve.errors import ConfigError
from llmserve.live.journal import read
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.twin import replay
from llmserve.simulation.twin.choice import P99_BOUND, SURE, choose, sure_of
from llmserve.simulation.twin.past import Past, Recording
from llmserve.simulation.twin.replay import Twin

SCENARIO = Scenario(
    requests=1_500, load=0.95, lengths="lognormal:5,1.5", predictions="quantiles:0.6", slots=8, prefill_s=0.05
)


@pytest.fixture(autouse=True)
def shorter_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "REPLAYED", 1_600)


def recorded(path: Path, scenario: Scenario = SCENARIO, **settings: object) -> Recording:
    simulate(scenario, SchedulingConfig(**settings), journal_path=path)  # type: ignore[arg-type]
    header, steps = read(path)
    return Past(header).read(steps).recording()


@pytest.mark.parametrize("settings", [{}, {"order": "fffs"}, {"patience": 120.0}])
def test_a_replay_under_the_journals_own_order_gives_the_journals_latencies(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    recording = recorded(tmp_path / "j", **settings)
    twin = Twin(recording, least=0)
    outcome = twin.replay(twin.present)
    observed_s = np.array([(request.ended_s or 0.0) - request.arrived_s for request in recording.requests])
    assert outcome.latency_s.mean() == pytest.approx(observed_s.mean(), rel=0.02)


def test_a_replay_under_another_order_gives_the_latencies_of_a_run_under_it(tmp_path: Path) -> None:
    recording = recorded(tmp_path / "a", order="fffs")
    shortest = recorded(tmp_path / "b", order="shortest", patience=120.0)
    outcome = Twin(recording, least=0).replay({"order": "shortest", "patience": 120.0})
    real_s = np.array([(request.ended_s or 0.0) - request.arrived_s for request in shortest.requests])
    assert outcome.latency_s.mean() == pytest.approx(real_s.mean(), rel=0.05)


def test_batches_of_a_barrier_engine_are_replayed_and_other_releases_are_candidates(tmp_path: Path) -> None:
    scenario = Scenario(requests=800, load=0.9, lengths="lognormal:5,1", barrier=True)
    recording = recorded(tmp_path / "j", scenario)
    twin = Twin(recording, least=0)
    assert twin.replay(twin.present).latency_s.mean() == pytest.approx(twin.observed_mean_s, rel=0.02)
    one_bin = {"order": "fffs", "release": "greedy", "bins": 1}
    assert one_bin in twin.candidates()
    assert twin.replay(one_bin).latency_s.mean() > 1.2 * twin.observed_mean_s, "batches of mixed lengths take longer"


def test_the_choice_keeps_the_p99_within_its_bound(tmp_path: Path) -> None:
    twin = Twin(recorded(tmp_path / "j"))
    choice = choose(twin, "mean", twin.candidates(), left_out={})
    best = choice.rows[choice.best]
    assert best.p99 <= P99_BOUND
    assert best.mean == min(row.mean for row in choice.rows if row.is_safe)
    assert best.sure >= SURE
    assert choice.rows[0].mean == choice.rows[0].p99 == 1.0
    assert (choice.recorded, choice.requests) == (1_500, 1_600)


def test_a_bound_that_holds_by_little_is_not_sure_to_hold() -> None:
    rng = np.random.default_rng(1)
    first_s, like_s = rng.exponential(size=(2, 5_000))
    sure = {ratio: sure_of(ratio * like_s, first_s, 5_000) for ratio in (0.8, 1.10, 1.5)}
    assert sure[0.8] > 0.95
    assert 0.1 < sure[1.10] < 0.9
    assert sure[1.5] < 0.05
    assert sure_of(1.09 * first_s, first_s, 5_000) == 1.0, "requests that take the same share more are sure to do so"


def test_what_is_repeated_makes_nothing_surer() -> None:
    rng = np.random.default_rng(2)
    first_s, like_s = np.tile(rng.exponential(size=(2, 200)), 25)
    ratio = 0.9 * np.nanpercentile(first_s, 99) / np.nanpercentile(like_s, 99)
    assert sure_of(ratio * like_s, first_s, 200) < sure_of(ratio * like_s, first_s, 5_000)


def test_bursts_are_resampled_as_wholes() -> None:
    rng = np.random.default_rng(3)
    first_s = rng.exponential(size=5_000)
    like_s, scattered_s = first_s.copy(), first_s.copy()
    like_s[1_000:1_060] += 20.0
    scattered_s[rng.choice(5_000, 60, replace=False)] += 20.0
    assert sure_of(scattered_s, first_s, 5_000) < 0.2 < sure_of(like_s, first_s, 5_000) < 0.6


def test_a_present_order_above_the_bound_is_undone(tmp_path: Path) -> None:
    scenario = Scenario(requests=3_000, load=0.97, lengths="lognormal:5,0.8", predictions="quantiles:0.6", slots=8)
    twin = Twin(recorded(tmp_path / "j", scenario, patience=400.0))
    choice = choose(twin, "mean", twin.candidates(), left_out={})
    assert choice.rows[choice.present].p99 > P99_BOUND
    assert choice.take == choice.best != choice.present
    assert "exceeds the bound" in choice.reason


def test_goals_that_the_journal_does_not_show_are_an_error(tmp_path: Path) -> None:
    twin = Twin(recorded(tmp_path / "j"), least=0)
    with pytest.raises(ConfigError, match="no request had a deadline"):
        choose(twin, "deadlines", twin.candidates(), left_out={})
    with pytest.raises(ConfigError, match="--profile"):
        choose(twin, "energy", twin.candidates(), left_out={})


# ---- the command ----------------------------------------------------------------------------------------------------


def run(*words: str) -> int:
    return command.main(["tune", *words])


def test_the_command_prints_every_candidate_and_what_it_would_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(tmp_path / "j")
    assert run("--journal", str(tmp_path / "j"), "--plot", str(tmp_path / "f.png")) == 0
    printed = capsys.readouterr().out
    assert "shortest patience 120" in printed
    assert "in force" in printed
    assert "It would" in printed
    assert "llmserve serve --order" in printed
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path / "j")
    assert run("--journal", str(tmp_path / "j"), "--for", "p99", "--json") == 0
    choice = json.loads(capsys.readouterr().out)
    assert choice["goal"] == "p99"
    assert choice["rows"][0]["settings"] == {"order": "fffs"}


def test_energy_is_a_goal_with_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path / "j")
    words = ("--for", "energy", "--profile", "h100-llama-3.1-8b", "--json")
    assert run("--journal", str(tmp_path / "j"), *words) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["goal"] == 1.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--journal", "/nowhere/j"), "cannot read the journal"),
        (("--minutes", "0.001"), "answers in that time"),
        (("--for", "deadlines"), "no request had a deadline"),
        (("--profile", "nosuch"), "profile"),
    ],
)
def test_errors_of_the_command_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    recorded(tmp_path / "j")
    journal = () if "--journal" in words else ("--journal", str(tmp_path / "j"))
    assert run(*journal, *words) in (1, 2)
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
