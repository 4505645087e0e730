"""OpenAI's client, unchanged, against a server with --state."""

from __future__ import annotations

from pathlib import Path

from batch_client import client_of, create, ended, jsonl, request, rows
from front import StartFront, through_relays_too

from llmserve.engines.timed.server import FakeEngine
from llmserve.settings.tree import ServerConfig


@through_relays_too
async def test_a_batch_runs_through_the_servers_queue(start_front: StartFront, tmp_path: Path) -> None:
    requests = [request(number) for number in range(300)]
    data = jsonl(requests)
    async with FakeEngine(slots=8, step_s=0.0005) as engine:
        front = await start_front(engine, server=ServerConfig(port=0, state=str(tmp_path)))
        client = client_of(front.url)
        batch = await ended(client, await create(client, data, metadata={"team": "red"}))
        assert (batch.status, batch.error_file_id, batch.metadata) == ("completed", None, {"team": "red"})
        assert batch.request_counts is not None
        assert (batch.request_counts.total, batch.request_counts.completed) == (300, 300)
        times = batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at
        assert list(times) == sorted(times, key=lambda time: time or 0)
        output = await rows(client, batch.output_file_id)
        assert sorted(row["custom_id"] for row in output) == sorted(one["custom_id"] for one in requests)
        assert {row["response"]["status_code"] for row in output} == {200}
        assert {row["response"]["body"]["usage"]["completion_tokens"] for row in output} == {3}
        assert (await client.files.content(batch.input_file_id)).content == data
        assert engine.running_max == 8, "the engine was full"
