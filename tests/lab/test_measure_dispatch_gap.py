"""How far plans are from the joint optimum of two bins on one engine, at one load."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from kit.rows import Row
from questions.dispatch import gap


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script with one load and two weights, which take a second each."""
    module = gap
    module.LOADS, module.WEIGHTS = (0.3,), (0.0, 5.0)  # type: ignore[attr-defined]
    return module


@pytest.fixture(scope="module")
def rows(script: ModuleType) -> list[Row]:
    measured: list[Row] = script.measure()
    return measured


def test_the_joint_optimum_costs_no_more_than_the_plan_nor_than_greedy(rows: list[Row]) -> None:
    assert [(row["load"], row["energy_weight"]) for row in rows] == [(0.3, 0.0), (0.3, 5.0)]
    for row in rows:
        assert row["optimum_ms"] <= row["plan_ms"] * (1 + 1e-9)
        assert row["optimum_ms"] <= row["greedy_ms"] * (1 + 1e-9)


def test_the_plans_gap_is_below_6_per_cent_and_below_greedys_where_energy_counts(rows: list[Row]) -> None:
    gaps = [row["plan_ms"] / row["optimum_ms"] - 1 for row in rows]
    assert max(gaps) < 0.06
    assert rows[1]["plan_ms"] < rows[1]["greedy_ms"]


def test_the_command_prints_the_gaps_and_writes_them(
    script: ModuleType,
    rows: list[Row],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "gap.json"
    monkeypatch.setattr(script, "measure", lambda: rows)
    monkeypatch.setattr(sys, "argv", ["lab dispatch.gap", "--json", str(path)])
    script.main()
    assert json.loads(path.read_text()) == [row.record for row in rows]
    printed = capsys.readouterr().out
    for row in rows:
        assert f"{row['optimum_ms']:.1f}" in printed
        assert f"+{row['plan_ms'] / row['optimum_ms'] - 1:.2%}" in printed
