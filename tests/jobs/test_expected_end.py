"""When a batch will end."""

from __future__ import annotations

import asyncio

import openai
from batch_client import at, create, jsonl, request
from front import Front

from llmserve.engines.fake import FakeEngine


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
