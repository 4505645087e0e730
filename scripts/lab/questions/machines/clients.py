"""Clients of a cluster, and the end of each of their requests."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import aiohttp
import msgspec
import numpy as np

TRY_AGAIN_S = 0.2
GIVE_UP_S = 60.0
TOKEN = b'"content":"tok "'

End = Literal["whole", "told", "cut", "refused", "wrong"]
"""whole: every token that was asked for, once. told: an error event after the first byte. cut: the gateway died after
the
first byte. refused: an error without a first byte. wrong: anything else."""


@dataclass
class Asked:
    """One request. times in seconds of the loop's clock; None: not yet"""

    number: int
    model: str
    tokens: int
    sent_s: float
    first_s: float | None = None
    ended_s: float | None = None
    ends: list[End] = field(default_factory=list)
    tries: int = 0
    note: str = ""


class Clients:
    """Send streams at random times to the gateways in turn. A request without a byte of an answer is sent again, to the
    next gateway, when its gateway does not accept it, is stopping (503, draining) or dies: as load balancers do.
    """

    def __init__(self, gateways: Sequence[str], models: Sequence[str], rate_per_s: float, seed: int) -> None:
        self._gateways = itertools.cycle(gateways)
        self._models = models
        self._rate_per_s = rate_per_s
        self._rng = np.random.default_rng(seed)
        self.asked: list[Asked] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._sending = asyncio.create_task(self._send())

    async def stop(self) -> None:
        """Send no more, and wait for the answers."""
        if self._sending is not None:
            self._sending.cancel()
        await asyncio.gather(*self._tasks)

    async def _send(self) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
            try:
                while True:
                    await asyncio.sleep(self._rng.exponential(1.0 / self._rate_per_s))
                    number = len(self.asked)
                    model, tokens = str(self._rng.choice(self._models)), int(self._rng.integers(5, 40))
                    asked = Asked(number, model, tokens, time.monotonic())
                    self.asked.append(asked)
                    task = asyncio.create_task(self._ask(session, asked))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
            except asyncio.CancelledError:
                await asyncio.gather(*self._tasks)

    async def _ask(self, session: aiohttp.ClientSession, asked: Asked) -> None:
        body = {"model": asked.model, "stream": True, "max_tokens": asked.tokens}
        data = msgspec.json.encode({**body, "messages": [{"role": "user", "content": f"request {asked.number}"}]})
        while not asked.ends:
            asked.tries += 1
            end = await self._try(session, next(self._gateways), data, asked)
            if end is not None:
                asked.ends.append(end)
            elif time.monotonic() - asked.sent_s > GIVE_UP_S:
                asked.ends.append("refused")
            else:
                await asyncio.sleep(TRY_AGAIN_S)
        asked.ended_s = time.monotonic()

    async def _try(self, session: aiohttp.ClientSession, gateway: str, data: bytes, asked: Asked) -> End | None:
        """None: no byte of an answer has come, and the gateway is gone."""
        received = b""
        try:
            async with session.post(f"{gateway}/v1/chat/completions", data=data) as response:
                if response.status != 200:
                    asked.note = f"{response.status} {(await response.read())[:200].decode(errors='replace')}"
                    return None if response.status == 503 and "draining" in asked.note else "refused"
                async for chunk in response.content.iter_any():
                    if asked.first_s is None and TOKEN in chunk:
                        asked.first_s = time.monotonic()
                    received += chunk
        except (aiohttp.ClientError, OSError) as error:
            asked.note = type(error).__name__
            return "cut" if received else None
        if b'"error"' in received:
            asked.note = received[-300:].decode(errors="replace")
            return "told" if asked.first_s is not None else "refused"
        whole = received.count(TOKEN) == asked.tokens and received.count(b"[DONE]") == 1
        return "whole" if whole else "wrong"
