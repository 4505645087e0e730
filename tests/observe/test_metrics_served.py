"""/metrics of a real server that has served: times of tokens, counts by engine, and Prometheus' own check."""

from __future__ import annotations

import asyncio
import re

import pytest
from engines.lying import LyingEngine, http
from front import Front, StartFront, until
from promtool import needs_promtool, promtool

from llmserve import __version__
from llmserve.engines.timed.server import FakeEngine, Fault
from llmserve.settings.tree import LiveConfig


async def scraped(front: Front) -> str:
    await until(lambda: not front.cluster.scheduler.requests)
    async with front.session.get(f"{front.url}/metrics") as response:
        return await response.text()


async def read(front: Front, **fields: object) -> int:
    async with front.post(**fields) as response:
        await response.read()
        return int(response.status)


def value(text: str, name: str, **labels: str) -> float:
    """The only sample of this name with these labels among its own."""
    rows = re.findall(rf"^{name}(?:\{{(.*)\}})? (\S+)$", text, re.M)
    wanted = {f'{label}="{value}"' for label, value in labels.items()}
    (found,) = [number for pairs, number in rows if wanted <= set(pairs.split(","))]
    return float(found)


async def test_streams_have_the_times_of_their_tokens_by_model_and_engine(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0.01, prefill_s=0.05) as engine:
        front = await start_front(engine)
        await asyncio.gather(*(read(front, stream=True, max_tokens=tokens) for tokens in (11, 21)))
        await read(front, stream=True, max_tokens=1)
        await read(front, max_tokens=5)
        text = await scraped(front)
    of = {"engine": engine.url.removeprefix("http://"), "model": "fake"}
    assert value(text, "llmserve_time_to_first_token_seconds_count", **of) == 3, "whole answers have no first token"
    assert value(text, "llmserve_time_to_first_token_seconds_sum", **of) >= 3 * 0.05
    assert value(text, "llmserve_time_between_tokens_seconds_count", **of) == 2, "one token has no other to follow"
    assert 0.008 <= value(text, "llmserve_time_between_tokens_seconds_sum", **of) / 2 <= 0.1
    assert value(text, "llmserve_latency_seconds_count", **of) == 4
    assert value(text, "llmserve_waiting_seconds_count", **of) == 4
    assert value(text, "llmserve_output_tokens_total", **of) == 38
    assert value(text, "llmserve_prompt_tokens_total", cached="unknown", **of) > 0
    assert value(text, "llmserve_engine_requests_total", outcome="completed", **of) == 4
    assert value(text, "llmserve_retries_total", outcome="completed", **of) == 0


async def test_tokens_of_prompts_are_counted_by_whether_the_engine_had_them(start_front: StartFront) -> None:
    said = [{"role": "user", "content": " ".join(f"word{number}" for number in range(100))}]
    async with FakeEngine(step_s=0, cache_words=1_000) as engine:
        front = await start_front(engine)
        for stream in (False, True):
            await read(front, stream=stream, max_tokens=1, messages=said)
        text = await scraped(front)
    of = {"engine": engine.url.removeprefix("http://"), "model": "fake"}
    assert value(text, "llmserve_prompt_tokens_total", cached="yes", **of) == 96
    assert value(text, "llmserve_prompt_tokens_total", cached="no", **of) == 2 * 103 - 96
    assert value(text, "llmserve_prompt_tokens_total", cached="unknown", **of) == 0


async def test_forecast_work_stands_beside_what_came(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0.002) as engine:
        front = await start_front(engine)
        for _ in range(3):
            await read(front, max_tokens=10)
        text = await scraped(front)
    of = {"engine": engine.url.removeprefix("http://"), "model": "fake"}
    assert value(text, "llmserve_forecast_work_seconds_total", **of) > 0
    assert value(text, "llmserve_work_seconds_total", **of) >= 3 * 10 * 0.002


async def test_a_retry_is_counted_where_it_ran_and_the_fault_where_it_was(start_front: StartFront) -> None:
    async with FakeEngine() as bad, FakeEngine() as good:
        bad.fault = Fault("500")
        front = await start_front(bad, good, slots=1)
        statuses = await asyncio.gather(*(read(front, max_tokens=2) for _ in range(2)))
        text = await scraped(front)
    bad_name, good_name = (engine.url.removeprefix("http://") for engine in (bad, good))
    assert statuses == [200, 200]
    faults = value(text, "llmserve_engine_requests_total", engine=bad_name, outcome="fault")
    assert faults >= 1
    assert value(text, "llmserve_engine_requests_total", engine=good_name, outcome="completed") == 2
    assert value(text, "llmserve_retries_total", engine=good_name, outcome="completed") == 1
    assert value(text, "llmserve_retries_total", engine=bad_name, outcome="fault") == faults - 1


async def test_a_client_that_leaves_is_an_outcome_of_its_own(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0.01) as engine:
        front = await start_front(engine)
        leaving = asyncio.ensure_future(read(front, max_tokens=1000))
        await until(lambda: engine.running == 1)
        leaving.cancel()
        text = await scraped(front)
    assert value(text, "llmserve_engine_requests_total", outcome="cancelled") == 1


async def test_what_an_engine_refuses_is_no_fault(start_front: StartFront) -> None:
    async with LyingEngine(http(b"{}", status="400 Bad Request")) as engine:
        front = await start_front(engine.url)
        assert await read(front) == 400
        text = await scraped(front)
    assert value(text, "llmserve_engine_requests_total", outcome="failed") == 1
    assert value(text, "llmserve_engine_requests_total", outcome="fault") == 0


async def test_whether_an_engines_slots_are_a_guess_is_known(start_front: StartFront) -> None:
    async with FakeEngine() as engine:
        front = await start_front(engine, slots=None, live=LiveConfig(probe_every_s=0.02))
        guessed = await scraped(front)
        known = await scraped(await start_front(engine, slots=4))
    assert value(guessed, "llmserve_engine_slots_known") == 0
    assert value(known, "llmserve_engine_slots_known") == 1


@needs_promtool
@pytest.mark.parametrize("barrier", [False, True])
async def test_prometheus_finds_no_fault_in_the_metrics(barrier: bool, start_front: StartFront) -> None:
    async with FakeEngine(step_s=0.001, barrier=barrier) as engine:
        front = await start_front(engine, barrier=barrier)
        for streamed in (True, False):
            await read(front, stream=streamed, max_tokens=3)
        await read(front, model="another")
        text = await scraped(front)
    assert promtool("check", "metrics", text=text) == ""
    assert "_created" not in text
    assert value(text, "llmserve_build_info", version=__version__) == 1
    assert value(text, "process_resident_memory_bytes") > 0
