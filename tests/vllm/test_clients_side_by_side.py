"""Clients that others wrote, unchanged, against the real vLLM: directly and through the front-end.

Each client makes the same calls both ways, through a tap that keeps the bytes which the client reads (tap.py): these
must be equal, and so must be what the client makes of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from batch_client import client_of, create, ended, jsonl, request, rows
from front import StartFront
from npm_clients import from_npm
from pydantic import BaseModel
from tap import Answer, tapping
from vllm_on_cpu import MODEL as FILES_OF_MODEL
from vllm_on_cpu import running_vllm

from llmserve.scheduling.messages import RequestArrived
from llmserve.settings.tree import ServerConfig

pytestmark = pytest.mark.vllm

MODEL, EMBEDDER = "llmserve-demo", "llmserve-embedder"
QUESTION = "Count from 3 to 9."
COUNT: Any = [{"role": "user", "content": QUESTION}]
ANSWER = "3, 4, 5, 6, 7, 8, 9"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}
LOOKUP: Any = {"name": "lookup", "description": "looks a number up", "parameters": PARAMETERS, "strict": True}
# The `vllm` command of the CPU package does not start, so its benchmark's main is called, once for each argument.
BENCHMARK = (
    "import argparse, shlex, sys; from vllm.benchmarks.serve import add_cli_args, main; "
    "parser = argparse.ArgumentParser(); add_cli_args(parser); "
    "[main(parser.parse_args(shlex.split(words))) for words in sys.argv[1:]]"
)
PROMPTS, OUTPUT_TOKENS = 24, 20
BACKENDS = {
    "openai-chat": ["--model", MODEL, "--endpoint", "/v1/chat/completions"],
    "openai": ["--model", MODEL, "--endpoint", "/v1/completions"],
    "openai-responses": ["--model", MODEL, "--endpoint", "/v1/responses"],
    "openai-embeddings": ["--model", EMBEDDER, "--endpoint", "/v1/embeddings"],
}
OF_THE_EMBEDDER = ("/v1/embeddings", "/rerank", "/v1/rerank", "/score", "/v1/score")


class Verdict(BaseModel):
    ok: bool


# ---- what each client asks ------------------------------------------------------------------------------------------


async def openai_chat(url: str) -> list[Any]:
    client = client_of(url)
    exact: Any = {"model": MODEL, "messages": COUNT, "temperature": 0, "max_tokens": 80}
    whole = await client.chat.completions.create(**exact, logprobs=True, top_logprobs=2)
    called = await client.chat.completions.create(
        **exact,
        tools=[{"type": "function", "function": LOOKUP}],
        tool_choice={"type": "function", "function": {"name": "lookup"}},
    )
    parsed = await client.chat.completions.parse(**exact, response_format=Verdict)
    async with client.chat.completions.stream(**exact) as stream:
        streamed = (await stream.get_final_completion()).choices[0].message.content
    text = await client.completions.create(model=MODEL, prompt=QUESTION, max_tokens=9, temperature=0)
    call: Any = (called.choices[0].message.tool_calls or [])[0]
    assert isinstance(parsed.choices[0].message.parsed, Verdict)
    return [whole.choices[0].message.content, streamed, call.function.model_dump(), text.choices[0].text]


async def openai_responses(url: str) -> list[Any]:
    client = client_of(url)
    exact: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 80}
    first = await client.responses.create(**exact, input=QUESTION, instructions="Be brief.")
    again = await client.responses.retrieve(first.id)
    after = await client.responses.create(**exact, input="Say hello.", previous_response_id=first.id)
    async with client.responses.stream(**exact, input=QUESTION) as stream:
        streamed = (await stream.get_final_response()).output_text
    parsed = await client.responses.parse(**exact, input=QUESTION, text_format=Verdict)
    assert isinstance(parsed.output_parsed, Verdict)
    return [first.output_text, again.output_text, after.output_text, streamed]


async def openai_embeddings(url: str) -> list[Any]:
    client = client_of(url)
    packed = await client.embeddings.create(model=EMBEDDER, input=["red", "green"])
    plain = await client.embeddings.create(model=EMBEDDER, input=[5, 6, 7], encoding_format="float")
    assert packed.data[0].embedding != packed.data[1].embedding
    return [[item.embedding for item in embedded.data] for embedded in (packed, plain)]


async def anthropic_messages(url: str) -> list[Any]:
    client = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)
    exact: Any = {"model": MODEL, "max_tokens": 80, "messages": COUNT, "extra_body": {"temperature": 0}}
    tool: Any = {"name": "lookup", "description": "looks a number up", "input_schema": PARAMETERS}
    whole = await client.messages.create(**exact, system="Be brief.")
    called = await client.messages.create(**exact, tools=[tool], tool_choice={"type": "tool", "name": "lookup"})
    async with client.messages.stream(**exact) as stream:
        final = await stream.get_final_message()
    counted = await client.messages.count_tokens(model=MODEL, messages=COUNT)
    uses = [block.input for block in called.content if block.type == "tool_use"]
    return ["".join([block.text for block in final.content]), whole.content[0].text, counted.input_tokens, uses]


async def langchain(url: str) -> list[Any]:
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    common: Any = {"model": MODEL, "base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, "temperature": 0}
    chat = ChatOpenAI(**common, max_tokens=80)
    whole = await chat.ainvoke(QUESTION)
    streamed = "".join([str(chunk.content) async for chunk in chat.astream(QUESTION)])
    tools = chat.bind_tools([{"type": "function", "function": LOOKUP}], tool_choice="lookup")
    called = await tools.ainvoke(QUESTION)
    verdict = await chat.with_structured_output(Verdict).ainvoke(QUESTION)
    responses = await ChatOpenAI(**common, use_responses_api=True).ainvoke(QUESTION)
    embedder = OpenAIEmbeddings(
        model=EMBEDDER, base_url=f"{url}/v1", api_key="none", max_retries=0, check_embedding_ctx_length=False
    )
    vectors = await embedder.aembed_documents(["red", "green"])
    assert isinstance(verdict, Verdict)
    return [whole.content, streamed, called.tool_calls[0]["args"], verdict, responses.text, vectors]


async def litellm(url: str) -> list[Any]:
    import litellm as lite

    common: Any = {"api_base": f"{url}/v1", "api_key": "none", "num_retries": 0, "temperature": 0}
    exact: Any = {"model": f"hosted_vllm/{MODEL}", "messages": COUNT, "max_tokens": 80, **common}
    whole = await lite.acompletion(**exact)
    streamed = [chunk async for chunk in await lite.acompletion(**exact, stream=True)]
    function = {"type": "function", "function": LOOKUP}
    called = await lite.acompletion(
        **exact, tools=[function], tool_choice={"type": "function", "function": {"name": "lookup"}}
    )
    responses = await lite.aresponses(model=f"openai/{MODEL}", input=QUESTION, **common)
    place: Any = {"model": f"hosted_vllm/{EMBEDDER}", "api_key": "none"}
    vectors = await lite.aembedding(**place, api_base=f"{url}/v1", input=["red", "green"])
    ranked = await lite.arerank(**place, api_base=url, query="red", documents=["a red gateway", "green"])
    return [
        whole.choices[0].message.content,
        "".join([chunk.choices[0].delta.content or "" for chunk in streamed]),
        called.choices[0].message.tool_calls[0].function.arguments,
        responses.output_text,
        [item["embedding"] for item in vectors.data],
        [result["index"] for result in ranked.results],
    ]


async def npm_openai(url: str) -> list[Any]:
    return await from_npm("openai", url, MODEL, EMBEDDER)


async def npm_ai_sdk(url: str) -> list[Any]:
    return await from_npm("ai", url, MODEL, EMBEDDER)


async def npm_ai_sdk_compatible(url: str) -> list[Any]:
    return await from_npm("compatible", url, MODEL, EMBEDDER)


Client = Callable[[str], Awaitable[list[Any]]]
CLIENTS: tuple[tuple[Client, int], ...] = (
    (openai_chat, 5),
    (openai_responses, 5),
    (openai_embeddings, 2),
    (anthropic_messages, 4),
    (langchain, 6),
    (litellm, 6),
    (npm_openai, 9),
    (npm_ai_sdk, 6),
    (npm_ai_sdk_compatible, 4),
)
"""With the number of answers that each reads."""


# ---- both ways ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedder_url(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Another vLLM, whose model answers with vectors."""
    log = tmp_path_factory.mktemp("embedder") / "log"
    with running_vllm(vllm_python, log, "--served-model-name", EMBEDDER, "--runner", "pooling") as url:
        yield url


@pytest.mark.parametrize(("client", "answers"), CLIENTS, ids=[client.__name__ for client, _ in CLIENTS])
async def test_a_client_gets_through_the_front_end_what_it_gets_directly(
    start_front: StartFront, vllm_url: str, embedder_url: str, client: Client, answers: int
) -> None:
    front = await start_front(vllm_url, embedder_url, slots=4)
    read: list[list[Answer]] = []
    made: list[list[Any]] = []
    ways: list[Callable[[str], str]] = [
        lambda path: embedder_url if path.startswith(OF_THE_EMBEDDER) else vllm_url,
        lambda path: front.url,
    ]
    for server_of in ways:
        async with tapping(server_of) as tap:
            made.append(await client(tap.url))
            read.append(tap.answers)
    directly, through = read
    assert [(answer.status, answer.path) for answer in through] == [(200, answer.path) for answer in directly]
    assert through == directly
    assert all(one.same(other) for one, other in zip(through, directly, strict=True))
    assert made[1] == made[0]
    assert len(through) == answers
    assert "embeddings" in client.__name__ or ANSWER in made[0][0]


async def batch_of_openai(url: str) -> list[Any]:
    client = client_of(url)
    body = {"model": MODEL, "messages": COUNT, "temperature": 0, "max_tokens": 80}
    data = jsonl([{**request(number), "body": body} for number in range(3)])
    batch = await ended(client, await create(client, data))
    listed = [one.id async for one in client.batches.list(limit=1)]
    told = await rows(client, batch.output_file_id)
    deleted = await client.files.delete(batch.input_file_id)
    contents = [row["response"]["body"]["choices"][0]["message"]["content"] for row in told]
    return [contents, len(listed), deleted.deleted]


async def batch_from_npm(url: str) -> list[Any]:
    return await from_npm("batch", url, MODEL, EMBEDDER)


@pytest.mark.parametrize("client", [batch_of_openai, batch_from_npm])
async def test_a_client_runs_a_batch_on_vllm(
    start_front: StartFront, vllm_url: str, client: Client, tmp_path: Path
) -> None:
    front = await start_front(vllm_url, slots=4, server=ServerConfig(port=0, state=str(tmp_path)))
    assert await client(front.url) == [[ANSWER] * 3, 1, True]


# ---- vLLM's own benchmark -------------------------------------------------------------------------------------------


async def test_vllms_own_benchmark_completes_every_request(
    start_front: StartFront, vllm_url: str, embedder_url: str, tmp_path: Path
) -> None:
    front = await start_front(vllm_url, embedder_url, slots=4)
    common = ["--base-url", front.url, "--tokenizer", str(FILES_OF_MODEL), "--ignore-eos"]
    common += ["--dataset-name", "random", "--random-input-len", "40", "--random-output-len", str(OUTPUT_TOKENS)]
    common += ["--num-prompts", str(PROMPTS), "--save-result", "--result-dir", str(tmp_path)]
    process = await asyncio.create_subprocess_exec(
        *(os.environ["VLLM_PYTHON"], "-c", BENCHMARK),
        *(
            shlex.join([*common, "--backend", backend, *words, "--result-filename", f"{backend}.json"])
            for backend, words in BACKENDS.items()
        ),
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(240):
            log, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, log.decode(errors="replace")[-3_000:]
    results = {backend: json.loads((tmp_path / f"{backend}.json").read_text()) for backend in BACKENDS}
    assert {backend: result["completed"] for backend, result in results.items()} == dict.fromkeys(BACKENDS, PROMPTS)
    assert results["openai-embeddings"]["total_input_tokens"] >= 40 * PROMPTS
    for backend in BACKENDS.keys() - {"openai-embeddings"}:
        assert results[backend]["failed"] == 0, backend  # it counts no failures of embeddings
        assert results[backend]["total_output_tokens"] == PROMPTS * OUTPUT_TOKENS, backend
    arrived = [step.event for step in front.cluster.journal.steps if isinstance(step.event, RequestArrived)]
    answers = [event for event in arrived if event.request.choices]  # it asks for tokens of prompts, too
    assert len(answers) == 3 * PROMPTS
