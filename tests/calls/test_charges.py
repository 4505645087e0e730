"""What a call reserves of its key's limits, and what it has used in the end."""

from __future__ import annotations

from typing import Any

import pytest
from calls import a_call

from llmserve.calls.charges import most_tokens, used_tokens
from llmserve.calls.in_flight import InFlightCall, Receipt
from llmserve.request import Call, Request
from llmserve.scheduling.rates import ServiceTime
from llmserve.wire.event_stream import Usage, UsageFilter
from predictor.prompt import Prompt

NOBODY: Any = None
EVENT = b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n'
SERVICE = ServiceTime(seconds_per_token=0.5, tokens_mean=80.0)


def call_of(*, stream: bool = False, **fields: Any) -> Call:
    return a_call("/v1/completions", b"", Prompt("", "m"), stream=stream, **fields)


def in_flight(*, stream: bool = False, started: bool = True, choices: int = 1) -> InFlightCall:
    """A call with a prompt of 10 tokens and likely answers of up to 60, which has waited for 3 s since second 10."""
    call = InFlightCall(call_of(stream=stream, choices=choices), 1, NOBODY)
    call.request = Request(1, 20.0, quantiles=(10.0, 20.0, 60.0), prompt_tokens=10.0, choices=choices)
    call.arrived_at_s = 10.0
    call.receipt = Receipt(1, 0, 1, "e", 3_000.0, 20.0) if started else None
    return call


def test_the_largest_likely_length_is_reserved() -> None:
    assert most_tokens(Request(1, 20.0, quantiles=(10.0, 20.0, 60.0)), call_of(), 80.0) == 60
    assert most_tokens(Request(1, 20.0, quantiles=(10.0, 20.0, 60.0)), call_of(output_tokens_max=40), 80.0) == 40
    assert most_tokens(Request(1, 20.0, quantiles=(10.0, 20.0, 60.0)), call_of(output_tokens_max=4_000), 80.0) == 60


@pytest.mark.parametrize(
    ("claimed", "limit", "reserved"),
    [(None, None, 80), (5, None, 80), (500, None, 500), (5, 300, 300), (500, 300, 300)],
)
def test_a_claim_never_lowers_the_reserve(claimed: float | None, limit: int | None, reserved: float) -> None:
    """The model's mean is 80; a client's own prediction has no likely lengths."""
    assert most_tokens(Request(1, claimed), call_of(output_tokens_max=limit), 80.0) == reserved


def test_the_engines_counts_are_what_was_used() -> None:
    call = in_flight()
    call.measured.counts = Usage(12, 33)
    assert used_tokens(call, SERVICE, 20.0) == (12, 33)
    call.measured.counts = Usage(None, None)
    assert used_tokens(call, SERVICE, 20.0) == (10, None), (
        "without counts, the prompt's estimate and all of the reserve"
    )


def test_a_stream_that_breaks_off_has_used_what_has_come() -> None:
    call = in_flight(stream=True)
    call.measured.usage = UsageFilter(strip=False)
    call.measured.usage.feed(EVENT * 7)
    assert used_tokens(call, SERVICE, 20.0) == (10, 7)


def test_a_client_that_leaves_pays_by_the_time_and_at_most_the_reserve() -> None:
    call = in_flight(choices=2)
    call.delivery.gone = True
    assert used_tokens(call, SERVICE, 18.0) == (10, 2 * 10)  # 5 s at 2 tokens a second
    assert used_tokens(call, SERVICE, 1_000.0) == (10, 2 * 60)
    call = in_flight(stream=True)
    call.delivery.gone = True
    assert used_tokens(call, SERVICE, 18.0) == (10, 0), "a stream that has not begun"


def test_what_never_ran_or_failed_without_an_answer_has_used_nothing() -> None:
    waiting = in_flight(started=False)
    waiting.gone = True
    assert used_tokens(waiting, SERVICE, 20.0) == (0, 0)
    assert used_tokens(in_flight(), SERVICE, 20.0) == (0, 0)
