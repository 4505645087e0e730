"""The front-end before the real vLLM: passed, held back and aborted requests."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import aiohttp
import openai
import pytest
from front import Front, StartFront, until

pytestmark = pytest.mark.vllm

COUNT: Any = [{"role": "user", "content": "Count from 3 to 9."}]
ENDLESS = {"ignore_eos": True, "max_tokens": 900}


def client(front: Front) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)


async def gauge(session: aiohttp.ClientSession, url: str, name: str) -> float:
    async with session.get(f"{url}/metrics") as response:
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", await response.text(), re.M))


async def until_running(session: aiohttp.ClientSession, url: str, count: int) -> None:
    async with asyncio.timeout(30):
        while await gauge(session, url, "vllm:num_requests_running") != count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_the_official_client_chats_with_vllm(start_front: StartFront, vllm_url: str) -> None:
    front = await start_front(vllm_url, slots=4)
    answer = await client(front).chat.completions.create(model="llmserve-demo", messages=COUNT)
    assert answer.choices[0].message.content == "3, 4, 5, 6, 7, 8, 9"
    assert answer.usage is not None
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("stop", 14)


async def test_the_demo_model_answers_alike_on_vllm_and_on_the_embedded_engine(
    start_front: StartFront, vllm_url: str
) -> None:
    """One greedy model, two engines. Where the model is unsure, rounding may decide: two answers may differ."""
    from make import demo_corpus

    from llmserve.server.serving import serving
    from llmserve.settings.tree import Config, ServerConfig

    prompts = [example.prompt for example in demo_corpus.examples(12, seed=5, held_out=True)]

    async def answers(url: str) -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as asking:
            ask = asking.chat.completions
            answers = await asyncio.gather(
                *(ask.create(model="llmserve-demo", messages=[{"role": "user", "content": p}]) for p in prompts)
            )
        return [answer.choices[0].message.content for answer in answers]

    front = await start_front(vllm_url, slots=4)
    async with serving(Config(server=ServerConfig(port=0))) as (cluster, url):
        await until(lambda: all(cluster.engines_ready.values()))
        pairs = zip(await answers(url), await answers(front.url), strict=True)
    assert sum(embedded == vllm for embedded, vllm in pairs) >= len(prompts) - 2


async def test_a_stream_is_vllms_without_the_usage_that_was_not_requested(
    start_front: StartFront, vllm_url: str
) -> None:
    front = await start_front(vllm_url, slots=4)
    body = {"model": "llmserve-demo", "messages": COUNT, "stream": True}

    async def events(url: str) -> list[Any]:
        async with front.session.post(f"{url}/v1/chat/completions", json=body) as response:
            lines = (await response.read()).decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    def text(chunks: list[Any]) -> str:
        """vLLM puts all ready tokens into one event, so that only the joined text is reproducible."""
        return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)

    through, own = await events(front.url), await events(vllm_url)
    assert text(through) == text(own)
    assert {frozenset(chunk) for chunk in through} == {frozenset(chunk) for chunk in own}
    await until(lambda: not front.cluster.scheduler.requests)
    assert front.cluster.journal.steps[-1].event.output_tokens == 14  # type: ignore[union-attr]


async def test_vllms_parameters_and_errors_pass_through(start_front: StartFront, vllm_url: str) -> None:
    front = await start_front(vllm_url, slots=4)
    fields = {"model": "llmserve-demo", "messages": COUNT}
    async with front.post(**fields, n=2, logprobs=True, top_logprobs=2, min_tokens=3) as response:
        answer = await response.json()
    assert len(answer["choices"]) == 2
    assert len(answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2
    async with (
        front.post(**fields, top_logprobs=99, logprobs=True) as through,
        front.session.post(
            f"{vllm_url}/v1/chat/completions", json={**fields, "top_logprobs": 99, "logprobs": True}
        ) as own,
    ):
        assert (through.status, await through.read()) == (own.status, await own.read())
        assert own.status == 400


async def test_a_client_that_leaves_is_aborted_in_vllm(start_front: StartFront, vllm_url: str) -> None:
    front = await start_front(vllm_url, slots=4)
    for stream in (False, True):
        request = asyncio.ensure_future(front.post(model="llmserve-demo", stream=stream, **ENDLESS).__aenter__())
        await until_running(front.session, vllm_url, 1)
        if stream:
            (await request).close()
        request.cancel()
        await until_running(front.session, vllm_url, 0)
    await until(lambda: not front.cluster.scheduler.requests)


async def test_the_queue_is_kept_in_front_so_that_vllm_never_queues(start_front: StartFront, vllm_url: str) -> None:
    front = await start_front(vllm_url, slots=2)
    requests = [
        asyncio.ensure_future(front.post(model="llmserve-demo", ignore_eos=True, max_tokens=60).__aenter__())
        for _ in range(6)
    ]
    running = []
    while not all(request.done() for request in requests):
        running.append(await gauge(front.session, vllm_url, "vllm:num_requests_running"))
        assert await gauge(front.session, vllm_url, "vllm:num_requests_waiting") <= 2, (
            "at most the requests that were just sent"
        )
        await asyncio.sleep(0.01)
    assert max(running) <= 2
    assert all(request.result().status == 200 for request in requests)
