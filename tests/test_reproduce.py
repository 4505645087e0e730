"""scripts/reproduce.py: its rows, its pages, and a few cells of the papers' tables, from a quick run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SCRIPTS = str(Path(__file__).resolve().parents[1] / "scripts")
KEYS = {
    *("figure", "case", "quantity", "unit", "published", "measured", "low", "high", "note"),
    *("expected", "kind", "tolerance", "ok"),
}

sys.path.insert(0, SCRIPTS)  # as when a script is run
import reproduce  # noqa: E402
from reproduction import page  # noqa: E402
from reproduction.batchmonitor.measure import (  # noqa: E402
    BASIC,
    DEADLINE_S,
    after_warm_up,
    preferred_size,
    ramp,
    write_trace,
)
from reproduction.rows import KINDS, Curve, Row, Rows, claim  # noqa: E402
from reproduction.smdp.policies import CASE_LOADS, CASE_WEIGHTS, control_limit, exceptions  # noqa: E402

sys.path.remove(SCRIPTS)

from bins.profile import PROFILES  # noqa: E402
from llmserve.scheduling.policies import SchedulingConfig  # noqa: E402
from llmserve.simulate import Scenario, simulate  # noqa: E402


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What both quick runs write."""
    folder = tmp_path_factory.mktemp("docs")
    for name in reproduce.REPRODUCTIONS:
        reproduce.main([name, "--quick", "--output-folder", str(folder)])
    return folder


def records(folder: Path, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "results" / f"{name}.json").read_text())
    return found


def record(folder: Path, name: str, figure: str, case: str, quantity: str) -> dict[str, Any]:
    (found,) = [
        each
        for each in records(folder, name)
        if (each["figure"], each["case"], each["quantity"]) == (figure, case, quantity)
    ]
    return found


# ---- what is written --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(reproduce.REPRODUCTIONS))
def test_every_row_has_a_number_or_a_curve_and_its_interval_holds_it(written: Path, name: str) -> None:
    found = records(written, name)
    assert len(found) > 20
    for each in found:
        assert set(each) - {"curve"} == KEYS
        assert (each["measured"] is None) == ("curve" in each), each
        assert (each["low"] is None) == (each["high"] is None)
        if each["low"] is not None:
            assert each["low"] <= each["measured"] <= each["high"], each
        assert (each["ok"] is None) == (each["expected"] is None) == (each["kind"] is None), each


@pytest.mark.parametrize("name", list(reproduce.REPRODUCTIONS))
def test_no_two_rows_say_the_same(written: Path, name: str) -> None:
    named = [(each["figure"], each["case"], each["quantity"]) for each in records(written, name)]
    assert len(named) == len(set(named))


@pytest.mark.parametrize("name", list(reproduce.REPRODUCTIONS))
def test_a_page_says_how_it_was_made_and_shows_every_figure(written: Path, name: str) -> None:
    text = (written / f"reproduce-{name}.md").read_text()
    assert f"    python scripts/reproduce.py {name} --quick --output-folder {written}\n" in text
    assert "seed 1" in text
    figures = sorted(path.name for path in written.glob(f"{name}-*.png"))
    assert figures
    assert all(f"({figure})" in text for figure in figures)
    assert all((written / figure).stat().st_size > 5_000 for figure in figures)


def test_without_a_name_the_names_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    reproduce.main([])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["smdp", "batchmonitor"]


@pytest.mark.parametrize("name", list(reproduce.REPRODUCTIONS))
def test_a_page_counts_each_kind_of_comparison_apart(written: Path, name: str) -> None:
    text = (written / f"reproduce-{name}.md").read_text()
    found = [each for each in records(written, name) if each["kind"] is not None]
    assert found
    for kind in {each["kind"] for each in found}:
        agree = [each["ok"] for each in found if each["kind"] == kind]
        assert f"| {kind} | {KINDS[kind]} | {len(agree)} | {sum(agree)} |" in text


def test_a_quick_run_writes_only_where_it_is_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        reproduce.main(["smdp", "--quick"])
    assert "--quick needs --output-folder" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "library"), [("smdp", "matplotlib"), ("batchmonitor", "scipy")])
def test_a_missing_library_is_named_with_the_extra_that_has_it(name: str, library: str, tmp_path: Path) -> None:
    program = f"import sys; sys.path.insert(0, {SCRIPTS!r}); sys.modules[{library!r}] = None; import reproduce; "
    program += f"reproduce.main([{name!r}, '--quick', '--output-folder', {str(tmp_path / 'docs')!r}])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"needs {library}" in done.stderr
    assert done.stderr.strip().endswith("pip install '.[train]'")
    assert not (tmp_path / "docs").exists()


def test_a_number_beyond_its_tolerance_is_shown_as_such() -> None:
    rows = [
        Row("Table I", {"rho": 0.5}, "average cost g", "ms", 38.9, 38.86, 1e-4),
        Row("Table I", {"rho": 0.9}, "average cost g", "ms", 66.1374, 66.1374, 1e-4),
    ]
    assert [row.ok for row in rows] == [False, True]
    assert "| rho=0.5 | average cost g (ms) | 38.86 | published | 38.9 | +0.1 % | **no** |" in page.table(rows)


def test_rows_are_counted_by_what_they_are_compared_with() -> None:
    rows = Rows(
        [
            Row("Table I", {}, "g", "ms", 38.9, 38.86),
            claim("Table I", {}, "g rises", True),
            Row("Fig. 3", {}, "control limit Q", "", 8, 8, 0.0, kind="computed"),
            Row("Fig. 2", {}, "latency", "ms", 7.3, 7.3, kind="fitted"),
            Row("Fig. 2", {}, "power", "W", 40.0),
        ]
    )
    assert rows.counts() == {"published": (1, 2), "computed": (1, 1), "fitted": (1, 1)}


def test_a_simulated_number_may_differ_by_what_two_simulations_do() -> None:
    near = Row("Fig. 6", {}, "percentile", "ms", 11.45, 11.34, 0.0, low=11.25, high=11.65)
    far = Row("Fig. 6", {}, "percentile", "ms", 11.45, 11.10, 0.0, low=11.25, high=11.65)
    assert (near.ok, far.ok) == (True, False)


def test_a_statement_that_does_not_hold_is_not_ok() -> None:
    assert claim("Fig. 5", {}, "nothing is better", True).ok
    assert claim("Fig. 5", {}, "nothing is better", False).ok is False


def test_rows_are_found_by_their_case_and_a_missing_one_is_an_error() -> None:
    rows = Rows([Row("Fig. 4", {"rho": 0.1, "policy": "smdp"}, "W", "ms", None, curve=Curve.of("w2", [0, 1], [2, 3]))])
    assert rows.curve("Fig. 4", "W", rho=0.1).value(1.0) == 3.0
    with pytest.raises(LookupError, match=r"0 rows of 'W' in 'Fig\. 4'"):
        rows.number("Fig. 4", "W", rho=0.3)
    with pytest.raises(LookupError, match="is a curve"):
        rows.number("Fig. 4", "W", rho=0.1)


# ---- SMDP -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("figure", "case", "quantity", "measured", "tolerance"),
    [
        ("Table I", "policy=smdp w2=1.6", "mean power P", 44.955, 1e-4),
        ("Table I", "policy=static 8", "mean response time W", 6.852, 1e-4),
        ("Table II", "c_o=100", "least s_max", 70, 0),
        ("Table II", "c_o=10000", "iterations", 1846, 0),
        ("Table II", "c_o=1000", "Delta", 9.78e-4, 1e-3),
        ("Table III", "policy=greedy", "average cost g", 42.53, 1e-4),
        ("Fig. 10", "rho=0.9, w2=1", "g of the infinite queue", 66.1374, 1e-4),
        ("Fig. 5", "policy=static 8", "unstable from rho", 0.774, 1e-4),
        ("Fig. 5", "rho=0.3, below=5 ms", "W of the least power", 4.88, 1e-3),
        ("Fig. 5", "rho=0.3, below=5 ms", "least w2 with this W", 1.006, 1e-3),
        ("Fig. 5", "rho=0.3, below=5 ms", "greatest w2 with this W", 1.503, 1e-3),
        ("Thresholds", "service=exponential", "best single threshold above the optimum, at most", 8.10, 1e-2),
    ],
)
def test_smdp_cells_are_the_published_ones(
    written: Path, figure: str, case: str, quantity: str, measured: float, tolerance: float
) -> None:
    found = record(written, "smdp", figure, case, quantity)["measured"]
    assert found == pytest.approx(measured, rel=tolerance, abs=0)


def test_proposition_4_agrees_with_every_policy_of_cases_2_and_3(written: Path) -> None:
    limits = [
        each
        for each in records(written, "smdp")
        if each["quantity"] == "control limit Q" and each["kind"] == "computed"
    ]
    assert len(limits) == 2 * len(CASE_LOADS) * len(CASE_WEIGHTS)
    assert all(each["ok"] for each in limits)


def test_control_limit_waits_for_full_batches_where_energy_is_dear_and_for_nothing_where_service_is_fast() -> None:
    assert control_limit(1.0, 2.4252, 8, fixed_mj=19.603, energy_weight=100.0) == 8
    assert control_limit(0.001, 2.4252, 8, fixed_mj=19.603, energy_weight=0.0) == 1


def test_exceptions_to_a_control_limit_are_counted_by_state() -> None:
    assert exceptions(np.array([0, 0, 2, 3, 4, 4]), batch_max=4) == 0
    assert exceptions(np.array([0, 1, 0, 0, 4, 4]), batch_max=4) == 2  # waits again
    assert exceptions(np.array([0, 1, 2, 2, 3, 4]), batch_max=4) == 2  # serves fewer than fit


# ---- BatchMonitor -----------------------------------------------------------------------------------------------


def test_a_ramp_has_as_many_arrivals_as_its_rate_says_and_they_become_more() -> None:
    arrivals_s = ramp(np.random.default_rng(7), 300.0)
    expected = (1 + 240) / 2 * 300
    assert abs(arrivals_s.size - expected) < 4 * np.sqrt(expected)
    last = np.count_nonzero(arrivals_s > 290)  # 10 s at a mean of 236
    assert abs(last - 2360) < 4 * np.sqrt(2360)
    assert (np.diff(arrivals_s) > 0).all()


def test_waiting_for_company_saves_energy_and_takes_time(written: Path) -> None:
    def cell(rule: str, quantity: str) -> float:
        found: float = record(written, "batchmonitor", "Fig. 2", f"model=ResNet50, rule={rule}", quantity)["measured"]
        return found

    latency = [cell(rule, "mean latency") for rule in ("ad hoc", "rate", "largest batch")]
    efficiency = [cell(rule, "requests per joule") for rule in ("ad hoc", "rate", "largest batch")]
    assert latency == sorted(latency)
    assert efficiency == sorted(efficiency)
    assert cell("largest batch", "95th percentile of the latency") <= 1e3 * DEADLINE_S * 1.01


def test_the_scheduler_simulated_agrees_with_the_exact_means(written: Path) -> None:
    for release in ("greedy", "static:8"):
        found = record(written, "batchmonitor", "Constant load", f"release={release}, load=0.7", "mean latency")
        exact_ms = float(found["note"].partition("exact: ")[2].split()[0])
        assert found["measured"] == pytest.approx(exact_ms, rel=0.1)  # twice 6,000 requests at a load of 0.7


def test_the_preferred_size_is_the_least_of_two_and_more_whose_throughput_exceeds_the_rate() -> None:
    profile = PROFILES[BASIC]
    assert preferred_size(1.0, profile) == 2
    assert preferred_size(2071.0, profile) == 6  # a load of 0.7; batches of 6 serve 2,081 a second, of 5 1,940
    assert preferred_size(1e6, profile) == 32


def test_if_every_count_were_its_mean_the_rule_as_printed_would_take_53_ms(written: Path) -> None:
    case = "release=static:6, load=0.7"
    assert record(written, "batchmonitor", "Constant load", case, "mean latency")["measured"] == pytest.approx(
        53.06, rel=1e-3
    )


def test_what_arrives_in_the_warm_up_is_left_out(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.csv", np.array([0.0, 1.0, 10.0, 20.0]))
    scenario = Scenario(trace=str(tmp_path / "trace.csv"), step_s=2.0, barrier=True, predictions="none")
    scheduling = SchedulingConfig(release="greedy", batch_size=1, bins=1)
    simulate(scenario, scheduling, journal_path=tmp_path / "journal")
    # Batches run from 0 to 2, 2 to 4, 10 to 12 and from 20 on: from 3 to 20 the engine is busy for 1 + 2 s.
    assert after_warm_up(tmp_path / "journal", 3.0) == pytest.approx((2.0, 3 / 17))
