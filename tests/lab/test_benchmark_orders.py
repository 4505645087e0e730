"""scripts/lab/questions/orders/run.py: boost against shortest with a fixed patience."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from questions.orders import run as benchmark_orders
from scipy.stats import kendalltau


def test_every_order_is_measured_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths, output, figure = tmp_path / "lengths.csv", tmp_path / "orders.json", tmp_path / "orders.png"
    lengths.write_text("tokens\n" + "\n".join(str(10 * number % 700) for number in range(400)))
    command = ["lab orders", "--lengths", f"some={lengths}:tokens", "--requests", "150", "--seeds", "2"]
    command += ["--loads", "0.95", "--taus", "0.63", "--output", str(output), "--plot", str(figure)]
    monkeypatch.setattr(sys, "argv", command)
    benchmark_orders.main()
    rows = json.loads(output.read_text())
    # Three sets of lengths, two seeds: first come, perfect, boost, four patiences; extreme forecasts under two orders.
    assert len(rows) == 3 * 2 * 9
    assert {row["order"] for row in rows} == {"fffs", "perfect", "boost", *benchmark_orders.PATIENT}
    assert figure.stat().st_size > 1_000
    printed = capsys.readouterr().out
    assert "| some | 0.95 |" in printed
    assert "extreme forecasts, tau 0.63" in printed
    monkeypatch.setattr(sys, "argv", ["lab orders", "--results", str(output)])
    benchmark_orders.main()
    assert capsys.readouterr().out.strip() in printed


@pytest.mark.parametrize("calibrated", [True, False])
def test_forecasts_have_the_rank_correlation_and_only_calibrated_ones_the_right_extremes(calibrated: bool) -> None:
    rng = np.random.default_rng(1)
    lengths = rng.lognormal(5.0, 1.0, 4_000)
    error = benchmark_orders.error_of(lengths, 0.63)
    forecast = benchmark_orders.forecast(lengths, lengths, error, rng, calibrated=calibrated)
    assert forecast.quantiles is not None
    assert kendalltau(forecast.medians, lengths).statistic == pytest.approx(0.63, abs=0.02)
    longest = forecast.medians > np.quantile(forecast.medians, 0.9)
    share = lengths[longest].mean() / forecast.quantiles[longest].mean()
    assert share == pytest.approx(1.0, abs=0.1) if calibrated else share < 0.7
