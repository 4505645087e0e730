"""The front-end returns what vLLM returns: each request is sent both ways, and the bytes are compared.

Two answers of one vLLM differ in the answer's id, in its creation time and in the ids of tool calls: these are masked.
Where several choices are streamed, vLLM orders the events of a step arbitrarily: events are compared choice by choice.
A busy vLLM server puts several ready tokens into one event: a stream is repeated, both ways, until both ways have had
the same events; of a long stream only the joined texts and all the rest are compared. One thing is lost on purpose:
vLLM's `system_fingerprint`, if several choices are streamed without usage (event_stream.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
from front import Front, StartFront

pytestmark = pytest.mark.vllm

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
COUNT = "Count from 3 to 9."
TEMPLATED = f"<|user|>{COUNT}<|end|><|assistant|>"
ASKINGS_MAX = 150  # a busy vLLM puts tokens together into events as it happens
LARGE_TOKENS = 400  # about 70 kB as a stream: more than one read from a socket

TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "looks a number up",
        "parameters": {"type": "object", "properties": {"n": {"enum": [3, 4]}}, "required": ["n"]},
    },
}
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}


@dataclass(frozen=True)
class Case:
    """fields : of the body.  shows : a pattern that vLLM's answer must have, so that the case tests its subject."""

    name: str
    path: str
    fields: dict[str, Any] = field(default_factory=dict)
    shows: bytes = rb"3, 4, 5"
    status: int = 200
    streams: tuple[bool, ...] = (False, True)


def chat(name: str, shows: bytes = rb"[34]", /, **fields: Any) -> Case:
    expectations = {key: fields.pop(key) for key in ("status", "streams") if key in fields}
    return Case(name, CHAT, {"messages": [{"role": "user", "content": COUNT}], **fields}, shows, **expectations)


def completion(name: str, shows: bytes = rb"[34]", /, **fields: Any) -> Case:
    expectations = {key: fields.pop(key) for key in ("status", "streams") if key in fields}
    return Case(name, COMPLETIONS, {"prompt": TEMPLATED, **fields}, shows, **expectations)


def words(count: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "word " * count}]


CASES = [
    chat("greedy", rb'"system_fingerprint":"vllm'),
    chat("seeded", temperature=1.0, seed=7, top_p=0.9, top_k=20, repetition_penalty=1.1),
    chat("several-choices", rb'"index":2', n=3, temperature=1.0, seed=7),
    chat(
        "multi-turn",
        messages=[
            {"role": "system", "content": "Be exact."},
            {"role": "user", "content": "Count from 1 to 3."},
            {"role": "assistant", "content": "1, 2, 3"},
            {"role": "user", "content": [{"type": "text", "text": COUNT}]},
        ],
    ),
    chat("tools-unused", rb"3", tools=[TOOL], tool_choice="none"),
    chat("tools-auto", rb"3", tools=[TOOL], tool_choice="auto"),
    chat(
        "tool-named",
        rb"lookup",
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "lookup"}},
    ),
    chat("tool-required", rb"lookup", tools=[TOOL], tool_choice="required", max_tokens=60),
    chat(
        "tool-results",
        tools=[TOOL],
        messages=[
            {"role": "user", "content": "Look up 3."},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "a", "type": "function", "function": {"name": "lookup", "arguments": '{"n":3}'}}],
            },
            {"role": "tool", "tool_call_id": "a", "content": "three"},
            {"role": "user", "content": COUNT},
        ],
    ),
    chat("tool-choice-without-tools", rb"tools", tool_choice="required", status=400),
    chat("json-schema", rb"{", response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}),
    chat("json-object", rb"{", response_format={"type": "json_object"}, max_tokens=12),
    chat("regex", rb"-", structured_outputs={"regex": "[a-c]{5}-[0-9]{3}"}),
    chat("choice", rb'"content":"[rg]', structured_outputs={"choice": ["red", "green"]}),
    chat("regex-that-is-none", rb"regex", structured_outputs={"regex": "(["}, status=400, streams=(False,)),
    chat("regex-that-is-none-streamed", rb"error", structured_outputs={"regex": "(["}, streams=(True,)),
    chat("log-probabilities", rb'"top_logprobs":\[{', logprobs=True, top_logprobs=3),
    chat("too-many-log-probabilities", rb"20", logprobs=True, top_logprobs=99, status=400, streams=(False,)),
    chat("prompt-log-probabilities", rb'"prompt_logprobs":\[null,{', prompt_logprobs=2, streams=(False,)),
    chat("prompt-log-probabilities-streamed", rb"prompt_logprobs", prompt_logprobs=2, status=400, streams=(True,)),
    chat("token-ids", rb'"token_ids":\[\d', return_token_ids=True),
    chat("stop", rb'"stop_reason":"6"', stop=["6", "END"]),
    chat("unknown-fields", no_such_field={"a": [1, 2.50, "h\u00e9 \U0001f600"]}, metadata=None),
    chat("a-role-unheard-of", rb"o", messages=[{"role": "nobody", "content": "Say hello."}]),
    chat("near-the-context-limit", rb'"finish_reason":"(length|stop)"', messages=words(1_012), max_tokens=5),
    chat("beyond-the-context-limit", rb"maximum context length is 1024", messages=words(2_000), status=400),
    chat("more-tokens-than-context", rb"1024", max_tokens=2_000, status=400),
    chat("usage-asked-for", rb'"choices":\[\],"usage"', stream_options={"include_usage": True}, streams=(True,)),
    chat("usage-declined", rb'}\],"system_', stream_options={"include_usage": False}, streams=(True,)),
    chat(
        "usage-in-every-event",
        rb'"choices":\[{.*"usage":{"prompt_tokens":\d',
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        streams=(True,),
    ),
    chat("half-asked-usage", rb'}\],"system_', stream_options={"continuous_usage_stats": True}, streams=(True,)),
    chat("large", rb'"length"', ignore_eos=True, max_tokens=LARGE_TOKENS),
    completion("greedy", rb'"system_fingerprint":"vllm'),
    completion("seeded", temperature=1.0, seed=7),
    completion("several-choices", rb'"index":1', n=2, temperature=1.0, seed=3),
    completion("several-prompts", rb'"index":1', prompt=[TEMPLATED, "<|user|>Count from 4 to 6.<|end|><|assistant|>"]),
    completion("token-ids", rb'"text":"0', prompt=[5, 6, 7], max_tokens=10),
    completion("log-probabilities", rb'"token_logprobs":\[-', logprobs=3),
    completion("too-many-log-probabilities", rb"20", logprobs=99, status=400, streams=(False,)),
    completion("prompt-log-probabilities", rb'"prompt_logprobs":\[null,{', prompt_logprobs=1, streams=(False,)),
    completion("echo", rb"\|user\|>Count", echo=True),
    completion("echo-and-log-probabilities", rb'"token_logprobs":\[null,-', echo=True, logprobs=1),
    completion("echo-alone", rb'"token_logprobs":\[null,-', echo=True, logprobs=1, max_tokens=0),
    completion("no-tokens", rb"at least 1", max_tokens=0, status=400),
    completion("stop", rb'"stop_reason":"5"', stop="5"),
    completion("suffix", rb"suffix", suffix="x", status=400),
    completion("regex", rb'"text":"[abc]', structured_outputs={"regex": "[a-c]{5}"}),
    completion("beyond-the-context-limit", rb"maximum context length is 1024", prompt="word " * 2_000, status=400),
    completion("usage-asked-for", rb'"choices":\[\],"usage"', stream_options={"include_usage": True}, streams=(True,)),
    completion(
        "usage-in-every-event",
        rb'"choices":\[{.*"usage":{"prompt_tokens":\d',
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        streams=(True,),
    ),
    completion("large", rb'"length"', ignore_eos=True, max_tokens=LARGE_TOKENS),
]


async def ask(front: Front, url: str, case: Case, *, stream: bool) -> tuple[int, str, bytes]:
    body = {"model": "llmserve-demo", "temperature": 0, "max_tokens": 40, **case.fields}
    if stream:
        body["stream"] = True
    async with front.session.post(url + case.path, json=body) as response:
        return response.status, response.headers["content-type"], masked(await response.read())


def masked(answer: bytes) -> bytes:
    answer = re.sub(rb'"id":"(chatcmpl|cmpl|chatcmpl-tool)-[0-9a-f]+"', rb'"id":"\1"', answer)
    return re.sub(rb'"created":\d+', b'"created":0', answer)


def by_choice(stream: bytes) -> bytes:
    """A stream of several choices: the events in order of the choices, without the fingerprint."""
    events = re.sub(rb',"system_fingerprint":"[^"]*"', b"", stream).split(b"\n\n")
    return b"\n\n".join(sorted(events, key=lambda event: re.findall(rb'"index":\d+', event)[:1]))


def text_apart(stream: bytes) -> tuple[bytes, list[bytes]]:
    """A long stream's joined texts, and the rest of its events without repetitions."""
    text = re.compile(rb'(?<="content":")(?:[^"\\]|\\.)*|(?<="text":")(?:[^"\\]|\\.)*')
    around = [text.sub(b"", event) for event in stream.split(b"\n\n")]
    changed = [event for event, previous in zip(around, [None, *around], strict=False) if event != previous]
    return b"".join(text.findall(stream)), changed


@pytest.mark.parametrize(
    ("case", "stream"),
    [
        pytest.param(case, stream, id=f"{case.path[4:8]}-{case.name}-{'stream' if stream else 'whole'}")
        for case in CASES
        for stream in case.streams
    ],
)
async def test_an_answer_is_vllms_byte_for_byte(
    start_front: StartFront, vllm_url: str, case: Case, stream: bool
) -> None:
    front = await start_front(vllm_url, slots=4)
    own_ways: set[tuple[int, str, bytes]] = set()
    ways_through: set[tuple[int, str, bytes]] = set()
    for _ in range(ASKINGS_MAX if stream and case.name != "large" else 1):
        own, through = [await ask(front, url, case, stream=stream) for url in (vllm_url, front.url)]
        assert own[0] == case.status
        assert re.search(case.shows, own[2]), own[2][:2_000]
        if stream and case.name.startswith("several"):
            own, through = [(*answer[:2], by_choice(answer[2])) for answer in (own, through)]
        own_ways.add(own)
        ways_through.add(through)
        if own_ways & ways_through:
            return
    assert stream, (own, through)
    assert case.name == "large", "no split into events occurred both ways"
    assert text_apart(through[2]) == text_apart(own[2])
    assert through[:2] == own[:2]


async def test_vllm_names_the_answer_by_the_clients_request_id(start_front: StartFront, vllm_url: str) -> None:
    front = await start_front(vllm_url, slots=4)
    case = chat("greedy")
    body = {"model": "llmserve-demo", **case.fields, "max_tokens": 40}
    for headers in ({"x-request-id": "job-7"}, {"x-request-id": "job-7", "authorization": "Bearer sk-1"}):
        async with front.post(case.path, headers=headers, **body) as response:
            assert (await response.json())["id"] == "chatcmpl-job-7"
            assert response.headers["x-request-id"] == "job-7"
