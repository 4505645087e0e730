"""scripts/reproduce.py: its rows, its pages, and a few cells of the papers' tables, from a quick run."""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import reproduce
from matplotlib.figure import Figure
from papers import page
from papers.batchmonitor.measure import (
    BASIC,
    DEADLINE_S,
    after_warm_up,
    preferred_size,
    ramp,
    write_trace,
)
from papers.multibin import engines, exponential, gsm8k, uniform
from papers.multibin.worlds import AT_ONCE, Effort, World, rates_up_to, simulate_all
from papers.rows import KINDS, Curve, Row, Rows, claim
from papers.smdp.policies import CASE_LOADS, CASE_WEIGHTS, control_limit, exceptions

from bins.fitting import Observation
from bins.profile import PROFILES
from llmserve.commands.simulate import Scenario, run, simulate
from llmserve.errors import ConfigError
from llmserve.live import journal
from llmserve.scheduling.messages import ReportTrust
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.report import Recorder
from llmserve.simulation.scenario import prepare

SCRIPTS = str(Path(__file__).resolve().parents[2] / "scripts")
KEYS = {
    *("figure", "case", "quantity", "unit", "published", "measured", "low", "high", "note"),
    *("expected", "kind", "tolerance", "ok"),
}
OPTIONS = {"multibin": ("--jobs", "1", "--gsm8k", "answers.jsonl")}  # the file lies in the folder that is written to


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every quick run writes. Its engines are made up: real ones would take minutes. And figures are not laid out:
    that would take most of the time, and moves only margins.
    """
    folder = tmp_path_factory.mktemp("docs")
    lengths = np.random.default_rng(1).integers(20, 300, size=400).tolist()
    (folder / "answers.jsonl").write_text("".join(f'{{"output_tokens": {length}}}\n' for length in lengths))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(engines, "observe", made_up)
        patch.setattr(Figure, "set_layout_engine", lambda figure, layout=None, **options: None)
        for name in reproduce.REPRODUCTIONS:
            reproduce.main([name, "--quick", "--output-folder", str(folder), *OPTIONS.get(name, ())])
    return folder


async def made_up(effort: engines.Effort, report: object) -> engines.Observed:
    """Steps of 10 ms and 20 ms besides, however many run; 100 requests of 1 to 100 tokens, sorted by known lengths."""
    batches = [Observation(size, tokens, 0.01 * tokens) for size in effort.sizes for tokens in (4, 16, 16)]
    answers = [Observation(1, tokens, 0.02 + 0.01 * tokens) for tokens in (100, 200, 400)]
    shuffled = np.random.default_rng(2).permutation(100).tolist()
    runs = {each.name: [run_of(sorted(shuffled) if each.bins > 1 else shuffled)] for each in effort.arrangements}
    return engines.Observed(batches, {engines.EMBEDDED: answers, engines.VLLM: answers}, runs, np.poly1d([0.01, 0.0]))


def run_of(lengths: list[int], size: int = 8) -> engines.throughput.BenchRun:
    """Batches of neighbours in the list; a batch takes 10 ms for each token of its longest answer."""
    batches = [str(place // size) for place in range(len(lengths))]
    made = engines.throughput.BenchRun(1.0, lengths, batches, [1.0] * len(lengths))
    return dataclasses.replace(made, seconds=0.01 * sum(made.longest))


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
    text = (written / "papers" / f"{name}.md").read_text()
    options = shlex.join(["--quick", "--output-folder", str(written), *OPTIONS.get(name, ())])
    assert f"    python scripts/reproduce.py {name} {options}\n" in text
    assert "seed 1" in text
    others = [other for other in reproduce.REPRODUCTIONS if other.startswith(f"{name}-")]
    found = sorted(path.name for path in (written / "papers").glob(f"{name}-*.png"))
    figures = [file for file in found if not any(file.startswith(f"{other}-") for other in others)]
    assert figures
    assert all(f"({figure})" in text for figure in figures)
    assert all((written / "papers" / figure).stat().st_size > 5_000 for figure in figures)


def test_without_a_name_the_names_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    reproduce.main([])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        *("smdp", "batchmonitor"),
        *("multibin", "multibin-engines"),
        "shepherd",
    ]


@pytest.mark.parametrize("name", list(reproduce.REPRODUCTIONS))
def test_a_page_counts_each_kind_of_comparison_apart(written: Path, name: str) -> None:
    text = (written / "papers" / f"{name}.md").read_text()
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


@pytest.mark.parametrize(
    ("name", "library"), [("smdp", "matplotlib"), ("batchmonitor", "matplotlib"), ("multibin", "matplotlib")]
)
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
    scheduling = SchedulingConfig(release="greedy", batch_size=1, bins=1).resolved(barrier=True)
    recorder = Recorder(4)
    run(scenario, scheduling, prepare(scenario, scheduling), recorder=recorder)
    # Batches run from 0 to 2, 2 to 4, 10 to 12 and from 20 on: from 3 to 20 the engine is busy for 1 + 2 s.
    assert after_warm_up(recorder, 3.0) == pytest.approx((2.0, 3 / 17))


# ---- Multi-Bin --------------------------------------------------------------------------------------------------


def test_the_example_takes_eleven_seconds_without_bins_and_eight_with_two(written: Path) -> None:
    seconds = [record(written, "multibin", "Fig. 1 (b)", f"bins={bins}", "time for all")["measured"] for bins in (1, 2)]
    assert seconds == [11, 8]


@pytest.mark.parametrize(
    ("bins", "throughputs"),
    [
        (2, [8.43, 7.41, 6.53, 6.45]),
        (4, [9.97, 8.88, 7.93, 7.82]),
        (8, [10.97, 10.17, 9.41, 9.32]),
    ],
)
def test_errors_of_prediction_cost_what_figure_8_shows(bins: int, throughputs: list[float]) -> None:
    derived = [uniform.throughput_with_errors(bins, error) for error in (0.0, 0.01, 0.1, 0.5)]
    assert derived == pytest.approx(throughputs, abs=0.0051)


def test_errors_at_random_between_two_bins_leave_one_bin() -> None:
    assert uniform.throughput_with_errors(2, 0.5) == pytest.approx(uniform.capacity(1), rel=1e-6)


def test_simulated_throughput_is_near_theory_and_latency_near_lemma_5_1_in_a_quick_run_already(written: Path) -> None:
    rows = {(each["figure"], each["case"]): each for each in records(written, "multibin") if each["kind"] == "computed"}
    for case in (("Theorem 4.2", "k=1"), ("Lemma 5.1", "k=1, rate=6, engines=16"), ("Fig. 4", "k=5, rate=1")):
        assert rows[case]["measured"] == pytest.approx(rows[case]["expected"], rel=0.03), case


def test_a_partial_last_batch_that_runs_costs_throughput(written: Path) -> None:
    dropped = record(written, "multibin", "Fig. 8", "k=8, p_e=0", "throughput")["measured"]
    flushed = record(written, "multibin", "Theorem 4.2", "k=8, last batches=flushed", "throughput")["measured"]
    assert flushed < 0.95 * dropped  # of 40 batches 8 are partial


def test_bins_of_equal_mass_are_worse_than_those_of_lemma_a_1_for_exponential_lengths() -> None:
    loss = [
        1 - exponential.batch_s(exponential.LEMMA_A1, bins) / exponential.batch_s(exponential.EQUAL_MASS, bins)
        for bins in (2, 3, 5)
    ]
    assert all(0.24 <= share <= 0.30 for share in loss), loss


def test_rates_end_with_the_first_that_is_well_above_what_can_be_served() -> None:
    assert list(rates_up_to((1.0, 2.0, 4.0, 6.0), 3.9)) == [1.0, 2.0, 4.0, 6.0]
    assert list(rates_up_to((1.0, 2.0, 4.0, 6.0), 3.0)) == [1.0, 2.0, 4.0]


def test_runs_are_the_same_however_many_processes_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)  # as in a script, whose processes find it there
    worlds = {
        ("of", size): World.of("exponential:3", (2.0,), size, rate, 100 * size, 2)
        for size, rate in ((2, AT_ONCE), (4, 1.0))
    }
    alone, together = (simulate_all(worlds, Effort(1, jobs), lambda *_: None) for jobs in (1, 2))
    assert alone == together
    assert [len(runs) for runs in alone.values()] == [2, 2]
    assert len({run.latency_s_mean for runs in alone.values() for run in runs}) == 4


def test_predictions_are_never_doubted_in_a_world_of_the_paper(tmp_path: Path) -> None:
    """Of two bins, mistaken for each other every other time: they rank answers hardly better than chance."""
    world = World.of("uniform:1,20", (10.5,), 4, AT_ONCE, 4_000, 1, predictions="neighbour:2,0.5")
    doubting = msgspec.structs.replace(world.scheduling, trust_window=256)

    def doubts(scheduling: SchedulingConfig) -> int:
        simulate(world.scenario, scheduling, journal_path=tmp_path / "journal")
        return sum(
            type(action) is ReportTrust for step in journal.read(tmp_path / "journal")[1] for action in step.actions
        )

    assert doubts(doubting) > 0
    assert doubts(world.scheduling) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"output_tokens": 3}\n{"prompt": "?"}\n', "line 2: no tokens above 0 in output_tokens or response_tokens"),
        ('{"output_tokens": 0}\n', "line 1: no tokens above 0"),
        ("", "is empty"),
    ],
)
def test_a_file_of_answers_without_lengths_is_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        gsm8k.read_lengths(file)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([5, 4, 3, 4], True), ([5, 3, 4, 6], True), ([3, 4, 5], False), ([5, 4, 3], False), ([5, 3, 4, 3.5], False)],
)
def test_a_drop_and_then_a_rise_is_told_from_other_shapes(values: list[float], expected: bool) -> None:
    assert gsm8k.drops_then_rises(values) is expected


@pytest.mark.parametrize(
    "words",
    [["smdp", "--jobs", "2"], ["batchmonitor", "--gsm8k", "x"], ["multibin", "--jobs", "0"], ["smdp", "--seed", "-1"]],
)
def test_options_of_no_use_are_refused(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        reproduce.main([*words, "--quick", "--output-folder", str(tmp_path / "docs")])
    assert words[1] in capsys.readouterr().err
    assert not (tmp_path / "docs").exists()


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "docs").write_text("a file")
    with pytest.raises(SystemExit):
        reproduce.main(["smdp", "--quick", "--output-folder", str(tmp_path / "docs")])
    assert "--output-folder: cannot make" in capsys.readouterr().err


def test_without_answers_figure_6_is_left_out_and_the_page_says_so() -> None:
    chosen = reproduce.REPRODUCTIONS["multibin"][1](reproduce.Options(jobs=1, gsm8k=None))
    assert not any("Fig. 6" in section.title for section in chosen.page.sections)
    assert "Fig. 6 is left out" in chosen.page.opening(Rows())


# ---- Multi-Bin's engines ----------------------------------------------------------------------------------------


def test_a_straight_line_is_found_with_its_slope_and_intercept() -> None:
    points = [Observation(1, tokens, 0.02 + 0.003 * tokens) for tokens in (400, 50, 100)]
    _, slope, besides, share, linear = engines.line_rows("any", points)
    assert (slope.measured, besides.measured, share.measured) == pytest.approx((3.0, 20.0, 1.0))
    assert linear.ok


def test_times_that_do_not_go_by_tokens_are_not_called_linear() -> None:
    points = [Observation(1, tokens, seconds) for tokens, seconds in ((50, 1.0), (100, 0.2), (150, 0.9), (200, 0.4))]
    assert engines.line_rows("any", points)[-1].ok is False


def test_a_gain_stands_beside_the_one_that_its_batches_imply() -> None:
    """Batches of 8 of 100 lengths, sorted, against the same as they come."""
    effort = dataclasses.replace(engines.Effort.quick(1), oracle=(2,), predicted=(4,))
    shuffled = np.random.default_rng(2).permutation(100).tolist()
    plain, bins = run_of(shuffled), run_of(sorted(shuffled))
    runs = {each.name: [bins if each.bins > 1 else plain] for each in effort.arrangements}
    rows = Rows(engines.gain_rows(effort, runs, np.poly1d([0.01, 0.0])))
    gain = rows.only(engines.ORACLE, engines.GAIN, k=2)
    assert gain.measured == pytest.approx(plain.seconds / bins.seconds, abs=1e-3)
    assert gain.measured == gain.expected
    assert gain.measured > 1.5
    assert rows.only(engines.PREDICTED, engines.GAIN, k=4).note == "the paper: 1.08 (Vicuna-13B, A100)"


@pytest.mark.parametrize("name", ["smdp", "batchmonitor", "multibin", "multibin-engines", "shepherd"])
def test_kept_rows_are_read_as_they_were_written(name: str, tmp_path: Path) -> None:
    kept = Path(__file__).resolve().parents[2] / "docs" / "results" / f"{name}.json"
    Rows.read(kept).write(tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == json.loads(kept.read_text())
