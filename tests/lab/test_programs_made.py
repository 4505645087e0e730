"""Worlds of programs that the laboratory makes: the simulator reads them, and they have the said percentiles."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from make import programs

from llmserve.simulation.programs import World, read_sessions


def made(path: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> Path:
    monkeypatch.setattr(sys, "argv", ["programs", "--output", str(path), *flags])
    programs.main()
    return path


def test_the_simulator_reads_a_world_with_sub_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made(tmp_path / "world.jsonl.gz", monkeypatch, "--sessions", "40", "--subagents", "0.3")
    sessions = read_sessions(str(path))
    assert [session.kind == "chat" for session in sessions].count(True) == 40
    assert any(step.sessions for session in sessions for turn in session.turns for step in turn.steps)
    assert all(sum([tokens for _, tokens in asked.text]) <= 120_000 for asked in World(sessions).asked)


def test_steps_and_tokens_have_their_percentiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = read_sessions(str(made(tmp_path / "world.jsonl", monkeypatch, "--sessions", "1000")))
    turns = [turn for session in sessions if session.kind != "chat" for turn in session.turns]
    steps = [len(turn.steps) for turn in turns]
    outputs = [step.output_tokens for turn in turns for step in turn.steps]
    assert 3 <= np.percentile(steps, 50) <= 5
    assert 14 <= np.percentile(steps, 90) <= 22
    assert np.percentile(outputs, 50) == pytest.approx(212, rel=0.1)
    gaps_s = [session.arrival_s for session in sessions]
    assert len(sessions) / gaps_s[-1] == pytest.approx(0.08, rel=0.1)


def test_the_same_seed_makes_the_same_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (made(tmp_path / name, monkeypatch, "--sessions", "5").read_text() for name in ("one", "two"))
    assert one == two
    assert json.loads(one.splitlines()[0])["session"] == "s0"
