"""Finds engines that run on this machine, on the ports that they have without further settings."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from llmserve.engines.dialects import MODELS_PATH
from llmserve.engines.probing import models_of
from llmserve.http.client import HttpClient
from llmserve.http.connecting import HttpError

PORTS = {8000: "vLLM", 8001: "vLLM", 8080: "llama.cpp", 11434: "Ollama", 1234: "LM Studio", 30000: "SGLang"}
"""Usual ports, and whose they are. What answers there tells what it is itself, once it is an engine."""

ANSWER_S = 1.0  # this machine answers at once, if at all
MODELS_SHOWN = 5


@dataclass(frozen=True)
class Nearby:
    """A server that lists models, or (models: None) refuses to without a key."""

    url: str
    models: tuple[str, ...] | None

    def __str__(self) -> str:
        place = self.url.removeprefix("http://")
        if self.models is None:
            return f"{place} (needs a key: --engine {self.url} --engine-api-key KEY)"
        more = ", ..." if len(self.models) > MODELS_SHOWN else ""
        return f"{place} ({', '.join(self.models[:MODELS_SHOWN])}{more})"


async def nearby(ports: tuple[int, ...] = tuple(PORTS)) -> list[Nearby]:
    """The servers of models at these ports of 127.0.0.1, but no other llmserve."""
    asked = await asyncio.gather(*[_asked(f"http://127.0.0.1:{port}") for port in ports])
    return [server for server in asked if server is not None]


async def _asked(url: str) -> Nearby | None:
    try:
        client = HttpClient(url, connect_s=ANSWER_S, idle_s=ANSWER_S, answer_s=ANSWER_S, headers_kept=[b"server"])
        async with client, asyncio.timeout(2 * ANSWER_S):
            answer = await client.answer("GET", MODELS_PATH)
    except (HttpError, TimeoutError):
        return None
    if b"llmserve" in answer.headers.get(b"server", b""):
        return None
    if answer.status in (401, 403):
        return Nearby(url, None)
    listed = models_of(answer.body) if answer.status == 200 else None
    return Nearby(url, tuple(model.id for model in listed.models)) if listed is not None and listed.models else None
