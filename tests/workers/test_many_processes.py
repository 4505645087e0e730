"""A server of several processes: what its clients see is what they see of one process."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import aiohttp
import psutil
import pytest
from many_processes import (
    asked,
    keys_in,
    metric,
    running_engine,
    session_of_many,
    started,
    until,
)
from server_process import Server, all_ended


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return keys_in(tmp_path, ann="concurrent = 3")


@pytest.fixture
def server(engine: str, keys: Path, tmp_path: Path) -> Iterator[Server]:
    with started(engine, tmp_path, "--slots", "8", "--access-log", "--log-format", "json") as server:
        yield server


async def test_what_one_process_answers_several_answer_the_same(server: Server) -> None:
    async with aiohttp.ClientSession() as session:
        async with asked(session, server) as response:
            whole = await response.json()
            assert whole["usage"]["completion_tokens"] == 4
            assert response.headers["x-llmserve-batch"]
            assert response.headers["x-request-id"].startswith("llmserve-")
        async with asked(session, server, stream=True) as response:
            text = await response.text()
            assert text.endswith("data: [DONE]\n\n")
            assert "usage" not in text, "the client has not asked for the counts"
        async with asked(session, server, model="nope") as response:
            assert (response.status, (await response.json())["error"]["code"]) == (404, "model_not_found")
        async with asked(session, server, key="x") as response:
            assert (response.status, (await response.json())["error"]["code"]) == (401, "invalid_api_key")
        async with session.get(f"{server.url}/v1/models", headers={"authorization": f"Bearer {'b' * 20}"}) as response:
            assert [model["id"] for model in (await response.json())["data"]] == ["fake"]
        async with session.get(f"{server.url}/admin/engines", headers={"authorization": f"Bearer {'r' * 20}"}) as told:
            assert told.status == 200
        assert await metric(session, server, "llmserve_requests_total") == 2
        assert await metric(session, server, "llmserve_engine_running") == 0


async def test_a_limit_counts_the_requests_of_all_relays(server: Server) -> None:
    async with session_of_many() as session:

        async def status() -> int:
            async with asked(session, server, key="a", max_tokens=100) as response:
                await response.read()
                return int(response.status)

        statuses = await asyncio.gather(*[status() for _ in range(12)])
        assert sorted(statuses) == [200] * 3 + [429] * 9
        assert await status() == 200, "all of them have given back what they held"


async def test_a_client_that_leaves_frees_its_slot(server: Server) -> None:
    async with aiohttp.ClientSession() as session:
        response = await asked(session, server, stream=True, max_tokens=3000)
        await response.content.readany()
        assert await metric(session, server, "llmserve_engine_running") == 1
        response.close()

        async def is_free() -> bool:
            return not await metric(session, server, "llmserve_engine_running")

        await until(is_free)
        assert await metric(session, server, 'llmserve_requests_total{outcome="cancelled"}') == 1


async def test_each_request_has_one_line_in_the_access_log(server: Server) -> None:
    async with aiohttp.ClientSession() as session:
        for _ in range(3):
            async with asked(session, server) as response:
                await response.read()
        await metric(session, server, "llmserve_requests_total")
    server.process.send_signal(signal.SIGTERM)
    assert server.process.stdout is not None
    lines = [json.loads(line) for line in await asyncio.to_thread(server.process.stdout.readlines) if line[0] == "{"]
    logged = [line for line in lines if line.get("message") == "access" or "path" in line]
    completions = [line for line in logged if line["path"] == "/v1/chat/completions"]
    assert [line["output_tokens"] for line in completions] == [4, 4, 4]
    assert {line["key"] for line in completions} == {"bob"}
    assert [line["path"] for line in logged if line not in completions] == ["/metrics"]


async def test_each_traced_request_has_its_spans_from_the_process_that_holds_it(
    engine: str, keys: Path, tmp_path: Path
) -> None:
    got: list[bytes] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words: object) -> None:
            return

    receiver = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=receiver.serve_forever, daemon=True).start()
    to = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{receiver.server_port}"}
    with started(engine, tmp_path, "--slots", "8", "--traces-sample", "1.0", environment=to) as server:
        async with aiohttp.ClientSession() as session:
            for _ in range(3):
                async with asked(session, server) as response:
                    assert response.status == 200
    receiver.shutdown()
    receiver.server_close()
    spans = b"".join(got)
    assert spans.count(b"POST /v1/chat/completions") == 3
    assert spans.count(b"llmserve.order") == 3, "each has waited in the queue once"


async def test_the_server_drains_and_ends_all_of_its_processes(server: Server) -> None:
    async with aiohttp.ClientSession() as session:
        response = await asked(session, server, stream=True, max_tokens=150)
        await response.content.readany()
        children = psutil.Process(server.process.pid).children()
        server.process.send_signal(signal.SIGTERM)
        assert (await response.text()).endswith("data: [DONE]\n\n"), "what runs is answered"
    assert await asyncio.to_thread(server.process.wait, 40) == 0
    assert all_ended(children)


async def test_requests_of_an_engine_that_dies_run_on_another(engine: str, keys: Path, tmp_path: Path) -> None:
    with running_engine() as (other, process), started(engine, tmp_path, "--slots", "8", "--engine", other) as server:
        async with session_of_many() as session:

            async def both_are_ready() -> bool:
                return await metric(session, server, "llmserve_engine_ready") == 2

            async def all_run() -> bool:
                return await metric(session, server, "llmserve_engine_running") == 12

            async def answer() -> int:
                async with asked(session, server, max_tokens=200) as response:
                    await response.read()
                    return int(response.status)

            await until(both_are_ready)
            answers = [asyncio.create_task(answer()) for _ in range(12)]
            await until(all_run)
            process.kill()
            assert set(await asyncio.gather(*answers)) == {200}, "none of them has had a byte of its answer"
            assert await metric(session, server, "llmserve_engine_running") == 0


async def test_a_stream_that_waits_is_told_its_place(engine: str, keys: Path, tmp_path: Path) -> None:
    with started(engine, tmp_path, "--slots", "1", "--keep-alive-s", "0.2") as server:
        async with aiohttp.ClientSession() as session:
            first = await asked(session, server, stream=True, max_tokens=150)
            await first.content.readany()
            async with asked(session, server, stream=True) as response:
                text = await response.text()
            assert ": position 1" in text
            assert text.endswith("data: [DONE]\n\n")
            first.close()


async def test_a_batch_that_is_preempted_in_a_relay_is_answered_later(keys: Path, tmp_path: Path) -> None:
    """A long answer that has not begun makes room for one in a hurry, and runs again."""
    profile = tmp_path / "fake.json"
    from bins.curve import Curve
    from bins.profile import Profile

    Profile.timed("fake", Curve.affine(0.0, 0.02), prefill_s=1.0, source="The fake engine's.").save(profile)
    flags = ("--barrier", "--order", "flex", "--batch-size", "8", "--edges", "10", "--profile", str(profile))
    pace = ("--barrier", "--step-s", "0.02", "--prefill-s", "1.0")
    with running_engine(*pace, slots=8) as (url, _), started(url, tmp_path, *flags) as server:
        async with session_of_many() as session:

            async def answer(tokens: int, **headers: str) -> int:
                predicted = {"x-llmserve-predicted-tokens": str(tokens), **headers}
                async with asked(session, server, max_tokens=tokens, headers=predicted) as response:
                    await response.read()
                    return int(response.status)

            assert await answer(1) == 200, "teaches the scheduler the length of quick answers"
            long = asyncio.create_task(answer(300))

            async def it_runs() -> bool:
                return await metric(session, server, "llmserve_engine_running") == 1

            await until(it_runs)
            in_a_hurry = {"x-llmserve-slo-ms": "5000"}
            assert set(await asyncio.gather(*[answer(1, **in_a_hurry) for _ in range(8)])) == {200}
            assert await long == 200
            assert await metric(session, server, "llmserve_preempted_requests_total") >= 1


async def test_a_reload_is_taken_by_all_processes_or_by_none(server: Server, keys: Path) -> None:
    async def statuses(key: str) -> set[int]:
        found = set()
        for _ in range(12):  # connections go to either relay
            async with aiohttp.ClientSession() as session, asked(session, server, key=key) as response:
                found.add(int(response.status))
        return found

    async def reload() -> int:
        headers = {"authorization": f"Bearer {'r' * 20}"}
        url = f"{server.url}/admin/reload"
        async with aiohttp.ClientSession() as session, session.post(url, headers=headers) as response:
            return int(response.status)

    bob, cem = (f'[keys.{name}]\nkey = "{name[0] * 20}"\n' for name in ("bob", "cem"))
    _write(keys, bob + cem)
    server.process.send_signal(signal.SIGHUP)

    async def cem_is_known() -> bool:
        return await statuses("c") == {200}

    await until(cem_is_known, 60.0)
    assert await statuses("a") == {401}
    _write(keys, bob + "[keys.dan]\nkey = 3\n")
    assert await reload() != 200
    assert await statuses("d") == {401}, "no process has taken a file that is wrong"
    assert await statuses("c") == {200}
    _write(keys, bob)
    assert await reload() == 200
    assert await statuses("c") == {401}
    assert await statuses("b") == {200}


def _write(file: Path, text: str) -> None:
    file.write_text(text)


def test_as_many_relays_as_cores_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    from llmserve.workers import processes

    monkeypatch.setattr(processes.os, "sched_getaffinity", lambda pid: set(range(16)))
    assert (processes.relays_of("auto"), processes.relays_of(3)) == (15, 3)
    monkeypatch.setattr(processes.os, "sched_getaffinity", lambda pid: {0})
    assert processes.relays_of("auto") == 1
