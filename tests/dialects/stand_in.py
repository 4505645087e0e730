"""An engine that speaks a dialect, well or with one of its faults."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict

from dialects.table import NOT_FOUND, Dialect
from engines.lying import LyingEngine, http

WELL, ERROR_FIRST, ERROR_BETWEEN, BUSY, GONE = "well", "error first", "error between", "busy", "gone"


class DialectEngine(LyingEngine):
    """says : WELL, or the fault with which POSTs are answered from now on"""

    def __init__(self, dialect: Dialect, says: str = WELL) -> None:
        not_found = _answer_of(*NOT_FOUND)
        super().__init__(self._say, probes={"/v1/models": _answer_of("200 OK", "application/json", dialect.models)})
        told = {path: _answer_of(*answer) for path, answer in dialect.probes.items()}
        self._probes = defaultdict(lambda: not_found, {"/v1/models": self._probes["/v1/models"], **told})
        self.dialect = dialect
        self.says = says

    async def _say(self, writer: asyncio.StreamWriter) -> None:
        """Answer the last request. A stream goes out event by event."""
        dialect, request = self.dialect, json.loads(self.requests[-1])
        refused = {BUSY: dialect.busy, GONE: dialect.gone}.get(self.says)
        if refused is not None:
            after = [f"retry-after: {refused.after_s}"] if refused.after_s is not None else []
            head = [f"content-type: {refused.content_type}", *after]
            writer.write(http(refused.body, *head, status=refused.status))
        elif not request.get("stream"):
            body = dialect.whole if self.says == WELL else dialect.whole_error
            writer.write(_answer_of("200 OK", "application/json", body))
        else:
            usage = bool((request.get("stream_options") or {}).get("include_usage"))
            told = {
                WELL: dialect.stream(usage=usage),
                ERROR_FIRST: dialect.error_first,
                ERROR_BETWEEN: dialect.broken,
            }[self.says]
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for event in told.split(b"\n\n"):
                piece = event + b"\n\n" if event and not event.endswith(b"\n") else event
                if piece:
                    writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                    await writer.drain()
                    await asyncio.sleep(0)
            writer.write(b"0\r\n\r\n")
        await writer.drain()


def _answer_of(status: str, content_type: str, body: bytes) -> bytes:
    return http(body, f"content-type: {content_type}", status=status)
