"""When a batch will end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
from batch_client import at, client_of, create, jsonl, request
from front import Front, StartFront

from llmserve.engines.timed.server import FakeEngine
from llmserve.settings.tree import ServerConfig


async def test_a_batch_says_when_it_will_end_and_warns_when_that_is_too_late(
    front: Front, client: openai.AsyncOpenAI, engine: FakeEngine
) -> None:
    requests = [request(number, max_tokens=200 if number < 200 else 1_000_000) for number in range(1000)]
    batch = await at(client, await create(client, jsonl(requests), window="60s"), "in_progress")
    async with asyncio.timeout(30):
        while (added := batch.llmserve)["warning"] is None:  # type: ignore[attr-defined]
            await asyncio.sleep(0.05)
            batch = await client.batches.retrieve(batch.id)
    assert batch.expires_at is not None
    assert added["expected_end_at"] > batch.expires_at
    assert "after its window" in added["warning"]
    await at(client, await client.batches.cancel(batch.id), "cancelled")


async def test_the_end_the_tokens_and_the_cost_are_forecast_at_the_creation_by_what_the_server_knows(
    start_front: StartFront, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[keys.ann]\nkey = "sk-ann"\n[prices.fake]\ninput = 0.0\noutput = 1000.0\n')
    keys.chmod(0o600)
    server = ServerConfig(port=0, state=str(tmp_path / "state"), api_key_file=str(keys))
    async with FakeEngine(slots=8, step_s=0.0005, output_tokens=9) as engine:
        front = await start_front(engine, server=server)
        client = client_of(front.url, "sk-ann")
        for number in range(20):
            hello: Any = [{"role": "user", "content": f"hello {number}"}]
            await client.chat.completions.create(model="fake", messages=hello)
        lines = [request(number, max_tokens=None) for number in range(300)]
        batch = await create(client, jsonl(lines))
        added = batch.llmserve  # type: ignore[attr-defined]
        assert batch.status == "validating"
        assert added["expected_end_at"] is not None
        assert added["forecast"]["output_tokens"] == pytest.approx(300 * 9, rel=0.2), "not 300 * 256"
        assert added["forecast"]["money"] == pytest.approx(300 * 9 * 1000e-6, rel=0.2)
        assert added["forecast"]["joules"] is None, "nothing meters the engine"
        batch = await at(client, batch, "completed")
        assert batch.llmserve["forecast"] == added["forecast"]  # type: ignore[attr-defined]
