"""scripts/lab/questions/performance/stalls.py: no step of the scheduler walks all waiting requests."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from questions.performance import stalls
from questions.performance.scheduler import Case

FEW, MANY = 1_200, 4_000
CALLS = 8_000  # of a step, which take some 2 ms: fewer than two for each of the many
SHARES_COUNT = ("boost, release window", "flex", "clockwork")  # where a step asks or deals between all shares
SETUPS = {case.name: case for case in stalls.setups(FEW) if case.shares > 1 and not case.name.startswith(SHARES_COUNT)}


def of_size(case: Case, queued: int) -> Case:
    return Case(case.name, case.settings, case.engines, queued, slo_s=case.slo_s, shares=case.shares)


@pytest.mark.parametrize("name", SETUPS)
def test_no_kind_of_step_calls_more_functions_where_more_requests_wait(name: str) -> None:
    few, many = [stalls.calls(of_size(SETUPS[name], queued)) for queued in (FEW, MANY)]
    grown = {kind: (few[kind], called) for kind, called in many.items() if called > max(CALLS, 2 * few[kind])}
    assert grown == {}


def test_the_longest_step_of_each_kind_is_shown_and_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "stalls.json"
    words = ["--queued", "60", "--rounds", "2", "--only", "boost, 1 shares", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["lab performance.stalls", *words])
    stalls.main()
    steps = json.loads(output.read_text())["steps"]
    assert {"arrivals and ends", "another order"} <= {step["kind"] for step in steps}
    assert all(step["ms"] > 0.0 and step["calls"] > 0 for step in steps)
    assert "arrivals and ends" in capsys.readouterr().out
