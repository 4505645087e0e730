"""The conversations of Codex and Claude Code replayed, with an engine that knows what comes next.

What the engine gets must be what the agent sent, and what the agent gets must be what the engine sent, in odd pieces.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from front import Front, StartFront, through_relays_too
from gateway.agent_turns import Turn
from gateway.claude_conversation import CLAUDE
from gateway.codex_conversation import CODEX, QUESTION

from llmserve.gateway.bodies import BodyLimits
from llmserve.gateway.parse import parse_call
from llmserve.scheduling.messages import RequestEnded

PIECE = 97  # bytes: events are cut anywhere


@asynccontextmanager
async def playing(turns: list[Turn]) -> AsyncIterator[tuple[str, list[tuple[str, bytes, Any]]]]:
    """The URL of an engine that knows what comes next, and what it gets: paths, bodies and headers."""
    got: list[tuple[str, bytes, Any]] = []

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def answer(request: web.Request) -> web.StreamResponse:
        got.append((request.path_qs, await request.read(), request.headers.copy()))
        data = turns[len(got) - 1].answered
        if data.startswith(b"{"):
            return web.Response(body=data, content_type="application/json")
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for start in range(0, len(data), PIECE):
            await response.write(data[start : start + PIECE])
        return response

    app = web.Application(client_max_size=1 << 24)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/{path:.*}", answer)
    async with TestServer(app) as server:
        yield str(server.make_url("")), got


@through_relays_too
@pytest.mark.parametrize("turns", [CODEX, CLAUDE], ids=["codex", "claude"])
async def test_a_conversation_with_tools_passes_unchanged(start_front: StartFront, turns: list[Turn]) -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "interleaved-thinking-2025-05-14"}
    async with playing(turns) as (url, got):
        front = await start_front(url)
        for turn in turns:
            async with front.session.post(front.url + turn.path, data=turn.asked, headers=headers) as response:
                assert response.status == 200
                assert await response.read() == turn.answered
    assert [body for _, body, _ in got] == [turn.asked for turn in turns]
    assert [path.partition("?")[0] for path, _, _ in got] == [turn.path.partition("?")[0] for turn in turns]
    if turns is CLAUDE:
        assert all(headers.items() <= dict(sent).items() for _, _, sent in got)
    assert output_tokens(front) == [turn.tokens for turn in turns]
    sizes = front.cluster.forecasts.prompt_tokens.state()["sums"]
    assert sizes[0][1] == pytest.approx(2 * 900 + (8 if turns is CLAUDE else 0), rel=0.01)  # with the prompt cache's


def output_tokens(front: Front) -> list[float]:
    return [step.event.output_tokens for step in front.cluster.journal.steps if isinstance(step.event, RequestEnded)]


@pytest.mark.parametrize(
    ("path", "data", "text", "system"),
    [
        ("/v1/responses", CODEX[1].asked, QUESTION, "Ask before you delete."),
        ("/v1/messages", CLAUDE[3].asked, "<system-reminder/> Fix é", "You are Claude Code. Be concise."),
    ],
)
def test_the_predictor_gets_what_the_user_asked_and_not_what_tools_said(
    path: str, data: bytes, text: str, system: str
) -> None:
    call = parse_call(path, data, BodyLimits(prompt_chars_max=100_000))
    assert (call.prompt.text, call.prompt.system) == (text, system)
    assert call.prompt.tools == len(json.loads(data)["tools"])
    assert call.prompt.history_characters > 10


@pytest.mark.parametrize(
    ("path", "data", "said"),
    [
        ("/v1/responses", CODEX[1].asked, ["+x = 2", "Success. Updated a.py", "pytest -q"]),
        ("/v1/messages", CLAUDE[3].asked, ["found nothing", "I should look.", "new_string", "1 failed"]),
    ],
)
def test_what_tools_are_asked_and_say_is_history(path: str, data: bytes, said: list[str]) -> None:
    whole = parse_call(path, data, BodyLimits(prompt_chars_max=100_000)).prompt.history_characters
    for text in said:
        shorter = parse_call(path, data.replace(text.encode(), b""), BodyLimits(prompt_chars_max=100_000))
        assert shorter.prompt.history_characters == whole - len(text), text


@through_relays_too
@pytest.mark.parametrize("turn", [CODEX[0], CLAUDE[1]], ids=["codex", "claude"])
async def test_a_stream_without_its_end_is_an_error(start_front: StartFront, turn: Turn) -> None:
    begun = b"\n\n".join(turn.answered.split(b"\n\n")[:-2]) + b"\n\n"
    async with playing([turn._replace(answered=begun)]) as (url, _):
        front = await start_front(url)
        async with front.session.post(front.url + turn.path, data=turn.asked) as response:
            told = await response.read()
    assert told.startswith(begun + b"event: error\ndata: {")
