"""`--plan`: groups of workers behind one server; with `--group`, a single group."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from front import Front, StartFront, until
from worlds.invariants import check

from llmserve import planning as herd
from llmserve.engines.timed.server import FakeEngine, FakePace
from llmserve.errors import ConfigError
from llmserve.live import journal
from llmserve.planning import HerdGroup, Instance, Model, Plan, Stream
from llmserve.scheduling.messages import PlanChanged, RequestArrived, RequestEnded, ServingGroup
from llmserve.server.reload import Reloader
from llmserve.server.serving import serving
from llmserve.settings.tree import Config, EngineConfig, LiveConfig, ServerConfig

M_AND_N = {"n": FakePace(0.005)}


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


def groups_of(front: Front) -> dict[str, tuple[str, ...]]:
    return {group.name: group.workers for group in front.cluster.scheduler.plan}


async def until_assigned(front: Front, **workers: tuple[str, ...]) -> None:
    await until(lambda: groups_of(front) == workers)


# ---- one process ----


async def test_requests_go_to_the_group_of_their_model_or_stream_and_the_rest_to_the_fallback(
    start_front: StartFront, tmp_path: Path
) -> None:
    plan = saved(
        tmp_path,
        HerdGroup("left", 1, ("m",), workers=("w0",)),
        HerdGroup("right", 1, ("n",), streams=(("chat", "m"),), workers=("w1",)),
    )
    async with engines(2) as (first, second), FakeEngine(step_s=0.005, model="k") as third:
        front = await start_front(engines=placed((first, second, third), plan=plan))
        assert await ask(front, "m") == (200, name_of(first))
        assert await ask(front, "n") == (200, name_of(second))
        assert await ask(front, "m", "chat") == (200, name_of(second))
        assert await ask(front, "m", "mail") == (200, name_of(first))
        assert await ask(front, "k") == (200, name_of(third))
        assert (await ask(front, "other"))[0] == 404


async def test_workers_that_a_plan_does_not_name_are_assigned_by_the_models_that_they_serve(
    start_front: StartFront, tmp_path: Path
) -> None:
    plan = saved(tmp_path, HerdGroup("left", 1, ("m",)), HerdGroup("right", 2, ("n",)))
    async with (
        FakeEngine(step_s=0.005, model="n") as first,
        FakeEngine(step_s=0.005, model="m") as second,
        engines(2) as (third, fourth),
    ):
        front = await start_front(engines=placed((first, second, third, fourth), plan=plan))
        await until_assigned(front, left=("w1",), right=("w0", "w2"))
        assert await ask(front, "m") == (200, name_of(second))
        for _ in range(3):
            assert (await ask(front, "n"))[1] in (name_of(first), name_of(third))


async def test_a_plan_that_changes_under_load_loses_no_request_and_runs_none_twice(
    start_front: StartFront, tmp_path: Path
) -> None:
    left, right = HerdGroup("left", 1, ("m",), workers=("w0",)), HerdGroup("right", 1, ("n",), workers=("w1",))
    swapped = (ServingGroup("left", ("w1",), ("m",)), ServingGroup("right", ("w0",), ("n",)))
    merged = (ServingGroup("all", ("w0", "w1"), ("m", "n")),)
    async with engines(2, slots=2) as fakes:
        front = await start_front(engines=placed(fakes, 2, plan=saved(tmp_path, left, right)))
        asking = [asyncio.ensure_future(ask(front, "mn"[number % 2], max_tokens=8)) for number in range(90)]

        def over(count: int) -> bool:
            return sum(task.done() for task in asking) >= count

        for ended, groups in zip((10, 20, 30, 40, 50), (swapped, merged, swapped, (), merged), strict=True):
            await until(partial(over, ended))
            assert front.cluster.scheduler.waiting, "some requests must wait"
            front.cluster.driver.step(PlanChanged(groups))
            check(front.cluster.scheduler)
            asking += [asyncio.ensure_future(ask(front, "mn"[number % 2], max_tokens=8)) for number in range(4)]
        assert {status for status, _ in await asyncio.gather(*asking)} == {200}
        assert sum(len(fake.bodies) for fake in fakes) == len(asking), "each request must run once"
    steps = list(front.cluster.journal.steps)
    ended = [step.event.request_id for step in steps if isinstance(step.event, RequestEnded)]
    assert sorted(ended) == [step.event.request.id for step in steps if isinstance(step.event, RequestArrived)]
    assert journal.replay(front.cluster.journal.header, steps) == steps


async def test_groups_are_planned_again_for_the_current_rates(start_front: StartFront, tmp_path: Path) -> None:
    """The plan has three GPUs for m and one for n; then all arrivals are of n."""
    instance = Instance(
        streams=(Stream("all", "m", rate_per_s=90.0, slo_s=1.0), Stream("all", "n", rate_per_s=20.0, slo_s=1.0)),
        models=tuple([Model(name, 30.0, 20.0, 0.0, batch_size_max=1) for name in ("m", "n")]),
        gpus=4,
        gpu_memory_gb=40.0,
        group_gpus_max=3,
        groups=2,
    )
    instance.save(tmp_path / "instance.json")
    first = herd.plan(instance)
    first.save(tmp_path / "plan.json")
    assert {group.models: group.gpus for group in first.groups} == {("m",): 3, ("n",): 1}
    files = {"plan": str(tmp_path / "plan.json"), "plan_instance": str(tmp_path / "instance.json")}
    async with engines(4, slots=4, step_s=0.001) as fakes:
        front = await start_front(engines=placed(fakes, 4, replan_every_s=1.0, **files))

        def workers() -> dict[tuple[str, ...], int]:
            return {group.models: len(group.workers) for group in front.cluster.scheduler.plan}

        await until(lambda: workers() == {("m",): 3, ("n",): 1})
        async with asyncio.timeout(30):
            while workers() != {("m",): 1, ("n",): 3}:
                await asyncio.gather(*(ask(front, "n", max_tokens=1) for _ in range(5)))
                await asyncio.sleep(0.05)
    steps = list(front.cluster.journal.steps)
    assert journal.replay(front.cluster.journal.header, steps) == steps


# ---- invalid settings ----


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"group": "left"}, "group has no effect without --plan"),
        ({"plan": "p", "replan_every_s": 5.0}, "must be given together"),
        (
            {"plan": "p", "plan_instance": "i", "replan_every_s": 5.0, "group": "left"},
            "group and replan_every_s must not be",
        ),
        ({"plan": "/nowhere/plan.json"}, "/nowhere/plan.json"),
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


async def test_a_worker_without_an_engine_is_an_error_with_the_nearest_name(tmp_path: Path) -> None:
    plan = saved(tmp_path, HerdGroup("left", 1, ("m",), workers=("gpu0", "gpu7")))
    urls = ("gpu0=http://127.0.0.1:9", "gpu1=http://127.0.0.1:10")
    with pytest.raises(ConfigError, match="plan: group left has no engine on its worker gpu7; did you mean gpu"):
        async with serving(Config(server=ServerConfig(port=0), engines=EngineConfig(engine=urls, plan=plan))):
            raise AssertionError("it must not start")


# ---- a single group ----


@pytest.mark.parametrize("group", [None, "left"])
async def test_a_model_of_the_plan_without_an_engine_is_503_and_not_404(
    start_front: StartFront, tmp_path: Path, group: str | None
) -> None:
    plan = saved(tmp_path, HerdGroup("left", 1, ("m", "later"), streams=(("chat", "soon"),), workers=("w0",)))
    async with engines(1) as fakes:
        front = await start_front(engines=placed(fakes, plan=plan, group=group))
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
        assert not front.cluster.scheduler.plan


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
    assert not front.cluster.journal.header.groups
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
    """The door of a cluster follows another plan so: groups come, go and get other engines while requests run."""
    left, right = HerdGroup("left", 1, ("m",), workers=("w0",)), HerdGroup("right", 1, ("n",), workers=("w1",))
    async with engines(3, slots=2) as fakes, aiohttp.ClientSession() as session:
        before = Config(
            server=ServerConfig(port=0),
            engines=placed(fakes[:2], 2, plan=saved(tmp_path, left, right)),
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
            with pytest.raises(ConfigError, match="group left has no engine on its worker w0"):
                await reloader.reload()
            saved(tmp_path, HerdGroup("left", 2, ("m",), workers=("w1", "w2")))
            await reloader.reload()
            assert {status for status, _ in await asyncio.gather(*running)} == {200}
            await until(lambda: set(cluster.engines_ready) == {name_of(fake) for fake in fakes[1:]})
            await until(lambda: all(cluster.engines_ready.values()))
            assert (await ask(front, "m"))[1] in (name_of(fakes[1]), name_of(fakes[2]))
            check(cluster.scheduler)
