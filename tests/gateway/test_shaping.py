"""What shapes an answer beside its texts reaches the learner of lengths, and passes to the engine as it came."""

import json
from typing import Any

import pytest

from llmserve.gateway.bodies import BodyLimits
from llmserve.gateway.parse import parse_call
from llmserve.gateway.shaping import SETTINGS_MAX

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HELLO = [{"role": "user", "content": "hello"}]
PICTURE = {"type": "image_url", "image_url": {"url": "data:,"}}


def shaping(path: str, fields: dict[str, Any]) -> tuple[str, ...]:
    prompt = {"input": "hello"} if path == RESPONSES else {"messages": HELLO}
    data = json.dumps({"model": "m", "max_tokens": 9, **prompt, **fields}).encode()
    call = parse_call(path, data, BodyLimits(), headers={})
    assert call.wire.body == data
    return call.prompt.shaping


@pytest.mark.parametrize(
    ("path", "fields", "told"),
    [
        (CHAT, {}, ()),
        (CHAT, {"reasoning_effort": "high"}, ("effort high",)),
        (CHAT, {"reasoning_effort": None, "tool_choice": "required"}, ("tool_choice required",)),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, ("template enable_thinking false",)),
        (CHAT, {"reasoning": {"effort": "low", "max_tokens": 2000}}, ("thinking effort low", "thinking max_tokens 11")),
        (CHAT, {"messages": [{"role": "user", "content": [PICTURE, PICTURE]}]}, ("media 2",)),
        (RESPONSES, {"reasoning": {"effort": "medium"}}, ("thinking effort medium",)),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}},
         ("thinking budget_tokens 11", "thinking type enabled")),
        (MESSAGES, {"output_config": {"effort": "max"}, "tool_choice": {"type": "tool", "name": "read"}},
         ("output effort max", "tool_choice name read", "tool_choice type tool")),
    ],
)  # fmt: skip
def test_settings_that_shape_the_answer_are_read(path: str, fields: dict[str, Any], told: tuple[str, ...]) -> None:
    assert shaping(path, fields) == told


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("odd", [7, -1e300, [], ["x"], {}, {"a": {"b": [1]}}, "x" * 10_000, {"n": {"n": {"n": "ü"}}}])
def test_a_setting_of_any_form_passes(path: str, odd: Any) -> None:
    told = shaping(path, {"reasoning": odd, "thinking": odd, "tool_choice": odd})
    assert all(len(setting) <= 60 for setting in told)


def test_a_budget_counts_by_its_power_of_two() -> None:
    near, far = ({"thinking": {"budget_tokens": budget}} for budget in (1100, 1900))
    assert shaping(MESSAGES, near) == shaping(MESSAGES, far)


def test_no_request_has_more_than_a_few_settings() -> None:
    assert len(shaping(CHAT, {"chat_template_kwargs": {f"k{number}": 1 for number in range(100)}})) == SETTINGS_MAX
