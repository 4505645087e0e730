"""`--plan`: a gateway's groups, or with `--group` the server of one group."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from front import Front, StartFront, until
from worlds.invariants import check

from llmserve.engines.timed.server import FakeEngine, FakePace
from llmserve.errors import ConfigError
from llmserve.planning import HerdGroup, Plan
from llmserve.scheduling.messages import RequestArrived
from llmserve.server.reload import Reloader
from llmserve.server.serving import serving
from llmserve.settings.tree import Config, EngineConfig, LiveConfig, ServerConfig

M_AND_N = {"n": FakePace(0.005)}
PAIR = HerdGroup("w0", 1, ("m",)), HerdGroup("w1", 1, ("n",))


@asynccontextmanager
async def engines(count: int, slots: int = 1, **fields: Any) -> AsyncIterator[list[FakeEngine]]:
    """Engines that serve both models m and n."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                FakeEngine(**{"slots": slots, "step_s": 0.005, "model": "m", "others": M_AND_N, **fields})
            )
            for _ in range(count)
        ]


def saved(folder: Path, *groups: HerdGroup) -> str:
    Plan(groups).save(folder / "plan.json")
    return str(folder / "plan.json")


def placed(fakes: Sequence[FakeEngine], slots: int = 1, **fields: Any) -> EngineConfig:
    """The engines as workers w0, w1, ..."""
    entries = tuple(f"w{index}={fake.url}" for index, fake in enumerate(fakes))
    return EngineConfig(engine=entries, slots=slots, look_ahead=0, **fields)


async def ask(front: Front, model: str, stream: str = "", **fields: Any) -> tuple[int, str]:
    """Return the status, and the engine that answered."""
    headers = {"x-llmserve-stream": stream} if stream else None
    async with front.post(model=model, headers=headers, **{"max_tokens": 2, **fields}) as response:
        await response.read()
        return response.status, response.headers.get("x-llmserve-engine", "")


def name_of(fake: FakeEngine) -> str:
    return fake.url.removeprefix("http://")


# ---- a gateway ----


async def test_a_gateway_sends_requests_to_the_group_of_their_model_or_stream_and_the_rest_anywhere(
    start_front: StartFront, tmp_path: Path
) -> None:
    plan = saved(tmp_path, HerdGroup("w0", 1, ("m",)), HerdGroup("w1", 1, ("n",), streams=(("chat", "m"),)))
    async with engines(2) as (first, second), FakeEngine(step_s=0.005, model="k") as third:
        front = await start_front(engines=placed((first, second, third), plan=plan, engines_are_groups=True))
        assert await ask(front, "m") == (200, name_of(first))
        assert await ask(front, "n") == (200, name_of(second))
        assert await ask(front, "m", "chat") == (200, name_of(second))
        assert await ask(front, "m", "mail") == (200, name_of(first))
        assert await ask(front, "k") == (200, name_of(third))
        assert (await ask(front, "other"))[0] == 404
    assert sorted(front.cluster.scheduler.models) == ["k", "m", "m in w1", "n"]


async def test_while_a_group_is_away_others_serve_its_requests_if_they_have_the_model(
    start_front: StartFront, tmp_path: Path
) -> None:
    plan = saved(tmp_path, HerdGroup("w0", 1, ("m",)), HerdGroup("w1", 1, ("n",), streams=(("chat", "m"),)))
    async with engines(2) as (first, second):
        front = await start_front(engines=placed((first, second), plan=plan, engines_are_groups=True))
        fleet = front.cluster.fleet
        left, right = fleet.handles[name_of(first)], fleet.handles[name_of(second)]
        assert await ask(front, "m", "chat") == (200, name_of(second))
        fleet.drain(right)
        assert await ask(front, "m", "chat") == (200, name_of(first))
        assert await ask(front, "n") == (200, name_of(first))
        fleet.resume(right)
        assert await ask(front, "m", "chat") == (200, name_of(second))
        assert await ask(front, "n") == (200, name_of(second))
        fleet.drain(left)
        assert await ask(front, "m") == (200, name_of(second))
        check(front.cluster.scheduler)


async def test_a_group_that_no_model_is_for_gets_the_streams_that_are(start_front: StartFront, tmp_path: Path) -> None:
    plan = saved(tmp_path, HerdGroup("w0", 1, ("m", "n")), HerdGroup("w1", 1, (), streams=(("chat", "m"),)))
    async with engines(2) as (first, second):
        front = await start_front(engines=placed((first, second), plan=plan, engines_are_groups=True))
        assert {(await ask(front, "m"))[1] for _ in range(3)} == {name_of(first)}
        assert await ask(front, "m", "chat") == (200, name_of(second))


# ---- invalid settings ----


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"group": "left"}, "group has no effect without --plan"),
        ({"plan": "p"}, "a server has one group. Give --group .*, or start all groups with `llmserve up CLUSTER.toml"),
        ({"plan": "p", "group": "left", "engines_are_groups": True}, "a server has one group"),
        ({"plan": "/nowhere/plan.json", "group": "left"}, "/nowhere/plan.json"),
    ],
)
async def test_contradictory_settings_of_plans_are_an_error(fields: dict[str, Any], message: str) -> None:
    config = Config(server=ServerConfig(port=0), engines=EngineConfig(**{"engine": ("http://127.0.0.1:9",), **fields}))
    with pytest.raises(ConfigError, match=message):
        async with serving(config):
            raise AssertionError("it must not start")


async def test_an_unknown_group_is_an_error_with_the_nearest_name(tmp_path: Path) -> None:
    plan = saved(tmp_path, HerdGroup("left", 1, ("m",)))
    engine = EngineConfig(engine=("http://127.0.0.1:9",), plan=plan, group="lift")
    with pytest.raises(ConfigError, match="no group 'lift'; did you mean left"):
        async with serving(Config(server=ServerConfig(port=0), engines=engine)):
            raise AssertionError("it must not start")


async def test_a_group_without_a_server_behind_its_gateway_is_an_error_with_the_nearest_name(tmp_path: Path) -> None:
    plan = saved(tmp_path, HerdGroup("left", 1, ("m",)))
    engine = EngineConfig(engine=("lift=http://127.0.0.1:9",), plan=plan, engines_are_groups=True)
    with pytest.raises(ConfigError, match="no engine left=URL is the server of the group left; did you mean lift"):
        async with serving(Config(server=ServerConfig(port=0), engines=engine)):
            raise AssertionError("it must not start")


# ---- a single group ----


@pytest.mark.parametrize("settings", [{"engines_are_groups": True}, {"group": "w0"}], ids=["gateway", "group"])
async def test_a_model_of_the_plan_without_an_engine_is_503_and_not_404(
    start_front: StartFront, tmp_path: Path, settings: dict[str, Any]
) -> None:
    plan = saved(tmp_path, HerdGroup("w0", 1, ("m", "later"), streams=(("chat", "soon"),), workers=("w0",)))
    async with engines(1) as fakes:
        front = await start_front(engines=placed(fakes, plan=plan, **settings))
        assert await ask(front, "m") == (200, name_of(fakes[0]))
        async with front.post(model="later") as response:
            assert (response.status, (await response.json())["error"]["code"]) == (503, "no_engine")
            assert response.headers["retry-after"]
        assert (await ask(front, "soon", "chat"))[0] == 503
        assert (await ask(front, "other"))[0] == 404


async def test_one_groups_server_has_the_engines_of_the_workers_that_the_plan_names_for_it(
    start_front: StartFront, tmp_path: Path
) -> None:
    plan = saved(tmp_path, HerdGroup("left", 1, ("m",), workers=("w1",)))
    async with engines(2) as fakes:
        front = await start_front(engines=placed(fakes, plan=plan, group="left"))
        assert list(front.cluster.engines_ready) == [name_of(fakes[1])]


@pytest.mark.parametrize(
    ("group", "workers"),
    [
        ("left", (0,)),
        ("right", (2, 3)),  # any workers without a named group; --engine selects them
        ("fallback", (1, 2, 3)),  # the plan gives w1 to it
    ],
)
async def test_one_groups_server_has_no_engine_of_another_groups_worker(
    start_front: StartFront, tmp_path: Path, group: str, workers: tuple[int, ...]
) -> None:
    named = HerdGroup("left", 1, ("m",), workers=("w0",)), HerdGroup("fallback", 1, ("n",), workers=("w1",))
    plan = saved(tmp_path, *named, HerdGroup("right", 1, ("n2",)))
    async with engines(4) as fakes:
        front = await start_front(engines=placed(fakes, plan=plan, group=group), wait=False)
        assert set(front.cluster.engines_ready) == {name_of(fakes[number]) for number in workers}


async def test_the_fallback_groups_server_has_the_unplanned_workers_and_models(
    start_front: StartFront, tmp_path: Path
) -> None:
    plan = saved(tmp_path, HerdGroup("left", 1, ("m",), streams=(("chat", "n"),), workers=("w0",)))
    async with engines(2) as (first, second):
        front = await start_front(engines=placed((first, second), plan=plan, group="fallback"))
        assert await ask(front, "n") == (200, name_of(second))
        assert (await ask(front, "m"))[0] == 404
        assert not first.bodies


async def test_models_of_other_groups_are_404_whatever_the_engines_serve(
    start_front: StartFront, tmp_path: Path
) -> None:
    left = HerdGroup("left", 1, ("m",), streams=(("chat", "k"),), workers=("w0",))
    plan = saved(tmp_path, left, HerdGroup("right", 1, ("n",), workers=("w1",)))
    async with engines(2, others={"n": FakePace(0.005), "k": FakePace(0.005)}) as (first, second):
        front = await start_front(engines=placed((first, second), plan=plan, group="left"))
        assert sorted(front.cluster.models) == ["k", "m"]
        assert await ask(front, "m") == (200, name_of(first))
        assert await ask(front, "k", "chat") == (200, name_of(first))
        assert (await ask(front, "n"))[0] == 404
        assert (await ask(front, "other"))[0] == 404
        assert not second.bodies


async def test_one_groups_server_gets_streams_deadlines_and_lengths_from_a_router(
    tmp_path: Path, start_front: StartFront
) -> None:
    plan = saved(tmp_path, HerdGroup("left", 1, ("m",), workers=("w0",)))
    async with engines(1, slots=2) as fakes:
        front = await start_front(engines=placed(fakes, 2, plan=plan, group="left"))
        headers = {"x-llmserve-slo-ms": "30000", "x-llmserve-predicted-tokens": "1", "x-llmserve-stream": "mail"}
        async with front.post(model="m", headers=headers, max_tokens=2) as response:
            assert response.headers["x-llmserve-engine"] == name_of(fakes[0])
            assert float(response.headers["x-llmserve-queue-ms"]) >= 0
            assert response.headers["x-llmserve-predicted-tokens"] == "1"
        slow = [asyncio.ensure_future(ask(front, "m", max_tokens=200)) for _ in range(2)]
        await until(lambda: fakes[0].running == 2)
        async with front.post(model="m", headers={"x-llmserve-slo-ms": "100"}, max_tokens=2) as response:
            assert response.status == 504
            assert (await response.json())["error"]["code"] == "deadline_exceeded"
        assert {status for status, _ in await asyncio.gather(*slow)} == {200}
    requests = [step.event.request for step in front.cluster.journal.steps if isinstance(step.event, RequestArrived)]
    assert [request.stream for request in requests] == ["mail", "", "", ""]
    assert requests[0].predicted_tokens == 1.0
    assert requests[0].deadline_s is not None


async def test_a_group_without_an_engine_here_is_an_error(tmp_path: Path) -> None:
    plan = saved(
        tmp_path, HerdGroup("left", 1, ("m",), workers=("w1",)), HerdGroup("right", 1, ("n",), workers=("w0",))
    )
    for group, message in (
        ("left", "group left: none of the engines is on its workers, w1"),
        ("fallback", "group fallback: none of the engines is on a worker that no other group names"),
    ):
        engine = EngineConfig(engine=("w0=http://127.0.0.1:9",), plan=plan, group=group)
        with pytest.raises(ConfigError, match=message):
            async with serving(Config(server=ServerConfig(port=0), engines=engine)):
                raise AssertionError("it must not start")


async def test_a_plan_and_engines_that_are_read_again_take_effect_together(tmp_path: Path) -> None:
    """A gateway follows another plan so: groups come and go while requests run."""
    async with engines(3, slots=2) as fakes, aiohttp.ClientSession() as session:
        before = Config(
            server=ServerConfig(port=0),
            engines=placed(fakes[:2], 2, plan=saved(tmp_path, *PAIR), engines_are_groups=True),
            live=LiveConfig(probe_every_s=0.05),
        )
        now = before
        reloader = Reloader(before, lambda: now)
        async with serving(before, reloader) as (cluster, url):
            front = Front(cluster, url, session)
            await until(lambda: all(cluster.engines_ready.values()))
            assert await ask(front, "m") == (200, name_of(fakes[0]))
            running = [asyncio.ensure_future(ask(front, "m", max_tokens=40)) for _ in range(6)]
            await until(lambda: len(cluster.scheduler.requests) == 6)
            now = Config(
                server=before.server,
                engines=msgspec.structs.replace(before.engines, engine=placed(fakes, 2).engine[1:]),
                live=before.live,
            )
            with pytest.raises(ConfigError, match="no engine w0=URL is the server of the group w0"):
                await reloader.reload()
            saved(tmp_path, HerdGroup("w2", 1, ("m",)), HerdGroup("w1", 1, ("n",)))
            await reloader.reload()
            assert {status for status, _ in await asyncio.gather(*running)} == {200}
            await until(lambda: set(cluster.engines_ready) == {name_of(fake) for fake in fakes[1:]})
            await until(lambda: all(cluster.engines_ready.values()))
            assert await ask(front, "m") == (200, name_of(fakes[2]))
            assert await ask(front, "n") == (200, name_of(fakes[1]))
            check(cluster.scheduler)
