"""Anthropic's official client through the front-end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import pytest
from front import Front, StartFront, through_relays_too

from llmserve.engines.timed.server import FakeEngine
from llmserve.settings.tree import ServerConfig

SAID: Any = [{"role": "user", "content": "how are you"}]
TOOL: Any = {"name": "run", "description": "runs", "input_schema": {"type": "object", "properties": {}}}


def claude(front: Front, key: str = "none") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=front.url, api_key=key, max_retries=0)


@through_relays_too
async def test_the_anthropic_client_creates_streams_and_counts(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine)
        messages = claude(front).messages
        whole = await messages.create(
            model="fake", max_tokens=5, messages=SAID, tools=[TOOL], system=[{"type": "text", "text": "be brief"}]
        )
        async with messages.stream(model="fake", max_tokens=5, messages=SAID) as stream:
            final = await stream.get_final_message()
        count = await messages.count_tokens(model="fake", messages=SAID)
    assert whole.content[0].type == "text"
    assert whole.content[0].text == "tok " * 5
    assert final.content[0].text == "tok " * 5
    assert final.usage.output_tokens == 5
    assert count.input_tokens > 0


@through_relays_too
async def test_anthropics_errors_raise_the_clients_exceptions(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine)
        with pytest.raises(anthropic.NotFoundError) as missing:
            await claude(front).messages.create(model="other", max_tokens=5, messages=SAID)
        with pytest.raises(anthropic.BadRequestError, match="--stops-max"):
            await claude(front).messages.create(model="fake", max_tokens=5, messages=SAID, stop_sequences=["x"] * 100)
    assert missing.value.body == {
        "type": "error",
        "error": {"type": "not_found_error", "message": "there is no model 'other'; this server has fake"},
    }


@through_relays_too
async def test_a_key_may_come_as_anthropic_sends_it(start_front: StartFront, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice: sk-alice\n")
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine, server=ServerConfig(port=0, api_key_file=str(keys)))
        await claude(front, "sk-alice").messages.create(model="fake", max_tokens=5, messages=SAID)
        with pytest.raises(anthropic.AuthenticationError):
            await claude(front, "sk-bob").messages.create(model="fake", max_tokens=5, messages=SAID)
        assert [model.id async for model in claude(front, "sk-alice").models.list()] == ["fake"]
        async with front.post("/v1/embeddings", headers={"x-api-key": "sk-alice"}, input="a") as refused:
            assert refused.status == 401
