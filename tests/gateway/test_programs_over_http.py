"""Agents over HTTP: what the scheduler, the client and the metrics learn of their programs."""

from __future__ import annotations

from typing import Any

import pytest
from front import StartFront
from gateway.agent_turns import Turn
from gateway.claude_conversation import CLAUDE
from gateway.codex_conversation import CODEX
from gateway.test_agents import playing

from llmserve.engines.timed.server import FakeEngine
from llmserve.live.journal import replay
from llmserve.observe.scrape import Scrape
from llmserve.scheduling.messages import RequestArrived, RequestEnded


@pytest.mark.parametrize(
    ("turns", "headers", "source", "tool"),
    [
        (CLAUDE, {"x-claude-code-session-id": "s"}, "claude_code", "Bash"),
        (CLAUDE, {}, "claude_code", "Bash"),  # by the `user_id` in its body
        (CODEX, {"session_id": "s", "conversation_id": "s"}, "codex", "shell"),
        (CODEX, {}, "answer", "shell"),
    ],
)
async def test_the_scheduler_is_told_of_programs_steps_and_tools(
    start_front: StartFront, turns: list[Turn], headers: dict[str, str], source: str, tool: str
) -> None:
    asked = [turn for turn in turns if b'"tools"' in turn.asked and "count" not in turn.path]
    told = []
    async with playing(asked) as (url, _):
        front = await start_front(url)
        for turn in asked:
            async with front.session.post(front.url + turn.path, data=turn.asked, headers=headers) as response:
                await response.read()
                told.append(int(response.headers["x-llmserve-program"], 16))
        async with front.session.get(f"{front.url}/metrics") as response:
            scrape = Scrape(await response.text())
    journal = front.cluster.journal
    requests = [step.event.request for step in journal.steps if isinstance(step.event, RequestArrived)]
    tools = [step.event.tools for step in journal.steps if isinstance(step.event, RequestEnded)]
    assert [request.step for request in requests] == [1, 2]
    assert told == [request.program for request in requests]
    assert len(set(told)) == len({request.kind for request in requests}) == 1
    assert tool in tools[0]
    assert tools[1] == ()
    assert scrape.by("llmserve_program_requests_total", "source")[source] >= 1
    assert replay(journal.header, list(journal.steps)) == list(journal.steps)


async def test_a_chat_is_of_no_program(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine)
        async with front.post() as response:
            assert "x-llmserve-program" not in response.headers
    requests: list[Any] = [step.event for step in front.cluster.journal.steps if isinstance(step.event, RequestArrived)]
    assert (requests[0].request.program, requests[0].request.step) == (0, 0)


async def test_what_an_engine_keeps_for_programs_is_in_the_metrics_once_programs_come(start_front: StartFront) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "edit", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "mend it"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]
    names = ("llmserve_engine_ledger_tokens", "llmserve_engine_kept_programs")

    async def scraped() -> list[list[float]]:
        async with front.session.get(f"{front.url}/metrics") as response:
            scrape = Scrape(await response.text())
        return [list(scrape.by(name, "engine").values()) for name in names]

    async with FakeEngine(step_s=0.001, slots=4, tokens_max=10_000) as engine:
        front = await start_front(engine)
        async with front.post(max_tokens=2) as response:
            assert response.status == 200
        assert await scraped() == [[], []]
        async with front.post(messages=messages, max_tokens=2, headers={"x-llmserve-session": "s"}) as response:
            assert response.status == 200
        assert await scraped() == [[0.0], [0.0]]
