"""The embedded engine over HTTP: OpenAI's protocol, and static batches."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
import openai
import pytest
from aiohttp.test_utils import TestClient, TestServer

pytest.importorskip("torch")

from tiny_llama import CONTEXT_TOKENS, EOS_AFTER, EOS_PROMPT

from llmserve.demo.generation import LanguageModel
from llmserve.demo.server import EmbeddedEngine, make_app, serve

PROMPTS = ["hi", "The quick brown fox jumps over the lazy dog.", "What is a good answer, then?", "a"]
LIMIT_S = 60.0  # a test that waits longer than this has failed


async def until(condition: Callable[[], bool]) -> None:
    """Poll the condition: the worker thread and the server have no event that a test could await."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


class WatchedModel(LanguageModel):
    """A model that records its batches, and whose steps can be released one by one."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model._tokenizer, model._model)
        self.batches: list[int] = []  # number of rows of each batch, in order
        self.rows: list = []  # rows of the last batch
        self.running = self.running_max = 0
        self._gated = False
        self._permits = threading.Semaphore(0)

    def gate(self) -> None:
        """Make every further step wait for a permit."""
        self._gated = True

    def permit(self, steps: int) -> None:
        self._permits.release(steps)

    def open(self) -> None:
        self._gated = False
        self.permit(1)

    def run(self, rows, emit) -> None:
        def step(deltas) -> None:
            if self._gated:
                self._permits.acquire()
            emit(deltas)

        self.batches.append(len(rows))
        self.rows = list(rows)
        self.running += 1
        self.running_max = max(self.running_max, self.running)
        try:
            super().run(rows, step)
        finally:
            self.running -= 1


class Server:
    """A running engine, with short methods for requests."""

    def __init__(self, url: str, engine: EmbeddedEngine, model: WatchedModel, stop: asyncio.Event) -> None:
        self.url = url
        self.engine = engine
        self.model = model
        self.stop = stop
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S))
        self.client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0)

    def post(self, prompt: str = "hi", *, batch: str | None = None, size: int = 1, path="chat/completions", **body):
        """A request, as a context manager."""
        headers = {"x-llmserve-batch": batch, "x-llmserve-batch-size": str(size)} if batch else {}
        messages = {"messages": [{"role": "user", "content": prompt}]}
        return self.session.post(f"{self.url}/v1/{path}", json=messages | body, headers=headers)

    async def answer(self, prompt: str = "hi", **request) -> tuple[str, str, int]:
        """Return an answer's text, finish reason and number of tokens."""
        async with self.post(prompt, **request) as response:
            body = await response.json()
            assert response.status == 200, body
            choice = body["choices"][0]
            return choice["message"]["content"], choice["finish_reason"], body["usage"]["completion_tokens"]

    async def until_waiting(self, count: int) -> None:
        """Return when `count` requests wait in the engine."""
        await until(lambda: len(self.engine._queue) == count)

    async def until_running(self) -> None:
        await until(lambda: bool(self.model.rows))


@pytest.fixture(scope="session")
def language_model(tiny_model) -> LanguageModel:
    model = LanguageModel.load(str(tiny_model))
    model.warm_up(2)
    return model


@asynccontextmanager
async def serving(model: LanguageModel, *, drain_s: float = 5.0, **options) -> AsyncIterator[Server]:
    watched = WatchedModel(model)
    engine = EmbeddedEngine(watched, "tiny", **options)
    sock = socket.create_server(("127.0.0.1", 0))
    stop, ready = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(serve(engine, sock, stop, drain_s=drain_s, ready=ready.set))
    await ready.wait()
    server = Server(f"http://127.0.0.1:{sock.getsockname()[1]}", engine, watched, stop)
    try:
        yield server
    finally:
        watched.open()
        await server.session.close()
        await server.client.close()
        stop.set()
        await task


@pytest.fixture
async def server(language_model) -> AsyncIterator[Server]:
    async with serving(language_model, gather_s=LIMIT_S) as server:
        yield server


# ---------------------------------------------------------------------------------------------- the protocol


async def test_with_a_key_other_clients_get_nothing_below_v1(language_model):
    app = make_app(EmbeddedEngine(WatchedModel(language_model), "tiny"), "sk-own")
    async with TestClient(TestServer(app)) as client:
        assert (await client.get("/health")).status == 200
        for headers in ({}, {"authorization": "Bearer sk-other"}, {"authorization": "sk-own"}):
            response = await client.get("/v1/models", headers=headers)
            assert (response.status, (await response.json())["error"]["code"]) == (401, "invalid_api_key")
        assert (await client.get("/v1/models", headers={"authorization": "Bearer sk-own"})).status == 200


async def test_it_lists_the_endpoints_that_it_has(server: Server):
    async with server.session.get(f"{server.url}/openapi.json") as response:
        listed = await response.json()
    assert [*listed["paths"]] == ["/v1/completions", "/v1/chat/completions"]


async def test_health_models_and_metrics_are_served(server: Server):
    async with server.session.get(server.url + "/health") as response:
        assert response.status == 200
    (model,) = (await server.client.models.list()).data
    assert (model.id, model.owned_by, model.max_model_len) == ("tiny", "llmserve", CONTEXT_TOKENS)
    assert (await server.client.models.retrieve("tiny")).id == "tiny"
    await server.answer(max_tokens=3, ignore_eos=True)
    await server.engine._idle.wait()
    async with server.session.get(server.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    for line in (
        "llmserve_embedded_batches_total 1.0",
        "llmserve_embedded_steps_total 3.0",
        "llmserve_embedded_output_tokens_total 3.0",
        "llmserve_embedded_requests_running 0.0",
        "llmserve_embedded_requests_waiting 0.0",
    ):
        assert line in lines


async def test_a_chat_completion_has_openais_shape(server: Server):
    answer = await server.client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], max_completion_tokens=5
    )
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5


async def test_a_completion_has_openais_shape_and_no_template(server: Server):
    answer = await server.client.completions.create(model="tiny", prompt="Hello", max_tokens=5)
    assert answer.object == "text_completion"
    assert answer.choices[0].text
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (1, 5)
    listed = await server.client.completions.create(model="tiny", prompt=["Hello"], max_tokens=5)
    assert listed.choices[0].text == answer.choices[0].text


async def test_a_prompt_may_be_token_ids(server: Server, language_model: LanguageModel):
    text = await server.client.completions.create(model="tiny", prompt="Hello, you", max_tokens=8)
    ids = language_model.text_ids("Hello, you")
    for prompt in (ids, [ids]):
        answer = await server.client.completions.create(model="tiny", prompt=prompt, max_tokens=8)
        assert answer.choices[0].text == text.choices[0].text
    with pytest.raises(openai.BadRequestError, match="not in the vocabulary"):
        await server.client.completions.create(model="tiny", prompt=[10**30], max_tokens=8)


async def test_content_may_be_text_parts_and_developer_is_system(server: Server):
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello you"}]
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "you"}]
    newer = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    assert await server.answer(messages=plain, max_tokens=8) == await server.answer(messages=newer, max_tokens=8)


async def test_a_stream_has_the_same_text_as_an_unstreamed_answer(server: Server):
    for prompt in PROMPTS:
        text, finish_reason, tokens = await server.answer(prompt, max_tokens=40)
        stream = await server.client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
        )
        *chunks, last = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
        assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + [finish_reason]
        assert last.choices == []
        assert last.usage is not None
        assert last.usage.completion_tokens == tokens


async def test_a_completion_streams_too(server: Server):
    unstreamed = await server.client.completions.create(model="tiny", prompt="Hello", max_tokens=9)
    stream = await server.client.completions.create(model="tiny", prompt="Hello", max_tokens=9, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == unstreamed.choices[0].text
    assert all(chunk.usage is None for chunk in chunks)


async def test_a_stream_is_server_sent_events_ending_with_done(server: Server):
    async with server.post(max_tokens=2, stream=True, ignore_eos=True) as response:
        assert response.content_type == "text/event-stream"
        events = (await response.read()).decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(event.removeprefix("data: "))["object"].endswith(".chunk") for event in events[:-2])


async def test_the_end_of_sequence_token_ends_the_answer_and_is_not_counted(server: Server):
    text, finish_reason, tokens = await server.answer(EOS_PROMPT, max_tokens=50)
    assert (finish_reason, tokens) == ("stop", EOS_AFTER)
    longer, finish_reason, tokens = await server.answer(EOS_PROMPT, max_tokens=50, ignore_eos=True)
    assert (finish_reason, tokens) == ("length", 50)
    assert longer.startswith(text)


async def test_an_answer_may_fill_the_rest_of_the_context(server: Server):
    for limit in ({}, {"max_tokens": 10**9}):
        async with server.post(ignore_eos=True, **limit) as response:
            body = await response.json()
        assert body["usage"]["total_tokens"] == CONTEXT_TOKENS
        assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(server: Server, stream: bool):
    text, _, _ = await server.answer(max_tokens=30)
    for length in (1, 4, 9):  # longer than a token, so that it spans several
        stop = text[7 : 7 + length]
        expected_text = text.partition(stop)[0]
        request = {"max_tokens": 30, "stop": ["never there", stop], "stream": stream}
        if not stream:
            stopped, finish_reason, tokens = await server.answer(**request)
            assert tokens < 30
        else:
            async with server.post(**request) as response:
                stopped, finish_reason = joined(await response.text())
        assert (stopped, finish_reason) == (expected_text, "stop")


def joined(events: str) -> tuple[str, str]:
    """Return the text of a chat stream and its finish reason."""
    lines = [line.removeprefix("data: ") for line in events.split("\n\n") if line and "[DONE]" not in line]
    choices = [json.loads(line)["choices"][0] for line in lines]
    return "".join(c["delta"].get("content", "") for c in choices), choices[-1]["finish_reason"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_completion_tokens": -2}, "max_completion_tokens"),
        ({"seed": "x"}, "seed"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stream": "perhaps"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"model": 7}, "model"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"logprobs": True}, "logprobs"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}, "messages"),
    ],
)
async def test_a_wrong_or_unsupported_field_is_a_400_that_names_it(server: Server, body: dict, param: str):
    request = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]} | body
    with pytest.raises(openai.BadRequestError) as raised:
        await server.client.post("/chat/completions", body=request, cast_to=object)
    assert raised.value.param == param
    assert raised.value.type == "invalid_request_error"


async def test_half_a_surrogate_pair_in_a_prompt_is_a_400(server: Server):
    async with server.post("\ud800") as response:
        assert (response.status, (await response.json())["error"]["param"]) == (400, "messages[0].content")


async def test_fields_with_neutral_values_are_ignored(server: Server):
    neutral_fields = {
        "n": 1,
        "user": "me",
        "tools": [],
        "logprobs": False,
        "response_format": {"type": "text"},
        "store": False,
    }
    plain = await server.answer(max_tokens=5)
    assert await server.answer(max_tokens=5, metadata={"a": "b"}, temperature=None, **neutral_fields) == plain


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b"", b"[" * 100_000])
async def test_a_body_that_is_not_a_json_object_is_a_400(server: Server, body: bytes):
    async with server.session.post(server.url + "/v1/chat/completions", data=body) as response:
        assert response.status == 400
        assert (await response.json())["error"]["code"] == "invalid_json"


async def test_a_prompt_beyond_the_context_is_a_400(server: Server):
    with pytest.raises(openai.BadRequestError) as raised:
        await server.client.completions.create(model="tiny", prompt="fox " * CONTEXT_TOKENS)
    assert raised.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="no tokens"):
        await server.client.completions.create(model="tiny", prompt="")


async def test_an_unknown_model_or_path_is_a_404(server: Server):
    with pytest.raises(openai.NotFoundError) as raised:
        await server.client.completions.create(model="gpt-9", prompt="Hi")
    assert raised.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        await server.client.models.retrieve("org/gpt-9")
    async with server.session.get(server.url + "/v1/nowhere") as response:
        assert (response.status, (await response.json())["error"]["type"]) == (404, "invalid_request_error")
    async with server.session.get(server.url + "/v1/completions") as response:
        assert response.status == 405


# ----------------------------------------------------------------------------------------- answers and batches


async def test_a_greedy_answer_is_the_same_alone_and_in_a_padded_batch(server: Server):
    alone = [await server.answer(prompt, max_tokens=60) for prompt in PROMPTS]
    together = await asyncio.gather(*(server.answer(prompt, max_tokens=60, batch="x", size=4) for prompt in PROMPTS))
    assert together == alone
    assert server.model.batches == [1, 1, 1, 1, 4]


async def test_a_seeded_answer_is_the_same_whatever_else_is_in_the_batch(server: Server):
    request = {"temperature": 1.3, "top_p": 0.95, "max_tokens": 40}
    alone = await server.answer(seed=11, **request)
    neighbours = [server.answer(p, seed=5, batch="x", size=4, **request) for p in PROMPTS[1:]]
    among, *_ = await asyncio.gather(server.answer(seed=11, batch="x", size=4, **request), *neighbours)
    assert among == alone
    assert await server.answer(seed=12, **request) != alone


async def test_batches_run_one_at_a_time_in_the_order_in_which_they_were_formed(server: Server):
    server.model.gate()
    first = asyncio.create_task(server.answer(max_tokens=2, ignore_eos=True))
    await server.until_running()
    half = asyncio.create_task(server.answer(batch="late", size=2, max_tokens=2))
    await server.until_waiting(1)
    early = [asyncio.create_task(server.answer(batch="early", size=3, max_tokens=2)) for _ in range(3)]
    await server.until_waiting(4)
    other_half = asyncio.create_task(server.answer(batch="late", size=2, max_tokens=2))
    await server.until_waiting(5)
    server.model.open()
    await asyncio.gather(first, half, *early, other_half)
    assert server.model.batches == [1, 3, 2]
    assert server.model.running_max == 1


async def test_a_short_answer_is_sent_at_once_but_its_batch_ends_with_the_longest(server: Server):
    server.model.gate()
    short = asyncio.create_task(server.answer(batch="x", size=2, max_tokens=3, ignore_eos=True))
    long = asyncio.create_task(server.answer(batch="x", size=2, max_tokens=30, ignore_eos=True))
    await server.until_running()
    following = asyncio.create_task(server.answer("Hello", max_tokens=2, ignore_eos=True))
    await server.until_waiting(1)
    server.model.permit(3)
    assert (await short)[2] == 3
    assert not long.done()
    server.model.permit(26)  # 29 of 30 steps
    await until(lambda: max(row.output_tokens for row in server.model.rows) >= 29)
    assert server.model.batches == [2]
    assert len(server.engine._queue) == 1
    server.model.open()
    assert (await long)[2] == 30
    assert (await following)[2] == 2
    assert server.model.batches == [2, 1]


async def test_a_client_that_leaves_frees_the_batch(server: Server):
    server.model.gate()
    server.model.permit(2)
    short = asyncio.create_task(server.answer(batch="x", size=2, max_tokens=4, ignore_eos=True))
    async with server.post(batch="x", size=2, max_tokens=200, ignore_eos=True, stream=True) as response:
        assert await response.content.readany()
        response.close()
    await until(lambda: any(row.cancelled for row in server.model.rows))
    server.model.open()
    assert (await short)[2] == 4
    assert (await server.answer(max_tokens=2))[2] == 2
    assert sorted(row.output_tokens for row in server.model.rows)[-1] <= 4
    assert server.model.batches == [2, 1]


async def test_a_queued_request_whose_client_leaves_never_runs(server: Server):
    server.model.gate()
    first = asyncio.create_task(server.answer(max_tokens=2, ignore_eos=True))
    await server.until_running()
    cancelled = asyncio.create_task(server.answer(max_tokens=2))
    cancelled_too = asyncio.create_task(server.answer(batch="x", size=2, max_tokens=2))
    await server.until_waiting(2)
    stays = asyncio.create_task(server.answer(batch="x", size=2, max_tokens=2))
    await server.until_waiting(3)
    cancelled.cancel()
    cancelled_too.cancel()
    await server.until_waiting(1)
    server.model.open()
    await asyncio.gather(first, stays)
    assert server.model.batches == [1, 1]


async def test_a_batch_with_a_missing_member_starts_after_the_gather_limit(language_model: LanguageModel):
    async with serving(language_model, gather_s=0.05) as server:
        await asyncio.gather(*(server.answer(batch="x", size=3, max_tokens=2) for _ in range(2)))
        assert server.model.batches == [2]


async def test_a_batch_does_not_wait_for_a_refused_member(server: Server):
    async def refused() -> None:
        async with server.post(batch="x", size=2, temperature=9) as response:
            assert response.status == 400

    answer, _ = await asyncio.gather(server.answer(batch="x", size=2, max_tokens=2), refused())
    assert answer[2] == 2


async def test_a_batch_above_the_limit_is_a_400(language_model: LanguageModel):
    async with serving(language_model, batch_size_max=2) as server:
        async with server.post(batch="x", size=3) as response:
            assert response.status == 400
            assert "at most 2" in (await response.json())["error"]["message"]
        await asyncio.gather(*(server.answer(batch="y", size=2, max_tokens=2) for _ in range(2)))


async def test_a_full_queue_is_a_429(language_model: LanguageModel):
    async with serving(language_model, queue_max=1) as server:
        server.model.gate()
        running = asyncio.create_task(server.answer(max_tokens=2))
        await server.until_running()
        waiting = asyncio.create_task(server.answer(max_tokens=2))
        await server.until_waiting(1)
        async with server.post(max_tokens=2) as response:
            assert response.status == 429
        server.model.open()
        await asyncio.gather(running, waiting)


async def test_a_failing_batch_is_a_500_and_the_next_one_runs(server: Server, monkeypatch: pytest.MonkeyPatch):
    def fail(rows, emit) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(server.model, "run", fail)
        async with server.post(max_tokens=2) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (500, "internal_error")
    assert (await server.answer(max_tokens=2))[2] == 2


# ------------------------------------------------------------------------------------------------ draining


async def test_draining_finishes_running_requests_and_refuses_waiting_ones(language_model: LanguageModel):
    async with serving(language_model, drain_s=LIMIT_S) as server:
        server.model.gate()
        running = asyncio.create_task(server.answer(max_tokens=5, ignore_eos=True))
        await server.until_running()
        waiting = asyncio.ensure_future(server.post(max_tokens=5))
        await server.until_waiting(1)
        server.stop.set()
        assert (await waiting).status == 503
        server.model.open()
        assert (await running)[2] == 5


async def test_draining_cuts_off_requests_that_take_too_long(language_model: LanguageModel):
    async with serving(language_model, drain_s=0.01) as server:
        server.model.gate()
        server.model.permit(2)
        stream = await server.client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=200,
            extra_body={"ignore_eos": True},
            stream=True,
        )
        server.stop.set()
        await until(lambda: server.model.rows[0].cancelled)
        server.model.open()
        with pytest.raises(openai.APIError, match="shutting down"):
            [chunk async for chunk in stream]
