"""The benchmark on vLLM servers: its loads, requests, counts and goals. vLLM itself is not needed."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from kit import client, servers
from kit.rows import Row
from questions.vllm import arrangements, killed, loads, parts, passes, report
from questions.vllm import run as benchmark_vllm
from scipy.stats import kendalltau

from llmserve.engines.timed.server import FakeEngine, Fault

SERVICE = loads.ServiceTime(start_s=0.01, token_s=0.002)


def some_tokens(count: int = 600) -> np.ndarray:
    return np.maximum(1, np.random.default_rng(0).lognormal(4.2, 1.1, count)).astype(int)


def some_load(tokens: list[int]) -> Any:
    predictions = {"oracle": np.array(tokens), "random": np.array(tokens[::-1])}
    return loads.Load([f"prompt {n}" for n in tokens], np.array(tokens), np.zeros(len(tokens)), predictions)


# ---- loads --------------------------------------------------------------------------------------------------------


def test_predictions_rank_as_well_as_the_trained_predictor():
    tokens = some_tokens()
    drawn = loads.draw_predictions(tokens, np.random.default_rng(1))
    assert (drawn["oracle"] == tokens).all()
    assert kendalltau(drawn["predicted"], tokens).statistic == pytest.approx(loads.KENDALL_TAU, abs=0.03)
    assert drawn["predicted"].min() >= 1
    assert abs(kendalltau(drawn["random"], tokens).statistic) < 0.1
    assert sorted(drawn["random"]) == sorted(tokens)


def test_a_better_rank_correlation_needs_a_smaller_error():
    tokens = some_tokens()
    assert loads.error_sigma(tokens, 0.9) < loads.error_sigma(tokens, 0.6) < loads.error_sigma(tokens, 0.3)


def test_poisson_arrivals_have_exactly_the_given_load():
    arrivals_s = loads.poisson_arrivals_s(4000, 20.0, np.random.default_rng(2))
    gaps_s = np.diff(arrivals_s)
    assert arrivals_s.size == 4000
    assert 0 <= arrivals_s[0] <= arrivals_s[-1] <= 200
    assert (gaps_s >= 0).all()
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(1, abs=0.1)  # as of exponential gaps


def test_a_traces_lengths_get_the_nearest_prompts_and_all_equally_near_prompts_are_used():
    tokens = np.array([5, 100, 9, 100, 480])
    chosen = loads.nearest_indices(np.array([6.0, 8.0, 1000.0, *[90.0] * 40]), tokens, np.random.default_rng(3))
    assert list(chosen[:3]) == [0, 2, 4]
    assert set(chosen[3:]) == {1, 3}


def test_the_fit_recovers_the_service_time():
    tokens = [2, 20, 100, 400]
    fitted = loads.ServiceTime.fitted(tokens, list(SERVICE(np.array(tokens))))
    assert fitted.start_s == pytest.approx(SERVICE.start_s)
    assert fitted.token_s == pytest.approx(SERVICE.token_s)


def test_shares_have_about_the_same_number_of_tokens():
    tokens = some_tokens()
    placed = np.array(passes.shares(tokens, 2))
    first, second = (tokens[placed == server].sum() for server in (0, 1))
    assert abs(first - second) <= tokens.max()


# ---- requests -----------------------------------------------------------------------------------------------------


def sent(way: str, predictions: str | None, *, burst: bool = False) -> list[tuple[dict[str, Any], dict[str, str]]]:
    load = some_load([10, 300])
    questions = passes.questions_of(arrangements.Arrangement(way, predictions), load, SERVICE, burst=burst)
    return [(json.loads(question.body), dict(question.headers)) for question in questions]


def test_vllm_gets_lengths_as_priorities_and_llmserve_in_a_header():
    for body, headers in sent("direct", None) + sent("fffs", None):
        assert "priority" not in body
        assert "x-llmserve-predicted-tokens" not in headers
    assert [body["priority"] for body, _ in sent("priority", "random")] == [300, 10]
    shortest = sent("shortest", "random")
    assert [headers["x-llmserve-predicted-tokens"] for _, headers in shortest] == ["300", "10"]
    assert not any("priority" in body or "max_tokens" in body for body, _ in shortest)


def test_only_edf_gets_deadlines_and_in_a_burst_the_predictions_set_them():
    deadlines_ms = [float(headers["x-llmserve-slo-ms"]) for _, headers in sent("edf", "random")]
    assert deadlines_ms == pytest.approx([500 + 5 * 30, 500 + 5 * 610])
    short, long = (float(headers["x-llmserve-slo-ms"]) for _, headers in sent("edf", "random", burst=True))
    assert short > long > 1e3 * passes.SLO_BURST_S
    assert not any("x-llmserve-slo-ms" in headers for _, headers in sent("shortest", "oracle"))


async def ask(engine: FakeEngine, **body: Any) -> Any:
    fields = {"model": engine.model, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    fields |= {"stream_options": {"include_usage": True}, "max_tokens": 8}
    question = passes.Question(json.dumps(fields | body).encode(), {"content-type": "application/json"})
    return (await passes.send([engine.url], [question]))[0]


async def test_an_answer_is_timed_from_its_first_token_to_its_last():
    async with FakeEngine(step_s=0.02) as engine:
        outcome = await ask(engine)
    assert outcome.failure is None
    assert outcome.tokens == 8
    assert outcome.first_s >= 0.02
    assert outcome.latency_s >= max(0.16, outcome.first_s)


async def test_an_incomplete_answer_is_a_failure():
    async with FakeEngine(step_s=0.001) as engine:
        assert (await ask(engine, model="other")).failure == "404 model_not_found"
        engine.fault = Fault("500")
        assert (await ask(engine)).failure == "500 internal_error"
        engine.fault = Fault("close_mid_stream", after_tokens=3)
        assert (await ask(engine)).failure is not None


async def test_latency_counts_from_the_arrival():
    async with FakeEngine(slots=1, step_s=0.01, output_tokens=10) as engine:
        question = passes.Question(json.dumps({"stream": True, "stream_options": {"include_usage": True}}).encode(), {})
        late = replace(question, arrival_s=0.05)
        _, second = await passes.send([engine.url] * 2, [question, late])
    assert second.arrival_s == 0.05
    assert second.latency_s >= 0.2 - 0.05  # the request waited for the only slot


async def test_a_server_stays_in_the_session_and_ends_with_its_context():
    def command(port: int) -> list[str]:
        return [sys.executable, "-m", "llmserve.engines.timed", "--port", str(port)]

    async with servers.running("the engine", command, ready="/health") as server:
        pid = server.process.pid
        assert os.getsid(pid) == os.getsid(0)
        assert os.getpgid(pid) == pid
        (engine,) = psutil.Process(pid).children()
    assert server.process.returncode is not None
    assert not engine.is_running()


async def test_a_server_that_does_not_start_is_quoted():
    with pytest.raises(RuntimeError, match="no such thing"):
        async with servers.running("it", lambda _: [sys.executable, "-c", "exit('no such thing')"], ready="/health"):
            pass


# ---- counts -------------------------------------------------------------------------------------------------------


def test_a_pass_has_its_numbers():
    load = some_load([10, 100, 100, 400])
    outcomes = [
        passes.Outcome(0.0, 0.1, 0.2, 10),
        passes.Outcome(1.0, 0.1, 3.0, 101),
        passes.Outcome(1.0, math.nan, 0.5, 0, "504 deadline_exceeded"),
        passes.Outcome(2.0, math.nan, 0.5, 0, "502 engine_failed"),
    ]
    numbers = passes.summary(outcomes, load, SERVICE)
    assert numbers["tokens_per_s"] == pytest.approx(111 / 4.0)
    assert numbers["latency_s_mean"] == pytest.approx(1.6)
    assert numbers["slowdown_mean"] == pytest.approx((0.2 / 0.03 + 3.0 / 0.21) / 2)
    assert numbers["deadlines_met"] == 0.25  # the dropped, failed and late requests missed their deadlines
    assert (numbers["dropped"], numbers["failed"], numbers["other_length"]) == (1, 1, 1)


def test_throughput_while_requests_wait_leaves_out_the_time_of_empty_slots():
    began_s, ended_s = np.array([0.0, 1.0, 1.5]), np.array([1.0, 1.5, 3.5])
    # Ten tokens a second until 1.5 s, when the last request gets its slot; none of its own tokens count.
    assert passes.saturated_tokens_per_s(began_s, ended_s, np.array([10, 5, 20])) == pytest.approx(10)
    # The longest answer started first: half of it has come when the last request gets its slot.
    assert passes.saturated_tokens_per_s(np.array([0.0, 1.0]), np.array([2.0, 1.5]), np.array([20, 5])) == 10


def test_a_pass_without_answers_names_the_first_failure():
    with pytest.raises(RuntimeError, match="503 no_engine"):
        passes.summary([passes.Outcome(0.0, math.nan, 0.1, 0, "503 no_engine")], some_load([5]), SERVICE)


def passes_of(name: str, *latencies_s: float) -> list[Row]:
    """A row for each round."""
    numbers = [dict.fromkeys(passes.RATIOS, 1.0) | {"latency_s_mean": latency_s} for latency_s in latencies_s]
    return [Row({"arrangement": name, "round": number}, row) for number, row in enumerate(numbers)]


def test_ratios_are_taken_within_a_round():
    direct, shortest = arrangements.DIRECT, arrangements.Arrangement("shortest", "predicted")
    priority = arrangements.Arrangement("priority", "predicted")
    rounds = [  # the machine is ten times as slow in the last round
        *passes_of(direct.name, 1.0, 2.0, 20.0),
        *passes_of(priority.name, 0.5, 1.0, 10.0),
        *passes_of(shortest.name, 0.6, 0.8, 14.0),
    ]
    first, _, last = passes.rows([direct, priority, shortest], rounds)
    assert first.ratios == {}
    assert last["latency_s_mean"] == 0.8
    assert last.ratios["direct"]["latency_s_mean"] == pytest.approx(0.6)  # not 0.8 / 2
    assert last.ratios["priority"]["latency_s_mean"] == pytest.approx(1.2)


def test_an_order_is_compared_with_vllms_priorities_of_the_same_predictions():
    names = [arrangement.name for arrangement in arrangements.arrangements_of("burst", arrangements.ORDERS)]
    assert len(names) == len(set(names)) == 12
    for kind in arrangements.KINDS:
        baselines = arrangements.baselines_of(arrangements.Arrangement("edf", kind), names)
        assert baselines == {"direct": "vLLM directly", "priority": f"vLLM by priority, {kind}"}
    routers = [arrangement.name for arrangement in arrangements.arrangements_of("routers", arrangements.ORDERS)]
    assert set(arrangements.baselines_of(arrangements.Arrangement("fffs"), routers)) == set(
        arrangements.ROUTER_POLICIES
    )


def test_an_arrangement_is_compared_with_the_llmserve_of_before():
    found = arrangements.with_those_before([arrangements.DIRECT, arrangements.Arrangement("boost")])
    names = [arrangement.name for arrangement in found]
    assert names == ["vLLM directly", "llmserve boost", "llmserve boost, before"]
    assert [set(arrangements.baselines_of(each, names)) for each in found] == [set(), {"direct", "before"}, {"direct"}]


def a_section(path: Path, **changes: Any) -> argparse.Namespace:
    """The arguments of a run that adds to two rounds of a file."""
    section = {
        "requests": 50,
        "seed": 7,
        "loads": [{"mean_tokens": 80.0, "capacity": 9.0}, {"mean_tokens": 90.0, "capacity": 8.0}],
        "passes": {"vLLM directly": [{"latency_s_mean": 1.0}, {"latency_s_mean": 2.0}]},
    }
    path.write_text(json.dumps({"burst": section | changes}))
    return argparse.Namespace(output=path, more=True, requests=50, seed=7)


def test_further_rounds_are_added_to_those_of_a_file(tmp_path: Path):
    args = a_section(tmp_path / "vllm.json")
    rounds, found = parts.earlier_rounds(args, "burst", ["vLLM directly"])
    assert [(row["round"], row["capacity"]) for row in rounds] == [(0, 9.0), (1, 8.0)]
    assert [(row["round"], row["latency_s_mean"]) for row in found] == [(0, 1.0), (1, 2.0)]
    assert parts.earlier_rounds(args, "trace", ["vLLM directly"]) == ([], [])
    args.more = False
    assert parts.earlier_rounds(args, "burst", ["vLLM directly"]) == ([], [])


def test_rounds_of_other_requests_or_arrangements_are_not_added_to(tmp_path: Path):
    with pytest.raises(ValueError, match="other arrangements"):
        parts.earlier_rounds(a_section(tmp_path / "vllm.json", requests=60), "burst", ["vLLM directly"])
    with pytest.raises(ValueError, match="other arrangements"):
        parts.earlier_rounds(a_section(tmp_path / "vllm.json"), "burst", ["vLLM directly", "llmserve boost"])
    with pytest.raises(ValueError, match="loads of its rounds"):
        parts.earlier_rounds(a_section(tmp_path / "vllm.json", loads=[]), "burst", ["vLLM directly"])


def test_arrangements_can_be_chosen_by_their_way():
    chosen = arrangements.arrangements_of("burst", ["boost"], ["direct", "boost"])
    assert [arrangement.name for arrangement in chosen] == ["vLLM directly", "llmserve boost, predicted"]


def events(*contents: str, end: str = "data: [DONE]\n\n") -> bytes:
    texts = [f'data: {{"choices":[{{"delta":{{"content":"{text}"}},"finish_reason":null}}]}}\n\n' for text in contents]
    return ("".join(texts) + end).encode()


FINISH = 'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
DONE = "data: [DONE]\n\n"
ERROR = 'data: {"error":{"message":"gone","type":"server_error","code":"engine_failed"}}\n\n'


@pytest.mark.parametrize(
    ("status", "body", "kind", "code"),
    [
        (200, events("a", "b", end=FINISH + DONE), "answer", ""),
        (200, events("a", end=ERROR), "error", "event engine_failed"),
        (200, events("a", end=ERROR + DONE), "error", "event engine_failed"),
        (503, b'{"error":{"message":"none","type":"server_error","code":"no_engine"}}', "error", "503 no_engine"),
        (502, b"<html>", "lost", "an unclear error"),
        (0, events("a", end=""), "lost", "cut off"),
        (0, events("a", end='data: {"cho'), "lost", "cut off"),
        (0, b"", "lost", "cut off"),
        (200, events("a", end=FINISH), "lost", "cut off"),
        (200, events("a", end=FINISH + FINISH + DONE), "twice", ""),
        (200, events("a", end=FINISH + ERROR), "twice", ""),
    ],
)
def test_a_streamed_reply_is_judged(status: int, body: bytes, kind: str, code: str):
    verdict = killed.judge(client.Reply(status, body), stream=True)
    assert (verdict.kind, verdict.code) == (kind, code)


def test_a_whole_reply_is_judged():
    answer = b'{"choices":[{"message":{"content":"ab"},"finish_reason":"stop"}]}'
    assert killed.judge(client.Reply(200, answer), stream=False) == killed.Verdict("answer", text="ab")
    assert killed.judge(client.Reply(0, answer[:20]), stream=False).kind == "lost"
    assert killed.judge(client.Reply(0, b""), stream=False).kind == "lost"


# ---- goals --------------------------------------------------------------------------------------------------------


def test_no_goal_is_met_before_it_is_measured():
    assert {goal.met for goal in report.goals({})} == {None}


def test_the_worst_order_counts_in_the_burst():
    rows = [
        Row(
            {"arrangement": name, "way": way, "predictions": kind, "bins": 1},
            {"failed": 0, "dropped": 0},
            {"direct": {"tokens_per_s": ratio - 0.1, "tokens_per_s_saturated": ratio}},
        )
        for name, way, kind, ratio in (
            ("vLLM by priority, oracle", "priority", "oracle", 0.5),
            ("llmserve fffs", "fffs", None, 1.01),
            ("llmserve shortest, random", "shortest", "random", 0.97),
        )
    ]
    waiting, to_the_end = report.goals({"burst": {"rows": rows}})[:2]
    assert "llmserve shortest, random" in waiting.text
    assert waiting.value == 0.97
    assert waiting.met is False
    assert to_the_end.value == pytest.approx(0.87)


def test_every_killed_request_must_be_accounted_for():
    killed = {"requests": 500, "answer": 490, "error": 9, "lost": 1, "twice": 0}
    goals = [goal for goal in report.goals({"kill": killed}) if goal.text.startswith("kill")]
    assert [goal.met for goal in goals] == [False, False, True]


def test_a_part_replaces_its_own_section_only(tmp_path: Path):
    file = tmp_path / "folder" / "results.json"
    benchmark_vllm.write(file, "kill", {"answer": 1})
    benchmark_vllm.write(file, "idle", {"added_latency_ms": 2.0})
    benchmark_vllm.write(file, "kill", {"answer": 3})
    results = json.loads(file.read_text())
    assert list(results) == ["idle", "kill"]
    assert results == {"idle": {"added_latency_ms": 2.0}, "kill": {"answer": 3}}
