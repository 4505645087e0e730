"""How long a running call still takes, by its forecast and the tokens that its client has got. Pure.

The count of a stream's tokens exists anyway, so this costs nothing until somebody asks.
"""

from __future__ import annotations

from llmserve.calls.in_flight import InFlightCall
from llmserve.scheduling.engines import remaining_tokens
from llmserve.scheduling.rates import ServiceTime


def remaining_s(in_flight: InFlightCall, service: ServiceTime, now_s: float) -> float:
    """Predicted seconds until a running call ends: the mean of its likely lengths above the tokens so far, less these.

    A stream goes on at its own speed. A body that comes whole shows no tokens, so their number follows from the time.
    An answer longer than all its likely lengths is expected to grow by a share of itself: nothing is known of its end
    but that long answers have more left than short ones (engines.OVERDUE_SHARE).
    service : times of its model's answers
    """
    request, per_token_s = in_flight.request, service.seconds_per_token
    generated = generated_tokens(in_flight, service, now_s)
    if in_flight.call.wire.stream and generated > 0:
        per_token_s = _ran_s(in_flight, now_s) / generated
    expected = service.tokens_mean if request.expected_tokens is None else request.expected_tokens
    return per_token_s * remaining_tokens(request.quantiles, expected, generated)


def generated_tokens(in_flight: InFlightCall, service: ServiceTime, now_s: float) -> float:
    """Tokens of each answer of a running call so far: those that have streamed, or by the time."""
    if in_flight.call.wire.stream:
        return in_flight.streamed_tokens / in_flight.request.sequences
    return _ran_s(in_flight, now_s) / service.seconds_per_token


def _ran_s(in_flight: InFlightCall, now_s: float) -> float:
    assert in_flight.receipt is not None, "a running call has a receipt"
    return max(0.0, now_s - in_flight.arrived_at_s - in_flight.receipt.queue_ms / 1e3)
