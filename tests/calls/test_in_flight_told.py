"""What a client is told of a forecast that others' answers have taught."""

from __future__ import annotations

import math

import pytest
from calls import a_call

from llmserve.calls.in_flight import told_tokens
from llmserve.request import Call
from predictor.prompt import Prompt


def call(sender: str = "", own: float | None = None, choices: int = 1) -> Call:
    prompt = Prompt("hello", "m", sender=sender)
    return a_call("/v1/chat/completions", b"{}", prompt, False, predicted_tokens=own, choices=choices)


@pytest.mark.parametrize("tokens", [0.2, 1, 2, 3, 40, 389, 718, 731, 100_000])
def test_where_there_are_keys_a_forecast_is_told_as_a_power_of_two(tokens: float) -> None:
    told = told_tokens(call("alice"), tokens)
    assert told is not None
    assert math.log2(told) == round(math.log2(told))
    assert abs(math.log2(told) - math.log2(max(1, tokens))) <= 0.5
    assert told_tokens(call(), tokens) == tokens


def test_an_own_prediction_is_told_as_it_is() -> None:
    assert told_tokens(call("alice", own=333), 333) == 333
    assert told_tokens(call("alice"), None) is None
    assert told_tokens(call(choices=0), 5) is None
