"""What a line of the log says of a call: never a prompt, an answer or a key."""

from __future__ import annotations

from typing import Any

from llmserve.calls.in_flight import InFlightCall


def about(in_flight: InFlightCall) -> dict[str, Any]:
    """The argument `extra` of a line about a call."""
    return {"fields": fields_of(in_flight)}


def fields_of(in_flight: InFlightCall) -> dict[str, Any]:
    """What every line about a call says of the call; `id` is that of the journal."""
    call, receipt = in_flight.call, in_flight.receipt
    fields: dict[str, Any] = {"request_id": in_flight.name, "id": in_flight.request.id}
    if call.terms.key:
        fields["key"] = call.terms.key
    fields["model"] = call.model
    if receipt is not None:
        fields |= {"engine": receipt.engine, "attempt": in_flight.attempts}
    return fields
