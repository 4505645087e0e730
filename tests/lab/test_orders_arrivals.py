"""scripts/lab/questions/orders/arrivals.py: boost under arrivals that are not Poisson."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from questions.orders import arrivals
from questions.orders.run import forecast, scheduling

from llmserve.commands.simulate import run
from llmserve.simulation import workload
from llmserve.simulation.report import Recorder
from llmserve.simulation.scenario import STEP_S, Scenario, Workload


@pytest.mark.parametrize(("name", "arrival"), arrivals.kinds().items())
def test_each_kind_of_arrivals_has_its_load(name: str, arrival: arrivals.Arrivals) -> None:
    load = {"batches": 0.9, "MMPP": 0.85, "stretch": 0.86, "steps": 0.85, "day, 2,000": 0.9, "day, 10,000": 0.9}
    times_s = arrival(40_000, 2.0, np.random.default_rng(3))
    assert np.all(np.diff(times_s) >= 0.0)
    assert 40_000 * 2.0 / times_s[-1] == pytest.approx(load.get(name) or float(name.split()[-1]), rel=0.1)


def test_first_come_first_served_is_what_the_scheduler_serves_under_fffs() -> None:
    rng = np.random.default_rng(5)
    times_s, tokens = arrivals.batches(600, 0.25, rng), rng.lognormal(4.5, 1.0, 600)
    recorder, trace = Recorder(600), workload.Trace(times_s, tokens, np.zeros(600))
    run(Scenario(slots=4), scheduling("fffs"), Workload(trace, None, (), (), 4.0), recorder=recorder)
    waits_s = np.array(recorder.ended_s) - STEP_S * tokens - times_s
    assert arrivals.first_come_waits(times_s, STEP_S * tokens, 4) == pytest.approx(waits_s, abs=1e-6)


def test_of_blind_forecasts_the_longest_answers_have_the_shortest() -> None:
    rng = np.random.default_rng(7)
    lengths = rng.lognormal(5.0, 1.0, 2_000)
    seen = forecast(lengths, lengths, 0.5, rng, calibrated=True)
    blind = arrivals.blinded(seen, lengths)
    longest = lengths >= np.quantile(lengths, 1.0 - arrivals.BLIND)
    assert blind.medians[longest].max() < np.quantile(seen.medians, 2 * arrivals.BLIND)
    assert np.array_equal(blind.medians[~longest], seen.medians[~longest])


def test_results_are_compared_with_those_of_another_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "arrivals.json"
    command = ["lab", "--only", "bimodal", "batches", "Poisson 0.97", "--requests", "300", "--seeds", "2"]
    monkeypatch.setattr(sys, "argv", [*command, "--output", str(output)])
    arrivals.main()
    monkeypatch.setattr(sys, "argv", ["lab", "--results", str(output), "--before", str(output)])
    arrivals.main()
    printed = capsys.readouterr().out
    assert "| batches | " in printed
    assert "The mean is above 1.05 of before's in 0 of 1 Poisson cells (mean 1.000)" in printed
