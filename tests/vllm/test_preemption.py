"""FLEX preempts on the real vLLM: the batch is aborted there, long before its end, and started again later.

As far as the scheduler knows, vLLM and a timed engine share a GPU: one batch at a time on both together.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator

import aiohttp
import pytest
from front import Front, StartFront, until

from llmserve.engines.timed.server import FakeEngine
from llmserve.live import journal
from llmserve.scheduling.messages import PreemptBatch, RequestEnded

pytestmark = pytest.mark.vllm

ESSAY = {"model": "llmserve-demo", "max_tokens": 900, "ignore_eos": True}
QUICK_TOKENS = 40  # 40 steps of 25 ms: a second for reading vLLM's metrics


@pytest.fixture
async def shared_gpu(start_front: StartFront, vllm_url: str) -> AsyncIterator[Front]:
    async with FakeEngine(model="quick", step_s=0.025, slots=8, barrier=True) as quick:
        scheduling = {"order": "flex", "batch_size": 8}
        yield await start_front(f"gpu={vllm_url}", f"gpu={quick.url}", barrier=True, scheduling=scheduling)


async def sample(session: aiohttp.ClientSession, url: str, name: str) -> float:
    """The sum of a metric of vLLM over its labels."""
    async with session.get(f"{url}/metrics") as response:
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", await response.text(), re.M))


async def until_running(front: Front, url: str, count: int) -> None:
    async with asyncio.timeout(30):
        while await sample(front.session, url, "vllm:num_requests_running") != count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def ask_quick(front: Front) -> int:
    async with front.post(model="quick", max_tokens=QUICK_TOKENS) as response:
        await response.read()
        return int(response.status)


async def generated(front: Front, url: str) -> float:
    return await sample(front.session, url, "vllm:generation_tokens_total")


async def finished(front: Front, url: str) -> float:
    """Number of answers, whatever ended them."""
    return await sample(front.session, url, "vllm:request_success_total")


async def test_a_preempted_batch_is_aborted_on_vllm_and_started_again(shared_gpu: Front, vllm_url: str) -> None:
    front = shared_gpu
    tokens_before, answers_before = await generated(front, vllm_url), await finished(front, vllm_url)
    essay = asyncio.ensure_future(front.post(**ESSAY).__aenter__())
    await until_running(front, vllm_url, 1)

    burst = [asyncio.ensure_future(ask_quick(front)) for _ in range(8)]
    await until_running(front, vllm_url, 0)
    stopped_at = await generated(front, vllm_url)
    assert stopped_at - tokens_before < ESSAY["max_tokens"], "the batch ended before it could be preempted"
    assert not any(request.done() for request in burst)
    await asyncio.sleep(0.3)
    assert await generated(front, vllm_url) == stopped_at, "vLLM goes on with the preempted batch"
    assert not essay.done()

    assert await asyncio.gather(*burst) == [200] * 8
    response = await essay
    usage = (await response.json())["usage"]
    assert (response.status, usage["completion_tokens"]) == (200, ESSAY["max_tokens"])
    await until(lambda: not front.cluster.scheduler.requests)
    (preemption,) = [
        action for step in front.cluster.journal.steps for action in step.actions if isinstance(action, PreemptBatch)
    ]
    ends = [
        (step.event.engine, step.event.outcome)
        for step in front.cluster.journal.steps
        if isinstance(step.event, RequestEnded) and step.event.request_id == preemption.request_ids[0]
    ]
    name = vllm_url.removeprefix("http://")
    assert (preemption.engine, ends) == (name, [(name, "cancelled"), (name, "completed")])
    assert await generated(front, vllm_url) == stopped_at + ESSAY["max_tokens"], (
        "the second run must start from the beginning"
    )
    assert await finished(front, vllm_url) == answers_before + 1, "vLLM must begin two answers and finish one"
    assert journal.replay(front.cluster.journal.header, front.cluster.journal.steps) == list(
        front.cluster.journal.steps
    )


async def test_a_stream_that_vllm_has_begun_to_answer_is_not_preempted(shared_gpu: Front, vllm_url: str) -> None:
    front = shared_gpu
    tokens_before = await generated(front, vllm_url)
    essay = await front.post(stream=True, **ESSAY).__aenter__()
    assert await essay.content.readany()
    burst = [asyncio.ensure_future(ask_quick(front)) for _ in range(8)]
    assert (await essay.read()).endswith(b"data: [DONE]\n\n")
    assert await asyncio.gather(*burst) == [200] * 8, "no deadline may pass"
    actions = [action for step in front.cluster.journal.steps for action in step.actions]
    assert not any(isinstance(action, PreemptBatch) for action in actions)
    assert await generated(front, vllm_url) == tokens_before + ESSAY["max_tokens"]
