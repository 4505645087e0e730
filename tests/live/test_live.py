"""The live body on fake HTTP engines: batches, faults, predictions, drain, and the journal."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from calls import a_call
from front import Front, StartFront, until
from reader import answered, submitted

from llmserve.engines.engine import EngineError
from llmserve.engines.openai import OpenAIEngine
from llmserve.engines.timed.server import FakeEngine, Fault
from llmserve.forecasts.lengths import Forecasts
from llmserve.live import journal
from llmserve.live.cluster import LiveCluster
from llmserve.live.fleet import Fleet
from llmserve.live.journal import Header, Journal, Step
from llmserve.request import EngineInfo
from llmserve.scheduling.messages import RequestArrived, RequestEnded, StartBatch, TimerFired
from llmserve.settings.policies import SchedulingConfig
from llmserve.settings.tree import EngineConfig, LiveConfig, ServerConfig
from predictor.forecaster import Forecaster
from predictor.online import OnlineLearner
from predictor.prediction import Prediction
from predictor.prompt import Prompt


async def answer(front: Front, **fields: Any) -> tuple[int, dict[str, Any], aiohttp.typedefs.LooseHeaders]:
    async with front.post(**fields) as response:
        return response.status, await response.json(), response.headers


async def stream(front: Front, **fields: Any) -> list[Any]:
    """Return the events of a stream; the last is "[DONE]" after a proper end."""
    async with front.post(stream=True, **fields) as response:
        lines = [line.decode().removeprefix("data: ").strip() async for line in response.content if line.strip()]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def starts(front: Front) -> list[StartBatch]:
    steps = front.cluster.journal.steps
    return [action for step in steps for action in step.actions if isinstance(action, StartBatch)]


# ---- batches ----


async def test_a_barrier_engine_gets_whole_batches_and_one_at_a_time(start_front: StartFront) -> None:
    async with FakeEngine(slots=4, step_s=0.002, barrier=True) as engine:
        front = await start_front(engine, barrier=True, scheduling={"batch_size": 4, "release": "full", "bins": 1})
        answers = await asyncio.gather(*(answer(front, max_tokens=tokens) for tokens in (3, 9, 5, 7, 4, 4, 4, 4)))
    assert all(status == 200 for status, *_ in answers)
    assert engine.running_max == 4
    assert [len(start.batch.requests) for start in starts(front)] == [4, 4]


async def test_a_refill_engine_is_never_given_more_than_its_slots(start_front: StartFront) -> None:
    async with FakeEngine(slots=64, step_s=0.001) as engine:
        front = await start_front(engine, slots=3)
        await asyncio.gather(*(answer(front, max_tokens=10) for _ in range(20)))
    assert engine.running_max == 3


async def test_a_timeout_release_releases_a_lone_request(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine, scheduling={"release": "timeout", "batch_size": 8, "batch_wait_s": 0.05})
        status, _, headers = await answer(front)
    assert status == 200
    assert float(headers["x-llmserve-queue-ms"]) >= 50


# ---- predictions ----


class Table:
    """A predictor with a table of answers; "slow" hangs and "broken" raises."""

    async def predict(self, prompt: Prompt) -> Prediction:
        if prompt.text == "slow":
            await asyncio.sleep(60)
        if prompt.text == "broken":
            raise RuntimeError("the predictor is broken")
        return Prediction((float(prompt.text),))


async def submit(cluster: LiveCluster, prompt: str, **fields: Any) -> Any:
    body = json.dumps({"model": "fake", "messages": [], "max_tokens": 4}).encode()
    call = a_call("/v1/chat/completions", body, Prompt(prompt, "fake"), stream=False, **fields)
    return await answered(cluster, call)


async def test_predictions_choose_the_bin_and_a_bad_predictor_costs_its_budget_at_most(tmp_path: Path) -> None:
    async with FakeEngine(step_s=0) as fake:
        engine = OpenAIEngine(EngineInfo("e", 8, False), fake.url)
        header = Header(SchedulingConfig(bins=2, edges=(100.0,)).resolved(barrier=False))
        forecaster = Forecaster(Table(), OnlineLearner(), budget_s=0.5)
        cluster = LiveCluster(header.scheduler(), Fleet([engine]), Journal(header), forecasts=Forecasts(forecaster))
        cluster.start()
        await until(lambda: all(cluster.engines_ready.values()))
        assert (await submit(cluster, "300", output_tokens_max=50)).receipt.predicted_tokens == 50
        assert (await submit(cluster, "30", output_tokens_min=200)).receipt.predicted_tokens == 200
        assert (await submit(cluster, "3000", predicted_tokens=7.0)).receipt.predicted_tokens == 7
        assert (await submit(cluster, "30")).receipt.bin == 0
        assert (await submit(cluster, "30000")).receipt.bin == 1
        for prompt in ("slow", "broken"):  # both fall back on the observed lengths: 4 tokens each
            assert (await submit(cluster, prompt)).receipt.predicted_tokens == pytest.approx(4, rel=0.05)
        assert dict(cluster.forecasts.fallbacks) == {"slow": 1, "failed": 1}
        await cluster.close()


async def test_a_call_that_is_cancelled_leaves_its_engine_and_hears_no_more(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0.05) as engine:
        front = await start_front(engine)
        call = a_call("/v1/chat/completions", b'{"max_tokens": 900}', Prompt("", "fake"), stream=False)
        in_flight, reader = submitted(front.cluster, call)
        await until(lambda: engine.running == 1)
        front.cluster.calls.cancel(in_flight)
        await until(lambda: engine.running == 0 and not front.cluster.scheduler.requests)
        assert (reader.chunks, reader.error) == ([], None)


# ---- engines that fail ----


async def test_a_missed_health_probe_costs_no_stream(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0.01) as engine:
        front = await start_front(engine)
        (handle,) = front.cluster.fleet.handles.values()
        streaming = asyncio.ensure_future(stream(front, max_tokens=60))
        await until(lambda: engine.running == 1)
        probe, misses = handle.engine.probe, 0

        async def miss_twice() -> Any:
            nonlocal misses
            misses += 1
            if misses <= 2:
                raise EngineError("too busy to say how it is")
            return await probe()

        handle.engine.probe = miss_twice  # type: ignore[method-assign]
        assert (await streaming)[-1] == "[DONE]"
        await until(lambda: misses > 2)
        assert front.cluster.engines_ready == {handle.engine.info.name: True}


async def test_senseless_token_counts_of_an_engine_leak_no_slot(start_front: StartFront) -> None:
    async def nonsense(request: web.Request) -> web.Response:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "fake"}]})
        return web.json_response({"choices": [{}], "usage": {"completion_tokens": -1}})

    app = web.Application()
    app.router.add_route("*", "/v1/{path:.*}", nonsense)
    async with TestServer(app) as engine:
        front = await start_front(str(engine.make_url("")), slots=1)
        assert [status for status, *_ in await asyncio.gather(*(answer(front) for _ in range(3)))] == [200] * 3


async def test_requests_of_a_killed_engine_run_elsewhere(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0.01) as survivor:
        async with FakeEngine(step_s=0.01) as victim:
            front = await start_front(survivor, victim, slots=4)
            requests = [asyncio.ensure_future(answer(front, max_tokens=30)) for _ in range(8)]
            await until(lambda: survivor.running == victim.running == 4)
        answers = await asyncio.gather(*requests)
        await until(lambda: not front.cluster.scheduler.requests)
    assert [status for status, *_ in answers] == [200] * 8
    ends = [step.event for step in front.cluster.journal.steps if isinstance(step.event, RequestEnded)]
    assert sorted(end.request_id for end in ends if end.outcome == "completed") == list(range(1, 9))
    assert all(end.fault and end.retryable for end in ends if end.outcome != "completed")


async def test_a_stream_cut_off_by_its_engine_ends_with_an_error_event(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0.001) as engine:
        engine.fault = Fault("close_mid_stream", after_tokens=3)
        front = await start_front(engine)
        events = await stream(front, max_tokens=50)
    *pieces, failure, done = events
    assert (failure["error"]["code"], done) == ("engine_failed", "[DONE]")
    assert sum("choices" in event for event in pieces) >= 3


async def test_a_request_cut_off_before_its_first_byte_runs_elsewhere(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0.001) as good, FakeEngine(step_s=0.001) as bad:
        bad.fault = Fault("close_mid_stream")
        front = await start_front(good, bad, slots=2)
        answers = await asyncio.gather(*(answer(front, max_tokens=5) for _ in range(4)))
        assert [status for status, *_ in answers] == [200] * 4


async def test_a_request_is_retried_after_a_500_of_an_engine(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0.001) as good, FakeEngine(step_s=0.001) as bad:
        bad.fault = Fault("500")
        front = await start_front(good, bad, slots=1)
        answers = await asyncio.gather(*(answer(front, max_tokens=5) for _ in range(6)))
        assert [status for status, *_ in answers] == [200] * 6
        assert bad.bodies


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_on_an_engine_that_hangs_is_given_up_and_not_run_again(
    stream: bool, start_front: StartFront
) -> None:
    async with FakeEngine(step_s=0.001) as good, FakeEngine(step_s=0.001) as bad:
        bad.fault = Fault("hang", after_tokens=0)
        urls, idle_s = (good.url, bad.url), 0.3 if stream else 30.0
        engines = EngineConfig(engine=urls, slots=1, engine_idle_s=idle_s, engine_answer_s=0.4)
        front = await start_front(good, bad, engines=engines)

        async def ask() -> tuple[int, str, str]:
            async with front.post(max_tokens=5, stream=stream) as response:
                return response.status, response.headers.get("x-should-retry", ""), await response.text()

        good_one, hung = sorted(await asyncio.gather(ask(), ask()))
        assert (good_one[0], hung[:2]) == (200, (504, "false"))
        assert ("--engine-idle-s" if stream else "--engine-answer-s") in hung[2]
        assert len(good.bodies) == len(bad.bodies) == 1


async def test_a_whole_answer_may_be_silent_for_as_long_as_it_takes(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0.1) as engine:
        front = await start_front(engine, engine_idle_s=0.1)
        assert (await answer(front, max_tokens=5))[0] == 200
        assert len(engine.bodies) == 1


async def test_an_engine_that_comes_back_is_used_again(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0) as first:
        front = await start_front(first, scheduling={"engine_wait_s": 0.1})
        port = int(first.url.rpartition(":")[2])
    await until(lambda: not any(front.cluster.engines_ready.values()))
    assert (await answer(front))[0] == 503
    async with FakeEngine(step_s=0, port=port):
        await until(lambda: all(front.cluster.engines_ready.values()))
        assert (await answer(front))[0] == 200


# ---- clients that read slowly ----


async def test_a_client_that_reads_nothing_holds_no_slot(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine, slots=1)
        response = await front.post(stream=True, max_tokens=20_000).__aenter__()
        await until(lambda: not front.cluster.scheduler.requests)
        assert (await answer(front))[0] == 200
        assert (await response.read()).endswith(b"data: [DONE]\n\n")


async def test_a_slow_client_slows_its_engine_down_once_its_buffer_is_full(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine, live=LiveConfig(buffer_bytes_max=10_000))
        response = await front.post(stream=True, max_tokens=200_000).__aenter__()
        first = await response.content.readexactly(100)
        await until(lambda: (call := front.cluster.calls.get(1)) is not None and call.delivery.behind)
        assert front.cluster.scheduler.requests, "the answer is longer than all buffers on the way"
        assert (first + await response.read()).endswith(b"data: [DONE]\n\n")
        await until(lambda: not front.cluster.scheduler.requests)


async def test_a_client_that_never_reads_is_cut_off_once_its_buffer_is_full(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0) as engine:
        live = LiveConfig(buffer_bytes_max=10_000, client_stall_s=0.2)
        front = await start_front(engine, slots=1, live=live)
        response = await front.post(stream=True, max_tokens=400_000).__aenter__()
        await until(lambda: not front.cluster.scheduler.requests)
        assert (await answer(front, max_tokens=1))[0] == 200
        response.close()


# ---- drain and close ----


async def test_closing_starts_nothing_and_fails_waiting_requests(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0.05) as engine:
        front = await start_front(engine, slots=1)
        requests = [asyncio.ensure_future(front.post(max_tokens=200).__aenter__()) for _ in range(3)]
        await until(lambda: front.cluster.scheduler.waiting == 2)
        await front.cluster.close()
        assert [response.status for response in await asyncio.gather(*requests)] == [503] * 3
        assert len(starts(front)) == 1


async def test_a_drain_finishes_present_requests_and_refuses_new_ones(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0.01) as engine:
        front = await start_front(engine, slots=1, scheduling={"release": "full", "batch_size": 2})
        requests = [asyncio.ensure_future(answer(front, max_tokens=10)) for _ in range(3)]  # one batch and a lone one
        await until(lambda: len(front.cluster.scheduler.requests) == 3)
        draining = asyncio.ensure_future(front.cluster.drain(10.0))
        await asyncio.sleep(0)
        assert (await answer(front))[0] == 503
        assert await draining
        assert [status for status, *_ in await asyncio.gather(*requests)] == [200] * 3


async def test_a_drain_that_takes_too_long_is_reported(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0.05) as engine:
        front = await start_front(engine)
        request = asyncio.ensure_future(answer(front, max_tokens=1_000))
        await until(lambda: engine.running == 1)
        assert not await front.cluster.drain(0.05)
        request.cancel()
        await until(lambda: not front.cluster.scheduler.requests)


# ---- the journal ----


async def test_a_live_journal_replays_and_holds_no_text_of_prompts_or_answers(
    start_front: StartFront, tmp_path: Path
) -> None:
    path = tmp_path / "journal.jsonl"
    async with FakeEngine(step_s=0.001) as first, FakeEngine(step_s=0.001) as second:
        second.fault = Fault("500")
        front = await start_front(
            first,
            second,
            slots=2,
            scheduling={"release": "timeout", "batch_wait_s": 0.01, "batch_size": 3},
            server=ServerConfig(port=0, journal=str(path)),
        )
        secret = [{"role": "user", "content": "the secret word is xyzzy"}]
        requests = [asyncio.ensure_future(answer(front, max_tokens=5, messages=secret)) for _ in range(12)]
        await until(lambda: len(front.cluster.scheduler.requests) >= 8)
        requests.pop().cancel()
        await asyncio.gather(*requests)
        await until(lambda: not front.cluster.scheduler.requests)
        front.cluster.journal.close()
    header, steps = journal.read(path)
    assert sum(isinstance(step.event, RequestArrived) for step in steps) >= 11
    assert journal.replay(header, steps) == steps
    assert b"xyzzy" not in path.read_bytes()


async def test_a_journal_that_cannot_be_written_stops_nothing(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine, server=ServerConfig(port=0, journal="/dev/full"))
        answers = await asyncio.gather(*(answer(front) for _ in range(40)))
        assert [status for status, *_ in answers] == [200] * 40


def test_a_listener_that_fails_stops_nothing() -> None:
    journal_ = Journal(Header(SchedulingConfig().resolved(barrier=True)))
    times_s: list[float] = []

    def fail(step: Step) -> None:
        raise RuntimeError("only a listener")

    journal_.listen(fail)
    journal_.listen(lambda step: times_s.append(step.now_s))
    journal_.append(1.0, TimerFired(), [])
    assert times_s == [1.0]


def test_a_journal_keeps_only_its_last_steps_in_memory() -> None:
    journal_ = Journal(Header(SchedulingConfig().resolved(barrier=True)), steps_max=3)
    for now_s in range(5):
        journal_.append(float(now_s), TimerFired(), [])
    assert [step.now_s for step in journal_.steps] == [2.0, 3.0, 4.0]


async def scraped(front: Front) -> dict[str, float]:
    """The metrics of predictions."""
    async with front.session.get(f"{front.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    prefix = "llmserve_prediction_"
    return {
        name.removeprefix(prefix): float(value)
        for name, value in (line.split(" ") for line in lines if line.startswith(prefix) and "{" not in line)
    }


async def test_lost_and_regained_trust_in_predictions_is_applied_and_logged(
    start_front: StartFront, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="llmserve")
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine, scheduling={"bins": 2, "batch_size": 1, "trust_window": 32})

        async def ask(tokens: int) -> None:
            await answer(front, max_tokens=tokens, headers={"x-llmserve-predicted-tokens": str(tokens)})

        assert (await scraped(front))["trusted"] == 1.0
        for _ in range(32):  # equal lengths: no prediction can rank them
            await ask(5)
        assert (await scraped(front))["trusted"] == 0.0
        for tokens in range(1, 65):
            await ask(tokens)
        metrics = await scraped(front)
    assert metrics["trusted"] == 1.0
    assert metrics["window_answers"] == 32
    assert metrics["rank_correlation"] == pytest.approx(1.0)
    assert metrics["bin_accuracy"] == metrics["near_bin_accuracy"] == 1.0
    messages = [record.getMessage() for record in caplog.records if "rank answers" in record.getMessage()]
    assert [text.rpartition(": ")[2] for text in messages] == ["one bin, first come first served", "bins are back"]


async def test_answers_teach_the_forecast_of_their_kind(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine)

        async def ask(system: str, text: str, **fields: Any) -> float:
            messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
            _, _, headers = await answer(front, messages=messages, **fields)
            return float(headers.get("x-llmserve-predicted-tokens", "nan"))

        assert math.isnan(await ask("be brief", "hi"))
        for _ in range(12):
            await ask("be brief", "hi")  # an answer of 16 tokens
            await ask("write essays", "hi", max_tokens=90)  # an answer of at least 90 tokens
        assert await ask("be brief", "something new") == pytest.approx(16, rel=0.1)
        assert await ask("write essays", "something new") >= 90
        assert await ask("write essays", "something new", max_tokens=20) == 20
