"""The timed fake engine: durations of answers, queues, and faults on request."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator

import aiohttp
import openai
import pytest

from llmserve.engines.timed.server import FakeEngine, FakePace, Fault

LIMIT_S = 60.0


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session


def post(session: aiohttp.ClientSession, engine: FakeEngine, tokens: int, *, batch: str | None = None, size=1, **body):
    """A request, as a context manager."""
    headers = {"x-llmserve-batch": batch, "x-llmserve-batch-size": str(size)} if batch else {}
    request = {"messages": [{"role": "user", "content": "Hi there"}], "max_tokens": tokens} | body
    return session.post(engine.url + "/v1/chat/completions", json=request, headers=headers)


async def timed(session: aiohttp.ClientSession, engine: FakeEngine, tokens: int, **request) -> float:
    """When an answer has ended, on the event loop's clock, seconds."""
    async with post(session, engine, tokens, **request) as response:
        assert response.status == 200, await response.text()
        await response.read()
        return asyncio.get_running_loop().time()


async def until(engine: FakeEngine, *, running: int, waiting: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while (engine.running, engine.waiting) != (running, waiting):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("step_s", [0.0, 0.001])
async def test_the_fake_engine_speaks_openais_protocol(step_s: float):
    async with (
        FakeEngine(step_s=step_s, model="f") as engine,
        openai.AsyncOpenAI(base_url=engine.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        assert [model.id for model in (await client.models.list()).data] == ["f"]
        chat = {"model": "f", "messages": [{"role": "user", "content": "Hi"}]}
        answer = await client.chat.completions.create(**chat, max_completion_tokens=3)
        assert answer.choices[0].message.content == "tok tok tok "
        assert answer.usage.completion_tokens == 3
        stream = await client.chat.completions.create(
            **chat, max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
        *chunks, last = [chunk async for chunk in stream]
        assert [chunk.choices[0].delta.content for chunk in chunks] == ["", *["tok "] * 5, None]
        assert chunks[-1].choices[0].finish_reason == "length"
        assert last.usage.completion_tokens == 5
        plain = await client.completions.create(model="f", prompt="Hi")
        assert plain.choices[0].text.split() == ["tok"] * 16
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="g", prompt="Hi")
        with pytest.raises(openai.BadRequestError):
            await client.post("/completions", body={"max_tokens": "x"}, cast_to=object)


async def test_an_answer_takes_a_step_for_each_token(session):
    async with FakeEngine(step_s=0.01, prefill_s=0.05) as engine:
        started_s = asyncio.get_running_loop().time()
        short, long = await asyncio.gather(timed(session, engine, 5), timed(session, engine, 20, stream=True))
        assert short - started_s >= 0.05 + 0.05 - 0.001
        assert long - started_s >= 0.05 + 0.20 - 0.001


async def test_several_models_have_their_own_paces(session):
    async with FakeEngine(step_s=0.1, others={"quick": FakePace(0.01, prefill_s=0.02)}) as engine:
        async with session.get(engine.url + "/v1/models") as response:
            assert [model["id"] for model in (await response.json())["data"]] == ["fake", "quick"]
        started_s = asyncio.get_running_loop().time()
        quick, slow = await asyncio.gather(
            timed(session, engine, 3, model="quick"), timed(session, engine, 3, model="fake", stream=True)
        )
        assert quick - started_s >= 0.05 - 0.001
        assert slow - started_s >= 0.3 - 0.001
        assert quick < slow
        async with post(session, engine, 1, model="quick") as response:
            assert (await response.json())["model"] == "quick"
        async with post(session, engine, 1, model="other") as response:
            assert response.status == 404


async def test_a_batch_of_one_token_answers_takes_alpha_b_plus_beta(session):
    alpha_s, beta_s = 0.05, 0.1
    async with FakeEngine(step_s=0.0, prefill_s=beta_s, row_s=alpha_s, slots=4, barrier=True) as engine:

        async def seconds(size: int) -> float:
            started_s = asyncio.get_running_loop().time()
            ends = [timed(session, engine, 1, batch=str(size), size=size) for _ in range(size)]
            return max(await asyncio.gather(*ends)) - started_s

        assert alpha_s + beta_s - 0.001 <= await seconds(1)
        assert 4 * alpha_s + beta_s - 0.001 <= await seconds(4)


def test_only_batches_have_a_cost_per_row():
    with pytest.raises(ValueError, match="row_s: only a barrier engine"):
        FakeEngine(row_s=0.1)


async def test_a_refill_engine_fills_each_slot_as_soon_as_it_is_free_first_come_first_served(session):
    async with FakeEngine(slots=2, step_s=0.01) as engine:
        first = [asyncio.create_task(timed(session, engine, tokens)) for tokens in (30, 5)]
        await until(engine, running=2, waiting=0)
        second = asyncio.create_task(timed(session, engine, 2))
        await until(engine, running=2, waiting=1)
        third = asyncio.create_task(timed(session, engine, 2))
        await until(engine, running=2, waiting=2)
        async with session.get(engine.url + "/metrics") as response:
            metrics = await response.text()
        assert 'vllm:num_requests_running{model_name="fake"} 2.0' in metrics
        assert 'vllm:num_requests_waiting{model_name="fake"} 2.0' in metrics
        long, short = await asyncio.gather(*first)
        assert short < await second < await third < long
        assert engine.running_max == 2


async def test_a_barrier_engine_runs_one_batch_at_a_time_to_the_end_of_its_longest(session):
    async with FakeEngine(slots=2, step_s=0.01, barrier=True) as engine:
        batch = [asyncio.create_task(timed(session, engine, tokens, batch="a", size=2)) for tokens in (2, 30)]
        await until(engine, running=2, waiting=0)
        other = asyncio.create_task(timed(session, engine, 1))
        short, long = await asyncio.gather(*batch)
        assert short < long < await other
        async with post(session, engine, 1, batch="b", size=3) as response:
            assert response.status == 400


async def test_a_barrier_engine_starts_without_a_member_that_was_refused_or_does_not_arrive(session):
    async with FakeEngine(step_s=0.001, barrier=True, gather_s=LIMIT_S) as engine:

        async def refused() -> None:
            async with post(session, engine, 1, batch="a", size=2, model="other") as response:
                assert response.status == 404

        await asyncio.gather(timed(session, engine, 1, batch="a", size=2), refused())
    async with FakeEngine(step_s=0.001, barrier=True, gather_s=0.01) as engine:
        await timed(session, engine, 1, batch="a", size=2)


@pytest.mark.parametrize("barrier", [False, True])
async def test_a_client_that_leaves_frees_its_place(session, barrier: bool):
    async with FakeEngine(slots=1, step_s=0.01, barrier=barrier) as engine:
        running = asyncio.create_task(timed(session, engine, 10**6))
        await until(engine, running=1, waiting=0)
        waiting = asyncio.create_task(timed(session, engine, 10**6))
        await until(engine, running=1, waiting=1)
        waiting.cancel()
        await until(engine, running=1, waiting=0)
        running.cancel()
        await until(engine, running=0, waiting=0)
        await timed(session, engine, 1)


async def test_an_engine_can_be_made_to_hang(session):
    async with FakeEngine(step_s=0.001) as engine:
        engine.fault = Fault("hang", after_tokens=2)
        async with post(session, engine, 10, stream=True) as response:
            text = b""
            while text.count(b"tok ") < 2:
                text += await response.content.readany()
            engine.fault = Fault()
            await timed(session, engine, 3)  # other requests are served meanwhile
            assert (engine.running, text.count(b"tok ")) == (1, 2)


async def test_an_engine_can_be_made_to_fail(session):
    async with FakeEngine(step_s=0.0) as engine:
        async with session.post(engine.url + "/fault", json={"mode": "500"}) as response:
            assert response.status == 200
        async with post(session, engine, 1) as response:
            assert (response.status, (await response.json())["error"]["type"]) == (500, "server_error")
        async with session.post(engine.url + "/fault", json={"mode": "ok"}) as response:
            assert response.status == 200
        async with post(session, engine, 1) as response:
            assert response.status == 200
        async with session.post(engine.url + "/fault", json={"mode": "explode"}) as response:
            assert response.status == 400


@pytest.mark.parametrize("step_s", [0.0, 0.001])
async def test_an_engine_can_be_made_to_close_the_connection_in_the_middle(session, step_s: float):
    async with FakeEngine(step_s=step_s) as engine:
        engine.fault = Fault("close_mid_stream", after_tokens=3)
        async with post(session, engine, 10, stream=True) as response:
            text = b""
            while text.count(b"tok ") < 3:
                text += await response.content.readany()
            with pytest.raises(aiohttp.ClientError):
                await response.read()
        with pytest.raises(aiohttp.ClientError):
            await timed(session, engine, 10)


async def test_an_engine_can_be_made_slow(session):
    async with FakeEngine(step_s=0.002) as engine:
        engine.fault = Fault("slow")
        started_s = asyncio.get_running_loop().time()
        assert await timed(session, engine, 5) - started_s >= 0.1 - 0.001


async def test_received_bodies_are_kept(session):
    async with FakeEngine(step_s=0.0) as engine:
        await timed(session, engine, 7, user="me")
        assert json.loads(engine.bodies[0])["user"] == "me"


async def test_all_of_many_clients_are_answered(session):
    async with FakeEngine(slots=8, step_s=0.0001) as engine:
        await asyncio.gather(*(timed(session, engine, 10, stream=bool(i % 2)) for i in range(200)))
        assert (engine.running, engine.waiting, engine.running_max) == (0, 0, 8)


def test_the_process_prints_its_address_and_ends_with_status_0():
    command = [sys.executable, "-m", "llmserve.engines.timed", "--port", "0", "--step-s", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        try:
            line = engine.stdout.readline()
            assert "ready at http://127.0.0.1:" in line
            same_port = [*command, "--port", line.rsplit(":", 1)[1].strip()]
            ended = subprocess.run(same_port, capture_output=True, text=True, timeout=LIMIT_S, check=False)
            assert (ended.returncode, len(ended.stderr.splitlines())) == (1, 1)
            engine.send_signal(signal.SIGTERM)
            assert engine.wait(LIMIT_S) == 0
        finally:
            engine.kill()


async def test_a_prefix_cache_tells_whole_blocks_of_earlier_prompts_and_forgets_the_least_recently_used(
    session: aiohttp.ClientSession,
):
    async def cached(name: str, words: int) -> int:
        body = {"messages": [{"role": "user", "content": " ".join(f"{name}{number}" for number in range(words))}]}
        async with post(session, engine, 1, **body) as response:
            return (await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"]

    async with FakeEngine(step_s=0, cache_words=128) as engine:
        assert await cached("a", 70) == 0
        assert await cached("a", 70) == 64, "whole blocks of 16"
        assert await cached("a", 40) == 32, "what the prompts share"
        assert await cached("b", 100) == 0
        assert await cached("a", 70) == 32, "the end of the longer prompt has left first"
    async with FakeEngine(step_s=0, cache_words=1024) as engine:
        words = 64 - len(['[{"role":', '"user",', '"content":'])
        assert await cached("a", words) == 0
        assert await cached("a", words) == 48, "the last word is computed in any case"
