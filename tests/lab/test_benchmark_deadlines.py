"""The benchmark of deadlines: its requests, counts, checks and tables; and a tiny run with real servers."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.results import rounded, with_rows
from questions.deadlines import run as benchmark_deadlines
from questions.deadlines import simulated
from questions.deadlines.engines import Timed, profile_of, timed_engines
from questions.deadlines.ledger import WARM_UP, Answer, check, ledger_of
from questions.deadlines.runs import Count
from questions.deadlines.runs import run_of as run_from
from questions.deadlines.serving import Engines, measure
from questions.deadlines.tables import live_from, live_result, live_tables
from questions.deadlines.traffic import Arrival, Setting, Stream, draw

from llmserve.live.journal import Header, Step
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import (
    EngineReady,
    Event,
    FailRequest,
    PreemptBatch,
    RequestArrived,
    RequestEnded,
    TimerFired,
)
from llmserve.settings.policies import SchedulingConfig

IMAGES = Stream("images", "classifier", slo_s=0.5, rate_per_s=10.0, tokens=(1, 1), burst_per_s=90.0)
CHATS = Stream("chats", "chat", slo_s=4.0, rate_per_s=2.0, tokens=(30, 70))
SETTING = Setting((IMAGES, CHATS), seconds=100.0, burst_s=(40.0, 60.0), batch_size=8)


# ---- the requests -------------------------------------------------------------------------------------------------


def test_streams_arrive_at_their_rates_and_the_burst_adds_requests() -> None:
    arrivals = draw(SETTING, seed=1)
    assert [arrival.at_s for arrival in arrivals] == sorted(arrival.at_s for arrival in arrivals)
    counts = Counter((arrival.stream.name, SETTING.in_burst(arrival.at_s)) for arrival in arrivals)
    for (name, in_burst), expected in {
        ("images", True): 20 * 100,
        ("images", False): 80 * 10,
        ("chats", True): 20 * 2,
        ("chats", False): 80 * 2,
    }.items():
        assert abs(counts[name, in_burst] - expected) < 5 * expected**0.5, "five standard deviations of Poisson"
    tokens = [arrival.tokens for arrival in arrivals if arrival.stream is CHATS]
    assert (min(tokens) >= 30, max(tokens) <= 70) == (True, True)
    assert {arrival.tokens for arrival in arrivals if arrival.stream is IMAGES} == {1}


def test_a_seed_fixes_the_requests_and_another_seed_draws_other_requests() -> None:
    assert draw(SETTING, 7) == draw(SETTING, 7)
    assert draw(SETTING, 7) != draw(SETTING, 8)


# ---- a journal without a server -----------------------------------------------------------------------------------


def played(*events: tuple[float, Event], order: str = "flex") -> list[Step]:
    """The steps of a scheduler for these events and one GPU with an engine for each model, ready at 0."""
    head = Header(SchedulingConfig(order=order, batch_size=8, bins=1).resolved(barrier=True))
    scheduler = head.scheduler()
    ready = [
        (0.0, EngineReady(EngineInfo(model, slots=8, barrier=True, models=(model,), worker="gpu0")))
        for model in ("classifier", "chat")
    ]
    return [Step(now_s, event, tuple(scheduler.handle(event, now_s))) for now_s, event in (*ready, *events)]


def come(at_s: float, stream: Any, *ids: int) -> list[tuple[float, Event]]:
    return [
        (at_s, RequestArrived(Request(id_, deadline_s=at_s + stream.slo_s, model=stream.model, stream=stream.name)))
        for id_ in ids
    ]


def end(at_s: float, stream: Any, *ids: int, outcome: str = "completed") -> list[tuple[float, Event]]:
    return [(at_s, RequestEnded(stream.model, id_, outcome, 1.0)) for id_ in ids]


# A chat runs, four images preempt it, and the chat runs again: 1 s of engine time is lost.
PREEMPTED = [
    *come(1.0, CHATS, 1),
    *come(2.0, IMAGES, 2, 3, 4, 5),
    *end(2.0, CHATS, 1, outcome="cancelled"),
    *end(2.25, IMAGES, 2, 3, 4, 5),
    *end(4.0, CHATS, 1),
]


def answer(stream: Any, at_s: float, latency_s: float, status: int = 200, batch: str = "") -> Any:
    return Answer(Arrival(at_s, stream, 1), status, latency_s, batch)


def batches_of(steps: list[Step]) -> dict[int, str]:
    ledger = ledger_of(steps)
    return {id_: str(history.batch) for id_, history in ledger.histories.items() if history.batch is not None}


def answers_of(steps: list[Step]) -> list[Any]:
    """The answers that the clients of PREEMPTED see if the network takes no time."""
    batches = batches_of(steps)
    chat = answer(CHATS, 1.0, 3.0, batch=batches[1])
    return [chat, *[answer(IMAGES, 2.0, 0.25, batch=batches[id_]) for id_ in (2, 3, 4, 5)]]


def test_a_preempted_request_has_one_end_and_two_batches() -> None:
    ledger = ledger_of(played(*PREEMPTED))
    chat = ledger.histories[1]
    assert (chat.preempted, chat.ends) == (1, ["in time"])
    assert [history.ends for history in ledger.histories.values()] == [["in time"]] * 5
    assert [
        (batch.stream, batch.size, batch.began_s, batch.ended_s, batch.stopped, batch.in_time)
        for batch in ledger.batches
    ] == [
        ("chats", 1, 1.0, 2.0, True, 0),
        ("images", 4, 2.0, 2.25, False, 4),
        ("chats", 1, 2.25, 4.0, False, 1),
    ]
    assert {batch.worker for batch in ledger.batches} == {"gpu0"}
    assert chat.batch == ledger.batches[2].id


def test_a_preempted_request_that_ends_before_it_stops_has_ended() -> None:
    ledger = ledger_of(played(*PREEMPTED[:5], *end(2.0, CHATS, 1), *end(2.25, IMAGES, 2, 3, 4, 5)))
    assert (ledger.histories[1].preempted, ledger.histories[1].ends) == (1, ["in time"])


def test_a_preempted_request_that_is_refused_has_the_batch_that_its_client_sees() -> None:
    stopped = [*come(1.0, CHATS, 1), *come(4.5, IMAGES, 2, 3, 4, 5), *end(4.5, CHATS, 1, outcome="cancelled")]
    steps = played(*stopped, (5.01, TimerFired()), *end(5.02, IMAGES, 2, 3, 4, 5))
    ledger = ledger_of(steps)
    chat = ledger.histories[1]
    assert (chat.preempted, chat.ends, chat.batch) == (1, ["504"], ledger.batches[0].id)
    images = [answer(IMAGES, 4.5, 0.5, batch=str(ledger.batches[1].id))] * 4
    check([answer(CHATS, 1.0, 4.0, 504, str(chat.batch)), *images], ledger)


def test_a_waiting_request_is_refused_at_its_deadline_and_a_running_request_ends_late() -> None:
    steps = played(*come(1.0, CHATS, 1), *come(1.5, IMAGES, 2), (2.1, TimerFired()), *end(6.0, CHATS, 1), order="fffs")
    assert FailRequest(2, "deadline_exceeded") in steps[-2].actions
    ledger = ledger_of(steps)
    assert {id_: history.ends for id_, history in ledger.histories.items()} == {1: ["late"], 2: ["504"]}
    assert ledger.histories[2].batch is None


def test_the_warm_up_is_not_counted() -> None:
    warm = RequestArrived(Request(9, model="chat", stream=WARM_UP))
    ledger = ledger_of(played((0.1, warm), *end(0.9, CHATS, 9), *PREEMPTED))
    assert sorted(ledger.histories) == [1, 2, 3, 4, 5]
    assert len(ledger.batches) == 3


# ---- checks -------------------------------------------------------------------------------------------------------


def test_client_and_journal_that_agree_are_accepted() -> None:
    steps = played(*PREEMPTED)
    check(answers_of(steps), ledger_of(steps))


def test_a_request_that_never_ended_is_found() -> None:
    steps = played(*PREEMPTED[:-1])
    with pytest.raises(AssertionError, match=r"did not end exactly once.*\{1: \[\]\}"):
        check([], ledger_of(steps))


def test_a_request_that_ended_twice_is_found() -> None:
    steps = played(*PREEMPTED)
    twice = Step(4.5, TimerFired(), (FailRequest(1, "deadline_exceeded"),))
    with pytest.raises(AssertionError, match=r"\{1: \['in time', '504'\]\}"):
        check(answers_of(steps), ledger_of([*steps, twice]))


@pytest.mark.parametrize("change", [{"status": 504, "batch": ""}, {"batch": "77"}])
def test_a_client_with_another_status_or_batch_is_found(change: dict[str, Any]) -> None:
    steps = played(*PREEMPTED)
    first, *rest = answers_of(steps)
    with pytest.raises(AssertionError, match=r"client: .*journal: "):
        check([replace(first, **change), *rest], ledger_of(steps))


def test_a_gpu_that_runs_two_batches_at_a_time_is_found() -> None:
    steps = played(*PREEMPTED)
    ledger = ledger_of(steps)
    ledger.batches[1].began_s -= 0.1
    with pytest.raises(AssertionError, match="gpu0 ran two batches"):
        check(answers_of(steps), ledger)


@pytest.mark.parametrize(
    ("latency_s", "status", "end_"), [(0.5, 200, "in time"), (0.51, 200, "late"), (0.2, 504, "504")]
)
def test_an_answer_ends_in_one_of_three_ways(latency_s: float, status: int, end_: str) -> None:
    assert answer(IMAGES, 1.0, latency_s, status).end == end_


def test_any_other_answer_is_an_error() -> None:
    with pytest.raises(AssertionError, match="status 503"):
        answer(IMAGES, 1.0, 0.1, 503).end  # noqa: B018


# ---- a run --------------------------------------------------------------------------------------------------------


def run_of(policy: str = "flex", number: int = 1) -> Any:
    steps = played(*PREEMPTED)
    assert any(isinstance(action, PreemptBatch) for step in steps for action in step.actions)
    setting = replace(SETTING, seconds=5.0, burst_s=(2.0, 3.0))
    return run_from(policy, number, setting, answers_of(steps), ledger_of(steps))


def test_a_run_counts_its_streams_its_preemptions_and_their_cost() -> None:
    run = run_of()
    assert run.counts["images"] == Count(
        {"in time": 4, "late": 0, "504": 0}, {"in time": 4, "late": 0, "504": 0}, 0.25, 0.25
    )
    assert run.counts["chats"].burst == {"in time": 0, "late": 0, "504": 0}
    assert run.preempted == {"in time": 1, "late": 0, "504": 0}
    assert (run.stops, run.stopped_s, run.too_late_s, run.busy_s) == (1, 1.0, 0.0, 3.0)
    assert run.bars == [
        ("gpu0", "chats", 1, 1.0, 2.0, True),
        ("gpu0", "images", 4, 2.0, 2.25, False),
        ("gpu0", "chats", 1, 2.25, 4.0, False),
    ]
    assert run.goodput_per_s(replace(SETTING, seconds=5.0)) == 1.0


def test_shares_are_of_a_whole_stream_or_of_its_burst() -> None:
    images = Count({"in time": 6, "late": 1, "504": 3}, {"in time": 1, "late": 1, "504": 2}, 0.1, 0.2)
    chats = Count({"in time": 0, "late": 0, "504": 10}, {"in time": 0, "late": 0, "504": 0}, None, None)
    run = replace(run_of(), counts={"images": images, "chats": chats})
    assert run.share() == 0.3
    assert (run.share("images"), run.share("images", "burst"), run.share("images", "steady")) == (0.6, 0.25, 5 / 6)
    assert (run.share("chats"), run.share("chats", "burst")) == (0.0, 1.0), (
        "no request came in the burst, so none was late"
    )


def test_late_answers_are_missed_deadlines_and_lost_engine_time() -> None:
    steps = played(*come(1.0, CHATS, 1), *end(6.0, CHATS, 1))
    run = run_from("fffs", 1, SETTING, [answer(CHATS, 1.0, 5.0, batch="1")], ledger_of(steps))
    assert (run.too_late_s, run.stopped_s) == (5.0, 0.0)
    assert run.missed == [("chats", 5.0)]
    assert run.counts["chats"].latency_s_p50 is None


# ---- batch times --------------------------------------------------------------------------------------------------


def test_batch_times_for_two_lengths_give_prefill_and_step_times() -> None:
    took_s = {(size, tokens): 0.1 + tokens * (0.01 + 0.001 * size) for size in (1, 2, 4, 8) for tokens in (8, 200)}
    profile = profile_of("m", took_s)
    assert profile.prefill_s == pytest.approx(0.1)
    assert profile.step_s.at([1, 2, 3, 8]) == pytest.approx([0.011, 0.012, 0.013, 0.018])


def test_a_larger_batch_that_was_faster_by_chance_counts_as_equally_fast() -> None:
    took_s = {(1, 10): 1.0, (1, 20): 2.0, (2, 10): 0.9, (2, 20): 1.8}
    assert profile_of("m", took_s).step_s.at([1, 2]) == pytest.approx([0.1, 0.1])


# ---- tables and files ---------------------------------------------------------------------------------------------


def some_result() -> Any:
    runs = [run_of(policy, number) for policy in ("fffs", "flex, no preemption", "flex") for number in (1, 2)]
    engines = Engines("some engines", [], {"chat": profile_of("chat", {(1, 1): 1.0, (1, 2): 2.0})})
    setting = replace(SETTING, seconds=5.0, burst_s=(2.0, 3.0))
    return runs, setting, json.loads(with_rows(rounded(live_result(engines, setting, 1, runs)), "runs"))


def test_a_result_that_was_written_is_read_again() -> None:
    runs, setting, result = some_result()
    engines, setting_read, runs_read = live_from(result)
    assert (engines, setting_read) == ("some engines", setting)
    assert [(run.policy, run.round, run.counts, run.preempted) for run in runs_read] == [
        (run.policy, run.round, run.counts, run.preempted) for run in runs
    ]
    assert [len(run.bars) for run in runs_read] == [3, 0] * 3, "only the first round, which is drawn, keeps its bars"


def test_the_tables_have_a_row_for_each_policy() -> None:
    runs, setting, _ = some_result()
    shares, costs = live_tables(setting, runs)
    row = "| flex | 100.0 % | 100.0 % | 100.0 % | 100.0 % | 100.0 % | 1.0 | 0.25 / 0.25 | 3.00 / 3.00 |"
    assert shares.splitlines()[-1] == row
    assert costs.splitlines()[-1] == "| flex | 2 | 2 | 2 | 0 | 0 | 1.0 | 0.0 | 3.0 |", "counts of both rounds"
    assert len(shares.splitlines()) == 2 + 2 + 3


def test_an_earlier_result_is_shown_and_drawn_and_nothing_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, result = some_result()
    (tmp_path / "old.json").write_text(json.dumps(result))
    figure = tmp_path / "new" / "figure.png"
    benchmark_deadlines.main(["fake", "--results", str(tmp_path / "old.json"), "--figure", str(figure)])
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert "| flex, no preemption |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["vllm"], "vllm needs --vllm-python"),
        (["fake", "--policies", "flex;lifo"], "'lifo' is none of: fffs; edf; "),
        (["fake", "--rounds", "0"], "a whole number of at least 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        benchmark_deadlines.main(arguments)
    assert message in capsys.readouterr().err


# ---- simulated loads ----------------------------------------------------------------------------------------------


def test_simulated_loads_have_a_row_for_every_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "SIMULATED", {name: simulated.SIMULATED[name] for name in ("edf", "flex")})
    monkeypatch.setattr(simulated, "LOADS", {"batches to their end": (0.1, 3.0), "slots that refill": (0.1, 3.0)})
    rows = simulated.simulated({"lognormal": {}}, requests=400, seeds=2, jobs=1)
    shares = {(row["kind"], row["policy"], row["load"]): row["in_time"] for row in rows}
    assert len(shares) == len(rows) == 2 * 2 * 2 + 2 * 2, "clients that stream only where batches run to their end"
    for (kind, policy, load), share in shares.items():
        at_low_load = shares[kind, policy, simulated.LOADS[kind][0]]
        assert 0 < share <= at_low_load <= 1, f"{kind}, {policy}: no more in time at load {load} than at 0.1"
    flex, edf = [shares["batches to their end", policy, 3.0] for policy in ("flex", "edf")]
    assert flex > edf, "flex preempts to meet more deadlines"
    tables = simulated.load_tables(rows)
    assert [len(table.splitlines()) for table in tables] == [2 + 2 + 4, 2 + 2 + 2]
    simulated.load_figure(rows).savefig(tmp_path / "load.png")
    result = rounded({"seeds": 2, "cells": [row.record for row in rows]})
    written = json.loads(with_rows(result, "cells"))
    assert np.isclose([cell["in_time"] for cell in written["cells"]], [row["in_time"] for row in rows], 1e-4).all()


# ---- servers ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_tiny_benchmark_on_timed_engines_ends_every_request_once_by_clients_and_journals(tmp_path: Path) -> None:
    timed = {"classifier": Timed(0.0, 0.01, 0.0005), "chat": Timed(0.3, 0.001, 0.0)}
    images = replace(IMAGES, rate_per_s=5.0, burst_per_s=60.0)
    chats = replace(CHATS, rate_per_s=4.0, tokens=(10, 20))
    setting = Setting((images, chats), seconds=2.0, burst_s=(0.5, 1.5), batch_size=8)

    async def measured() -> list[Any]:
        async with timed_engines(setting, timed) as engines:
            runs: list[Any] = await measure(setting, engines, ["fffs", "flex"], 1, 5, tmp_path)
            return runs

    runs = asyncio.run(measured())
    arrivals = Counter(arrival.stream.name for arrival in draw(setting, 6))
    for run in runs:
        assert {name: sum(count.ends.values()) for name, count in run.counts.items()} == arrivals
        assert run.goodput_per_s(setting) > 0
        assert {bar[0] for bar in run.bars} == {"gpu0", "gpu1"}
    fffs, flex = runs
    assert (fffs.stops, sum(fffs.preempted.values())) == (0, 0)
    assert flex.stops > 0, "a burst preempts chats"
    assert sum(flex.preempted.values()) > 0
