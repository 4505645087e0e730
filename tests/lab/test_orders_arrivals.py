"""scripts/lab/questions/orders/arrivals.py: boost under arrivals that are not Poisson."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from questions.orders import arrivals, limits
from questions.orders.run import forecast, scheduling

from llmserve.commands.simulate import run
from llmserve.scheduling import load
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
    command += ["--slots", "4", "8", "--taus", "0.65", "--forecasts", "calibrated"]
    monkeypatch.setattr(sys, "argv", [*command, "--output", str(output)])
    arrivals.main()
    monkeypatch.setattr(sys, "argv", ["lab", "--results", str(output), "--before", str(output)])
    arrivals.main()
    printed = capsys.readouterr().out
    assert "| bimodal | batches | 8 | calibrated, tau 0.65 | 1.00 | " in printed
    assert "| batches | 2 | 1.00, 1.00 | " in printed
    assert "The mean is above 1.05 of before's in 0 of 2 Poisson cells" in printed


@pytest.mark.parametrize("names", [9, 10])
def test_a_part_of_the_cells_has_each_value_of_each_flag_about_equally_often(names: int) -> None:
    args = argparse.Namespace(
        slots=[4, 8, 32, 128],
        taus=[0.2, 0.5, 0.65],
        forecasts=["calibrated", "extreme"],
        every=25,
        first_seed=0,
        seeds=1,
    )
    cases = list(arrivals.cases_of(args, map(str, range(names)), map(str, range(14))))
    assert len(cases) == math.ceil(names * 14 * 24 / 25)
    for flag, values in (("name", names), ("arrivals", 14), ("slots", 4), ("tau", 3), ("forecasts", 2)):
        counts = Counter(case[flag] for case in cases).values()
        assert len(counts) == values
        assert max(counts) <= 1.3 * min(counts)


def test_what_the_bounds_cost_is_measured_with_other_bounds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (load.SPENT, load.LONGEST)
    command = ["lab", "--only", "bimodal", "--requests", "300", "--seeds", "1"]
    monkeypatch.setattr(sys, "argv", command)
    limits.main()
    waits = dict(re.findall(r"\| bimodal \| 0.5% \| (\S+) \| .* \| (\S+) \|", capsys.readouterr().out))
    assert float(waits["10"]) > float(waits[f"{load.LONGEST:g}"])
    assert before == (load.SPENT, load.LONGEST)
