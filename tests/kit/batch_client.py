"""Input files for batches, and the official client of a server in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import openai
from openai.types import Batch

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


def request(number: int, *, url: str = CHAT, **fields: Any) -> dict[str, Any]:
    """A request of an input file."""
    content = {"messages": [{"role": "user", "content": f"hello {number}"}]} if url == CHAT else {"prompt": "hello"}
    return {
        "custom_id": f"request-{number}",
        "method": "POST",
        "url": url,
        "body": {"model": "fake", "max_tokens": 3, **content, **fields},
    }


def jsonl(requests: Sequence[dict[str, Any]]) -> bytes:
    return b"".join([json.dumps(one).encode() + b"\n" for one in requests])


def client_of(url: str, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


async def create(client: openai.AsyncOpenAI, data: bytes, window: Any = "24h", **fields: Any) -> Batch:
    """Upload an input file, and make a batch of it."""
    file = await client.files.create(file=("in.jsonl", data), purpose="batch")
    endpoint = fields.pop("endpoint", CHAT)
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window=window, **fields)


async def ended(client: openai.AsyncOpenAI, batch: Batch, within_s: float = 60.0) -> Batch:
    """The batch at its end."""
    return await at(client, batch, *ENDED, within_s=within_s)


async def at(client: openai.AsyncOpenAI, batch: Batch, *statuses: str, within_s: float = 60.0) -> Batch:
    """The batch at one of these statuses."""
    async with asyncio.timeout(within_s):
        while batch.status not in statuses:
            await asyncio.sleep(0.02)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def rows(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """The rows of an output or error file; [] without a file."""
    if file_id is None:
        return []
    return [json.loads(row) for row in (await client.files.content(file_id)).text.splitlines()]
