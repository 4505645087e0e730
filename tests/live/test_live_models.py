"""Several models, streams, shared GPUs and preemption, on fake HTTP engines."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from front import Front, StartFront, until
from prometheus_client.parser import text_string_to_metric_families
from worlds.invariants import check

import predictor
from bins.curve import Curve
from bins.profile import Profile
from llmserve.engines.timed.server import FakeEngine, FakePace
from llmserve.errors import ConfigError
from llmserve.live import journal
from llmserve.request import Request
from llmserve.scheduling.messages import (
    AnswerBegan,
    EngineReady,
    Event,
    FailRequest,
    PreemptBatch,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    StartBatch,
)
from llmserve.settings.dispatch import DispatchConfig
from llmserve.settings.tree import ApiConfig, PredictorConfig, ServerConfig

FLEX = {"order": "flex", "batch_size": 8}
TIGHT = {"x-llmserve-slo-ms": "5000"}  # tight enough to count, loose enough for a busy machine


async def ask(front: Front, model: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    async with front.post(model=model, **fields) as response:
        return response.status, json.loads(await response.read())


async def statuses(front: Front, model: str, count: int, **fields: Any) -> Counter[int]:
    answers = await asyncio.gather(*(ask(front, model, **fields) for _ in range(count)))
    return Counter(status for status, _ in answers)


async def listed(front: Front) -> list[str]:
    async with front.session.get(f"{front.url}/v1/models") as response:
        return [model["id"] for model in (await response.json())["data"]]


def events(front: Front, kind: type[Event]) -> list[Any]:
    return [step.event for step in front.cluster.journal.steps if isinstance(step.event, kind)]


def actions(front: Front, kind: type[Any]) -> list[Any]:
    return [action for step in front.cluster.journal.steps for action in step.actions if isinstance(action, kind)]


def arrived(front: Front) -> list[Request]:
    return [event.request for event in events(front, RequestArrived)]


def models_asked(engine: FakeEngine) -> set[str]:
    return {json.loads(body)["model"] for body in engine.bodies}


def name_of(engine: FakeEngine) -> str:
    return engine.url.removeprefix("http://")


async def scrape(front: Front, *names: str) -> dict[tuple[str, ...], float]:
    """Samples of /metrics without buckets, by name and label values."""
    async with front.session.get(f"{front.url}/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    samples = [sample for family in families for sample in family.samples if sample.name in names]
    return {
        (sample.name, *[sample.labels[label] for label in sorted(sample.labels)]): sample.value for sample in samples
    }


# ---- models of engines ----


async def test_each_model_is_answered_by_the_engines_that_serve_it(start_front: StartFront) -> None:
    async with (
        FakeEngine(step_s=0.01, model="small", slots=2) as first,
        FakeEngine(step_s=0.01, model="large", slots=2) as second,
        FakeEngine(step_s=0.01, model="small", others={"large": FakePace(0.01)}, slots=2) as both,
    ):
        front = await start_front(first, second, both, slots=2)
        assert await listed(front) == ["large", "small"]
        ends = await asyncio.gather(
            statuses(front, "small", 12, max_tokens=4), statuses(front, "large", 12, max_tokens=4)
        )
        assert ends == [Counter({200: 12}), Counter({200: 12})]
        assert (models_asked(first), models_asked(second)) == ({"small"}, {"large"})
        assert models_asked(both) == {"small", "large"}, "the engine serves both models"
        status, body = await ask(front, "medium")
        assert (status, body["error"]["code"]) == (404, "model_not_found")
        async with front.session.get(f"{front.url}/v1/models/medium") as response:
            assert response.status == 404
    assert {request.model for request in arrived(front)} == {"small", "large"}
    assert journal.replay(front.cluster.journal.header, front.cluster.journal.steps) == list(
        front.cluster.journal.steps
    )


async def test_the_time_of_a_load_is_learnt_from_streams_and_is_in_the_metrics(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0.01, model="a", others={"b": FakePace(0.01, 0.2)}, slots=2) as engine:
        front = await start_front(engine, slots=2)
        info = front.cluster.scheduler.engines[name_of(engine)].info
        await ask_stream(front, "a")
        assert events(front, AnswerBegan) == [], "an engine that has all models has nothing to tell"
        front.cluster.calls._driver.step(EngineReady(msgspec.structs.replace(info, models_at_once=1)))
        for model in ("a", "a", "b", "b"):
            await ask_stream(front, model)
        await ask(front, "b", max_tokens=2)
        assert [event.request_id for event in events(front, AnswerBegan)] == [2, 3, 4, 5], "of streams only"
        loads_s = await scrape(front, "llmserve_engine_model_load_seconds")
        assert {labels[-1] for labels in loads_s} == {"a", "b"}
        check(front.cluster.scheduler)
    steps = list(front.cluster.journal.steps)
    assert journal.replay(front.cluster.journal.header, steps) == steps


async def ask_stream(front: Front, model: str) -> None:
    async with front.post(model=model, max_tokens=3, stream=True) as response:
        assert (await response.read()).endswith(b"data: [DONE]\n\n")


async def test_a_known_model_whose_engines_are_down_is_503_and_the_others_go_on(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0, model="small") as staying:
        async with FakeEngine(step_s=0, model="large") as leaving:
            front = await start_front(staying, leaving, scheduling={"engine_wait_s": 0.1})
            name, port = name_of(leaving), int(leaving.url.rpartition(":")[2])
        await until(lambda: not front.cluster.engines_ready[name])
        async with front.post(model="large") as response:
            assert response.status == 503
            assert int(response.headers["retry-after"]) >= 1
            error = (await response.json())["error"]
        assert (error["code"], error["message"]) == ("no_engine", "no engine that serves this model is up")
        assert (await ask(front, "small", max_tokens=2))[0] == 200
        assert await listed(front) == ["large", "small"]
        async with FakeEngine(step_s=0, model="large", port=port):
            await until(lambda: front.cluster.engines_ready[name])
            assert (await ask(front, "large", max_tokens=2))[0] == 200
        await until(lambda: not front.cluster.engines_ready[name])
        async with FakeEngine(step_s=0, model="other", port=port):
            await until(lambda: front.cluster.engines_ready[name])
            assert await listed(front) == ["other", "small"]
            assert (await ask(front, "large"))[0] == 404


async def test_requests_of_a_model_wait_for_the_restart_of_their_engine_while_others_are_served(
    start_front: StartFront,
) -> None:
    async with FakeEngine(step_s=0.005, model="small") as staying:
        async with FakeEngine(step_s=0.5, model="large") as leaving:
            front = await start_front(staying, leaving)
            name, port = name_of(leaving), int(leaving.url.rpartition(":")[2])
            waiting = asyncio.ensure_future(ask(front, "large", max_tokens=5))
            await until(lambda: leaving.running == 1)
        await until(lambda: not front.cluster.engines_ready[name])
        assert await statuses(front, "small", 5, max_tokens=2) == {200: 5}
        assert not waiting.done()
        async with FakeEngine(step_s=0, model="large", port=port):
            assert (await waiting)[0] == 200


async def test_an_engine_that_lists_no_models_gets_no_requests(start_front: StartFront) -> None:
    models: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": model} for model in models]})
        return web.json_response({"choices": [], "usage": {"completion_tokens": 1}})

    app = web.Application()
    app.router.add_route("*", "/v1/{path:.*}", answer)
    async with TestServer(app) as empty, FakeEngine(step_s=0, model="small") as other:
        front = await start_front(other, str(empty.make_url("")), wait=False)
        handle = front.cluster.fleet.handles[empty.make_url("").authority]
        await until(lambda: other.url.removeprefix("http://") in front.cluster.scheduler.engines and handle.up)
        assert (handle.word, handle.ready) == ("without a model", False)
        assert await statuses(front, "small", 5, max_tokens=2) == {200: 5}
        assert len(other.bodies) == 5
        models.append("large")
        await until(lambda: handle.ready)
        assert (await ask(front, "large"))[0] == 200
        models.clear()
        await until(lambda: not handle.ready)
        assert (await ask(front, "large"))[0] == 404


async def test_a_model_has_the_smallest_context_of_its_engines(start_front: StartFront) -> None:
    @asynccontextmanager
    async def engine(context_tokens: int | None) -> AsyncIterator[TestServer]:
        async def list_models(request: web.Request) -> web.Response:
            return web.json_response({"data": [{"id": "m", "max_model_len": context_tokens}]})

        app = web.Application()
        app.router.add_get("/v1/models", list_models)
        async with TestServer(app) as server:
            yield server

    async with engine(None) as unknown, engine(8192) as long_, engine(4096) as short:
        front = await start_front(*(str(server.make_url("")) for server in (unknown, long_, short)))
        async with front.session.get(f"{front.url}/v1/models/m") as response:
            assert (await response.json())["max_model_len"] == 4096


async def test_the_scheduler_gets_each_engines_models_worker_and_speeds_again_after_a_change(
    start_front: StartFront, tmp_path: Path
) -> None:
    curves = {"plain": Curve.affine(0.001, 0.01), "large": Curve.affine(0.0, 0.05)}
    profile_of = {
        name: Profile.timed(name, step_s, prefill_s=0.02, source="Made up.") for name, step_s in curves.items()
    }
    for name, profile in profile_of.items():
        profile.save(tmp_path / f"{name}.json")
    profiles = (f"{tmp_path}/plain.json", f"model:large={tmp_path}/large.json")
    async with FakeEngine(step_s=0.02, model="small", slots=6) as engine:
        front = await start_front(f"gpu-0={engine.url}", slots=None, dispatch=DispatchConfig(profile=profiles))
        (ready,) = events(front, EngineReady)
        assert (ready.engine.models, ready.engine.worker) == (("small",), "gpu-0")
        assert (ready.engine.slots, len(ready.engine.speeds[""].step_s)) == (2, 2), "a guess at first"
        requests = asyncio.ensure_future(statuses(front, "small", 20, max_tokens=20))
        await until(lambda: events(front, EngineReady)[-1].engine.slots > 2)  # learnt: more streams advance at once
        learnt = events(front, EngineReady)[-1].engine
        engine._paces["large"] = FakePace(0.0)
        await until(lambda: events(front, EngineReady)[-1].engine.models != ("small",))
        last = events(front, EngineReady)[-1].engine
        assert await requests == {200: 20}
    assert learnt.speeds == {"": profile_of["plain"].step_times(learnt.slots)}
    assert (last.models, last.worker) == (("small", "large"), "gpu-0")
    names = {"": "plain", "large": "large"}
    assert last.speeds == {model: profile_of[name].step_times(last.slots) for model, name in names.items()}


async def test_a_long_prompt_has_blocks_and_a_short_one_none(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0, model="small") as engine:
        front = await start_front(engine)
        for characters in (1_200, 300):
            messages = [{"role": "user", "content": "x" * characters}]
            assert (await ask(front, "small", messages=messages))[0] == 200
    long, short = arrived(front)
    assert (len(long.blocks), len(short.blocks)) == (2, 0)
    assert long.block_tokens == pytest.approx(long.prompt_tokens * 512 / 1_205, rel=0.01)


async def test_engines_of_one_worker_run_one_batch_at_a_time_in_all(start_front: StartFront) -> None:
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(FakeEngine(step_s=0.005, model=model, slots=4, barrier=True))
            for model in ("small", "large", "small")
        ]
        urls = [f"{worker}={engine.url}" for worker, engine in zip(("a", "a", "b"), engines, strict=True)]
        front = await start_front(*urls, barrier=True, scheduling={"batch_size": 4})
        ends = await asyncio.gather(*(statuses(front, model, 30, max_tokens=3) for model in ("small", "large")))
    assert ends == [{200: 30}, {200: 30}]
    running: dict[str, set[int]] = {name_of(engine): set() for engine in engines}
    shared = [running[name_of(engine)] for engine in engines[:2]]
    both_worked = 0
    for step in front.cluster.journal.steps:
        if isinstance(step.event, RequestEnded):
            running[step.event.engine].discard(step.event.request_id)
        for action in step.actions:
            if isinstance(action, StartBatch):
                assert action.engine == name_of(engines[2]) or not any(shared), "its GPU is busy"
                running[action.engine] |= {request.id for request in action.batch.requests}
        both_worked += bool(any(shared) and running[name_of(engines[2])])
    assert both_worked, "another worker need not wait"


# ---- streams ----


async def test_a_stream_is_named_by_its_header_or_its_key_and_may_have_a_deadline(
    start_front: StartFront, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice: sk-1\nchat: sk-2\n")  # alice's stream chat is another than that of the key chat
    async with FakeEngine(step_s=0.1) as engine:
        front = await start_front(
            engine,
            slots=1,
            server=ServerConfig(port=0, api_key_file=str(keys)),
            limits=ApiConfig(slo_ms=("model:fake=60000", "stream:alice/chat=30", "stream:chat=20")),
        )

        async def of(key: str, **headers: str) -> int:
            headers = {"authorization": f"Bearer {key}", **headers}
            return (await ask(front, "fake", headers=headers, max_tokens=3))[0]

        first = asyncio.ensure_future(of("sk-1"))
        await until(lambda: engine.running == 1)
        waiting = [of("sk-1", **{"x-llmserve-stream": "chat"}), of("sk-2"), of("sk-1")]
        waiting += [of("sk-2", **{"x-llmserve-stream": "night run"})]
        assert await asyncio.gather(first, *waiting) == [200, 504, 504, 200, 200]
    assert Counter(request.stream for request in arrived(front)) == {
        "alice": 2,
        "alice/chat": 1,
        "chat": 1,
        "chat/night run": 1,
    }


@pytest.mark.parametrize("name", ["x" * 65, "caf\u00e9", "a\tb"])
async def test_a_stream_name_unfit_for_a_label_is_400(start_front: StartFront, name: str) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine)
        status, body = await ask(front, "fake", headers={"x-llmserve-stream": name})
        assert (status, body["error"]["param"]) == (400, "x-llmserve-stream")
        assert (await ask(front, "fake", headers={"x-llmserve-stream": "x" * 64}, max_tokens=1))[0] == 200


async def test_metrics_are_labelled_by_model_and_stream(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0.005, model="small", others={"large": FakePace(0.005)}) as engine:
        front = await start_front(engine)
        for _ in range(3):
            await ask(front, "small", max_tokens=4, headers={"x-llmserve-stream": "chat", **TIGHT})
        short_deadline = {"x-llmserve-slo-ms": "20"}  # the request starts at once and ends too late
        await ask(front, "large", max_tokens=40, headers=short_deadline)
        await until(lambda: not front.cluster.scheduler.requests)
        requests, deadlines = "llmserve_stream_requests_total", "llmserve_deadlines_total"
        tokens, bins = "llmserve_stream_output_tokens_total", "llmserve_bin_requests"
        samples = await scrape(front, requests, deadlines, tokens, bins, "llmserve_prediction_trusted")
    assert samples[requests, "small", "completed", "chat"] == 3
    assert samples[requests, "large", "completed", ""] == 1
    assert samples[tokens, "small", "chat"] == 12
    assert samples[deadlines, "small", "met", "chat"] == 3
    assert samples[deadlines, "small", "missed", "chat"] == 0
    assert samples[deadlines, "large", "missed", ""] == 1
    assert samples[bins, "0", "small"] == samples[bins, "0", "large"] == 0
    assert ("llmserve_prediction_trusted", "large") in samples


# ---- preemption ----


SMALL, LARGE = FakePace(0.02, prefill_s=0.05), FakePace(0.02, prefill_s=2.0)
HURRY = {"x-llmserve-slo-ms": "1000"}  # too short to wait for the end of a large answer
HURRY_IN_A_LONG_PREFILL = {"x-llmserve-slo-ms": "30000"}


def speeds(folder: Path, **paces: FakePace) -> DispatchConfig:
    """Profiles with the true speeds of the fake models."""
    for model, pace in paces.items():
        profile = Profile.timed(
            model, Curve.affine(0.0, pace.step_s), prefill_s=pace.prefill_s, source="The fake engine's."
        )
        profile.save(folder / f"{model}.json")
    return DispatchConfig(profile=tuple([f"model:{model}={folder}/{model}.json" for model in paces]))


@asynccontextmanager
async def two_models(start_front: StartFront, folder: Path, large: FakePace) -> AsyncIterator[tuple[Front, FakeEngine]]:
    """A barrier engine of two models, under FLEX."""
    async with FakeEngine(
        step_s=SMALL.step_s, prefill_s=SMALL.prefill_s, model="small", others={"large": large}, slots=8, barrier=True
    ) as engine:
        dispatch = speeds(folder, small=SMALL, large=large)
        yield await start_front(engine, barrier=True, scheduling=FLEX, dispatch=dispatch), engine


@pytest.fixture
async def shared_gpu(start_front: StartFront, tmp_path: Path) -> AsyncIterator[tuple[Front, FakeEngine]]:
    async with two_models(start_front, tmp_path, LARGE) as shared:
        yield shared


@pytest.fixture
async def engine_in_a_long_prefill(start_front: StartFront, tmp_path: Path) -> AsyncIterator[tuple[Front, FakeEngine]]:
    """The same engine, whose large model takes a minute to begin, once; then it is quick.

    A preempting burst has 30 s, which no pause of a busy machine uses up.
    """
    slow = FakePace(0.02, prefill_s=60.0)

    async def quick_from_the_second_run(engine: FakeEngine) -> None:
        await until(lambda: engine.running == 1)
        engine._paces["large"] = FakePace(0.02)

    async with two_models(start_front, tmp_path, slow) as (front, engine):
        turn = asyncio.ensure_future(quick_from_the_second_run(engine))
        yield front, engine
        await turn


def show_its_speed(front: Front) -> None:
    """Let the scheduler know that large answers take as long as declared, as an answer of a minute would."""
    (state,) = front.cluster.scheduler.engines.values()
    profile_s = state.speed("large").batch_s(1, 1)
    state.record_batch("large", 1, 1, profile_s, front.cluster.now_s())


async def burst(front: Front, tokens: int = 1, headers: dict[str, str] = HURRY) -> Counter[int]:
    return await statuses(front, "small", 8, max_tokens=tokens, headers=headers)


def ends_of(front: Front, request_id: int) -> list[str]:
    return [event.outcome for event in events(front, RequestEnded) if event.request_id == request_id]


async def test_a_preempted_request_is_started_again_and_ends_once(
    engine_in_a_long_prefill: tuple[Front, FakeEngine],
) -> None:
    front, engine = engine_in_a_long_prefill
    large = asyncio.ensure_future(front.post(model="large", max_tokens=2).__aenter__())
    await until(lambda: engine._paces["large"] == FakePace(0.02))
    assert await burst(front, headers=HURRY_IN_A_LONG_PREFILL) == {200: 8}
    assert not large.done()
    response = await large
    assert (response.status, (await response.json())["usage"]["completion_tokens"]) == (200, 2)
    await until(lambda: not front.cluster.scheduler.requests)
    preempted = {
        name: value
        for name, value in (
            await scrape(
                front,
                "llmserve_preempted_requests_total",
                "llmserve_preempted_batches_total",
                "llmserve_preempted_seconds_total",
                "llmserve_stream_requests_total",
            )
        ).items()
        if name[1] == "large" and value
    }
    (preemption,) = actions(front, PreemptBatch)
    assert preemption.request_ids == (1,)
    assert ends_of(front, 1) == ["cancelled", "completed"]
    starts = [action for action in actions(front, StartBatch) if action.batch.requests[0].id == 1]
    assert len(starts) == 2
    assert response.headers["x-llmserve-batch"] == str(starts[1].batch.id), "the receipt must be of the second run"
    assert float(response.headers["x-llmserve-queue-ms"]) > 50, "the request waited for the preempting ones"
    seconds = preempted.pop(("llmserve_preempted_seconds_total", "large"))
    assert 0 < seconds < 60
    assert preempted == {
        ("llmserve_preempted_requests_total", "large", ""): 1,
        ("llmserve_preempted_batches_total", "large"): 1,
        ("llmserve_stream_requests_total", "large", "completed", ""): 1,
    }
    assert journal.replay(front.cluster.journal.header, front.cluster.journal.steps) == list(
        front.cluster.journal.steps
    )
    assert front.cluster.calls.empty.is_set()


async def test_a_stream_without_a_first_byte_may_be_preempted_too(
    engine_in_a_long_prefill: tuple[Front, FakeEngine],
) -> None:
    front, engine = engine_in_a_long_prefill
    request = asyncio.ensure_future(front.post(model="large", max_tokens=3, stream=True).__aenter__())
    await until(lambda: engine._paces["large"] == FakePace(0.02))
    assert await burst(front, headers=HURRY_IN_A_LONG_PREFILL) == {200: 8}
    assert not request.done(), "the request must be preempted, as its engine runs one batch at a time"
    response = await request
    body = (await response.read()).decode()
    assert body.count('"tok "') == 3
    assert body.endswith("data: [DONE]\n\n")
    assert ends_of(front, 1) == ["cancelled", "completed"]


async def test_a_stream_that_has_begun_is_not_preempted(shared_gpu: tuple[Front, FakeEngine]) -> None:
    front, engine = shared_gpu
    engine._paces["large"] = FakePace(0.02)  # begins sooner than declared
    response = await front.post(model="large", max_tokens=100, stream=True).__aenter__()
    assert await response.content.readany()
    assert await burst(front) == {504: 8}
    assert (await response.read()).endswith(b"data: [DONE]\n\n")
    await until(lambda: not front.cluster.scheduler.requests)
    assert not actions(front, PreemptBatch)
    assert events(front, AnswerBegan) == [AnswerBegan(1)]
    assert ends_of(front, 1) == ["completed"]


async def test_a_preempted_request_that_waits_too_long_is_504_that_names_the_preemption(
    engine_in_a_long_prefill: tuple[Front, FakeEngine],
) -> None:
    front, engine = engine_in_a_long_prefill
    show_its_speed(front)
    headers = {"x-llmserve-slo-ms": "63000"}  # three seconds longer than the declared prefill
    large = asyncio.ensure_future(front.post(model="large", max_tokens=1, headers=headers).__aenter__())
    await until(lambda: engine._paces["large"] == FakePace(0.02))
    assert await burst(front, tokens=200, headers=HURRY_IN_A_LONG_PREFILL) == {
        200: 8
    }  # four seconds: unexpectedly long
    response = await large
    error = (await response.json())["error"]
    await until(lambda: not front.cluster.scheduler.requests)
    deadlines = await scrape(front, "llmserve_deadlines_total")
    assert (response.status, error["code"]) == (504, "deadline_exceeded")
    assert error["message"] == "the request was preempted for other requests and cannot meet its deadline now"
    assert ends_of(front, 1) == ["cancelled"]
    assert [action.request_id for action in actions(front, FailRequest)] == [1]
    assert deadlines["llmserve_deadlines_total", "large", "missed", ""] == 1
    assert deadlines["llmserve_deadlines_total", "small", "met", ""] == 8


async def test_a_preempted_request_that_cannot_be_in_time_is_504_at_once(
    engine_in_a_long_prefill: tuple[Front, FakeEngine],
) -> None:
    front, engine = engine_in_a_long_prefill
    show_its_speed(front)
    headers = {"x-llmserve-slo-ms": "62000"}
    large = asyncio.ensure_future(front.post(model="large", max_tokens=1, headers=headers).__aenter__())
    await until(lambda: engine._paces["large"] == FakePace(0.02))
    await asyncio.sleep(2.1)  # the remaining time is too short for the answer
    requests = asyncio.ensure_future(burst(front, tokens=100, headers=HURRY_IN_A_LONG_PREFILL))
    response = await large
    assert (response.status, requests.done()) == (504, False)
    assert await requests == {200: 8}
    (fail,) = actions(front, FailRequest)
    (step,) = [step for step in front.cluster.journal.steps if fail in step.actions]
    assert isinstance(step.event, RequestEnded), "the request must fail as soon as its engine has stopped it"


async def test_a_client_that_leaves_after_its_preemption_uses_no_engine_any_more(
    engine_in_a_long_prefill: tuple[Front, FakeEngine],
) -> None:
    front, engine = engine_in_a_long_prefill
    large = asyncio.ensure_future(front.post(model="large", max_tokens=2).__aenter__())
    await until(lambda: engine._paces["large"] == FakePace(0.02))
    requests = asyncio.ensure_future(burst(front, tokens=50, headers=HURRY_IN_A_LONG_PREFILL))
    await until(lambda: bool(actions(front, PreemptBatch)))
    large.cancel()
    assert await requests == {200: 8}
    await until(lambda: not front.cluster.scheduler.requests and engine.running == 0)
    assert events(front, RequestCancelled) == [RequestCancelled(1)]
    assert sum(json.loads(body)["model"] == "large" for body in engine.bodies) == 1
    assert front.cluster.calls.empty.is_set()


async def test_under_bursts_every_request_ends_exactly_once(start_front: StartFront, tmp_path: Path) -> None:
    large_, small_ = FakePace(0.01, prefill_s=0.3), FakePace(0.01)
    dispatch = speeds(tmp_path, large=large_, small=small_)
    async with (
        FakeEngine(step_s=0.01, model="small", others={"large": large_}, slots=8, barrier=True) as first,
        FakeEngine(step_s=0.01, model="small", others={"large": large_}, slots=8, barrier=True) as second,
    ):
        front = await start_front(first, second, barrier=True, scheduling=FLEX, dispatch=dispatch)

        async def trickle() -> Counter[int]:
            ends: Counter[int] = Counter()
            for _ in range(8):
                ends[(await ask(front, "large", max_tokens=3, headers={"x-llmserve-slo-ms": "1500"}))[0]] += 1
            return ends

        async def bursts() -> Counter[int]:
            ends: Counter[int] = Counter()
            for _ in range(12):
                ends += await statuses(front, "small", 16, max_tokens=2, headers={"x-llmserve-slo-ms": "150"})
                await asyncio.sleep(0.1)
            return ends

        large, small = await asyncio.gather(trickle(), bursts())
        await until(lambda: not front.cluster.scheduler.requests)
        check(front.cluster.scheduler)
        ended = await scrape(front, "llmserve_requests_total")
    assert set(large) | set(small) <= {200, 504}
    assert (large.total(), small.total()) == (8, 12 * 16)
    assert sum(ended.values()) == 8 + 12 * 16, "each was counted once"
    assert actions(front, PreemptBatch), "nothing was preempted"
    completed = Counter(event.request_id for event in events(front, RequestEnded) if event.outcome == "completed")
    failed = Counter(action.request_id for action in actions(front, FailRequest))
    assert set((completed + failed).values()) == {1}
    assert journal.replay(front.cluster.journal.header, front.cluster.journal.steps) == list(
        front.cluster.journal.steps
    )


# ---- settings by model ----


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        (("model:large",), "profile: 'model:large' is not `model:ID=VALUE`"),
        (("model:a=p4-googlenet", "model:a=h100-llama-3.1-8b"), "is a second value for the same"),
        (("h100-llama-3.1-8b", "model:a=h100-llama"), "'h100-llama' is neither a shipped profile nor a file"),
    ],
)
async def test_an_invalid_profile_is_an_error(start_front: StartFront, profile: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await start_front("http://127.0.0.1:9", wait=False, dispatch=DispatchConfig(profile=profile))


async def test_each_model_is_planned_for_by_its_own_profile(start_front: StartFront, tmp_path: Path) -> None:
    for model, step_s in (("small", 0.001), ("large", 0.02)):
        Profile.timed(model, Curve.affine(0.0, step_s), source="Made up.").save(tmp_path / f"{model}.json")
    profiles = tuple([f"model:{model}={tmp_path}/{model}.json" for model in ("small", "large")])
    async with FakeEngine(
        step_s=0.001, model="small", others={"large": FakePace(0.02)}, slots=4, barrier=True
    ) as engine:
        front = await start_front(
            engine,
            barrier=True,
            scheduling={"batch_size": 4, "release": "table", "bins": 1},
            dispatch=DispatchConfig(profile=profiles),
        )
        for _ in range(12):
            assert (await ask(front, "small", max_tokens=5))[0] == (await ask(front, "large", max_tokens=5))[0] == 200
        expected = "llmserve_dispatch_response_seconds_expected"
        async with asyncio.timeout(30):
            while len(samples := await scrape(front, expected)) < 2:
                await ask(front, "small", max_tokens=5)
                await ask(front, "large", max_tokens=5)
                await asyncio.sleep(0.05)
    assert samples[expected, "large"] > 2 * samples[expected, "small"]


async def test_a_model_may_have_its_own_predictor(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0, model="small", others={"large": FakePace(0.0)}) as engine:
        chosen = PredictorConfig(predictor=("none", f"model:large={predictor.DEMO}"))
        front = await start_front(engine, prediction=chosen)
        for model in ("small", "large", "large"):
            assert (await ask(front, model, max_tokens=7))[0] == 200
    first, second, third = arrived(front)
    assert (first.predicted_tokens, first.quantiles) == (None, ())
    assert second.predicted_tokens == 7, "no answer is longer than its max_tokens"
    assert len(second.quantiles) == len(third.quantiles) > 1
