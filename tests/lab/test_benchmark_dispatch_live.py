"""The live benchmark of dispatching: its load, and the numbers it reads from a journal. No server is started."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kit.results import rounded
from questions.dispatch import live
from questions.dispatch.journal import FreeWaits, free_waits, plans_of, run_of
from rich.console import Console

from bins.curve import Curve
from bins.dispatch import DispatchPlan, DispatchTable
from bins.profile import Profile
from llmserve.live.journal import Header, Step
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import (
    DispatchSolved,
    DrainRequested,
    EngineReady,
    Event,
    RequestArrived,
    RequestEnded,
    TimerFired,
)
from llmserve.settings.policies import SchedulingConfig

BUSY_W, IDLE_W = 20.0, 8.0
PROFILE = Profile(
    "made up",
    Curve.affine(0.01, 0.09),
    Curve.affine(0.2, 1.8),
    IDLE_W,
    source="steps of 0.09 + 0.01 b seconds at 20 W",
    energy_source="modelled",
)


# ---- a journal without a server -----------------------------------------------------------------------------------


def header(release: str, bins: int = 1) -> Header:
    """With two bins, the second bin is for answers longer than 100 tokens."""
    edges = (100.0,) if bins == 2 else None
    return Header(SchedulingConfig(bins=bins, batch_size=4, release=release, edges=edges).resolved(barrier=True))


def played(head: Header, *events: tuple[float, Event]) -> list[Step]:
    """The steps of a scheduler for these events and one barrier engine of 4 slots, ready at 0."""
    scheduler = head.scheduler()
    ready = (0.0, EngineReady(EngineInfo("e", slots=4, barrier=True)))
    return [Step(now_s, event, tuple(scheduler.handle(event, now_s))) for now_s, event in (ready, *events)]


def come(at_s: float, *ids: int) -> list[tuple[float, Event]]:
    return [(at_s, RequestArrived(Request(id_, predicted_tokens=10.0))) for id_ in ids]


def end(at_s: float, *ids: int, tokens: float = 10.0) -> list[tuple[float, Event]]:
    return [(at_s, RequestEnded("e", id_, "completed", tokens)) for id_ in ids]


def plan(*waits_s: float, least: int = 3, response_s: float | None = 1.0) -> DispatchPlan:
    """A plan with a queue for each wait; a queue waits for `least` requests."""
    actions = tuple([size if size >= least else 0 for size in range(5)])
    tables = tuple([DispatchTable(actions, (), (), (1.0,) * 4, (1.0,) * 4, wait_s) for wait_s in waits_s])
    return DispatchPlan(tuple(range(len(waits_s))), tables, response_s_mean=response_s)


# ---- the load -----------------------------------------------------------------------------------------------------


def test_the_load_is_a_share_of_what_full_batches_serve() -> None:
    """All lengths are 100: a batch of 8 takes 100 steps of 0.17 s, and load 0.2 is 0.2 x 8 / 17 requests per second."""
    load = live.load_of(PROFILE, [100.0], 0.2, batch_size=8)
    assert load.arrival_rate_per_s == pytest.approx(0.2 * 8 / 17)


def test_prefill_is_part_of_a_batch() -> None:
    load = live.load_of(replace(PROFILE, prefill_s=3.0), [100.0], 0.2, batch_size=8)
    assert load.arrival_rate_per_s == pytest.approx(0.2 * 8 / 20)


def test_without_batches_greedy_is_an_m_d_1_queue() -> None:
    """Pollaczek and Khinchine: service + load x service / (2 (1 - load)), with a service time of 10 s."""
    load = live.load_of(PROFILE, [100.0], 0.5, batch_size=1)
    assert load.greedy_s == pytest.approx(10 + 0.5 * 10 / (2 * 0.5))


def test_lengths_are_of_the_right_answers() -> None:
    lengths = live.corpus_lengths(200, seed=1)
    assert lengths == live.corpus_lengths(200, seed=1)
    assert all(length == int(length) and 1 <= length <= 400 for length in lengths)
    assert 50 < sum(lengths) / len(lengths) < 120, "lognormal around a median of 65, cut at 400"


def test_a_seed_fixes_prompts_and_times_and_another_seed_changes_them() -> None:
    arrivals, same, other = [live.draw(20, 0.5, seed) for seed in (3, 3, 4)]
    assert arrivals == same
    assert arrivals.prompts != other.prompts
    assert arrivals.at_s != other.at_s
    assert arrivals.at_s == sorted(arrivals.at_s)
    assert arrivals.gap_s == 2.0


# ---- free waits ---------------------------------------------------------------------------------------------------


def test_with_a_timer_in_time_no_request_waits_beyond_its_bound() -> None:
    head = header("table")
    steps = played(head, (0.0, DispatchSolved(plan(2.0))), *come(10.0, 1), (12.001, TimerFired()))
    waits = free_waits(head, steps)
    assert waits.longest_s == pytest.approx(2.001)
    assert waits.bound_s_max == 2.0
    assert waits.late_s_max == pytest.approx(0.001)
    assert waits.violations == 0


def test_a_late_timer_is_a_violation() -> None:
    head = header("table")
    steps = played(head, (0.0, DispatchSolved(plan(2.0))), *come(10.0, 1), *come(11.0, 2), (13.0, TimerFired()))
    waits = free_waits(head, steps)
    assert waits.late_s_max == pytest.approx(1.0)
    assert waits.violations == 1, "the second request has only waited 2 s"


def test_a_batch_before_its_bound_has_negative_lateness() -> None:
    head = header("table")
    steps = played(head, (0.0, DispatchSolved(plan(2.0))), *come(10.0, 1, 2), *come(10.5, 3))
    waits = free_waits(head, steps)
    assert (waits.longest_s, waits.late_s_max, waits.violations) == (0.5, -1.5, 0)


def test_time_while_a_batch_runs_is_no_free_wait() -> None:
    head = header("table")
    first = [*come(1.0, 1, 2, 3), *come(2.0, 4)]  # three start at once; the fourth waits 10 s for a busy engine
    steps = played(head, (0.0, DispatchSolved(plan(60.0))), *first, *end(12.0, 1, 2, 3), *come(13.0, 5, 6))
    assert free_waits(head, steps).longest_s == 1.0


def test_a_request_whose_bound_passed_on_a_busy_engine_is_not_late() -> None:
    head = header("table")
    first = [*come(1.0, 1, 2, 3), *come(2.0, 4)]
    steps = played(head, (0.0, DispatchSolved(plan(2.0))), *first, *end(12.0, 1, 2, 3))
    waits = free_waits(head, steps)
    assert (waits.longest_s, waits.violations) == (0.0, 0)


def test_the_bound_is_that_of_the_queue_and_of_the_plan_in_force() -> None:
    head = header("table", bins=2)
    two = (0.0, DispatchSolved(plan(1.0, 50.0)))
    later = (13.0, DispatchSolved(plan(1.0, 9.0)))  # by which request 1 has 6 s left
    long = (10.0, RequestArrived(Request(1, predicted_tokens=500.0)))
    waits = free_waits(head, played(head, two, long, later, (19.001, TimerFired())))
    assert waits.bound_s_max == 50.0
    assert waits.late_s_max == pytest.approx(0.001)
    assert waits.longest_s == pytest.approx(9.001)


def test_under_greedy_no_request_waits_for_a_free_engine_and_full_has_no_bound() -> None:
    arrivals = [*come(1.0, 1), *come(2.0, 2), (9.0, DrainRequested())]
    greedy, full = header("greedy"), header("full")
    assert free_waits(greedy, played(greedy, *arrivals)) == FreeWaits(0.0, None, None, 0)
    assert free_waits(full, played(full, *arrivals)) == FreeWaits(8.0, None, None, 0)


def test_a_journal_that_differs_from_its_scheduler_is_refused() -> None:
    head = header("greedy")
    steps = played(head, *come(1.0, 1))
    steps[-1] = Step(1.0, steps[-1].event, ())
    with pytest.raises(AssertionError, match=r"at 1\.0 s the scheduler returns"):
        free_waits(head, steps)


# ---- a run --------------------------------------------------------------------------------------------------------


@pytest.fixture
def run() -> Callable[..., Any]:
    def of(release: str, *events: tuple[float, Event], number: int = 1) -> Any:
        head = header(release)
        return run_of(head, played(head, *events), PROFILE, release=release, number=number, client_s=[1.0, 3.0])

    return of


def test_a_run_is_counted_from_the_first_arrival_to_the_last_end(run: Callable[..., Any]) -> None:
    """By the profile 10 steps of batches of one and two take 1 s and 1.1 s; here both batches take twice as long."""
    measured = run("greedy", *come(5.0, 1), *come(6.0, 2, 3), *end(7.0, 1), *end(9.2, 2, 3))
    summary = measured.summary
    assert summary.completed == 3
    assert summary.elapsed_s == pytest.approx(4.2)
    assert summary.latency_s_mean == pytest.approx((2.0 + 3.2 + 3.2) / 3)
    assert summary.waiting_s_mean == pytest.approx(2 / 3)
    assert (measured.batches, summary.batch_size_mean) == (2, 1.5)
    assert summary.utilisation == pytest.approx(1.0)
    assert summary.energy_j == pytest.approx(BUSY_W * 4.2), "without the idle time before"
    assert summary.energy_j_per_token == pytest.approx(BUSY_W * 4.2 / 30)
    assert measured.above_idle_j_per_token == pytest.approx((BUSY_W - IDLE_W) * (1.0 + 1.1) / 30), "by the profile"
    assert measured.pace == pytest.approx(2.0)
    assert measured.client_s_mean == 2.0


def test_idle_time_between_batches_costs_idle_power(run: Callable[..., Any]) -> None:
    measured = run("greedy", *come(1.0, 1), *end(2.0, 1), *come(4.0, 2), *end(5.0, 2))
    assert measured.summary.energy_j == pytest.approx(2 * BUSY_W + 2 * IDLE_W)
    assert measured.summary.utilisation == pytest.approx(0.5)


def test_a_run_has_its_plans_and_the_latency_after_the_first_plan_for_a_known_load(run: Callable[..., Any]) -> None:
    blind, first = plan(0.0, least=1, response_s=None), plan(9.0)
    measured = run(
        "table",
        (0.1, DispatchSolved(blind)),
        *come(1.0, 1),
        *end(2.0, 1),
        (3.0, DispatchSolved(first)),
        *come(4.0, 2, 3, 4),
        *end(5.5, 2, 3, 4),
    )
    assert [(plan.at_s, plan.least, plan.wait_s_max) for plan in measured.plans] == [
        (0.1, [1], [0.0]),
        (3.0, [3], [9.0]),
    ]
    assert measured.planned_s_mean == pytest.approx(1.5)
    assert run("greedy", *come(1.0, 1), *end(2.0, 1)).planned_s_mean is None


def test_a_mixture_waits_for_as_many_requests_as_its_other_policy() -> None:
    table = replace(plan(9.0, least=1).tables[0], other=(0, 0, 0, 3, 4))
    mixed = replace(plan(9.0), tables=(table,), share=0.25)
    steps = played(header("table"), (1.0, DispatchSolved(mixed)))
    assert [(plan.least, plan.share) for plan in plans_of(steps)] == [([3], 0.25)]


def test_numbers_of_queues_are_listed_once_for_each_change() -> None:
    plans = [DispatchSolved(plan(*[1.0] * count)) for count in (1, 1, 2, 1)]
    steps = played(header("table", bins=2), *[(float(at_s), event) for at_s, event in enumerate(plans)])
    assert live.queues_over_time(plans_of(steps)) == "1, 2, 1"


# ---- tables and files ---------------------------------------------------------------------------------------------


def some_runs(run: Callable[..., Any]) -> list[Any]:
    """Two rounds with a run of each release."""
    events = [*come(1.0, 1), *end(2.0, 1)]
    solved = (0.5, DispatchSolved(plan(2.0)))
    waited = [solved, *come(1.0, 1), (3.0, TimerFired()), *end(4.0, 1)]
    drained = [*come(1.0, 1), (9.0, DrainRequested()), *end(10.0, 1)]
    journals = {"full": drained, "greedy": events, "table": waited}
    return [run(release, *journals[release], number=number) for number in (1, 2) for release in live.RELEASES]


def test_the_tables_show_every_run_and_the_bounds_of_runs_with_plans(run: Callable[..., Any]) -> None:
    console = Console(width=120)
    with console.capture() as captured:
        live.print_tables(some_runs(run), "Some load", 4.0, console)
    lines = captured.get().splitlines()
    assert sum(" greedy " in line for line in lines) == 2
    assert sum(" 9.00  9.00  9.00 " in line for line in lines) == 2, "full waits until the drain"
    last = [cell.strip() for cell in lines[-2].strip("│").split("│")]
    assert last == ["2", "3.00", "3.00", "1", "1", "2.00", "2.00", "0.00", "0"]


def test_the_figure_is_drawn_and_everything_is_json(run: Callable[..., Any], tmp_path: Path) -> None:
    runs = some_runs(run)
    load = live.load_of(PROFILE, [100.0], 0.2, batch_size=8)
    result = live.result_of(live.parser().parse_args([]), PROFILE, load, 4.0, runs)
    (tmp_path / "earlier.json").write_text(json.dumps(rounded(result)))
    figure = tmp_path / "new" / "figure.png"
    live.main(["--results", str(tmp_path / "earlier.json"), "--figure", str(figure)])
    assert figure.read_bytes().startswith(b"\x89PNG")
    back = json.loads((tmp_path / "earlier.json").read_text())
    assert back["arrival_rate_per_s"] == 0.0941176
    assert [record["release"] for record in back["runs"]] == [*live.RELEASES, *live.RELEASES]
    assert back["runs"][2]["waits"] == {"longest_s": 2.0, "bound_s_max": 2.0, "late_s_max": 0.0, "violations": 0}
    assert back["runs"][2]["plans"][0]["wait_s_max"] == [2.0]


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--load", "1", "a load below 1 is needed"),
        ("--load", "nan", "a number above 0 is needed"),
        ("--latency-target-s", "0", "a number above 0 is needed"),
        ("--latency-target-s", "soon", "invalid positive value: 'soon'"),
        ("--requests", "3", "a whole number of at least 16"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    flag: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        live.parser().parse_args([flag, value])
    assert message in capsys.readouterr().err


def test_an_unreadable_profile_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="cannot read the profile"):
        live.main(["--profile", str(tmp_path / "none.json")])
