"""A job in a running server beside online requests."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from batch_client import at, client_of, create, ended, jsonl, request, rows
from front import Front, StartFront, until

from llmserve.engines.timed.server import FakeEngine
from llmserve.scheduling.messages import RequestArrived, StartBatch
from llmserve.settings.tree import ServerConfig

SLOTS, LINES, LINE_TOKENS = 4, 32, 60


def contents(engine: FakeEngine) -> list[str]:
    """The messages of the requests that the engine has got, in order."""
    return [json.loads(body)["messages"][0]["content"] for body in engine.bodies]


async def ask(front: Front, name: str) -> None:
    async with front.post(messages=[{"role": "user", "content": name}], max_tokens=3) as answer:
        assert answer.status == 200


def begun_meanwhile(front: Front) -> dict[int, int]:
    """For each online request: how many lines began between its arrival and its start, by the journal."""
    waiting: dict[int, int] = {}
    begun: dict[int, int] = {}
    for step in front.cluster.journal.steps:
        if isinstance(step.event, RequestArrived) and not step.event.request.background:
            waiting[step.event.request.id] = 0
        for action in step.actions:
            for started in action.batch.requests if isinstance(action, StartBatch) else ():
                if started.background:
                    waiting = {online: lines + 1 for online, lines in waiting.items()}
                elif started.id in waiting:
                    begun[started.id] = waiting.pop(started.id)
    return begun


async def test_online_requests_never_wait_behind_a_line_that_had_not_begun(
    start_front: StartFront, tmp_path: Path
) -> None:
    async with FakeEngine(slots=SLOTS, step_s=0.005) as engine:
        server = ServerConfig(port=0, state=str(tmp_path))
        front = await start_front(engine, slots=SLOTS, server=server)
        client = client_of(front.url)
        batch = await create(client, jsonl([request(number, max_tokens=LINE_TOKENS) for number in range(LINES)]))
        await until(lambda: engine.running == SLOTS)  # lines take every slot, and many more wait
        assert len(front.cluster.scheduler.batch_lane.waiting) > SLOTS
        for number in range(5):
            await ask(front, f"online {number}")
        batch = await ended(client, batch)
        assert batch.status == "completed"
        assert len(await rows(client, batch.output_file_id)) == LINES
        assert list(begun_meanwhile(front).values()) == [0] * 5, "each got the first slot that was free"
        async with front.session.get(f"{front.url}/metrics") as response:
            metrics = (await response.text()).splitlines()
        assert f'llmserve_job_lines_ended_total{{outcome="completed"}} {LINES}.0' in metrics
        assert 'llmserve_job_lines{state="waiting"} 0.0' in metrics


async def test_an_online_request_stops_a_line_which_runs_again(start_front: StartFront, tmp_path: Path) -> None:
    async with FakeEngine(slots=1, step_s=0.01) as engine:
        front = await start_front(engine, slots=1, server=ServerConfig(port=0, state=str(tmp_path)))
        client = client_of(front.url)
        batch = await create(client, jsonl([request(number, max_tokens=150) for number in range(3)]))
        await until(lambda: engine.running == 1)
        async with front.post(messages=[{"role": "user", "content": "hurry"}], max_tokens=3) as answer:
            assert answer.status == 200
        assert contents(engine)[1] == "hurry", "before the first line's 1.5 s were over"
        batch = await ended(client, batch)
        assert batch.status == "completed"
        assert len(await rows(client, batch.output_file_id)) == 3
        assert len(engine.bodies) == 5, "three lines, one of them twice, and the online request"


async def test_lines_are_ordered_by_prefix(start_front: StartFront, tmp_path: Path) -> None:
    async with FakeEngine(slots=1, step_s=0.001) as engine:
        front = await start_front(engine, slots=1, server=ServerConfig(port=0, state=str(tmp_path)))
        client = client_of(front.url)
        prefixes = ["red " * 100, "blue " * 100]
        requests = [
            request(number, messages=[{"role": "user", "content": f"{prefixes[number % 2]}{number}"}])
            for number in range(40)
        ]
        await ended(client, await create(client, jsonl(requests)))
        colours = [content.partition(" ")[0] for content in contents(engine)]
        changes = sum([one != other for one, other in pairwise(colours)])
        assert len(colours) == 40
        assert changes == 1, "all lines of a prefix follow each other"


async def test_the_expected_end_is_known_before_the_first_answer(start_front: StartFront, tmp_path: Path) -> None:
    async with FakeEngine(slots=2, step_s=0.02) as engine:
        front = await start_front(engine, slots=2, server=ServerConfig(port=0, state=str(tmp_path)))
        client = client_of(front.url)
        batch = await create(client, jsonl([request(number, max_tokens=1000) for number in range(20)]))
        await at(client, batch, "in_progress")
        await until(lambda: engine.running == 2)
        batch = await client.batches.retrieve(batch.id)
        added = batch.llmserve  # type: ignore[attr-defined]
        assert batch.request_counts is not None
        assert batch.request_counts.completed == 0
        assert batch.in_progress_at is not None
        assert added["warning"] is None
        assert 0 < added["expected_end_at"] - batch.in_progress_at < 1000, "20 lines of 1,000 tokens"
        await at(client, await client.batches.cancel(batch.id), "cancelled")
