"""scripts/artefact: it goes on where it was, and says what agrees."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from campaigns import artefact
from campaigns.artefact import Done, Part, beside, parts, run_all, summary
from kit import ROOT
from papers.rows import Row, Rows


def arguments(**chosen: Any) -> argparse.Namespace:
    defaults = {"only": None, "quick": False, "gsm8k": None, "trace": None, "output_folder": Path("/tmp/made")}
    return argparse.Namespace(**{**defaults, **chosen})


def test_every_paper_that_can_be_reproduced_is_a_part() -> None:
    from reproduce import REPRODUCTIONS

    assert {*artefact.PARTS} == {*REPRODUCTIONS, "algorithms"}


def test_the_whole_takes_about_an_hour_as_measured() -> None:
    assert 40 * 60 < sum(part.expected_s for part in parts(arguments())) < 70 * 60
    assert sum(part.expected_s for part in parts(arguments(quick=True))) < 7 * 60


def test_a_file_goes_to_the_part_that_takes_it() -> None:
    made = {part.name: part.command for part in parts(arguments(trace=Path("calls.csv"), gsm8k=Path("answers.jsonl")))}
    assert [name for name, words in made.items() if "calls.csv" in words] == ["shepherd"]
    assert [name for name, words in made.items() if "answers.jsonl" in words] == ["multibin"]


def touching(name: str, file: Path, status: int = 0) -> Part:
    """A part that adds a line to a file."""
    code = f"import sys; open(sys.argv[1], 'a').write('{name}\\n'); sys.exit({status})"
    return Part(name, [sys.executable, "-c", code, str(file)], 1.0)


def test_a_run_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ran"
    good, bad = touching("good", file), touching("bad", file, status=1)
    assert [one.ok for one in run_all([good, bad], tmp_path, again=False).values()] == [True, False]
    run_all([good, bad], tmp_path, again=False)
    assert file.read_text().split() == ["good", "bad", "bad"]
    assert "good: done before" in capsys.readouterr().err
    run_all([good], tmp_path, again=True)
    assert file.read_text().split()[-1] == "good"


def test_another_command_runs_the_part_again(tmp_path: Path) -> None:
    file = tmp_path / "ran"
    run_all([touching("one", file)], tmp_path, again=False)
    run_all([Part("one", touching("other", file).command, 1.0)], tmp_path, again=False)
    assert file.read_text().split() == ["one", "other"]


def test_numbers_that_differ_from_the_committed_ones_are_named() -> None:
    before = Rows([Row("Fig. 1", {"k": 2}, "throughput", "1/s", 100.0), Row("Fig. 2", {}, "gone", "", 1.0)])
    made = Rows([Row("Fig. 1", {"k": 2}, "throughput", "1/s", 102.0), Row("Fig. 3", {}, "new", "", 1.0)])
    assert beside(made, before) == (0, 1, ["Fig. 1, k=2, throughput: 102 for 100"])
    assert beside(before, before) == (2, 2, [])


def test_the_summary_has_what_agrees_and_what_failed(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    rows = json.loads((ROOT / "docs" / "results" / "smdp.json").read_text())
    (tmp_path / "results" / "smdp.json").write_text(json.dumps(rows))
    done = {"smdp": Done([], 300.0, True), "shepherd": Done([], 5.0, False), "algorithms": Done([], 50.0, True)}
    text = summary(done, tmp_path, quick=False)
    assert "89 of 93 published" in text
    assert "| shepherd | 5 s | **failed** |" in text
    assert "differ from those of docs/" not in text
