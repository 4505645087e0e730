"""One line of the log for each request of a client, when its answer is written or its client has gone."""

from __future__ import annotations

import logging
from typing import Any

from llmserve.calls.client_request import ClientExchange
from llmserve.calls.in_flight import InFlightCall
from llmserve.calls.log_fields import fields_of

log = logging.getLogger("llmserve.access")


def enable() -> None:
    """Write the lines whatever --log-level says."""
    log.setLevel(logging.INFO)


def write(exchange: ClientExchange) -> None:
    """Write the line of a request that has ended. A client that left before the head of its answer has no status."""
    call = exchange.state.call
    fields: dict[str, Any] = {"method": exchange.method, "path": exchange.path}
    if exchange.status:
        fields["status"] = exchange.status
    fields["ms"] = _ms(exchange.seconds)
    if call is not None:
        fields |= fields_of(call) | _served(call)
    elif exchange.state.key:
        fields["key"] = exchange.state.key
    if call is not None and call.delivery.error:
        fields["error"] = call.delivery.error
    elif exchange.state.error is not None:
        fields["error"] = exchange.state.error.code or exchange.state.error.type
    fields["bytes"] = exchange.written
    log.info("access", extra={"fields": fields})


def _served(call: InFlightCall) -> dict[str, Any]:
    """How an engine has served the call, as far as it has. Tokens are those of the engine's count."""
    fields: dict[str, Any] = {}
    if call.receipt is not None:
        fields["queue_ms"] = round(call.receipt.queue_ms, 1)
    measured, counts = call.measured, call.measured.counts
    if measured.first_at_s is not None:
        fields["first_token_ms"] = _ms(measured.first_at_s - call.arrived_at_s)
    if counts is not None and counts.prompt_tokens is not None:
        fields["prompt_tokens"] = counts.prompt_tokens
    if counts is not None and counts.cached_tokens is not None:
        fields["cached_tokens"] = counts.cached_tokens
    tokens = counts.completion_tokens if counts is not None else measured.streamed_tokens
    if tokens is not None and call.delivery.answered:
        fields["output_tokens"] = tokens
    if call.delivery.gone:
        fields["gone"] = "client"
    return fields


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 1)
