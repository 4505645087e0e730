"""Cached tokens on their way from an engine's answer to the scheduler, the journal and the client's receipt."""

from __future__ import annotations

import json
from typing import Any

import pytest
from front import Front, StartFront, until

from llmserve.engines.timed.server import FakeEngine
from llmserve.live.journal import replay
from llmserve.scheduling.messages import RequestEnded

SAID = " ".join(f"word{number}" for number in range(100))
CHAT: Any = {"messages": [{"role": "user", "content": SAID}], "max_tokens": 2}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": SAID, "max_tokens": 2},
    "/v1/responses": {"input": SAID, "max_output_tokens": 2},
    "/v1/messages": CHAT,
}


async def ask(front: Front, path: str = "/v1/chat/completions", **fields: Any) -> tuple[str | None, bytes]:
    """The answer's header of cached tokens, and its body."""
    body = {"model": "fake", **(BODIES[path] if not fields.get("messages") else {}), **fields}
    headers = {"x-llmserve-receipt": "true"} if fields.get("stream") and "completions" in path else {}
    async with front.session.post(front.url + path, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        return response.headers.get("x-llmserve-cached-tokens"), await response.read()


async def cached(front: Front) -> list[float | None]:
    """What each request that has ended had in the engine's cache."""
    await until(lambda: not front.cluster.scheduler.requests)
    steps = front.cluster.journal.steps
    return [step.event.cached_tokens for step in steps if isinstance(step.event, RequestEnded)]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", BODIES)
async def test_the_scheduler_hears_what_each_endpoint_tells(path: str, stream: bool, start_front: StartFront) -> None:
    async with FakeEngine(step_s=0, cache_words=10_000) as engine:
        front = await start_front(engine)
        first, _ = await ask(front, path, stream=stream)
        second, body = await ask(front, path, stream=stream)
        assert await cached(front) == [0, 96]
        assert (first, second) == ((None, None) if stream else ("0", "96"))
        if stream and "completions" in path:
            events = [json.loads(line[5:]) for line in body.splitlines() if line.startswith(b"data: {")]
            assert [event["llmserve"]["cached_tokens"] for event in events if "llmserve" in event] == [96]


async def test_an_engine_that_tells_nothing_leaves_them_unknown(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine)
        for stream in (False, True):
            header, body = await ask(front, stream=stream)
            assert header is None
            assert b"cached_tokens" not in body
        assert await cached(front) == [None, None]


async def test_the_journal_replays_with_them(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0, cache_words=10_000) as engine:
        front = await start_front(engine)
        await ask(front)
        await ask(front)
        assert await cached(front) == [0, 96]
        steps = list(front.cluster.journal.steps)
        assert replay(front.cluster.journal.header, steps) == steps
