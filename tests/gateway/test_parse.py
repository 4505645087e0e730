"""From JSON to a Call: fields that are read, refused or left unchanged."""

import json
import time
from typing import Any

import pytest

from llmserve.calls.prompt_size import PromptTokens
from llmserve.errors import BadRequest
from llmserve.gateway.bodies import BodyLimits
from llmserve.gateway.parse import parse_call
from llmserve.request import Call
from predictor.prompt import Prompt

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def parse(path: str = CHAT, slo_ms: str | None = None, headers: dict[str, str] | None = None, **fields: Any) -> Call:
    headers = {**(headers or {}), **({"x-llmserve-slo-ms": slo_ms} if slo_ms is not None else {})}
    return parse_call(path, json.dumps({**HELLO, **fields}).encode(), BodyLimits(prompt_chars_max=100), headers=headers)


def test_a_plain_body_is_forwarded_byte_for_byte() -> None:
    data = b'{ "model":"m",  "messages":[{"role":"user","content":"h\\u00e9"}], "top_k": 7 }'
    assert parse_call(CHAT, data, BodyLimits(prompt_chars_max=100)).wire.body == data


def test_a_streaming_body_gains_only_the_request_for_usage() -> None:
    data = b'{ "model":"m",  "messages":[{"role":"user","content":"hi"}], "stream": true }'
    call = parse_call(CHAT, data, BodyLimits(prompt_chars_max=100))
    assert call.wire.usage_added
    assert call.wire.body == b'{"stream_options":{"include_usage":true},' + data[1:]


def test_stream_options_of_the_client_are_kept_beside_llmserves() -> None:
    call = parse(stream=True, stream_options={"other": 1})
    assert json.loads(call.wire.body)["stream_options"] == {"other": 1, "include_usage": True}
    assert call.wire.usage_added


def test_the_request_for_usage_does_not_switch_on_usage_in_every_event() -> None:
    """vLLM obeys this option only together with include_usage."""
    call = parse(stream=True, stream_options={"continuous_usage_stats": True})
    assert json.loads(call.wire.body)["stream_options"] == {"include_usage": True}
    stream_options = {"include_usage": True, "continuous_usage_stats": True}
    assert json.loads(parse(stream=True, stream_options=stream_options).wire.body)["stream_options"] == stream_options


def test_numbers_beyond_64_bits_are_kept_beside_the_request_for_usage() -> None:
    odd = {"large": 10**30, "small": 1e-300}
    data = json.dumps({**HELLO, "stream": True, "stream_options": {}, "metadata": odd}).encode()
    assert json.loads(parse_call(CHAT, data, BodyLimits(prompt_chars_max=100)).wire.body)["metadata"] == odd


def test_a_client_that_asks_for_usage_gets_it() -> None:
    assert not parse(stream=True, stream_options={"include_usage": True}).wire.usage_added


def test_the_predictor_reads_the_last_user_turn_and_the_system_prompt() -> None:
    messages = [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "answer"},
        {"role": "user", "content": [{"type": "text", "text": "last"}, {"type": "image_url", "image_url": {}}]},
    ]
    assert parse(messages=messages).prompt == Prompt(
        "last", "m", "be short", len("first") + len("answer") + 4_096, shaping=("media 1",)
    ), "an image whose size is not known counts as 1,024 tokens"


@pytest.mark.parametrize(("prompt", "text"), [("say hi", "say hi"), (["a", "b"], "a b"), ([1, 2, 3], "")])
def test_a_completion_has_the_prompt_itself(prompt: Any, text: str) -> None:
    data = json.dumps({"model": "m", "prompt": prompt}).encode()
    assert parse_call("/v1/completions", data, BodyLimits(prompt_chars_max=100)).prompt == Prompt(text, "m")


def test_the_newer_name_of_the_token_limit_wins() -> None:
    assert parse(max_tokens=5).bounds.output_tokens_max == 5
    assert parse(max_tokens=5, max_completion_tokens=7).bounds.output_tokens_max == 7


def test_a_deadline_comes_from_its_header() -> None:
    assert parse(slo_ms="1500").terms.slo_s == 1.5


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": 7}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": 3}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        ({"max_tokens": [5]}, "max_tokens"),
        ({"n": 2.5}, "n"),
        ({"n": "many"}, "n"),
        ({"n": 10**400}, "n"),
        ({"stream": "maybe"}, "stream"),
        ({"stream": 2}, "stream"),
        ({"priority": "first"}, "priority"),
        ({"messages": [{"role": "user", "content": "x" * 101}]}, "messages"),
    ],
)
def test_bad_input_names_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        parse(**fields)
    assert refusal.value.param == param
    assert param.split(".")[0] in refusal.value.message or "prompt" in refusal.value.message


HEAD = b'{"model":"m","messages":[{"role":"user","content":"hi"}],'
NO_JSON = [b"", b"{", b"nonsense", b"[]", b'"text"', b"\xff\xfe", b"[" * 100_000]


@pytest.mark.parametrize("data", [*NO_JSON, HEAD + b'"x":"\xff"}', HEAD + b'"x":' + b"[" * 100_000, HEAD + b'"x":nul}'])
def test_a_body_that_is_no_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_call(CHAT, data, BodyLimits(prompt_chars_max=100))


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
    assert (call.bounds.output_tokens_min, call.bounds.output_tokens_max, call.prompt.stop) == (
        tokens_min,
        tokens_max,
        stops,
    )


def test_a_client_may_send_its_own_prediction() -> None:
    assert parse(headers={"x-llmserve-predicted-tokens": "320"}).terms.predicted_tokens == 320


def test_a_long_list_of_wrong_items_costs_little_more_than_reading_it() -> None:
    """An error for each item would take hundreds of times as long."""
    data = b'{"model":"m","prompt":[' + b"1.5," * 500_000 + b"1.5]}"
    began_s = time.process_time()
    json.loads(data)
    reading_s = time.process_time() - began_s
    with pytest.raises(BadRequest):
        parse_call("/v1/completions", data, BodyLimits(prompt_chars_max=100))
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
    assert parse_call("/v1/completions", data, BodyLimits(prompt_chars_max=100)).bounds.choices == choices


def test_a_stream_is_named_by_its_header_only() -> None:
    assert parse().terms.stream_name == ""
    assert parse(headers={"x-llmserve-stream": "night run/7"}).terms.stream_name == "night run/7"


@pytest.mark.parametrize("name", ["x" * 65, "caf\u00e9", "a\tb", "a\x7f"])
def test_a_stream_name_that_cannot_be_printed_or_is_too_long_is_refused(name: str) -> None:
    with pytest.raises(BadRequest, match="x-llmserve-stream must be printable ASCII, at most 64 characters"):
        parse(headers={"x-llmserve-stream": name})


@pytest.mark.parametrize("slo_ms", ["soon", "0", "-5", "inf", "nan", "1e15"])
def test_a_deadline_that_is_no_number_of_ms_is_refused(slo_ms: str) -> None:
    with pytest.raises(BadRequest, match="slo-ms"):
        parse(slo_ms=slo_ms)


# ---- counts ----


WIDE = BodyLimits(choices_max=2048)


def refusal_of(path: str, data: bytes) -> BadRequest:
    with pytest.raises(BadRequest) as refusal:
        parse_call(path, data, WIDE)
    return refusal.value


def plain(prompt: Any, **fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": prompt, **fields}).encode()


def chat(messages: Any, **fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": messages, **fields}).encode()


SAID = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("path", "taken", "refused", "param", "message"),
    [
        (CHAT, chat([SAID] * 8192), chat([SAID] * 8193), "messages", "more than 8,192 messages (--messages-max)"),
        (
            CHAT,
            chat([{"role": "user", "content": [{}] * 4096}] * 2),
            chat([{"role": "user", "content": [{}] * 4096}] * 2 + [{"role": "user", "content": [{}]}]),
            "messages",
            "more than 8,192 content parts in the messages (--messages-max)",
        ),
        (
            CHAT,
            chat([SAID], stop=["\\"] * 64),
            chat([SAID], stop=["\\"] * 65),
            "stop",
            "more than 64 stop strings (--stops-max)",
        ),
        (CHAT, chat([SAID], stop=['a"'] * 64), chat([SAID], stop=["a"] * 500_000), "stop", "more than 64 stop strings"),
        (
            CHAT,
            chat([SAID], tools=[{}] * 1024),
            chat([SAID], tools=[{}] * 1025),
            "tools",
            "more than 1,024 tools (--tools-max)",
        ),
        (PLAIN, plain([""] * 2048), plain([""] * 2049), "prompt", "more than 2,048 prompts (--choices-max)"),
        (PLAIN, plain(['\\"'] * 2048), plain(["\\"] * 5000), "prompt", "more than 2,048 prompts"),
        (PLAIN, plain([[1]] * 2048), plain([[1]] * 2049), "prompt", "more than 2,048 in all (--choices-max)"),
        (PLAIN, plain([1] * 1_000_000), plain([1] * 1_000_001), "prompt", "1,000,001 token ids; at most 1,000,000"),
        (
            CHAT,
            chat([SAID], stream=True, stream_options={"a": "b" * 1000}),
            chat([SAID], stream=True, stream_options={"a": "b" * 1024}),
            "stream_options",
            "more than 1,024 bytes",
        ),
    ],
    ids=["messages", "parts", "stops", "many stops", "tools", "texts", "many texts", "ids", "long ids", "options"],
)
def test_a_list_that_is_too_long_is_refused_by_name(
    path: str, taken: bytes, refused: bytes, param: str, message: str
) -> None:
    parse_call(path, taken, WIDE)
    refusal = refusal_of(path, refused)
    assert refusal.param == param
    assert message in refusal.message


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [(CHAT, {"n": 9}, "n"), (PLAIN, {"prompt": ["a"] * 3, "n": 3}, "n"), (PLAIN, {"prompt": [[1]] * 9}, "prompt")],
)
def test_more_answers_than_allowed_are_refused(path: str, fields: dict[str, Any], param: str) -> None:
    data = json.dumps({**HELLO, **fields}).encode()
    with pytest.raises(BadRequest, match="more than 8 in all") as refusal:
        parse_call(path, data, BodyLimits(prompt_chars_max=100, choices_max=8))
    assert refusal.value.param == param
    parse_call(path, data, BodyLimits(prompt_chars_max=100, choices_max=9))


@pytest.mark.parametrize(
    ("fields", "tokens_min", "context_min"),
    [
        ({"prompt": "text", "n": 3}, 3, 1),
        ({"prompt": [1, 2, 3], "n": 2}, 5, 4),
        ({"prompt": [[1, 2], [3]], "min_tokens": 10}, 23, 12),
        ({"prompt": [1, 2, 3], "max_tokens": 0, "echo": True}, 3, 3),
        ({"prompt": [1, 2, 3], "truncate_prompt_tokens": 1}, 1, 1),
        ({"prompt": [1], "ignore_eos": True, "max_tokens": 10**6}, 2, 2),
    ],
)
def test_what_a_request_needs_at_least_counts_only_what_is_certain(
    fields: dict[str, Any], tokens_min: int, context_min: int
) -> None:
    data = json.dumps({"model": "m", **fields}).encode()
    call = parse_call(PLAIN, data, BodyLimits(prompt_chars_max=100))
    assert (call.bounds.tokens_min, call.bounds.context_min) == (tokens_min, context_min)


def test_counts_of_one_body_do_not_add_to_those_of_the_next() -> None:
    for _ in range(2):
        parse_call(CHAT, chat([SAID] * 8192, tools=[{}] * 1024), WIDE)


def test_lists_under_one_name_given_twice_are_counted_together() -> None:
    """Otherwise the second list would let a body make as many objects as it likes."""
    messages = json.dumps([SAID] * 6000)
    data = f'{{"model":"m","messages":{messages},"messages":{messages}}}'.encode()
    assert "more than 8,192 messages" in refusal_of(CHAT, data).message


@pytest.mark.parametrize(
    "prompt",
    [5, True, {}, [[1], 2], [1, [2]], [[1], 2, [3]], [[[1]]], [True], [None], ["a", ["b"]]],
)
def test_a_prompt_is_text_or_token_ids_and_nothing_else(prompt: Any) -> None:
    refusal = refusal_of(PLAIN, plain(prompt))
    assert refusal.param == "prompt"
    assert "`prompt`" in refusal.message


@pytest.mark.parametrize(
    ("prompt", "ids", "prompts"),
    [([], 0, 1), ([7], 1, 1), ([-1, 20, 3], 3, 1), ([[1, 2], [3]], 3, 2), ([[], [3]], 1, 2), ([[]], 0, 1)],
)
def test_token_ids_are_counted(prompt: Any, ids: int, prompts: int) -> None:
    data = json.dumps({"model": "m", "prompt": prompt}, indent=1).encode()
    call = parse_call(PLAIN, data, BodyLimits(prompt_chars_max=100))
    assert (call.bounds.prompt_ids, call.bounds.choices) == (ids, prompts)


def test_a_field_that_nobody_reads_may_hold_anything() -> None:
    odd = {"a": [[], {}, [[[1e999]]], 10**400, "\u0000", "\\"], "": None}
    data = chat([{**SAID, "tool_calls": odd, "name": 5}], metadata=odd, min_tokens=odd, response_format=odd)
    assert parse_call(CHAT, data.replace(b"Infinity", b"1e999"), BodyLimits(prompt_chars_max=100)).prompt.text == "x"


def test_parts_without_text_are_no_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"text": ["b"]}, {"text": None}, {}, {"text": "c"}]
    assert parse(messages=[{"role": "user", "content": parts}]).prompt.text == "a c"


@pytest.mark.parametrize(
    "options", ["null", '{"include_usage" : false}', '{"a":"\\"stream_options\\":{}"}', '{"stream_options":{}}']
)
def test_only_the_options_of_the_body_itself_are_changed(options: str) -> None:
    before = '{"x":{"stream_options":{}}, "y":"\\"stream_options\\":null", "model":"m", "stream":true,'
    after = ' "messages":[{"role":"user","content":"\u00e9 stream_options"}]}'
    data = f'{before}"stream_options": {options},{after}'.encode()
    body = parse_call(CHAT, data, BodyLimits(prompt_chars_max=100)).wire.body
    assert body.startswith(before.encode())
    assert body.endswith(after.encode())
    assert json.loads(body)["stream_options"] == {**(json.loads(options) or {}), "include_usage": True}


# ---- headers for the engine ----


def test_only_request_id_and_tracing_headers_go_to_the_engine() -> None:
    own_headers = {"x-request-id": "abc-1", "traceparent": "00-4bf9-00f0-01", "tracestate": "a=b,c=d"}
    call = parse(headers={**own_headers, "authorization": "Bearer sk-1", "cookie": "a=b", "x-other": "1"})
    assert dict(call.wire.headers) == own_headers


@pytest.mark.parametrize("value", ["", "x" * 257, "a\x00b", "a\tb", "a\x7f", "caf\xe9"])
def test_a_header_that_is_too_long_or_unprintable_is_left_out(value: str) -> None:
    assert parse(headers={"x-request-id": value, "traceparent": "x" * 256}).wire.headers == (
        ("traceparent", "x" * 256),
    )


# ---- the prompt's opening ----


def opening(path: str = CHAT, **fields: Any) -> str:
    data = json.dumps({"model": "m", **fields}).encode()
    return parse_call(path, data, BodyLimits(prompt_chars_max=1_000_000)).opening


def test_the_opening_is_the_start_of_the_engines_prompt() -> None:
    messages = [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {}}]},
        {"role": "assistant", "content": None, "tool_calls": []},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    before, image, after = opening(messages=messages).partition("\nhi\n")
    assert (before, len(image + after)) == ("system\nbe short\nuser", 512 - len(before)), "the image follows its text"
    assert opening(messages=messages, tools=tools).startswith(
        '[{"type": "function", "function": {"name": "f"}}]\nsystem\n'
    )
    assert opening(messages=messages, tools="any") == opening(messages=messages), "the engine must reject it"


@pytest.mark.parametrize(
    ("prompt", "text"), [("once", "once"), (["a", "b"], "a"), ([1, 23], "1,23"), ([[1, 2], [3]], "1,2")]
)
def test_the_opening_of_a_completion_is_its_first_prompt_or_its_token_ids(prompt: Any, text: str) -> None:
    assert opening("/v1/completions", prompt=prompt) == text


def test_the_opening_ends_at_its_limit_and_keeps_a_common_beginning() -> None:
    history = [{"role": "user", "content": "x" * 1_000} for _ in range(50)]
    first, second = opening(messages=history), opening(messages=[*history, {"role": "user", "content": "more"}])
    assert first == second
    assert len(first) == 512
    assert len(opening("/v1/completions", prompt="x" * 10_000)) == 512
    assert len(opening("/v1/completions", prompt=[7] * 10_000)) == 512


def blocks(path: str = CHAT, **fields: Any) -> tuple[int, ...]:
    data = json.dumps({"model": "m", **fields}).encode()
    return parse_call(path, data, BodyLimits(prompt_chars_max=1_000_000)).blocks


def test_the_blocks_of_a_conversation_begin_as_those_of_its_last_turn_on_every_endpoint() -> None:
    said, tools = [{"role": "user", "content": "x" * 2_000}], [{"name": "f", "description": "d" * 600}]
    more = [*said, {"role": "assistant", "content": "y" * 2_000}, {"role": "user", "content": "go on"}]
    for path, field in ((CHAT, "messages"), ("/v1/messages", "messages"), ("/v1/responses", "input")):
        before, after = blocks(path, **{field: said}), blocks(path, **{field: more})
        assert (len(before), before[:3]) == (3, after[:3])
        assert len(after) == 7
        assert not set(blocks(path, **{field: more}, tools=tools)) & set(after), "a template begins with the tools"


def test_images_and_sounds_of_a_prompt_are_told_apart_and_count_by_their_size() -> None:
    def call(data: str) -> Call:
        image = {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}}
        sound = {"type": "input_audio", "input_audio": {"data": "z" * 50_000, "format": "wav"}}
        content = [{"type": "text", "text": "x" * 1_000}, image, sound]
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()
        return parse_call(CHAT, body, BodyLimits(prompt_chars_max=2_000))

    one, other = call("a" * 200_000), call("b" * 200_000)
    assert one.blocks == call("a" * 200_000).blocks
    assert (one.blocks[0] == other.blocks[0], one.blocks[2] == other.blocks[2]) == (True, False)
    assert PromptTokens().estimate(one) == pytest.approx(1_000 / 4 + 200_000 / 256 + 50_000 / 256, rel=0.05)


def test_what_a_tool_shows_an_agent_counts_by_its_size_on_every_endpoint() -> None:
    shot = "a" * 200_000
    said = {"role": "user", "content": "x" * 1_000}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": shot}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "seen"}, image]}
    page = {"type": "input_image", "image_url": f"data:image/png;base64,{shot}"}
    screen = {"type": "computer_call_output", "call_id": "c", "output": {**page, "type": "computer_screenshot"}}
    bodies = [
        ("/v1/messages", {"messages": [said, {"role": "user", "content": [result]}]}),
        ("/v1/messages", {"messages": [said, {"role": "user", "content": [image]}]}),
        ("/v1/responses", {"input": [said, {"role": "user", "content": [page]}]}),
        ("/v1/responses", {"input": [said, screen]}),
    ]
    for path, body in bodies:
        call = parse_call(path, json.dumps({"model": "m", **body}).encode(), BodyLimits(prompt_chars_max=2_000))
        assert PromptTokens().estimate(call) == pytest.approx(1_000 / 4 + 200_000 / 256, rel=0.05)
        assert len(call.blocks) == (1_000 + 4 * 200_000 // 256) // 512


@pytest.mark.parametrize(
    ("prompt", "first"), [(["x" * 2_000, "y" * 2_000], "x" * 2_000), ([[7] * 2_000, [8]], [7] * 2_000)]
)
def test_the_blocks_of_several_prompts_are_those_of_the_first(prompt: Any, first: Any) -> None:
    assert blocks("/v1/completions", prompt=prompt) == blocks("/v1/completions", prompt=first) != ()


def test_the_opening_does_not_appear_in_the_repr_of_a_call() -> None:
    assert "hello" not in repr(parse())
