"""The length record: training data for a predictor, one JSON line for each completed request.

Unlike the journal, the record holds prompts, so the server writes it only on request. It never holds an answer.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import msgspec

from llmserve.errors import JournalError
from llmserve.request import Call
from llmserve.runtime.private_file import appending

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
"""Parameters that the record holds, where the client set them."""

log = logging.getLogger("llmserve")


class LengthRecord:
    """A JSON Lines file that only grows. A write that fails ends the record, never a request."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = appending(path)
        except OSError as error:
            raise JournalError(f"cannot write the record {path}: {error.strerror}") from error
        self._path = path
        log.info(
            "recording to %s: of each completed request the last user turn, the system prompt, the size of the "
            "history, the model, stop strings and sampling parameters, and the answer's length; never the answer",
            path,
        )

    def write(self, call: Call, output_tokens: int, *, capped: bool) -> None:
        """output_tokens : length of one answer."""
        prompt = call.prompt
        row = {
            "prompt": prompt.text,
            "system": prompt.system,
            "history_characters": prompt.history_characters,
            "model": prompt.model,
            "stop": prompt.stop,
            "max_tokens": call.bounds.output_tokens_max,
            **_sampling(call.wire.body),
            "output_tokens": output_tokens,
            "finish_reason": "length" if capped else "stop",
        }
        try:
            self._file.write(json.dumps(row).encode() + b"\n")  # ASCII: a client may send half a surrogate pair
            self._file.flush()
        except (OSError, ValueError) as error:  # a full disk; a closed file
            if not self._file.closed:
                log.error("the record %s ends here: %s", self._path, error)
                self.close()

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            log.error("the record %s may lack its last lines: %s", self._path, error)


def _sampling(body: bytes) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(body)
    except msgspec.MsgspecError:  # numbers such as 1e999, which the HTTP server accepts
        return {}
    return {name: fields[name] for name in SAMPLING if isinstance(fields.get(name), int | float)}
