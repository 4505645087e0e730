"""The log on standard error: a line of text, or of JSON, with its time, its level and the fields of its request.

    2026-11-23T17:20:05.123Z WARNING engine a broke off its answer request_id=llmserve-7 id=7 model=m engine=a attempt=1

A line never has a prompt, an answer or a key: the fields of a call are chosen here.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from llmserve.calls.in_flight import InFlightCall

LogFormat = Literal["text", "json"]
VALUE_CHARS_MAX = 200  # of a value that comes from a client
PLAIN = re.compile(r"[\w./:@+*-]+", re.ASCII)  # needs no quotes


def configure(level: str, form: LogFormat) -> None:
    """Write all logs of this process to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def about(in_flight: InFlightCall) -> dict[str, Any]:
    """The argument `extra` of a line about a call."""
    return {"fields": fields_of(in_flight)}


def fields_of(in_flight: InFlightCall) -> dict[str, Any]:
    """What every line about a call says of it; `id` is that of the journal."""
    call, receipt = in_flight.call, in_flight.receipt
    fields: dict[str, Any] = {"request_id": in_flight.name, "id": in_flight.request.id}
    if call.prompt.sender:
        fields["key"] = call.prompt.sender
    fields["model"] = call.model
    if receipt is not None:
        fields |= {"engine": receipt.engine, "attempt": in_flight.attempts}
    return fields


def _time_of(record: logging.LogRecord) -> str:
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{at}.{int(record.msecs):03d}Z"


def _cut(value: object) -> object:
    """Clients name streams, models and requests: a value of theirs must not fill the log."""
    return value[:VALUE_CHARS_MAX] if isinstance(value, str) else value


class TextLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        parts = [_time_of(record), record.levelname, record.getMessage()]
        fields: Mapping[str, object] = getattr(record, "fields", {})
        parts += [f"{name}={_shown(_cut(value))}" for name, value in fields.items()]
        line = " ".join(parts)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _shown(value: object) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if PLAIN.fullmatch(text) else msgspec.json.encode(text).decode()


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"time": _time_of(record), "level": record.levelname.lower(), "message": record.getMessage()}
        fields: Mapping[str, object] = getattr(record, "fields", {})
        line |= {name: _cut(value) for name, value in fields.items()}  # type: ignore[misc]
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()
