"""The ids that clients send of their sessions, each in its own way."""

from __future__ import annotations

import json
from typing import Any

import pytest
from agents.asking import CHAT, MESSAGES, RESPONSES, RULES, SHELL, Asking, calls, result, user

from llmserve.errors import ConfigError
from llmserve.gateway.bodies import SESSION_FIELDS, ChatBody
from llmserve.programs.sources import KNOWN, SOURCES, Sent
from llmserve.settings.limits import ApiConfig

SESSION = "0199f1c2-5d3e-7a41-b1c6-0c7e3f5a9b21"
IN_HEADERS = [
    ({"x-llmserve-session": "s"}, Sent("llmserve", "s")),
    ({"x-llmserve-program": "p"}, Sent("llmserve", "", "p")),
    ({"x-llmserve-session": "s", "x-llmserve-program": "p"}, Sent("llmserve", "s", "p")),
    ({"x-claude-code-session-id": "s"}, Sent("claude_code", "s")),
    ({"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"}, Sent("claude_code", "s", "a")),
    ({"session_id": "s", "conversation_id": "s"}, Sent("codex", "s")),
    ({"session-id": "s", "thread-id": "t", "x-codex-parent-thread-id": "s"}, Sent("codex", "s", "t")),
    ({"session-id": "s", "thread-id": "t", "x-codex-parent-thread-id": "u"}, Sent("codex", "s", "t", "u")),
    ({"x-dynamo-session-id": "s", "x-dynamo-parent-session-id": "p"}, Sent("dynamo", "s", "", "p")),
    ({"x-session-id": "s", "x-session-affinity": "s"}, Sent("session_header", "s")),
    ({"x-request-id": "s", "user-agent": "x"}, None),
    ({"x-session-id": "s" * 257}, None),
    ({"x-session-id": ""}, None),
]
IN_BODY: list[tuple[dict[str, Any], Sent | None]] = [
    ({"session_id": "s"}, Sent("vllm", "s")),
    ({"session_id": 7}, Sent("vllm", "7")),
    ({"session_params": {"session_id": "s"}}, Sent("vllm", "s")),
    ({"program_id": "p"}, Sent("thunder_agent", "p")),
    ({"prompt_cache_key": SESSION}, Sent("prompt_cache_key", SESSION)),
    ({"prompt_cache_key": "my-app-prompts"}, None),
    ({"metadata": {"user_id": f"user_0a1b_account__session_{SESSION}"}}, Sent("claude_code", SESSION)),
    ({"metadata": {"user_id": json.dumps({"device_id": "d", "session_id": "s"})}}, Sent("claude_code", "s")),
    ({"metadata": {"user_id": "ann"}}, None),
    ({"nvext": {"agent_context": {"session_id": "s", "trajectory_id": "s:t"}}}, Sent("dynamo", "s", "s:t")),
    ({"nvext": {"agent_hints": {"priority": 5}}}, None),
    ({"session_id": ["s"], "session_params": "s", "metadata": None, "nvext": 3}, None),
]


@pytest.mark.parametrize(("headers", "sent"), IN_HEADERS)
def test_ids_in_headers(headers: dict[str, str], sent: Sent | None) -> None:
    assert KNOWN.sent_in_headers(headers) == sent


@pytest.mark.parametrize(("fields", "sent"), IN_BODY)
def test_ids_in_the_body(fields: dict[str, Any], sent: Sent | None) -> None:
    body = {name: json.dumps(value).encode() for name, value in fields.items()}
    assert KNOWN.sent_in_body(body) == sent
    trail = Asking().asked([user("hi")], **fields).trail
    assert (trail.sent if trail is not None else None) == sent


def test_all_fields_and_headers_of_the_table_are_read() -> None:
    assert set(SESSION_FIELDS) == set(KNOWN.fields) <= set(ChatBody.__struct_fields__)
    assert all(name in KNOWN.headers for source in SOURCES for name in (*source.sessions, *source.contexts))


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_ids_count_whatever_the_prompt_is(path: str) -> None:
    asking = Asking()
    one, two = {"x-session-id": "one"}, {"x-session-id": "two"}
    drafts = [asking.asked([user(text)], path, headers=ids) for text, ids in (("a", one), ("a", two), ("b", one))]
    assert drafts[0].program == drafts[2].program != drafts[1].program
    assert [draft.step for draft in drafts] == [1, 1, 1]
    assert drafts[0].program != asking.asked([user("a")], path, headers=one, key="ann").program


def test_a_program_of_ids_is_the_same_after_a_restart_with_the_same_secret() -> None:
    first, second = [Asking().asked([user("a")], headers={"x-session-id": "s"}).program for _ in range(2)]
    assert first == second != 0


def test_a_client_may_send_back_the_program_that_an_answer_has_told() -> None:
    asking = Asking()
    first = asking.asked([user("a")], tools=[SHELL])
    told = {"x-llmserve-program": f"{first.program:012x}"}
    assert asking.asked([user("another context")], headers=told).program == first.program


def test_a_header_counts_before_the_body() -> None:
    asking = Asking()
    draft = asking.asked([user("a")], headers={"x-session-id": "s"}, session_id="other")
    assert draft.trail is not None
    assert draft.trail.sent == Sent("session_header", "s")


def test_a_sub_agent_is_a_program_beside_its_parent() -> None:
    asking = Asking()
    session = {"x-claude-code-session-id": "s"}
    parent = asking.ask([user("a")], MESSAGES, headers=session)
    child = asking.ask([user("b")], MESSAGES, headers={**session, "x-claude-code-agent-id": "a"})
    grandchild_ids = {"x-claude-code-agent-id": "b", "x-claude-code-parent-agent-id": "a"}
    grandchild = asking.ask([user("c")], MESSAGES, headers={**session, **grandchild_ids})
    assert [child.parent, grandchild.parent] == [parent.program, child.program]
    assert len({parent.program, child.program, grandchild.program}) == 3


def test_what_an_agent_asks_beside_its_work_does_not_enter_its_program() -> None:
    asking = Asking()
    session = {"x-session-id": "s"}
    work = [RULES, user("fix the test")]
    first = asking.asked(work, headers=session, tools=[SHELL])
    beside = asking.asked([user("Write a title")], headers=session)
    goes_on = [*work, calls("c1"), result("c1")]
    assert beside.program != first.program
    assert asking.asked(goes_on, headers=session, tools=[SHELL]).program == first.program
    summary = asking.asked([*goes_on, user("Summarize")], headers=session)
    assert summary.program == first.program, "what goes on from the work belongs to it, also without tools"


def test_claude_codes_changing_attribution_is_no_part_of_the_prompt() -> None:
    asking = Asking()

    def ask(number: int, messages: list[dict[str, Any]]) -> Any:
        told = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={number};"}
        return asking.asked(messages, MESSAGES, system=[told, {"type": "text", "text": "Rules"}], tools=[{"name": "t"}])

    first = ask(1, [user("a")])
    second = ask(2, [user("a"), {"role": "assistant", "content": "b"}, user("c")])
    assert (first.program, first.kind) == (second.program, second.kind)


def test_completions_have_programs_where_ids_are_sent() -> None:
    asking = Asking()
    assert asking.asked({"model": "m", "prompt": "a b c"}, "/v1/completions").program == 0
    drafts = [asking.asked({"model": "m", "prompt": [1, 2], "session_id": "s"}, "/v1/completions") for _ in range(2)]
    assert drafts[0].program == drafts[1].program != 0


# ---- a site's own ------------------------------------------------------------------------------------------------

OWN = ("header:X-Chat-Id", "body:metadata.thread", "body:chat-thread", "body:previous_response_id", "body:answers")


@pytest.mark.parametrize(
    ("headers", "fields", "session"),
    [
        ({"x-chat-id": "c"}, {}, "c"),
        ({"x-chat-id": "c"}, {"metadata": {"thread": "t"}}, "c"),
        ({}, {"metadata": {"thread": "t", "user_id": "ann"}}, "t"),
        ({}, {"chat-thread": 7}, "7"),
        ({}, {"answers": "a"}, "a"),
        ({}, {"chat-thread": {"id": "not here"}}, None),
        ({"x-session-id": "s"}, {}, None),
    ],
)
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_site_names_headers_and_fields_of_its_own(
    path: str, headers: dict[str, str], fields: dict[str, Any], session: str | None
) -> None:
    trail = Asking(OWN).ask([user("hi")], path, headers, **fields).trail
    sent = trail.sent if trail is not None else None
    assert (sent.session if sent is not None and sent.client == "site" else None) == session


def test_a_sites_field_may_be_one_that_bodies_have_anyway() -> None:
    trail = Asking(OWN).ask([user("hi")], RESPONSES, previous_response_id="r").trail
    assert trail is not None
    assert trail.sent == Sent("site", "r")


def test_what_an_answer_has_told_counts_before_a_sites_header() -> None:
    trail = Asking(OWN).ask([user("hi")], headers={"x-chat-id": "c", "x-llmserve-session": "s"}).trail
    assert trail is not None
    assert trail.sent == Sent("llmserve", "s")


@pytest.mark.parametrize("text", ["x-chat-id", "header:", "header:x chat", "body:a..b", "cookie:chat", "body:"])
def test_a_place_that_is_no_header_and_no_field_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="session_from"):
        ApiConfig(session_from=(text,))
