"""The front-end before the real llama.cpp."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import openai
import pytest
from conftest import StartLlama
from front import Front, StartFront, until

from llmserve.engines.process import free_port
from llmserve.scheduling.messages import RequestEnded

pytestmark = pytest.mark.llama

MODEL = "llmserve-demo"
COUNT: Any = [{"role": "user", "content": "Count from 3 to 9."}]
ANSWER = "3, 4, 5, 6, 7, 8, 9"
TEMPLATED = "<|user|>Count from 3 to 9.<|end|><|assistant|>"
ENDLESS = {"model": MODEL, "ignore_eos": True, "max_tokens": 900}
CHANGING = re.compile(
    rb'"(?:id|item_id)":"[\w-]+"|"(?:created|created_at|completed_at)":\d+|,"timings":{[^}]*}|"[\w-]+_[A-Za-z0-9]{20,}"'
)
"""What differs between two answers of one llama.cpp."""


def client(front: Front) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)


async def gauge(front: Front, url: str, name: str) -> float:
    async with front.session.get(f"{url}/metrics") as response:
        (value,) = re.findall(rf"^llamacpp:{name} (\S+)$", await response.text(), re.M)
    return float(value)


async def until_processing(front: Front, url: str, count: int) -> None:
    async with asyncio.timeout(30):
        while await gauge(front, url, "requests_processing") != count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def told(front: Front, url: str, fields: dict[str, Any]) -> tuple[int, str, bytes]:
    async with front.session.post(url, json={"model": MODEL, "temperature": 0, **fields}) as response:
        return response.status, response.headers["content-type"], CHANGING.sub(b"-", await response.read())


# ---- answers ------------------------------------------------------------------------------------------------------


async def test_the_official_client_chats(start_front: StartFront, llama_url: str) -> None:
    front = await start_front(llama_url, slots=None)
    answer = await client(front).chat.completions.create(model=MODEL, messages=COUNT, temperature=0)
    assert answer.choices[0].message.content == ANSWER
    assert answer.usage is not None
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("stop", 14)


async def test_the_official_client_streams_with_and_without_usage(start_front: StartFront, llama_url: str) -> None:
    front = await start_front(llama_url, slots=None)
    for with_usage in (False, True):
        options: Any = {"stream_options": {"include_usage": True}} if with_usage else {}
        stream = await client(front).chat.completions.create(
            model=MODEL, messages=COUNT, temperature=0, stream=True, **options
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
        assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [14] * with_usage
    await until(lambda: not front.cluster.scheduler.requests)
    assert front.cluster.journal.steps[-1].event.output_tokens == 14  # type: ignore[union-attr]


async def test_the_official_client_completes_responds_and_stops(start_front: StartFront, llama_url: str) -> None:
    front = await start_front(llama_url, slots=None)
    asking = client(front)
    completion = await asking.completions.create(model=MODEL, prompt=TEMPLATED, temperature=0, max_tokens=20)
    assert completion.choices[0].text == ANSWER
    response = await asking.responses.create(model=MODEL, input="Count from 3 to 9.", temperature=0)
    assert response.output_text == ANSWER
    stopped = await asking.chat.completions.create(model=MODEL, messages=COUNT, temperature=0, stop=[", 6"])
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("3, 4, 5", "stop")
    short = await asking.chat.completions.create(model=MODEL, messages=COUNT, temperature=0, max_tokens=5)
    assert short.usage is not None
    assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 5)


async def test_embeddings_of_a_server_that_makes_them(start_front: StartFront, start_llama: StartLlama) -> None:
    with start_llama("--embeddings", "--pooling", "mean", slots=2) as url:
        front = await start_front(url, slots=None)
        made = await client(front).embeddings.create(model=MODEL, input=["red", "blue"], encoding_format="float")
    assert [len(each.embedding) for each in made.data] == [256, 256]


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": COUNT}),
    "log-probabilities": ("/v1/chat/completions", {"messages": COUNT, "logprobs": True, "top_logprobs": 2}),
    "grammar": ("/v1/chat/completions", {"messages": COUNT, "grammar": 'root ::= "7" ", 8"?'}),
    "schema": (
        "/v1/chat/completions",
        {"messages": COUNT, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "boolean"}}}},
    ),
    "completion": ("/v1/completions", {"prompt": TEMPLATED, "max_tokens": 20}),
    "response": ("/v1/responses", {"input": "Count from 3 to 9."}),
    "message": ("/v1/messages", {"messages": COUNT, "max_tokens": 20}),
    "beyond-the-context": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 2_000}]}),
    "not-a-grammar": ("/v1/chat/completions", {"messages": COUNT, "grammar": "root := 1"}),
}
WHOLE_ONLY: dict[str, tuple[str, dict[str, Any]]] = {
    "tokens": ("/tokenize", {"content": "Count from 3 to 9."}),
    "text": ("/detokenize", {"tokens": [5, 6, 7]}),
    "tokens-of-messages": ("/v1/messages/count_tokens", {"messages": COUNT}),
}


@pytest.mark.parametrize(
    ("name", "stream"),
    [*[(name, stream) for name in BODIES for stream in (False, True)], *[(n, False) for n in WHOLE_ONLY]],
)
async def test_an_answer_is_llama_cpps_byte_for_byte(
    start_front: StartFront, llama_url: str, name: str, stream: bool
) -> None:
    """Both ways one after the other, so that the second may find the prompt in the cache."""
    front = await start_front(llama_url, slots=None)
    path, fields = {**BODIES, **WHOLE_ONLY}[name]
    fields = {**fields, "cache_prompt": False, **({"stream": True} if stream else {})}
    own = await told(front, llama_url + path, fields)
    assert await told(front, front.url + path, fields) == own
    assert own[0] == (400 if name in ("beyond-the-context", "not-a-grammar") else 200), own


async def test_errors_raise_the_official_clients_exceptions(start_front: StartFront, llama_url: str) -> None:
    front = await start_front(llama_url, slots=None)
    chat = client(front).chat.completions
    with pytest.raises(openai.BadRequestError, match="exceeds the available context size"):
        await chat.create(model=MODEL, messages=[{"role": "user", "content": "word " * 2_000}])
    with pytest.raises(openai.NotFoundError, match="no model"):
        await chat.create(model="another", messages=COUNT)


# ---- slots --------------------------------------------------------------------------------------------------------


async def test_a_client_that_leaves_frees_its_slot(start_front: StartFront, llama_url: str) -> None:
    front = await start_front(llama_url, slots=None)
    for stream in (False, True):
        request = asyncio.ensure_future(front.post(stream=stream, **ENDLESS).__aenter__())
        await until_processing(front, llama_url, 1)
        if stream:
            (await request).close()
        request.cancel()
        await until_processing(front, llama_url, 0)
    await until(lambda: not front.cluster.scheduler.requests)


@pytest.mark.parametrize("slots", [1, 3])
async def test_the_queue_is_kept_in_front_so_that_llama_cpp_never_queues(
    start_front: StartFront, start_llama: StartLlama, slots: int
) -> None:
    with start_llama(slots=slots) as url:
        front = await start_front(url, slots=slots, look_ahead=0)
        requests = [
            asyncio.ensure_future(front.post(**{**ENDLESS, "max_tokens": 200}).__aenter__()) for _ in range(3 * slots)
        ]
        running = []
        while not all(request.done() for request in requests):
            running.append(await gauge(front, url, "requests_processing"))
            assert await gauge(front, url, "requests_deferred") == 0
        assert max(running) == slots
        assert all(request.result().status == 200 for request in requests)


async def test_the_number_of_slots_is_read_and_read_again_after_a_restart_with_another_one(
    start_front: StartFront, start_llama: StartLlama
) -> None:
    port = free_port()
    with start_llama(slots=4, port=port) as url:
        front = await start_front(url, slots=None)
        (handle,) = front.cluster.fleet.handles.values()
        assert handle.info.slots == 4
        async with front.post(model=MODEL) as response:
            assert response.headers["x-llmserve-engine"] == handle.name
    await until(lambda: not handle.ready)
    with start_llama(slots=2, port=port):
        await until(lambda: handle.ready)
        assert handle.info.slots == 2
        async with front.post(model=MODEL) as response:
            assert response.status == 200


# ---- the model ----------------------------------------------------------------------------------------------------


async def test_the_file_splits_texts_as_the_demo_model_does(start_front: StartFront, llama_url: str) -> None:
    from kit.servers import MODEL_FOLDER
    from make import demo_corpus
    from tokenizers import Tokenizer

    front = await start_front(llama_url, slots=None)
    tokenizer = Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))
    texts = [example.prompt for example in demo_corpus.examples(100, seed=5, held_out=True)]
    for text in [*texts, "I'd say: \"no\", 'yes'!  2,345 = a\n\nb. Ünïcode, 日本"]:
        _, _, body = await told(front, f"{llama_url}/tokenize", {"content": text})
        assert json.loads(body)["tokens"] == tokenizer.encode(text).ids, text


async def test_cached_tokens_are_known_of_every_endpoint(start_front: StartFront, start_llama: StartLlama) -> None:
    paths = {"chat/completions": "messages", "completions": "prompt", "responses": "input", "messages": "messages"}
    with start_llama(slots=1) as url:
        front = await start_front(url, slots=None)
        for index, (path, name) in enumerate(paths.items()):
            said = " ".join([f"{index}{number}" for number in range(40)])
            asked = {name: [{"role": "user", "content": said}] if name == "messages" else said}
            asked |= {"max_output_tokens" if path == "responses" else "max_tokens": 4}
            for stream in (False, True, False):
                assert (await told(front, f"{front.url}/v1/{path}", {**asked, "stream": stream}))[0] == 200
        await until(lambda: not front.cluster.scheduler.requests)
        ends = [step.event for step in front.cluster.journal.steps if isinstance(step.event, RequestEnded)]
        hits = [end.cached_tokens for end in ends]
        assert None not in hits
        for first, streamed, whole in zip(hits[::3], hits[1::3], hits[2::3], strict=True):
            assert first < 20 < streamed == whole
