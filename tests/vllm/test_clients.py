"""Third-party clients against the front-end with the real vLLM."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from front import Front, StartFront

from llmserve.settings.tree import ApiConfig

pytestmark = pytest.mark.vllm

COUNT: Any = [{"role": "user", "content": "Count from 3 to 9."}]
ANSWER = "3, 4, 5, 6, 7, 8, 9"


def client(front: Front) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)


async def test_the_official_client_reads_answers_headers_and_log_probabilities(
    start_front: StartFront, vllm_url: str
) -> None:
    front = await start_front(vllm_url, slots=4)
    raw = await client(front).chat.completions.with_raw_response.create(
        model="llmserve-demo",
        messages=COUNT,
        logprobs=True,
        top_logprobs=2,
        extra_body={"min_tokens": 3},
        extra_headers={"x-request-id": "job-7"},
    )
    answer = raw.parse()
    assert (raw.status_code, raw.request_id, answer.id) == (200, "job-7", "chatcmpl-job-7")
    assert raw.headers["x-llmserve-engine"] == vllm_url.removeprefix("http://")
    assert float(raw.headers["x-llmserve-queue-ms"]) >= 0
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].logprobs is not None
    assert len((answer.choices[0].logprobs.content or [])[0].top_logprobs) == 2


async def test_the_official_client_streams_with_and_without_usage(start_front: StartFront, vllm_url: str) -> None:
    front = await start_front(vllm_url, slots=4)
    for with_usage in (False, True):
        options: Any = {"stream_options": {"include_usage": True}} if with_usage else {}
        stream = await client(front).chat.completions.create(
            model="llmserve-demo", messages=COUNT, stream=True, **options
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
        assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [14] * with_usage
        assert chunks[-1].system_fingerprint, "vLLM sends the fingerprint with its last event"
    texts = await client(front).completions.create(model="llmserve-demo", prompt="Once", max_tokens=9, stream=True)
    assert [chunk.choices[0].finish_reason async for chunk in texts][-1] == "length"


async def test_errors_raise_the_official_clients_exceptions(start_front: StartFront, vllm_url: str) -> None:
    front = await start_front(vllm_url, slots=4, limits=ApiConfig(requests_per_minute_max=3))
    chat = client(front).chat.completions
    with pytest.raises(openai.BadRequestError, match="maximum context length") as beyond:
        await chat.create(model="llmserve-demo", messages=[{"role": "user", "content": "word " * 2_000}])
    assert beyond.value.response.headers["x-llmserve-engine"]
    with pytest.raises(openai.BadRequestError, match="max allowed: 20"):
        await chat.create(model="llmserve-demo", messages=COUNT, logprobs=True, top_logprobs=99)
    with pytest.raises(openai.NotFoundError, match="no model"):
        await chat.create(model="another", messages=COUNT)
    with pytest.raises(openai.RateLimitError) as limited:
        await chat.create(model="llmserve-demo", messages=COUNT)
    assert int(limited.value.response.headers["retry-after"]) >= 1
