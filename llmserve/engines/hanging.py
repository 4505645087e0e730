"""A server that is there, but does not answer any more."""

from __future__ import annotations

import asyncio
import time

from llmserve.http.client import HttpClient
from llmserve.http.connecting import HttpError

PROBES = 3  # without an answer, in a row: a pause of the one who asks counts once


async def hang(url: str, hung_s: float) -> None:
    """Return when GET /health has had no answer, of whatever status, for `hung_s` seconds."""
    probe_s, failed = hung_s / PROBES, 0
    client = HttpClient(url, connect_s=probe_s, idle_s=probe_s, answer_s=probe_s)
    try:
        while failed < PROBES:
            next_s = time.monotonic() + probe_s
            try:
                response = await client.request(client.opening("GET", "/health", {}), fresh=True)
                response.close()
                failed = 0
            except HttpError:
                failed += 1
            await asyncio.sleep(next_s - time.monotonic())
    finally:
        await client.close()
