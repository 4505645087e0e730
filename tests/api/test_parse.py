"""From JSON to a Call: fields that are read, refused or left unchanged."""

import json
import time
from typing import Any

import pytest

from llmserve.api.parse import parse_call
from llmserve.errors import BadRequest
from llmserve.request import Call
from predictor.prompt import Prompt

CHAT = "/v1/chat/completions"
HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def parse(path: str = CHAT, slo_ms: str | None = None, headers: dict[str, str] | None = None, **fields: Any) -> Call:
    headers = {**(headers or {}), **({"x-llmserve-slo-ms": slo_ms} if slo_ms is not None else {})}
    return parse_call(path, json.dumps({**HELLO, **fields}).encode(), prompt_chars_max=100, headers=headers)


def test_a_plain_body_is_forwarded_byte_for_byte() -> None:
    data = b'{ "model":"m",  "messages":[{"role":"user","content":"h\\u00e9"}], "top_k": 7 }'
    assert parse_call(CHAT, data, prompt_chars_max=100).body == data


def test_a_streaming_body_gains_only_the_request_for_usage() -> None:
    data = b'{ "model":"m",  "messages":[{"role":"user","content":"hi"}], "stream": true }'
    call = parse_call(CHAT, data, prompt_chars_max=100)
    assert call.usage_added
    assert call.body == b'{"stream_options":{"include_usage":true},' + data[1:]


def test_stream_options_of_the_client_are_kept_beside_llmserves() -> None:
    call = parse(stream=True, stream_options={"other": 1})
    assert json.loads(call.body)["stream_options"] == {"other": 1, "include_usage": True}
    assert call.usage_added


def test_the_request_for_usage_does_not_switch_on_usage_in_every_event() -> None:
    """vLLM obeys this option only together with include_usage."""
    call = parse(stream=True, stream_options={"continuous_usage_stats": True})
    assert json.loads(call.body)["stream_options"] == {"include_usage": True}
    stream_options = {"include_usage": True, "continuous_usage_stats": True}
    assert json.loads(parse(stream=True, stream_options=stream_options).body)["stream_options"] == stream_options


def test_numbers_beyond_64_bits_are_kept_beside_the_request_for_usage() -> None:
    odd = {"large": 10**30, "small": 1e-300}
    data = json.dumps({**HELLO, "stream": True, "stream_options": {}, "metadata": odd}).encode()
    assert json.loads(parse_call(CHAT, data, prompt_chars_max=100).body)["metadata"] == odd


def test_a_client_that_asks_for_usage_gets_it() -> None:
    assert not parse(stream=True, stream_options={"include_usage": True}).usage_added


def test_the_predictor_reads_the_last_user_turn_and_the_system_prompt() -> None:
    messages = [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "answer"},
        {"role": "user", "content": [{"type": "text", "text": "last"}, {"type": "image_url", "image_url": {}}]},
    ]
    assert parse(messages=messages).prompt == Prompt("last", "m", "be short", len("first") + len("answer"))


@pytest.mark.parametrize(("prompt", "text"), [("say hi", "say hi"), (["a", "b"], "a b"), ([1, 2, 3], "")])
def test_a_completion_has_the_prompt_itself(prompt: Any, text: str) -> None:
    data = json.dumps({"model": "m", "prompt": prompt}).encode()
    assert parse_call("/v1/completions", data, prompt_chars_max=100).prompt == Prompt(text, "m")


def test_the_newer_name_of_the_token_limit_wins() -> None:
    assert parse(max_tokens=5).output_tokens_max == 5
    assert parse(max_tokens=5, max_completion_tokens=7).output_tokens_max == 7


def test_a_deadline_comes_from_its_header() -> None:
    assert parse(slo_ms="1500").slo_s == 1.5


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": 10**400}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 0}, "n"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop"),
        ({"seed": "x"}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"stream": True, "stream_options": 1}, "stream_options"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": [{"role": "user", "content": "x" * 101}]}, "messages"),
    ],
)
def test_bad_input_names_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        parse(**fields)
    assert refusal.value.param == param
    assert param.split(".")[0] in refusal.value.message or "prompt" in refusal.value.message


@pytest.mark.parametrize("data", [b"", b"{", b"nonsense", b"[]", b'"text"', b"\xff\xfe"])
def test_a_body_that_is_no_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_call(CHAT, data, prompt_chars_max=100)


@pytest.mark.parametrize(
    ("fields", "tokens_min", "tokens_max", "stops"),
    [
        ({"min_tokens": 5, "max_tokens": 9, "stop": "END"}, 5, 9, ("END",)),
        ({"ignore_eos": True, "max_tokens": 9, "stop": ["a", "b"]}, 9, 9, ("a", "b")),
        ({"ignore_eos": "yes", "min_tokens": "many"}, None, None, ()),  # the engine must reject it
    ],
)
def test_limits_and_stop_rules_bound_the_prediction(
    fields: dict[str, Any], tokens_min: int | None, tokens_max: int | None, stops: tuple[str, ...]
) -> None:
    call = parse(**fields)
    assert (call.output_tokens_min, call.output_tokens_max, call.prompt.stop) == (tokens_min, tokens_max, stops)


def test_a_client_may_send_its_own_prediction() -> None:
    assert parse(headers={"x-llmserve-predicted-tokens": "320"}).predicted_tokens == 320


def test_a_long_list_of_wrong_items_costs_little_more_than_reading_it() -> None:
    """An error for each item would take hundreds of times as long."""
    data = b'{"model":"m","prompt":[' + b"1.5," * 500_000 + b"1.5]}"
    began_s = time.process_time()
    json.loads(data)
    reading_s = time.process_time() - began_s
    with pytest.raises(BadRequest):
        parse_call("/v1/completions", data, prompt_chars_max=100)
    assert time.process_time() - began_s < 20 * reading_s


def test_the_prompt_limit_counts_the_whole_conversation() -> None:
    messages = [{"role": "user", "content": "x" * 60}, {"role": "user", "content": "y" * 60}]
    with pytest.raises(BadRequest, match="120 characters"):
        parse(messages=messages)


@pytest.mark.parametrize(
    ("prompt", "n", "choices"), [("a", None, 1), ("a", 3, 3), (["a", "b"], 3, 6), ([1, 2, 3], 2, 2), ([[1], [2]], 1, 2)]
)
def test_answers_that_share_one_count_of_tokens_are_counted(prompt: Any, n: int | None, choices: int) -> None:
    data = json.dumps({"model": "m", "prompt": prompt, "n": n}).encode()
    assert parse_call("/v1/completions", data, prompt_chars_max=100).choices == choices


def test_a_stream_is_named_by_its_header_only() -> None:
    assert parse().stream_name == ""
    assert parse(headers={"x-llmserve-stream": "night run/7"}).stream_name == "night run/7"


@pytest.mark.parametrize("name", ["x" * 65, "caf\u00e9", "a\tb", "a\x7f"])
def test_a_stream_name_that_cannot_be_printed_or_is_too_long_is_refused(name: str) -> None:
    with pytest.raises(BadRequest, match="x-llmserve-stream must be printable ASCII, at most 64 characters"):
        parse(headers={"x-llmserve-stream": name})


@pytest.mark.parametrize("slo_ms", ["soon", "0", "-5", "inf", "nan", "1e15"])
def test_a_deadline_that_is_no_number_of_ms_is_refused(slo_ms: str) -> None:
    with pytest.raises(BadRequest, match="slo-ms"):
        parse(slo_ms=slo_ms)


# ---- headers for the engine ----


def test_only_request_id_and_tracing_headers_go_to_the_engine() -> None:
    own_headers = {"x-request-id": "abc-1", "traceparent": "00-4bf9-00f0-01", "tracestate": "a=b,c=d"}
    call = parse(headers={**own_headers, "authorization": "Bearer sk-1", "cookie": "a=b", "x-other": "1"})
    assert dict(call.headers) == own_headers


@pytest.mark.parametrize("value", ["", "x" * 257, "a\x00b", "a\tb", "a\x7f", "caf\xe9"])
def test_a_header_that_is_too_long_or_unprintable_is_left_out(value: str) -> None:
    assert parse(headers={"x-request-id": value, "traceparent": "x" * 256}).headers == (("traceparent", "x" * 256),)


# ---- the prompt's opening ----


def opening(path: str = CHAT, **fields: Any) -> str:
    data = json.dumps({"model": "m", **fields}).encode()
    return parse_call(path, data, prompt_chars_max=1_000_000).opening


def test_the_opening_is_the_start_of_the_engines_prompt() -> None:
    messages = [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {}}]},
        {"role": "assistant", "content": None, "tool_calls": []},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert opening(messages=messages) == "system\nbe short\nuser\nhi\nassistant\n"
    assert opening(messages=messages, tools=tools).startswith('{"type":"function","function":{"name":"f"}}\nsystem\n')
    assert opening(messages=messages, tools="any") == opening(messages=messages), "the engine must reject it"


@pytest.mark.parametrize(
    ("prompt", "text"), [("once", "once"), (["a", "b"], "a\nb"), ([1, 23], "1\n23"), ([[1, 2], [3]], "1\n2\n3")]
)
def test_the_opening_of_a_completion_is_its_prompt_or_its_token_ids(prompt: Any, text: str) -> None:
    assert opening("/v1/completions", prompt=prompt) == text


def test_the_opening_ends_at_its_limit_and_keeps_a_common_beginning() -> None:
    history = [{"role": "user", "content": "x" * 1_000} for _ in range(50)]
    first, second = opening(messages=history), opening(messages=[*history, {"role": "user", "content": "more"}])
    assert first == second
    assert len(first) == 8192
    assert len(opening("/v1/completions", prompt="x" * 10_000)) == 8192
    assert len(opening("/v1/completions", prompt=[7] * 10_000)) <= 8192


def test_the_opening_does_not_appear_in_the_repr_of_a_call() -> None:
    assert "hello" not in repr(parse())
