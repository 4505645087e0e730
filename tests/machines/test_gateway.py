"""A gateway: a server whose engines are the servers of groups."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from batch_client import client_of, create, ended, jsonl, request
from calls import a_call
from front import Front, StartFront, until

from llmserve.engines.process import free_port
from llmserve.engines.timed.server import FakeEngine, Fault
from llmserve.errors import ConfigError
from llmserve.live.calls import line_now
from llmserve.request import Request
from llmserve.scheduling.messages import RequestArrived, RequestEnded
from llmserve.settings.tree import ApiConfig, EngineConfig, LiveConfig, ServerConfig
from predictor.prompt import Prompt

DOOR_KEY = "sk-gateways"
KEYS = """
[keys.ann]
key = "sk-ann"
weight = 3.0

[keys.ben]
key = "sk-ben"
requests_per_minute = 1
"""


@pytest.fixture
def group_server(tmp_path: Path) -> ServerConfig:
    file = tmp_path / "gateway-key"
    file.write_text(f"gateways: {DOOR_KEY}\n")
    file.chmod(0o600)
    return ServerConfig(port=0, gateway_key_file=str(file))


@pytest.fixture
def gateway_server(tmp_path: Path) -> ServerConfig:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    file.chmod(0o600)
    return ServerConfig(port=0, api_key_file=str(file))


async def start_gateway(start_front: StartFront, *groups: Front, **sections: Any) -> Front:
    engines = EngineConfig(
        engine=tuple(group.url for group in groups), engines_are_groups=True, engine_api_key=DOOR_KEY
    )
    return await start_front(engines=engines, **{"scheduling": {"order": "fffs"}, **sections})


def arrived(front: Front) -> list[Request]:
    events = [step.event for step in front.cluster.journal.steps]
    return [event.request for event in events if isinstance(event, RequestArrived)]


def ends(front: Front) -> list[RequestEnded]:
    events = [step.event for step in front.cluster.journal.steps]
    return [event for event in events if isinstance(event, RequestEnded)]


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer sk-{name}"}


async def test_a_gateway_tells_the_group_whose_request_it_is(
    start_front: StartFront, group_server: ServerConfig, gateway_server: ServerConfig
) -> None:
    async with FakeEngine(step_s=0.001) as fake:
        group = await start_front(fake, server=group_server)
        gateway = await start_gateway(start_front, group, server=gateway_server, limits=ApiConfig(slo_ms=("5000",)))
        headers = {**key("ann"), "x-llmserve-stream": "mail", "x-llmserve-predicted-tokens": "2"}
        async with gateway.post(headers=headers, max_tokens=3) as response:
            assert (await response.json())["usage"]["completion_tokens"] == 3
            assert response.headers["x-llmserve-engine"] == fake.url.removeprefix("http://"), (
                "the engine, not the group"
            )
    (request,) = arrived(group)
    assert (request.share, request.weight, request.stream) == ("ann", 3.0, "ann/mail")
    assert request.predicted_tokens == 2
    assert request.deadline_s is not None
    assert request.sender, "the key is the sender, whose lengths are learnt"


async def test_a_gateway_tells_the_group_to_which_program_a_request_belongs(
    start_front: StartFront, group_server: ServerConfig, gateway_server: ServerConfig
) -> None:
    tools = [{"type": "function", "function": {"name": "shell"}}]
    async with FakeEngine(step_s=0.001) as fake:
        group = await start_front(fake, server=group_server)
        gateway = await start_gateway(start_front, group, server=gateway_server)
        async with gateway.post(headers={**key("ann"), "x-session-id": "s"}, max_tokens=1, tools=tools) as response:
            told = int(response.headers["x-llmserve-program"], 16)
    (there,), (here,) = arrived(group), arrived(gateway)
    assert told == here.program == there.program != 0
    assert (here.kind, here.step) == (there.kind, there.step)


async def test_keys_and_limits_are_checked_at_the_gateway_only(
    start_front: StartFront, group_server: ServerConfig, gateway_server: ServerConfig
) -> None:
    async with FakeEngine(step_s=0.001) as fake:
        group = await start_front(fake, server=group_server)
        gateway = await start_gateway(start_front, group, server=gateway_server)
        statuses = []
        for headers in (key("ben"), key("ben"), key("eve"), {}):
            async with gateway.post(headers=headers, max_tokens=1) as response:
                statuses.append(response.status)
        assert statuses == [200, 429, 401, 401]
        assert len(arrived(group)) == 1


async def test_only_gateways_are_served_by_a_group_and_only_they_may_say_who_asks(
    start_front: StartFront, group_server: ServerConfig, gateway_server: ServerConfig
) -> None:
    asker = {"x-llmserve-asker": '{"share":"boss","weight":99}'}
    async with FakeEngine(step_s=0.001) as fake:
        group = await start_front(fake, server=group_server)
        async with group.post(headers=asker, max_tokens=1) as response:
            assert response.status == 401
        async with group.post(headers={**asker, "authorization": f"Bearer {DOOR_KEY}"}, max_tokens=1) as response:
            assert response.status == 200
        bad = {"x-llmserve-asker": "boss", "authorization": f"Bearer {DOOR_KEY}"}
        async with group.post(headers=bad, max_tokens=1) as response:
            assert response.status == 400
        single = await start_front(fake, server=gateway_server)
        async with single.post(headers={**asker, **key("ann")}, max_tokens=1) as response:
            assert response.status == 200
    assert [request.share for request in arrived(group)] == ["boss"]
    assert [request.share for request in arrived(single)] == ["ann"], "a client's own words about itself count nothing"


async def test_a_stream_passes_byte_by_byte_and_its_last_chunk_has_the_groups_receipt(
    start_front: StartFront, group_server: ServerConfig
) -> None:
    async with FakeEngine(step_s=0.001) as fake:
        group = await start_front(fake, server=group_server)
        gateway = await start_gateway(start_front, group)
        texts = []
        for front, headers in ((gateway, {}), (group, {"authorization": f"Bearer {DOOR_KEY}"})):
            headers = {**headers, "x-llmserve-receipt": "true"}
            async with front.post(stream=True, headers=headers, max_tokens=5) as response:
                texts.append(await response.text())
    last = [json.loads(text.split("data: ")[-2])["llmserve"] for text in texts]
    assert last[0]["engine"] == last[1]["engine"] == fake.url.removeprefix("http://")
    assert texts[0].count("tok ") == texts[1].count("tok ") == 5


async def test_the_groups_own_errors_reach_the_client(start_front: StartFront, group_server: ServerConfig) -> None:
    """The group has tried its engines: the gateway tries no other group."""
    async with FakeEngine(step_s=0.001) as fake:
        fake.fault = Fault("500")
        group = await start_front(fake, server=group_server, scheduling={"retries_max": 1})
        gateway = await start_gateway(start_front, group)
        async with gateway.post(max_tokens=1) as response:
            assert response.status == 500
            assert (await response.json())["error"]["message"] == "the engine was told to fail"
        assert len(fake.bodies) == 2
        async with gateway.post(model="nobody", max_tokens=1) as response:
            assert response.status == 404


async def test_the_waiting_requests_of_a_group_that_stops_run_in_another(
    start_front: StartFront, group_server: ServerConfig
) -> None:
    async with FakeEngine(step_s=0.02, slots=2) as fake:
        first, second = [await start_front(fake, server=group_server, slots=2) for _ in range(2)]
        gateway = await start_gateway(start_front, first, second)

        async def status() -> int:
            async with gateway.post(max_tokens=10) as response:
                await response.read()
                return int(response.status)

        asking = [asyncio.ensure_future(status()) for _ in range(12)]
        await until(lambda: len(first.cluster.scheduler.requests) >= 3)
        first.cluster.abort()
        assert set(await asyncio.gather(*asking)) == {200}
    assert {request.engine for request in ends(gateway)} == {
        front.url.removeprefix("http://") for front in (first, second)
    }


async def test_requests_wait_for_a_group_whose_engines_have_not_come(
    start_front: StartFront, group_server: ServerConfig
) -> None:
    late = free_port()
    async with FakeEngine(step_s=0.001) as fake:
        other = await start_front(fake, server=group_server)
        engines = EngineConfig(engine=(f"http://127.0.0.1:{late}",))
        group = await start_front(engines=engines, server=group_server, wait=False)
        gateway = await start_gateway(start_front, other, group, wait=False)
        await until(lambda: set(gateway.cluster.models) == {"fake"})
        asking = asyncio.ensure_future(_status_of(gateway, model="late"))
        await asyncio.sleep(0.3)
        assert not asking.done(), "a group may be about to serve this model"
        async with FakeEngine(step_s=0.001, model="late", port=late):
            assert await asking == 200


async def _status_of(front: Front, **fields: Any) -> int:
    async with front.post(max_tokens=1, **fields) as response:
        await response.read()
        return int(response.status)


@pytest.mark.parametrize("engine", [("embedded",), ()])
def test_only_servers_can_be_groups(engine: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="only URLs can be groups"):
        EngineConfig(engine=engine, engines_are_groups=True).check()


async def test_lines_of_jobs_stay_in_the_background_behind_a_gateway(
    start_front: StartFront, group_server: ServerConfig, tmp_path: Path
) -> None:
    async with FakeEngine(step_s=0.001) as fake:
        group = await start_front(fake, server=group_server)
        gateway = await start_gateway(start_front, group, server=ServerConfig(port=0, state=str(tmp_path)))
        client = client_of(gateway.url)
        batch = await create(client, jsonl([request(number) for number in range(8)]), window="30m")
        assert (await ended(client, batch)).status == "completed"
    lines = arrived(group)
    assert len(lines) == 8
    assert all(line.background for line in lines)
    assert max(line.after_tokens for line in lines) > 0
    by_gateway = {line.deadline_s is not None and 1700 < line.deadline_s < 1900 for line in lines}
    assert by_gateway == {True}, "the group knows the end of the window"


def test_a_line_that_starts_tells_what_is_left_of_its_window() -> None:
    call = a_call("/v1/completions", b"", Prompt("", ""), False, slo_s=100.0, deadline_s=100.0, background=True)
    started = line_now(call, Request(1, deadline_s=100.0, background=False), now_s=70.0)
    assert (started.terms.slo_s, started.terms.background) == (30.0, False)


async def test_a_stream_in_the_queue_of_a_group_hears_its_place_and_is_not_silent_for_the_gateway(
    start_front: StartFront, group_server: ServerConfig
) -> None:
    soon = {"live": LiveConfig(probe_every_s=0.05, keep_alive_s=0.1)}
    async with FakeEngine(step_s=0.02) as fake:
        group = await start_front(fake, server=group_server, slots=1, **soon)
        engines = EngineConfig(engine=(group.url,), engines_are_groups=True, engine_api_key=DOOR_KEY, engine_idle_s=0.4)
        gateway = await start_front(engines=engines, scheduling={"order": "fffs"}, **soon)
        first = asyncio.ensure_future(gateway.post(max_tokens=60, stream=True).__aenter__())
        await until(lambda: fake.running == 1)
        async with gateway.post(max_tokens=2, stream=True) as response:
            text = await response.text()
        (await first).close()
    assert ": position 1" in text
    assert text.endswith("data: [DONE]\n\n")
    assert "error" not in text
