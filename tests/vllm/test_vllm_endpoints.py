"""Endpoints beside completions, of the real vLLM: official clients through the front-end, and the same bytes."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest
from front import Front, StartFront

pytestmark = pytest.mark.vllm

MODEL = "llmserve-demo"
COUNT: Any = [{"role": "user", "content": "Count from 3 to 9."}]
BODIES: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": "Count from 3 to 9."},
    "/detokenize": {"tokens": [5, 6, 7]},
    "/v1/messages/count_tokens": {"messages": COUNT, "system": [{"type": "text", "text": "Be brief."}]},
    "/v1/messages": {"messages": COUNT, "max_tokens": 40, "temperature": 0},
    "/v1/responses": {"input": "Count from 3 to 9.", "max_output_tokens": 40, "temperature": 0},
}
STREAMED = ("/v1/messages", "/v1/responses")
CHANGING = re.compile(rb'"(?:id|item_id|created_at|completed_at|request_id)":"?[\w.-]+"?|chatcmpl-[\w-]+')
"""What differs between two answers of one vLLM."""


@pytest.mark.parametrize(
    ("path", "stream"), [*[(path, False) for path in BODIES], *[(path, True) for path in STREAMED]]
)
async def test_answers_are_vllms_own(start_front: StartFront, vllm_url: str, path: str, stream: bool) -> None:
    front = await start_front(vllm_url, slots=4)
    data = json.dumps({"model": MODEL, **BODIES[path], **({"stream": True} if stream else {})}).encode()
    told = [await ask(front, url + path, data) for url in (front.url, vllm_url)]
    assert told[0][:2] == told[1][:2]
    assert told[0][0] == 200
    through, direct = [joined(body) if stream else body for _, _, body in told]
    assert CHANGING.sub(b"-", through) == CHANGING.sub(b"-", direct)


async def ask(front: Front, url: str, data: bytes) -> tuple[int, str, bytes]:
    async with front.session.post(url, data=data, headers={"content-type": "application/json"}) as response:
        return response.status, response.headers["content-type"], await response.read()


def joined(stream: bytes) -> bytes:
    """The types of events without repetitions, and the text: a busy vLLM puts several tokens into one event."""
    events = [json.loads(line[6:]) for line in stream.split(b"\n") if line.startswith(b"data: {")]
    kinds = [event["type"] for event in events]
    deltas = [event.get("delta") for event in events]
    text = "".join([d if isinstance(d, str) else (d or {}).get("text", "") for d in deltas])
    return json.dumps(
        [text, [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before]]
    ).encode()


async def test_a_response_goes_on_from_an_earlier_one(start_front: StartFront, vllm_url: str) -> None:
    front = await start_front(vllm_url, slots=4)
    client = openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)
    first = await client.responses.create(model=MODEL, input="Count from 3 to 9.", temperature=0)
    assert (await client.responses.retrieve(first.id)).output_text == first.output_text
    second = await client.responses.create(
        model=MODEL, input="Count from 1 to 3.", temperature=0, previous_response_id=first.id, max_output_tokens=20
    )
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model=MODEL, input="and?", previous_response_id="resp_unknown")


async def test_an_endpoint_that_vllm_lacks_for_its_model_is_named(start_front: StartFront, vllm_url: str) -> None:
    front = await start_front(vllm_url, slots=4)
    async with front.session.post(f"{front.url}/v1/embeddings", json={"model": MODEL, "input": "a"}) as response:
        assert response.status == 404
        told = (await response.json())["error"]
    assert told["code"] == "endpoint_not_found"
    assert "/v1/responses" in told["message"]
