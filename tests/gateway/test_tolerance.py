"""Bodies as clients in the world spell them: what can be read is read, and the engine gets the client's own bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmserve.errors import BadRequest
from llmserve.gateway.bodies import BodyLimits
from llmserve.gateway.endpoints import ENDPOINTS
from llmserve.gateway.parse import parse_call
from llmserve.request import Call
from llmserve.wire.json_text import COUNT_MAX, NESTING_MAX, count_of, truth_of

CHAT, PLAIN, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
LIMITS = BodyLimits()


def parse(path: str = CHAT, **fields: Any) -> Call:
    """Parse, and check that nothing of the body was changed."""
    data = json.dumps({**HELLO, "prompt": "hello", "input": "hello", **fields}).encode()
    call = parse_call(path, data, LIMITS)
    assert call.wire.body == data or call.wire.usage_added
    return call


@pytest.mark.parametrize(
    ("spelling", "count"),
    [
        *((100, 100), (100.0, 100), ("100", 100), (" 100 ", 100), ("100.0", 100), ("1e2", 100), (True, 1), (0, 0)),
        *((-1, -1), ("-1", -1), (-1.0, -1), (10**400, COUNT_MAX), (-(10**30), -COUNT_MAX), ("9" * 30, COUNT_MAX)),
        *((2.5, None), ("2.5", None), ("ten", None), ("", None), (None, None), (float("nan"), None), ("inf", None)),
        *(
            (float("inf"), None),
            ("-Infinity", None),
            ("nan", None),
            ("\u0661", None),
            ("1" * 1000, None),
            ("0x10", None),
        ),
    ],
)
def test_a_count_is_read_in_every_spelling_that_engines_take(spelling: Any, count: int | None) -> None:
    assert count_of(spelling) == count


@pytest.mark.parametrize(
    ("spelling", "flag"),
    [
        *(
            (True, True),
            (1, True),
            (1.0, True),
            ("true", True),
            ("True", True),
            ("1", True),
            ("on", True),
            ("yes", True),
        ),
        *((False, False), (0, False), (0.0, False), ("false", False), ("FALSE", False), ("0", False), ("off", False)),
        *((None, None), (2, None), ("maybe", None), ("", None), (0.5, None), (float("nan"), None)),
    ],
)
def test_a_flag_is_read_in_every_spelling_that_engines_take(spelling: Any, flag: bool | None) -> None:
    assert truth_of(spelling) is flag


LIMIT_FIELDS = [
    (CHAT, "max_tokens"),
    (CHAT, "max_completion_tokens"),
    (PLAIN, "max_tokens"),
    (RESPONSES, "max_output_tokens"),
    (MESSAGES, "max_tokens"),
]


@pytest.mark.parametrize(("path", "field"), LIMIT_FIELDS)
@pytest.mark.parametrize(
    ("spelling", "most"),
    [(100.0, 100), ("100", 100), (-1, None), (-2, None), (None, None), (0, 1), ("lots", None), (2.5, None), (True, 1)],
)
def test_a_limit_that_cannot_be_read_is_the_engines_affair(
    path: str, field: str, spelling: Any, most: int | None
) -> None:
    assert parse(path, **{field: spelling}).bounds.output_tokens_max == most


@pytest.mark.parametrize("path", [CHAT, PLAIN, RESPONSES, MESSAGES])
@pytest.mark.parametrize(
    ("spelling", "stream"), [("false", False), ("true", True), (0, False), (1, True), (None, False), ("False", False)]
)
def test_a_stream_is_asked_for_in_any_spelling(path: str, spelling: Any, stream: bool) -> None:
    assert parse(path, stream=spelling).wire.stream is stream


@pytest.mark.parametrize(
    ("spelling", "n"), [(1.0, 1), ("3", 3), (None, 1), (0, 1), (-1, 1), (True, 1), ("2.0", 2), (4.0, 4)]
)
def test_the_number_of_answers_is_read_in_any_spelling(spelling: Any, n: int) -> None:
    assert [parse(path, n=spelling).bounds.choices for path in (CHAT, PLAIN)] == [n, n]


@pytest.mark.parametrize("spelling", ["500", 500.0, 1e300])
def test_no_spelling_of_n_gets_past_the_limit_of_answers(spelling: Any) -> None:
    with pytest.raises(BadRequest, match="--choices-max"):
        parse(n=spelling)


@pytest.mark.parametrize("path", [CHAT, PLAIN, RESPONSES, MESSAGES])
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": "hot", "top_p": 7, "seed": "x", "top_k": []},
        {"temperature": -1, "seed": 10**40, "logit_bias": {"7": "high"}},
        {"stop": 5, "stop_sequences": {}, "min_tokens": "some", "ignore_eos": "perhaps", "truncate_prompt_tokens": {}},
        {"stop": ["a", 5], "stop_sequences": [None], "response_format": "json", "tools": "all", "text": 1},
        {"tools": [{"function": {}}] * 150, "stop": ["x"] * 20, "stop_sequences": ["x"] * 20},
        {"service_tier": None, "metadata": [], "stream_options": {"include_usage": True}},
        {"model": None, "priority": None},
    ],
)
def test_what_the_engine_judges_passes(path: str, fields: dict[str, Any]) -> None:
    assert parse(path, **fields).prompt.text == "hello"


def test_minus_infinity_and_nan_pass_to_engines_that_read_them() -> None:
    """Python's json writes both, and httpx and requests send them."""
    data = (
        b'{"model":"m","logit_bias":{"7":-Infinity},"x":"NaN","top_p":NaN,"messages":[{"role":"user","content":"hi"}]'
    )
    assert parse_call(CHAT, data + b"}", LIMITS).wire.body == data + b"}"
    options = b',"stream":true,"stream_options":{"x":Infinity}}'
    streamed = parse_call(CHAT, data + options, LIMITS).wire.body
    assert streamed == data + b',"stream":true,"stream_options":{"x": Infinity, "include_usage": true}}'


@pytest.mark.parametrize(("field", "why"), [("n", "--choices-max"), ("stream", "form of the answer")])
def test_nan_where_a_number_is_needed_is_refused(field: str, why: str) -> None:
    data = json.dumps({**HELLO, field: float("nan")}).encode()
    with pytest.raises(BadRequest) as refusal:
        parse_call(CHAT, data, LIMITS)
    assert refusal.value.param == field


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("hi", "hi"),
        (["hi", "you"], "hi you"),
        (["hi", {"type": "text", "text": "you"}, {"type": "odd", "data": [1]}, {}], "hi you"),
        ({"type": "text", "text": "hi"}, "hi"),
        (None, ""),
        ([], ""),
    ],
)
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_contents_are_read_in_every_form(path: str, content: Any, text: str) -> None:
    assert (
        parse(path, messages=[{"role": "user", "content": content, "extra": [{}]}]).prompt.text.split() == text.split()
    )


@pytest.mark.parametrize("role", [None, "", "critic", "tool", "model"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_an_unknown_role_is_a_turn_like_others(path: str, role: str | None) -> None:
    call = parse(path, messages=[{"role": role, "content": "what?"}, {"content": "that"}])
    assert len(call.prompt.text) + call.prompt.history_characters == len("what?that")


@pytest.mark.parametrize(
    "prompt", [[12, "string", 56], {"prompt_string": "a", "multimodal_data": []}, None, [1.0, 2], ["a", None]]
)
def test_a_prompt_of_another_form_is_one_prompt_for_the_engine(prompt: Any) -> None:
    """llama.cpp takes the first two, vLLM a prompt of embeddings beside null."""
    assert parse(PLAIN, prompt=prompt, n=3).bounds.choices == 3


def test_a_byte_order_mark_is_skipped() -> None:
    for path in (CHAT, PLAIN, RESPONSES, MESSAGES, "/v1/embeddings"):
        data = json.dumps({**HELLO, "prompt": "a", "input": "a"}).encode()
        assert parse_call(path, b"\xef\xbb\xbf" + data, LIMITS).wire.body == data


@pytest.mark.parametrize("path", [path for path, endpoint in ENDPOINTS.items() if "audio" not in path])
@pytest.mark.parametrize(
    "field", ["tools", "response_format", "input", "unknown", "messages", "text", "prompt", "system"]
)
@pytest.mark.parametrize("depth", [NESTING_MAX, 500, 975, 980, 983, 990, 100_000])
def test_nesting_is_refused_wherever_it_enters(path: str, field: str, depth: int) -> None:
    data = json.dumps({**HELLO, "prompt": "a", "input": "a", field: "DEEP"}).encode()
    with pytest.raises(BadRequest, match=f"nested more than {NESTING_MAX} deep"):
        parse_call(path, data.replace(b'"DEEP"', b"[" * depth + b"]" * depth), LIMITS)


def test_nesting_below_the_limit_passes() -> None:
    data = json.dumps({**HELLO, "tools": [{"a": "DEEP"}]}).encode()
    depth = NESTING_MAX - 3
    parse_call(CHAT, data.replace(b'"DEEP"', b"[" * depth + b"]" * depth), LIMITS)


@pytest.mark.parametrize(
    ("data", "words", "param"),
    [
        (
            b'{"model":"m","messages":[{"role":"user","content":"a \\ud83d"}]}',
            "half of a surrogate pair",
            "messages.0.content",
        ),
        (b'{"model":"m","x":["\\udc00"],"messages":[]}', "half of a surrogate pair", "x.0"),
        (b'{"model":"m",\n"messages":[{"role":user}]}', "line 2, column 21", "messages.0.role"),
        ('{"model":"m"}'.encode("utf-16"), "UTF-16", None),
        (b'{"model":"m","messages":[{"role":"user","content":"\xe9"}]}', "not UTF-8", "messages.0.content"),
        (b"model=m&messages=hi", "line 1, column 1", None),
    ],
)
def test_a_body_that_is_no_json_is_refused_with_the_place(data: bytes, words: str, param: str | None) -> None:
    with pytest.raises(BadRequest) as refusal:
        parse_call(CHAT, data, LIMITS)
    assert words in refusal.value.message
    assert refusal.value.param == param


def test_limits_of_lists_are_settings() -> None:
    few = BodyLimits(messages_max=2, tools_max=2, stops_max=2)
    for fields, setting in (
        ({"messages": HELLO["messages"] * 3}, "--messages-max"),
        ({"tools": [{}] * 3}, "--tools-max"),
        ({"stop": ["a", "b", "c"]}, "--stops-max"),
    ):
        data = json.dumps({**HELLO, **fields}).encode()
        parse_call(CHAT, data, LIMITS)
        with pytest.raises(BadRequest, match=setting):
            parse_call(CHAT, data, few)
