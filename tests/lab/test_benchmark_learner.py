"""The benchmark of what a server learns: its figures are those of `llmserve evaluate --online`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from questions.prediction import learner

import predictor
from llmserve.__main__ import main

WORDS = ("apples", "pears", "plums", "figs", "dates", "limes", "nuts", "kale", "rice", "corn")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return learner


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Answers to lists are long, answers to questions short; a second model answers twice as long."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(300):
        words, is_list, twice = " ".join(rng.choice(WORDS, 4)), rng.random() < 0.5, rng.random() < 0.5
        tokens = (120 if is_list else 12) * (2 if twice else 1) * rng.lognormal(0, 0.2)
        text = f"{words}: {'write a long list' if is_list else 'which is shorter'}, {number}"
        rows.append({"prompt": text, "model": "b" if twice else "a", "tokens": max(1, int(tokens))})
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"{path}:tokens"


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, output: Path, *words: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["lab prediction.learner", "--output", str(output), *words])
    script.main()
    result = json.loads(output.read_text())
    assert isinstance(result, dict)
    return result


def test_the_figures_are_those_of_the_online_evaluation_over_the_seeds(
    script: ModuleType, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(script, monkeypatch, tmp_path / "learner.json", "--set", f"lists={data}", "--seeds", "2")
    capsys.readouterr()
    taus = []
    for seed in ("0", "1"):
        assert main(["evaluate", "--online", "--data", data, "--shuffle", seed, "--json"]) == 0
        taus.append([scored["tau"] for scored in json.loads(capsys.readouterr().out)["ranges"]])
    (part,) = result["sets"]
    assert (part["name"], part["rows"], part["models"]) == ("lists", 300, 2)
    ranges = part["ways"]["learner"]["ranges"]
    assert [scored["tau"] for scored in ranges] == pytest.approx(np.mean(taus, axis=0), rel=1e-5)
    assert [scored["tau_min"] for scored in ranges] == pytest.approx(np.min(taus, axis=0), rel=1e-5)
    assert ranges[-1]["tau"] > 0.4 > part["ways"]["prompt length"]["ranges"][-1]["tau"]
    assert (
        part["ways"]["learner"]["share_of_oracles_gain"] > 0.5 > part["ways"]["prompt length"]["share_of_oracles_gain"]
    )
    cost = result["costs"]["learner"]
    assert 0 < cost["both_us"]["median"] <= cost["both_us"]["p99"] <= cost["both_us"]["max"]
    assert 0 < cost["memory_mib"] < 64


def test_a_predictor_and_a_new_model_are_measured_where_they_are_asked_for(
    script: ModuleType, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--set", f"lists={data}", "--seeds", "1", "--predictor", f"lists={predictor.DEMO}", "--new-model", "lists"]
    result = run(script, monkeypatch, tmp_path / "learner.json", *words)
    ways = result["sets"][0]["ways"]
    assert list(ways) == [
        *(
            "learner",
            "learner, 64 in flight",
            "templates alone",
            "prompt length",
            "predictor alone",
            "predictor and learner",
        ),
    ]
    assert ways["predictor and learner"]["ranges"][-1]["tau"] > ways["predictor alone"]["ranges"][-1]["tau"]
    assert list(result["costs"]) == ["learner", "predictor and learner"]
    known, unknown = result["new_model"]
    assert (known["prompts_known"], unknown["prompts_known"]) == (True, False)
    assert known["tau"] > 0.3
    assert "A new model after" in capsys.readouterr().out


def test_results_are_shown_and_drawn_again(
    script: ModuleType, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(script, monkeypatch, tmp_path / "a.json", "--set", f"lists={data}", "--seeds", "1")
    printed = capsys.readouterr().out
    words = ["--results", str(tmp_path / "a.json"), "--plot", str(tmp_path / "learner.png")]
    assert run(script, monkeypatch, tmp_path / "b.json", *words) == result
    assert capsys.readouterr().out == printed
    assert (tmp_path / "learner.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "either --set or --results is needed"),
        (["--set", "lists"], "'lists' is not NAME=..."),
        (["--set", "lists=absent.jsonl", "--new-model", "list"], "no --set has the name 'list'"),
    ],
)
def test_wrong_flags_are_refused(
    words: list[str],
    message: str,
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(script, monkeypatch, tmp_path / "x.json", *words)
    assert message in capsys.readouterr().err
