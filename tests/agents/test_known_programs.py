"""Which requests belong to one program, without ids: by what was asked before."""

from __future__ import annotations

from typing import Any

import pytest
from agents.asking import RESPONSES, RULES, SHELL, Asking, calls, completion, end, result, says, user

from llmserve.gateway.draft import Draft
from llmserve.programs import known_programs as limits
from llmserve.programs.known_programs import KnownPrograms
from llmserve.programs.trail import Trail, marks_of

TOOLS = {"tools": [SHELL]}
TASK = [RULES, user("fix the test")]
FIRST = [*TASK, calls("c1"), result("c1")]
SECOND = [*FIRST, calls("c2"), result("c2")]


def test_a_request_whose_prompt_goes_on_from_an_earlier_one_is_the_next_step_of_its_program() -> None:
    asking = Asking()
    drafts = [asking.asked(messages, **TOOLS) for messages in (TASK, FIRST, SECOND)]
    assert len({draft.program for draft in drafts}) == 1
    assert [draft.step for draft in drafts] == [1, 2, 3]
    assert asking.found["prompt"] == 2


def test_a_persons_next_message_begins_a_turn_of_the_same_program() -> None:
    asking = Asking()
    last = asking.asked(SECOND, **TOOLS)
    turn = asking.asked([*SECOND, says("fixed"), user("now the docs")], **TOOLS)
    step = asking.asked([*SECOND, says("fixed"), user("now the docs"), calls("c3"), result("c3")], **TOOLS)
    assert (turn.program, turn.step, step.program, step.step) == (last.program, 1, last.program, 2)


def test_what_a_person_says_while_tools_run_begins_no_turn() -> None:
    asking = Asking()
    assert asking.asked([*FIRST, user("be quick")], **TOOLS).step == 2


def test_programs_that_share_a_system_prompt_and_tools_are_of_one_kind_and_stay_apart() -> None:
    asking = Asking()
    one, two = asking.asked(TASK, **TOOLS), asking.asked([RULES, user("write the docs")], **TOOLS)
    assert one.program != two.program
    assert one.kind == two.kind != 0
    assert asking.asked([user("hi")], **TOOLS).kind not in (0, one.kind)


def test_a_first_question_without_tools_is_of_no_program_and_its_next_one_begins_a_program() -> None:
    asking = Asking()
    chat = [RULES, user("hi"), says("hello"), user("how are you?")]
    assert asking.asked(chat[:2]).member is None
    second, third = asking.asked(chat), asking.asked([*chat, says("well"), user("bye")])
    assert (second.program, second.step) == (third.program, third.step)
    assert second.program > 0


def test_equal_questions_are_programs_of_their_own_and_tool_calls_tell_whose_turn_goes_on() -> None:
    asking = Asking()
    firsts = [asking.asked(TASK, answer=completion(calls(f"c{i}")), **TOOLS) for i in range(3)]
    seconds = {i: asking.asked([*TASK, calls(f"c{i}"), result(f"c{i}")], **TOOLS) for i in (2, 0, 1)}
    assert [seconds[i].program for i in range(3)] == [draft.program for draft in firsts]
    assert len({draft.program for draft in firsts}) == 3


def test_equal_questions_whose_answers_have_no_ids_are_still_as_many_programs() -> None:
    asking = Asking()
    firsts = [asking.asked(TASK, **TOOLS).program for _ in range(3)]
    seconds = [asking.asked([*TASK, says(f"answer {i}"), user("go on")], **TOOLS).program for i in range(3)]
    assert sorted(firsts) == sorted(seconds)


def test_ids_that_an_engine_gives_to_many_tool_calls_are_not_believed() -> None:
    asking = Asking()
    tasks = [[RULES, user(text)] for text in ("one", "two")]
    firsts = [asking.asked(task, answer=completion(calls("functions.shell:0")), **TOOLS) for task in tasks]
    more = [calls("functions.shell:0"), result("functions.shell:0")]
    seconds = [asking.asked([*task, *more], **TOOLS) for task in tasks]
    assert [draft.program for draft in seconds] == [draft.program for draft in firsts]


def test_a_tool_call_is_found_behind_a_prompt_that_was_cut_at_its_beginning() -> None:
    asking = Asking()
    first = asking.asked(FIRST, answer=completion(calls("c2")), **TOOLS)
    cut = asking.asked([RULES, calls("c2"), result("c2")], **TOOLS)
    assert (cut.program, cut.step) == (first.program, first.step + 1)
    assert asking.found["answer"] == 1


def test_a_request_that_goes_on_from_a_running_one_is_a_branch() -> None:
    asking = Asking()
    first = asking.asked(TASK, **TOOLS)
    runs = asking.ask(FIRST, **TOOLS)
    branch = asking.ask([*TASK, says("two ways"), user("take both")], **TOOLS)
    assert runs.program == first.program != branch.program
    assert branch.parent == first.program
    end(runs)
    end(branch)
    assert asking.asked(SECOND, **TOOLS).program == first.program
    ways = [*TASK, says("two ways"), user("take both"), says("done"), user("thanks")]
    assert asking.asked(ways, **TOOLS).program == branch.program


@pytest.mark.parametrize(
    "again",
    [SECOND, [*TASK, says("other"), user("edited")], [*FIRST, calls("c9"), result("c9", "other")]],
    ids=["regenerated", "edited", "edited later"],
)
def test_an_edited_or_regenerated_message_stays_in_its_program(again: list[dict[str, object]]) -> None:
    asking = Asking()
    first = next(asking.asked(messages, **TOOLS) for messages in (TASK, FIRST, SECOND))
    assert asking.asked(again, **TOOLS).program == first.program


def test_what_a_person_adds_to_a_question_without_an_answer_stays_in_its_program() -> None:
    asking = Asking()
    first = asking.asked(FIRST, **TOOLS)
    assert asking.asked([*FIRST, user("stop, and summarize")], **TOOLS).program == first.program


def test_a_context_that_begins_anew_is_a_new_program() -> None:
    asking = Asking()
    last = asking.asked(SECOND, **TOOLS)
    assert asking.asked([RULES, user("So far: the test was fixed. Go on.")], **TOOLS).program != last.program


def test_keys_and_models_do_not_share_programs() -> None:
    asking = Asking()
    first = asking.asked(TASK, key="ann", **TOOLS)
    assert asking.asked(FIRST, key="bob", **TOOLS).program != first.program
    other = {"model": "other", "messages": FIRST, **TOOLS}
    assert asking.asked(other, key="ann").program != first.program
    assert asking.asked(FIRST, key="ann", **TOOLS).program == first.program


def test_a_response_goes_on_from_the_one_that_it_names() -> None:
    asking = Asking()
    call = {"type": "function_call", "call_id": "c1", "name": "shell", "arguments": "{}"}
    answer = {"object": "response", "id": "resp_1", "output": [call]}
    tools = [{"type": "function", "name": "shell"}]
    first = asking.asked("fix the test", RESPONSES, answer, tools=tools)
    output = {"type": "function_call_output", "call_id": "c1", "output": "1 failed"}
    second = asking.asked([output], RESPONSES, {**answer, "id": "resp_2"}, tools=tools, previous_response_id="resp_1")
    third = asking.asked("thanks", RESPONSES, tools=tools, previous_response_id="resp_2")
    assert first.program == second.program == third.program
    assert [draft.step for draft in (first, second, third)] == [1, 2, 1]


def test_a_program_is_forgotten_after_some_hours() -> None:
    asking = Asking()
    first = asking.asked(TASK, **TOOLS)
    asking.now_s = limits.FORGOTTEN_AFTER_S
    assert asking.asked(FIRST, **TOOLS).program != first.program


def test_only_the_last_places_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MARKS_MAX", 2)
    monkeypatch.setattr(limits, "ALIKE_MAX", 2)
    programs = KnownPrograms()
    trails = [Trail(marks_of([("user", text)])[0], 1) for text in "abca"]
    for trail in trails:
        programs.arrived(trail)
    places = programs._places._programs
    assert len(places) == 2
    for _ in range(3):
        programs.arrived(trails[0])
    assert max(map(len, places.values())) == 2


def test_requests_of_one_prompt_show_nothing_of_it() -> None:
    drafts = [Asking().asked(TASK, **TOOLS) for _ in range(2)]
    assert drafts[0].program != drafts[1].program, "ids are drawn, not made of the prompt"


# ---- prompts without turns -----------------------------------------------------------------------------------------

COMPLETIONS = "/v1/completions"
RULES_TEXT = "Be careful. " * 100


def completing(asking: Asking, prompt: Any, model: str = "m", key: str = "") -> Draft:
    return asking.ask({"model": model, "prompt": prompt}, COMPLETIONS, key=key)


def completed(asking: Asking, prompt: Any, model: str = "m", key: str = "") -> Draft:
    draft = completing(asking, prompt, model, key)
    end(draft)
    return draft


@pytest.mark.parametrize(
    "prompts",
    [
        [RULES_TEXT, RULES_TEXT + " Yes. And?", RULES_TEXT + " Yes. And? Well" + "..." * 300],
        ["\u00e4" * 600, "\u00e4" * 601, "\u00e4" * 601 + "\n" * 1_000],
        [list(range(n)) for n in (300, 301, 900)],
    ],
    ids=["text", "not ASCII", "token ids"],
)
def test_a_completion_whose_prompt_goes_on_from_an_earlier_one_is_the_next_step_of_its_program(
    prompts: list[Any],
) -> None:
    asking = Asking()
    drafts = [completed(asking, prompt) for prompt in prompts]
    assert len({draft.program for draft in drafts}) == 1
    assert [draft.step for draft in drafts] == [1, 2, 3]
    assert completed(asking, prompts[1], key="ann").program != drafts[0].program
    assert completed(asking, prompts[1], model="other").program != drafts[0].program


def test_a_completion_that_comes_after_a_pause_begins_a_turn_of_its_program() -> None:
    asking = Asking()
    drafts = []
    for number, at_s in enumerate((0.0, 50.0, 100.0, 100.1 + limits.PAUSE_S, 200.0)):
        asking.now_s = at_s
        drafts.append(completed(asking, RULES_TEXT + number * "more"))
    assert len({draft.program for draft in drafts}) == 1
    assert [draft.step for draft in drafts] == [1, 2, 3, 1, 2]


def test_completions_that_share_a_beginning_stay_apart() -> None:
    asking = Asking()
    questions = [completed(asking, f"{RULES_TEXT} {number}?") for number in range(100, 200)]
    assert len({draft.program for draft in questions}) == 100
    on = completed(asking, f"{RULES_TEXT} 199? Yes. And?")
    assert (on.program, on.step) == (questions[-1].program, 2)


def test_a_token_id_that_begins_with_the_digits_of_another_is_another() -> None:
    asking = Asking()
    first = completed(asking, [*range(300), 1, 2])
    assert completed(asking, [*range(300), 1, 23, 4]).program != first.program
    assert completed(asking, [*range(300), 1, 2, 3]).program == first.program


def test_equal_completions_are_programs_of_their_own_and_what_goes_on_from_a_running_one_is_a_branch() -> None:
    asking = Asking()
    samples = [completing(asking, RULES_TEXT) for _ in range(3)]
    assert len({draft.program for draft in samples}) == 3
    branch = completing(asking, RULES_TEXT + " more")
    assert branch.parent in {draft.program for draft in samples}
    for draft in samples:
        end(draft)
    steps = [completing(asking, f"{RULES_TEXT} answer {number}") for number in range(3)]
    assert {draft.program for draft in steps} == {draft.program for draft in samples}


@pytest.mark.parametrize("prompt", ["short", [1, 2, 3], [RULES_TEXT, RULES_TEXT + " more"]])
def test_short_prompts_and_several_at_once_are_of_no_program(prompt: Any) -> None:
    assert completed(Asking(), prompt).program == 0


def test_only_the_last_ends_of_prompts_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MARKS_MAX", 2)
    asking = Asking()
    for number in range(5):
        completed(asking, f"{number}{RULES_TEXT}")
    assert len(asking.programs._ends._lengths) == 2
    assert completed(asking, f"4{RULES_TEXT} more").step == 2
    assert completed(asking, f"0{RULES_TEXT} more").step == 1
