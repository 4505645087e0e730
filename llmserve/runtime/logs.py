"""The log on standard error: a line of text, or of JSON, with its time, its level and the fields of its request.

    2026-11-23T17:20:05.123Z WARNING engine a broke off its answer request_id=llmserve-7 id=7 model=m engine=a attempt=1

A line never has a prompt, an answer or a key: the fields of a call are chosen in calls/log_fields.py.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Mapping
from typing import Literal

import msgspec

LogFormat = Literal["text", "json"]
VALUE_CHARS_MAX = 200  # of a value that comes from a client
PLAIN = re.compile(r"[\w./:@+*-]+", re.ASCII)  # needs no quotes


def configure(level: str, form: LogFormat) -> None:
    """Write all logs of this process to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("asyncio").setLevel(logging.WARNING)


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
