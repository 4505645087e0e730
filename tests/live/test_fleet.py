"""Engines that are drained, restarted, killed, frozen and replaced under load."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from calls import a_call
from front import Front, StartFront, until
from reader import answered, submitted
from worlds.invariants import check

from llmserve.engines.openai import OpenAIEngine
from llmserve.engines.process import EngineProcess
from llmserve.engines.timed.server import FakeEngine, FakePace, Fault
from llmserve.live.cluster import LiveCluster
from llmserve.live.engine_state import Condition, EngineState
from llmserve.live.fleet import Fleet
from llmserve.live.journal import Header, Journal
from llmserve.request import Call, EngineInfo
from llmserve.scheduling.messages import EngineLost, RequestEnded
from llmserve.settings.policies import SchedulingConfig
from llmserve.settings.tree import ApiConfig, LiveConfig, ServerConfig
from predictor.prompt import Prompt


@asynccontextmanager
async def engine_process(*flags: str) -> AsyncIterator[EngineProcess]:
    """A fake engine in its own process, which can be killed and frozen."""

    def command(port: int) -> list[str]:
        return [sys.executable, "-m", "llmserve.engines.timed", "--port", str(port), *flags]

    process = EngineProcess("a fake engine", command, start_s=60)
    await process.start()
    try:
        yield process
    finally:
        await process.stop()


async def ask(front: Front, *, stream: bool, **fields: Any) -> str:
    """Send a request; return its end: "done", an error's code, or "lost" without a proper end."""
    try:
        async with front.post(stream=stream, **fields) as response:
            body = (await response.read()).decode()
    except aiohttp.ClientError:
        return "lost"
    if response.status != 200:
        return str(json.loads(body)["error"]["code"])
    if not stream:
        return "done" if json.loads(body)["usage"]["completion_tokens"] == fields["max_tokens"] else "lost"
    events = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    if events[-1] != "[DONE]":
        return "lost"
    if "error" in (last := json.loads(events[-2])):
        return str(last["error"]["code"])
    text = sum(event.count('"tok "') for event in events)
    return "done" if text == fields["max_tokens"] else f"{text} tokens"


def state(front: Front, name: str) -> str:
    return front.cluster.fleet.handles[name].word


def name_of(url: str) -> str:
    return url.removeprefix("http://")


# ---- faults under load ----


@pytest.mark.slow
async def test_of_500_requests_none_is_lost_and_none_answered_twice_when_one_of_two_engines_is_killed(
    start_front: StartFront,
) -> None:
    flags = ("--step-s", "0.002", "--slots", "16")
    async with engine_process(*flags) as survivor, engine_process(*flags) as victim:
        front = await start_front(survivor.url, victim.url, slots=16)
        rng = random.Random(5)
        requests = [
            asyncio.ensure_future(ask(front, stream=number % 2 == 0, max_tokens=rng.randrange(5, 80)))
            for number in range(500)
        ]
        await until(lambda: sum(request.done() for request in requests) >= 150)
        assert victim.pid is not None
        os.killpg(victim.pid, signal.SIGKILL)
        ends = Counter(await asyncio.gather(*requests))
        await until(lambda: not front.cluster.scheduler.requests)
    assert set(ends) <= {"done", "engine_failed", "engine_lost"}, ends
    assert ends["done"] >= 500 - 16, "only streams that had begun on the victim may fail"
    final = Counter(
        step.event.request_id
        for step in front.cluster.journal.steps
        if isinstance(step.event, RequestEnded) and not (step.event.fault and step.event.retryable)
    )
    assert len(final) == 500
    assert max(final.values()) == 1
    assert any(isinstance(step.event, EngineLost) for step in front.cluster.journal.steps)


@pytest.mark.slow
async def test_a_frozen_engine_is_given_up_and_its_requests_run_elsewhere(start_front: StartFront) -> None:
    """The kernel still accepts connections, but the engine never answers."""
    flags = ("--step-s", "0.02", "--slots", "4")
    async with engine_process(*flags) as good, engine_process(*flags) as frozen:
        live = LiveConfig(probe_every_s=0.05, probes_failed_max=2)
        front = await start_front(good.url, frozen.url, slots=4, live=live)
        requests = [asyncio.ensure_future(ask(front, stream=False, max_tokens=20)) for _ in range(16)]
        await until(lambda: len(front.cluster.fleet.handles[name_of(frozen.url)].running) == 4)
        assert frozen.pid is not None
        os.killpg(frozen.pid, signal.SIGSTOP)
        try:
            assert Counter(await asyncio.gather(*requests)) == {"done": 16}
            assert state(front, name_of(frozen.url)) == "down"
        finally:
            os.killpg(frozen.pid, signal.SIGCONT)
        await until(lambda: all(front.cluster.engines_ready.values()))


async def test_an_engine_that_only_fails_gets_only_trial_requests_until_it_works_again(start_front: StartFront) -> None:
    scheduling = {"circuit_faults_max": 3, "circuit_pause_s": 0.2, "retries_max": 5}
    async with FakeEngine(step_s=0.001, slots=4) as good, FakeEngine(step_s=0.001, slots=4) as bad:
        bad.fault = Fault("500")
        front = await start_front(good, bad, slots=4, scheduling=scheduling)
        ends = [await ask(front, stream=False, max_tokens=3) for _ in range(60)]
        assert Counter(ends) == {"done": 60}
        assert len(bad.bodies) < 12, "after three faults the engine may get only trial requests"
        bad.fault = Fault()
        served = len(bad.bodies)
        async with asyncio.timeout(30):
            while len(bad.bodies) < served + 5:
                await asyncio.gather(*(ask(front, stream=False, max_tokens=3) for _ in range(4)))
        assert front.cluster.scheduler.engines[name_of(bad.url)].circuit.closed


async def test_bad_requests_open_no_circuit(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0, model="other", others={"fake": FakePace(0.0)}) as engine:
        front = await start_front(engine, scheduling={"circuit_faults_max": 1}, live=LiveConfig(probe_every_s=60))
        del engine._paces["fake"]  # llmserve learns of this only at the next probe
        ends = [await ask(front, stream=False, max_tokens=3) for _ in range(10)]
        assert ends == ["model_not_found"] * 10
        assert await ask(front, stream=False, max_tokens=3, model="other") == "done"


async def test_an_engine_that_refuses_connections_may_finish_its_streams(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0.01) as other, FakeEngine(step_s=0.01) as leaving:
        front = await start_front(other, leaving, slots=1)
        streams = [asyncio.ensure_future(ask(front, stream=True, max_tokens=60)) for _ in range(2)]
        await until(lambda: leaving.running == other.running == 1)
        assert leaving._runner is not None
        for site in list(leaving._runner.sites):
            await site.stop()  # no new connections; open ones stay
        assert await ask(front, stream=False, max_tokens=3) == "done"
        assert state(front, name_of(leaving.url)) == "down"
        assert await asyncio.gather(*streams) == ["done", "done"]


async def test_the_death_of_an_idle_engine_is_one_warning(
    start_front: StartFront, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeEngine() as other:
        async with FakeEngine() as dying:
            front = await start_front(other, dying)
            name = name_of(dying.url)
        await until(lambda: state(front, name) == "down")
        handle = front.cluster.fleet.handles[name]
        await until(lambda: not handle.state.alive)
    told = [record.message for record in caplog.records if record.levelname == "WARNING" and name in record.message]
    assert told == [f"engine {name} takes no connections; 0 requests run on it"]


# ---- operators ----


def admin_config(tmp_path: Path) -> dict[str, Any]:
    keys = tmp_path / "admin-keys"
    keys.write_text("operator: let-me-in\n")
    return {"server": ServerConfig(port=0, admin_key_file=str(keys))}


async def send_order(front: Front, name: str, command: str, key: str | None = "let-me-in") -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with front.session.post(f"{front.url}/admin/engines/{name}/{command}", headers=headers) as response:
        return response.status, await response.json()


async def test_a_drained_engine_finishes_its_requests_and_gets_no_more_until_it_is_resumed(
    start_front: StartFront, tmp_path: Path
) -> None:
    async with FakeEngine(step_s=0.01) as first, FakeEngine(step_s=0.01) as second:
        front = await start_front(first, second, slots=2, **admin_config(tmp_path))
        name = name_of(first.url)
        requests = [asyncio.ensure_future(ask(front, stream=True, max_tokens=40)) for _ in range(8)]
        await until(lambda: first.running == second.running == 2)
        status, reply = await send_order(front, name, "drain")
        assert (status, reply["state"], reply["running"]) == (200, "draining", 2)
        assert reply["drains_in_s"] > 0
        served = len(first.bodies)
        assert Counter(await asyncio.gather(*requests)) == {"done": 8}
        assert len(first.bodies) == served, "a drained engine was given a request"
        assert state(front, name) == "drained"
        assert (await send_order(front, name, "resume"))[1]["state"] == "ready"
        await asyncio.gather(*(ask(front, stream=False, max_tokens=5) for _ in range(4)))
        assert len(first.bodies) > served


async def test_only_the_admin_key_gives_orders(start_front: StartFront, tmp_path: Path) -> None:
    async with FakeEngine(step_s=0) as engine:
        name = name_of(engine.url)
        shut = await start_front(engine)
        assert (await send_order(shut, name, "drain"))[0] == 404
        front = await start_front(engine, **admin_config(tmp_path))
        assert (await send_order(front, name, "drain", key=None))[0] == 401
        assert (await send_order(front, name, "drain", key="guess"))[0] == 401
        assert (await send_order(front, "nobody", "drain"))[0] == 404
        handle = front.cluster.fleet.handles[name]
        handle.state = EngineState(Condition.DOWN)
        assert (await send_order(front, name, "drain"))[0] == 400, (
            "the engine is down and would be used when it is back"
        )
        handle.state = EngineState(Condition.UP)
        assert (await send_order(front, name, "explode"))[0] == 404
        assert (await send_order(front, name, "restart"))[0] == 400, "llmserve did not start this engine"
        assert state(front, name) == "ready"
        headers = {"authorization": "Bearer let-me-in"}
        async with front.session.get(f"{front.url}/admin/engines", headers=headers) as response:
            (engine_,) = (await response.json())["engines"]
        assert (engine_["name"], engine_["state"], engine_["slots"]) == (name, "ready", 8)
        assert engine_["drains_in_s"] == 0
        async with front.session.get(f"{front.url}/admin/engines") as response:
            assert response.status == 401


@pytest.mark.slow
async def test_a_rolling_restart_under_load_loses_no_request(start_front: StartFront, tmp_path: Path) -> None:
    """Drain an engine, restart it on its port, wait until it is back; then the next engine."""
    flags = ("--step-s", "0.002", "--slots", "4")
    async with engine_process(*flags) as first, engine_process(*flags) as second:
        front = await start_front(first.url, second.url, slots=4, **admin_config(tmp_path))
        stop, ends = asyncio.Event(), Counter[str]()

        async def keep_asking(number: int) -> None:
            while not stop.is_set():
                ends[await ask(front, stream=number % 2 == 0, max_tokens=20)] += 1

        clients = [asyncio.ensure_future(keep_asking(number)) for number in range(12)]
        for process in (first, second):
            name, ended_before = name_of(process.url), sum(ends.values())
            await until(lambda ended_before=ended_before: sum(ends.values()) > ended_before + 20)  # type: ignore[misc]
            await send_order(front, name, "drain")
            await until(lambda name=name: not front.cluster.fleet.handles[name].running)  # type: ignore[misc]
            await process.restart()
            await until(lambda name=name: front.cluster.engines_ready[name])  # type: ignore[misc]
        ended_before = sum(ends.values())
        await until(lambda: sum(ends.values()) > ended_before + 20)
        stop.set()
        await asyncio.gather(*clients)
    assert set(ends) == {"done"}, ends


@asynccontextmanager
async def cluster_of(*engines: OpenAIEngine) -> AsyncIterator[LiveCluster]:
    header = Header(SchedulingConfig().resolved(barrier=False))
    cluster = LiveCluster(header.scheduler(), Fleet(engines, LiveConfig(probe_every_s=0.05)), Journal(header))
    cluster.start()
    try:
        await until(lambda: all(cluster.engines_ready.values()))
        yield cluster
    finally:
        await cluster.close()


def call(**fields: Any) -> Call:
    body = {"model": "fake", "messages": [], "max_tokens": 5}
    return a_call("/v1/chat/completions", json.dumps(body).encode(), Prompt("", "fake"), stream=False, **fields)


async def test_llmserves_own_engine_is_restarted_on_order_when_it_is_empty() -> None:
    async with engine_process("--step-s", "0.01") as process:
        engine = OpenAIEngine(EngineInfo("mine", 8, False), process.url, restart=process.restart)
        async with cluster_of(engine) as cluster:
            _, reader = submitted(cluster, call())
            (handle,) = cluster.fleet.handles.values()
            first_pid = process.pid
            cluster.fleet.restart(handle)
            cluster.fleet.restart(handle)  # a second order changes nothing
            assert (handle.word, handle.ready) == ("restarting", False)
            assert (await reader.head()).status == 200
            await until(lambda: cluster.engines_ready["mine"])
            assert process.pid != first_pid
            assert (await answered(cluster, call())).status == 200


async def test_a_healthy_engine_that_refuses_the_key_is_logged_once(start_front: StartFront, caplog: Any) -> None:
    paths = Counter[str]()

    async def refuse(request: web.Request) -> web.Response:
        paths[request.path] += 1
        return web.Response(status=200 if request.path == "/health" else 401)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", refuse)
    async with TestServer(app) as engine:
        front = await start_front(str(engine.make_url("")), wait=False)
        (handle,) = front.cluster.fleet.handles.values()
        await until(lambda: paths["/v1/models"] > 2)
        assert not handle.up
    messages = [record.message for record in caplog.records if "/v1/models answers 401" in record.message]
    assert len(messages) == 1


async def test_a_single_failure_of_metrics_changes_nothing(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0.01, slots=3, tokens_max=5_000) as engine:
        front = await start_front(engine, slots=None)
        (handle,) = front.cluster.fleet.handles.values()
        requests = [asyncio.ensure_future(ask(front, stream=False, max_tokens=60)) for _ in range(20)]
        await until(lambda: handle.info.slots == 3)

        async def broken(request: web.BaseRequest) -> web.Response:
            return web.Response(status=500)

        engine._routes["GET", "/metrics"] = broken
        probes = []
        probe = handle.engine.probe

        async def counted() -> Any:
            probes.append(await probe())
            return probes[-1]

        handle.engine.probe = counted  # type: ignore[method-assign]
        await until(lambda: len(probes) >= 3)
        assert handle.up
        assert (handle.info.slots, handle.info.tokens_max) == (3, 5_000)
        await asyncio.gather(*requests)


# ---- slots, memory and prefixes ----


async def test_undeclared_slots_are_read_from_the_engine(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0.01, slots=3) as engine:
        front = await start_front(engine, slots=None)
        (handle,) = front.cluster.fleet.handles.values()
        requests = [asyncio.ensure_future(ask(front, stream=False, max_tokens=100)) for _ in range(30)]
        await until(lambda: handle.info.slots == 3)
        assert Counter(await asyncio.gather(*requests)) == {"done": 30}


async def test_an_engine_of_many_slots_soon_gets_as_many_requests_as_it_takes(start_front: StartFront) -> None:
    """Full slots cause an immediate probe, however rare the other probes are."""
    async with FakeEngine(step_s=0.01, slots=40) as engine:
        front = await start_front(engine, slots=None, live=LiveConfig(probe_every_s=60.0))
        (handle,) = front.cluster.fleet.handles.values()
        requests = [asyncio.ensure_future(ask(front, stream=False, max_tokens=200)) for _ in range(90)]
        await until(lambda: engine.running_max == 40)
        await until(lambda: handle.info.slots == 40)
        assert Counter(await asyncio.gather(*requests)) == {"done": 90}


async def test_the_engines_memory_bounds_the_requests_sent_to_it(start_front: StartFront) -> None:
    """At its end each request holds 100 tokens, plus a block's rounding; the cache holds 400."""
    async with FakeEngine(step_s=0.002, slots=64, tokens_max=400) as engine:
        front = await start_front(engine, slots=64)
        headers = {"x-llmserve-predicted-tokens": "100"}
        await asyncio.gather(*(ask(front, stream=False, max_tokens=100, headers=headers) for _ in range(12)))
        assert engine.running_max <= 6  # 4, plus early ones: on a busy machine progress is estimated from time
        engine.running_max = 0
        unbound = await start_front(engine, slots=64, live=LiveConfig(probe_every_s=0.05, memory_bound=False))
        await asyncio.gather(*(ask(unbound, stream=False, max_tokens=100, headers=headers) for _ in range(12)))
        assert engine.running_max == 12


async def test_a_conversation_stays_with_the_engine_that_has_its_prefix(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0.001) as first, FakeEngine(step_s=0.001) as second:
        front = await start_front(first, second)
        talks: list[list[dict[str, str]]] = [
            [{"role": "user", "content": f"talk {number}: " + chr(97 + number) * 400}] for number in range(6)
        ]
        engines: list[set[str]] = [set() for _ in talks]
        for _ in range(5):
            for number, messages in enumerate(talks):
                async with front.post(messages=messages, max_tokens=2) as response:
                    engines[number].add(response.headers["x-llmserve-engine"])
                messages += [{"role": "assistant", "content": "tok"}, {"role": "user", "content": "go on"}]
        assert [len(names) for names in engines] == [1] * len(talks)


@pytest.mark.parametrize("steps", range(5))
async def test_a_fleet_closes_although_an_engine_is_probed_early_at_that_moment(steps: int) -> None:
    async with FakeEngine(step_s=0) as fake:
        engine = OpenAIEngine(EngineInfo("mine", 8, False), fake.url)
        fleet = Fleet([engine])
        fleet.start(lambda event: None)
        (handle,) = fleet.handles.values()
        await until(lambda: handle.up and handle.probe is not None and handle.probe.done())
        await asyncio.sleep(0)  # the watch waits for its next probe
        handle.nudge.set()
        for _ in range(steps):
            await asyncio.sleep(0)
        async with asyncio.timeout(10):
            await fleet.close()


# ---- nothing leaks ----


@pytest.mark.slow
async def test_after_thousands_of_disconnects_at_any_moment_no_request_is_left(start_front: StartFront) -> None:
    limits = ApiConfig(concurrent_max=10_000)
    async with FakeEngine(step_s=0.002, slots=4) as first, FakeEngine(step_s=0.002, slots=4) as second:
        front = await start_front(first, second, slots=4, look_ahead=1, limits=limits)
        rng = random.Random(11)
        answered = 0

        async def come_and_go() -> None:
            nonlocal answered
            for number in range(60):
                patience_s = rng.expovariate(1 / 0.03) if number % 20 else None
                request = asyncio.ensure_future(ask(front, stream=rng.random() < 0.5, max_tokens=rng.randrange(1, 30)))
                await asyncio.wait({request}, timeout=patience_s)
                answered += request.done()
                request.cancel()

        await asyncio.gather(*(come_and_go() for _ in range(50)))
        assert 0 < answered < 3_000
        await until(lambda: not front.cluster.scheduler.requests)
        await until(lambda: first.running == second.running == 0)
        check(front.cluster.scheduler)
        assert front.cluster.calls.empty.is_set()
        assert [len(handle.running) for handle in front.cluster.fleet.handles.values()] == [0, 0]
        assert [state.total_tokens for state in front.cluster.scheduler.engines.values()] == [0, 0]
