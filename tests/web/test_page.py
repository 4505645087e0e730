"""GET / and GET /events: the page's files, and the snapshots that it shows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from batch_client import at, client_of, create, jsonl, request
from front import Front, StartFront, until
from sqlalchemy.exc import SQLAlchemyError

from llmserve.engines.timed.server import FakeEngine
from llmserve.jobs.service import JobService
from llmserve.jobs.sums import JobSums
from llmserve.observe.watch import JobsSeen
from llmserve.settings.tree import ServerConfig
from llmserve.web.page import FILES


async def snapshots(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        if line.startswith(b"data: "):
            yield json.loads(line.removeprefix(b"data: "))


async def events(front: Front, key: str = "") -> aiohttp.ClientResponse:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return await front.session.get(front.url + "/events", headers=headers)


async def test_the_files_come_from_this_host_alone(start_front: StartFront) -> None:
    async with FakeEngine() as engine:
        front = await start_front(engine)
        for path, (_, content_type) in FILES.items():
            async with front.session.get(front.url + path) as response:
                text = await response.text()
                assert (response.status, response.headers["content-type"]) == (200, content_type)
                assert "default-src 'self'" in response.headers["content-security-policy"]
                assert "http://" not in text
                assert "https://" not in text


async def test_snapshots_tell_what_runs_waits_and_has_ended(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0.02, slots=1, cache_words=0) as engine:
        front = await start_front(engine, slots=1)
        async with await events(front) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            seen = snapshots(response)
            first = await anext(seen)
            assert (first["running"], first["waiting"], first["slots"], first["requests"]) == (0, 0, 1, [])
            asking = [asyncio.ensure_future(front.post(max_tokens=100).__aenter__()) for _ in range(3)]
            await until(lambda: front.cluster.scheduler.waiting == 2)
            busy = await anext(seen)
            assert (busy["running"], busy["waiting"]) == (1, 2)
            assert busy["models"] == [{"name": "fake", "requests": 2}]
            assert [(request["outcome"], request["ended_s"]) for request in busy["requests"]] == [("runs", None)]
            reports = [busy]
            while sum(report["ended"] for report in reports) < 3:
                reports.append(await anext(seen))
            for answer in asking:
                await (await answer).read()
    ended = [request for report in reports for request in report["requests"] if request["outcome"] == "completed"]
    assert [request["tokens"] for request in ended] == [100, 100, 100]
    assert all(request["arrived_s"] <= request["started_s"] < request["ended_s"] for request in ended)
    assert sum(report["tokens"] for report in reports) == 300
    told = [(engine["prompt_tokens"], engine["cached_tokens"]) for report in reports for engine in report["engines"]]
    assert (sum(tokens for tokens, _ in told), sum(cached for _, cached in told)) == (3 * 4, 0)
    assert sum(report["arrived"] for report in reports) == 3
    assert all(0 < low <= high for low, high in (report["latency_s"] for report in reports if report["ended"]))


async def test_nothing_is_counted_while_nobody_watches(start_front: StartFront) -> None:
    async with FakeEngine() as engine:
        front = await start_front(engine)
        before = len(front.cluster.journal.listeners)
        async with await events(front) as one, await events(front) as other:
            await anext(snapshots(one))
            await anext(snapshots(other))
            assert len(front.cluster.journal.listeners) == before + 1
        await until(lambda: len(front.cluster.journal.listeners) == before)
        async with front.post(max_tokens=2) as response:
            assert response.status == 200
        async with await events(front) as again:
            assert (await anext(snapshots(again)))["arrived"] == 0


async def test_batch_jobs_of_all_keys_are_summed(start_front: StartFront, tmp_path: Path) -> None:
    for name, text in (("keys", "alice: sk-alice\nbob: sk-bob\n"), ("admin", "sk-admin\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    async with FakeEngine(step_s=0.01, slots=1) as engine:
        server = ServerConfig(
            port=0,
            api_key_file=str(tmp_path / "keys"),
            admin_key_file=str(tmp_path / "admin"),
            state=str(tmp_path / "state"),
        )
        front = await start_front(engine, slots=1, server=server)
        lines = jsonl([request(number, max_tokens=100) for number in range(400)])
        for key in ("sk-alice", "sk-bob"):
            client = client_of(front.url, key)
            await at(client, await create(client, lines), "in_progress")
        async with await events(front, "sk-admin") as response:
            seen = snapshots(response)
            jobs = (await anext(seen))["jobs"]
            while jobs["batches"] is None or jobs["lines_in_flight"] == 0:  # the store has not answered, nothing begun
                jobs = (await anext(seen))["jobs"]
    assert jobs["batches"] == {"in_progress": 2}
    in_flight = jobs["lines_in_flight"]
    assert 0 < in_flight < 800
    assert 800 - 100 < in_flight + jobs["lines_waiting"] <= 800
    assert jobs["tokens_waiting"] > jobs["lines_waiting"]


async def test_a_store_that_does_not_answer_is_told_until_it_does() -> None:
    class Store:
        """Answers from its second question on."""

        asked = 0

        async def counts(self) -> dict[str, int]:
            self.asked += 1
            if self.asked != 2:
                raise SQLAlchemyError("the database is away")
            return {"failed": 3}

    store = Store()
    feed = SimpleNamespace(lines_waiting=4, lines_in_flight=2, tokens_waiting=40.0)
    sums = JobSums(cast(JobService, SimpleNamespace(batches=store, runner=SimpleNamespace(feeder=feed))), every_s=0.01)
    following = asyncio.create_task(sums.follow())
    seen: list[dict[str, int] | None] = []
    while store.asked < 4:
        if not seen or sums.seen.batches != seen[-1]:
            seen.append(sums.seen.batches)
        await asyncio.sleep(0)
    following.cancel()
    assert seen == [None, {"failed": 3}, None]
    assert sums.seen == JobsSeen(None, 4, 2, 40.0)


async def test_a_server_without_a_store_shows_no_jobs(start_front: StartFront) -> None:
    async with FakeEngine() as engine:
        front = await start_front(engine)
        async with await events(front) as response:
            assert (await anext(snapshots(response)))["jobs"] is None


@pytest.mark.parametrize("admin", [True, False])
async def test_with_keys_only_an_admin_sees_the_events(start_front: StartFront, tmp_path: Path, admin: bool) -> None:
    for name, text in (("keys", "alice: sk-alice\n"), ("admin", "sk-admin\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    async with FakeEngine() as engine:
        server = ServerConfig(
            port=0, api_key_file=str(tmp_path / "keys"), admin_key_file=str(tmp_path / "admin") if admin else None
        )
        front = await start_front(engine, server=server)
        async with front.session.get(front.url + "/") as page:
            assert page.status == 200
        for key, status in (("", 401), ("sk-alice", 401), ("sk-admin", 200)):
            async with await events(front, key) as response:
                assert response.status == (status if admin else 404)


async def test_a_refused_request_is_counted_by_its_reason(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0.05, slots=1) as engine:
        front = await start_front(engine, slots=1)
        async with await events(front) as response:
            seen = snapshots(response)
            await anext(seen)
            running = asyncio.ensure_future(front.post(max_tokens=60).__aenter__())
            await until(lambda: engine.running == 1)
            async with front.post(headers={"x-llmserve-slo-ms": "30"}) as late:
                assert late.status == 504
            report = await anext(seen)
            while not report["refused"]:
                report = await anext(seen)
            assert report["refused"] == {"deadline_exceeded": 1}
            assert (await running).status == 200
