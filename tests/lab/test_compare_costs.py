"""scripts/lab/compare_costs.py: what two checkouts cost."""

from __future__ import annotations

from pathlib import Path

import compare_costs
import pytest
from kit import ROOT


def test_arrivals_and_ends_are_measured_apart_beside_the_mean_of_all_steps() -> None:
    costs = compare_costs.steps_us(ROOT, 1, 40)
    arrival, end, mean = [costs[name] for name in compare_costs.QUANTITIES if name.startswith("scheduler, ")]
    assert min(arrival, end) > 0.0
    assert mean >= 0.5 * min(arrival, end)


def test_a_checkout_without_the_benchmark_is_named_with_its_complaint(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="No module named"):
        compare_costs.steps_us(tmp_path, 1, 40)
