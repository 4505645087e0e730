"""The studies of turns: rivals, mistakes and tables, on small worlds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from kit.rows import Row
from make.programs import Drawing
from questions.turns import reachable, vllm
from questions.turns import run as study
from questions.turns.thunder import TICK_S, ThunderAgent

from llmserve.request import Request
from llmserve.scheduling.programs.turn import Program
from llmserve.scheduling.work import Work
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.program_run import run_programs
from llmserve.simulation.programs import Outcome, SessionOf, World
from llmserve.simulation.scenario import Scenario


def agent(name: str, arrival_s: float, *steps: dict[str, Any]) -> dict[str, Any]:
    turns = [{"steps": steps}]
    return {"session": name, "kind": name, "arrival_s": arrival_s, "shared_tokens": 0, "turns": turns}


def step(new_tokens: int, output_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"new_tokens": new_tokens, "output_tokens": output_tokens, **fields}


def by_thunder(path: Path, *sessions: dict[str, Any]) -> Outcome:
    """Before an engine of 1,600 tokens, with 1 s a step. All sessions are counted but the first, at 0."""
    file = path / "world.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in (agent("first", 0.0, step(16, 1)), *sessions)))
    scenario = Scenario(programs=str(file), kv_tokens=1_600, step_s=1.0, prefill_s_per_token=0.0)
    programs = ThunderAgent({"engine0": 1_600})
    return run_programs(scenario, SchedulingConfig(order="fffs").resolved(False), programs=programs)


def test_thunder_agent_lets_a_new_program_wait_for_a_tick_after_room_is_free(tmp_path: Path) -> None:
    """`a` has 1,000 of 1,600 tokens from 101 to 104; ticks are at 100, 105, ..."""
    sessions = agent("a", 101.0, step(1_000, 3)), agent("b", 102.0, step(900, 2))
    assert by_thunder(tmp_path, *sessions).turns_s == pytest.approx([3.0, 105.0 - 102.0 + 2.0])


def test_thunder_agent_pauses_the_program_whose_tool_runs_when_another_has_grown(tmp_path: Path) -> None:
    """`a` acts from 102 to 107 and is paused at 105, because `b` has 1,201 tokens by then."""
    a = agent("a", 101.0, step(600, 1, tool="t", tool_s=5.0), step(10, 1))
    b = agent("b", 101.5, step(500, 1, tool="t", tool_s=1.0), step(700, 20))
    b_ended_s, a_ended_s = by_thunder(tmp_path, a, b).turn_ends_s
    assert b_ended_s > 120.0
    assert a_ended_s == pytest.approx(TICK_S * math.ceil(b_ended_s / TICK_S) + 1.0)


@pytest.mark.parametrize("policy", ["thunder", "wrong", "attained"])
def test_all_turns_of_a_small_world_end(policy: str) -> None:
    row = study.run(12, {"cell": "430k, 0.95, two engines", "policy": policy, "seed": 1})
    assert row["turn_s_mean"] > row["tools_s_mean"] > 0.0


def test_mistakes_change_some_programs_and_not_the_rest() -> None:
    sessions = [msgspec.convert(one, SessionOf) for one in Drawing(1, 0.0).world(60, 0, 1.0)]
    world, wrong = World(sessions), World(sessions)
    study.Mistakes(0.05, 1)(wrong)
    changed = [one.program != other.program for one, other in zip(world.asked, wrong.asked, strict=True)]
    assert any(changed)
    assert not all(changed)


def test_what_was_asked_is_compared_with_what_was_reached() -> None:
    numbers = dict.fromkeys((*study.QUANTITIES.values(), "hit_rate", "tools_s_mean"), 1.0)
    cell = "430k, 0.95, sub-agents"
    rows = [
        Row({"cell": cell, "policy": policy, "seed": 1}, {**numbers, "turn_s_mean": mean})
        for policy, mean in (("arrival", 2.0), ("llmserve", 1.3))
    ]
    lines = list(study.compared(rows))
    assert lines[0] == [cell, "mean", "arrival", "at most 0.6", "0.650", "not reached"]
    assert [line[-2] for line in lines[1:]] == ["1.000", "1.000"]


def test_the_working_set_is_what_programs_hold_if_nothing_waits() -> None:
    """One session in 10 s holds 100 tokens for 2 s of its tool, and the second 50 for 1 s of its answer."""
    costs = vllm.Costs(prefill_s_per_token=0.0, step_s=0.1)
    sessions = [
        msgspec.convert(agent("a", 0.0, step(100, 0 + 1, tool="t", tool_s=1.9), step(1, 1)), SessionOf),
        msgspec.convert(agent("b", 10.0, step(40, 10)), SessionOf),
    ]
    token_s = 101 * (0.1 + 1.9) + 103 * 0.1 + 50 * 1.0
    assert vllm.working_set(sessions, 1.0, costs) == pytest.approx(token_s / 10.0)


def test_a_run_replaces_the_rows_of_its_case(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    for value in (1.0, 2.0):
        for seed in (2, 1):
            vllm.save(path, Row({"cell": "short", "seed": seed, "arrangement": "direct"}, {"turns": value}))
    assert [(row["seed"], row["turns"]) for row in vllm.rows_of(path)] == [(1, 2.0), (2, 2.0)]


def test_what_a_further_sequence_takes_follows_from_the_rate_of_sessions_side_by_side() -> None:
    """Three sessions side by side, whose requests take 0.1 s of prompts and 10 steps."""
    sessions = [msgspec.convert(agent("a", 0.0, step(100, 10, tool="t", tool_s=1.0), step(100, 10)), SessionOf)]
    alone = vllm.Costs(prefill_s_per_token=0.001, step_s=0.02)
    for each_s in (0.0, 0.005):
        step_s = 0.02 + 2 * each_s
        costs = alone.with_rate(sessions, 3, requests_per_s=3 / (10 * step_s + 3 * 0.1))
        assert costs.sequence_s == pytest.approx(each_s)


def test_the_oracle_knows_the_steps_that_remain_of_a_turn() -> None:
    one = agent("a", 0.0, step(100, 10, tool="t", tool_s=1.0), step(20, 30, tool="t", tool_s=1.0), step(1, 2))
    oracle = reachable.Oracle()
    oracle.read(World([msgspec.convert(one, SessionOf)]))
    times = SimpleNamespace(work=lambda tokens, prompt_tokens: Work(tokens, prompt_tokens))
    further_s = [oracle.further_s(Request(number), Program(), times) for number in range(3)]
    assert further_s == [20 + 30 + 1 + 2, 1 + 2, 0]
