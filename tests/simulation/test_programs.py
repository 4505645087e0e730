"""Programs: sessions of agents whose next request depends on the one before, and the times of their turns."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from llmserve.__main__ import main
from llmserve.errors import ConfigError
from llmserve.live import journal
from llmserve.scheduling.messages import RequestArrived, RequestEnded, StartBatch
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.program_run import run_programs
from llmserve.simulation.programs import Outcome, World, read_sessions
from llmserve.simulation.scenario import Scenario

AGENT = {"kind": "agent", "shared_tokens": 160}


def step(new_tokens: int, output_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"new_tokens": new_tokens, "output_tokens": output_tokens, **fields}


def session(name: str, *turns: list[dict[str, Any]], arrival_s: float = 0.0, **fields: Any) -> dict[str, Any]:
    """A session of an agent, with 100 s before each turn."""
    steps = [{"gap_s": 100.0, "steps": turn} for turn in turns]
    return {"session": name, "arrival_s": arrival_s, "turns": steps, **AGENT, **fields}


def written(path: Path, *sessions: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(one) + "\n" for one in sessions))
    return str(path)


def outcome_of(path: Path, *sessions: dict[str, Any], straight: bool = False, **fields: Any) -> Outcome:
    """On an engine with 1 s a step and 1 ms a token of a prompt. All sessions are counted but one, at 0."""
    first = session("first", [step(16, 1)], kind="other", arrival_s=0.0)
    late = [{**one, "arrival_s": one["arrival_s"] + 50.0} for one in sessions]
    settings = {"kv_tokens": 16_000, "step_s": 1.0, "prefill_s_per_token": 0.001, **fields}
    scenario = Scenario(programs=written(path / "programs.jsonl", first, *late), **settings)
    return run_programs(scenario, SchedulingConfig(order="fffs").resolved(False), straight=straight)


def test_a_turn_lasts_from_its_first_request_to_its_last_answer_with_its_tools(tmp_path: Path) -> None:
    """The second prompt of 160 + 40 + 10 + 20 tokens finds the 208 that were computed."""
    outcome = outcome_of(tmp_path, session("a", [step(40, 9, tool="edit", tool_s=7.0), step(20, 3)]))
    first_s = 9 + 0.2
    assert outcome.turns_s == [pytest.approx(first_s + 7 + 3 + 0.001 * (229 - 208))]
    assert outcome.turn_first_s == [pytest.approx(1.2)]
    assert (outcome.prompt_tokens, outcome.cached_tokens) == (200 + 229, 208)


def test_a_further_turn_begins_after_its_gap(tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path, session("a", [step(40, 9)], [step(20, 3)]))
    assert len(outcome.turns_s) == 2
    assert outcome.turn_ends_s[1] - outcome.turn_ends_s[0] == pytest.approx(100 + outcome.turns_s[1])


def test_sessions_of_a_kind_share_their_beginning(tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path, session("a", [step(40, 1)]), session("b", [step(40, 1)], arrival_s=10.0))
    assert outcome.cached_tokens == 160


def test_a_compacted_context_begins_anew_after_what_the_kind_shares(tmp_path: Path) -> None:
    steps = [step(400, 5, tool="edit", tool_s=1.0), step(50, 1, compacted=True)]
    outcome = outcome_of(tmp_path, session("a", steps))
    assert (outcome.prompt_tokens, outcome.cached_tokens) == (560 + 210, 160)


def test_a_turn_waits_for_all_sub_agents_that_it_has_called(tmp_path: Path) -> None:
    inner = [session("x", [step(10, 2)], kind="sub"), session("y", [step(10, 30)], kind="sub")]
    outcome = outcome_of(tmp_path, session("a", [step(40, 1, tool="task", sessions=inner), step(10, 1)]))
    assert len(outcome.turns_s) == 1
    assert outcome.turns_s[0] > 1 + 30 + 1
    assert outcome.prompt_tokens == 200 + 2 * 170 + 211


def test_chats_are_counted_apart(tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path, session("a", [step(40, 5)], kind="chat"))
    assert (outcome.turns_s, outcome.chats_s, outcome.chat_first_s) == ([], [pytest.approx(5.2)], [pytest.approx(1.2)])
    assert outcome.summary()["turn_s_mean"] is None
    assert outcome.summary()["chat_s_mean"] == pytest.approx(5.2)


def test_requests_go_straight_to_the_engine_and_wait_there(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    sessions = [session(name, [step(500, 40)]) for name in "abc"]
    file = written(tmp_path / "programs.jsonl", *sessions)
    scenario = Scenario(programs=file, kv_tokens=1_000, step_s=1.0)
    for straight, at_once in ((True, 3), (False, 1)):
        scheduling = SchedulingConfig(order="fffs").resolved(False)
        run_programs(scenario, scheduling, straight=straight, journal_path=path)
        steps = journal.read(path)[1]
        starts_s = [one.now_s for one in steps for action in one.actions if isinstance(action, StartBatch)]
        assert sum(at_s == 0.0 for at_s in starts_s) == at_once
        path.unlink()


def test_the_scheduler_knows_the_blocks_of_the_prompts(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    file = written(tmp_path / "programs.jsonl", session("a", [step(500, 200, tool="x"), step(500, 1)]))
    run_programs(Scenario(programs=file), SchedulingConfig().resolved(False), journal_path=path)
    first, second = (one.event.request for one in journal.read(path)[1] if isinstance(one.event, RequestArrived))
    assert (len(first.blocks), len(second.blocks)) == (5, 10)
    assert second.blocks[:5] == first.blocks


def test_requests_say_which_step_of_which_program_they_are_and_answers_which_tool_they_call(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    inner = session("inner", [step(20, 5)])
    turns = [[step(100, 5, tool="edit"), step(10, 5, sessions=[inner]), step(10, 5)], [step(10, 5)]]
    file = written(tmp_path / "programs.jsonl", session("a", *turns))
    run_programs(Scenario(programs=file), SchedulingConfig().resolved(False), journal_path=path)
    events = [one.event for one in journal.read(path)[1]]
    requests = [event.request for event in events if isinstance(event, RequestArrived)]
    assert [(request.program, request.parent, request.step) for request in requests] == [
        *((1, 0, 1), (1, 0, 2), (2, 1, 1), (1, 0, 3), (1, 0, 1)),
    ]
    assert len({request.kind for request in requests}) == 1
    tools = [event.tools for event in events if isinstance(event, RequestEnded)]
    assert tools == [("edit",), ("agents",), (), (), ()]


def test_where_contexts_do_not_fit_together_programs_take_a_fraction_of_the_time(tmp_path: Path) -> None:
    turn = [step(300, 10, tool="edit", tool_s=1.0), *[step(30, 10, tool="edit", tool_s=1.0)] * 8, step(30, 10)]
    sessions = [session(f"s{number}", turn, arrival_s=0.9 * number) for number in range(120)]
    engine = {"kv_tokens": 10_000, "step_s": 0.02, "prefill_s_per_token": 0.0008}
    direct, programs = (outcome_of(tmp_path, *sessions, straight=straight, **engine) for straight in (True, False))
    assert sum(programs.turns_s) < 0.5 * sum(direct.turns_s)
    assert max(programs.turns_s) < max(direct.turns_s)
    assert programs.cached_tokens > 1.3 * direct.cached_tokens


def test_where_contexts_fit_together_programs_are_as_quick_as_without_a_front_end(tmp_path: Path) -> None:
    turn = [step(300, 10, tool="edit", tool_s=1.0), *[step(30, 10, tool="edit", tool_s=1.0)] * 3, step(30, 10)]
    sessions = [session(f"s{number}", turn, arrival_s=10.0 * number) for number in range(30)]
    direct, programs = (
        outcome_of(tmp_path, *sessions, kv_tokens=1_000_000, straight=s).summary() for s in (True, False)
    )
    assert programs == direct


def test_the_same_seed_gives_the_same_figures(tmp_path: Path) -> None:
    sessions = [session(f"s{number}", [step(300, 30), step(50, 20)], arrival_s=number) for number in range(30)]
    one, two = (outcome_of(tmp_path, *sessions, kv_tokens=2_000).summary() for _ in range(2))
    assert one == two


def test_the_first_sessions_are_not_counted(tmp_path: Path) -> None:
    sessions = read_sessions(written(tmp_path / "x", *[session(f"s{number}", [step(1, 1)]) for number in range(20)]))
    assert [course.is_counted for course in World(sessions).courses] == [False] * 3 + [True] * 17


def test_a_compressed_file_is_read_and_its_figures_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "programs.jsonl.gz"
    with gzip.open(path, "wt") as file:
        for number in range(10):
            file.write(json.dumps(session(f"s{number}", [step(40, 5)], arrival_s=number)) + "\n")
    assert main(["simulate", "--programs", str(path), "--kv-tokens", "100000", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == [
        *("turn_s_mean", "turn_s_p50", "turn_s_p95", "turn_s_p99", "chat_s_mean", "first_token_s_p99"),
        *("hit_rate", "turns_per_s"),
    ]
    assert main(["simulate", "--programs", str(path), "--no-programs", "--order", "fffs"]) == 0
    assert "turn of an agent (s), 8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: Expected `object`, got `array`"),
        ('{"session": "a", "kind": "b", "shared_tokens": 1, "turns": []}', "length >= 1 - at `$.turns`"),
        (json.dumps(session("a", [step(-1, 2)])), r"at `$.turns[0].steps[0].new_tokens`"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "programs.jsonl"
    path.write_text(json.dumps(session("a", [step(1, 1)])) + f"\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        read_sessions(str(path))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--programs", "x", "--trace", "y"], "trace cannot be given with programs"),
        (["--programs", "x", "--seeds", "2"], "programs: one run at a time"),
        (["--no-programs"], "no-programs: there are no programs"),
        (["--programs", "x", "--predictions", "online:y"], "programs have no prompts to learn from"),
    ],
)
def test_flags_that_contradict_each_other_are_named(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "x", session("a", [step(1, 1)]))
    assert main(["simulate", *flags]) == 2
    assert message in capsys.readouterr().err
