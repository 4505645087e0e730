"""Ways to two vLLM servers: alone, behind vllm-router, behind llmserve; and the servers themselves."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from kit.client import MODEL
from kit.servers import Server, flags_of, front_end, running, vllm

from llmserve.engines.process import free_ports

DIRECT, EVENTS, BARE, TOLD = "direct", "events", "bare", "told"
POLICIES = ("kv_aware", "cache_aware", "round_robin")
NAMES = {
    DIRECT: "vLLM directly",
    EVENTS: "llmserve with KV events",
    BARE: "llmserve without",
    TOLD: "llmserve with --slots",
    **{policy: f"vllm-router {policy}" for policy in POLICIES},
}
BLOCK_TOKENS = 32  # the smallest of vLLM on a CPU
CONTEXT_TOKENS = 4096


@dataclass(frozen=True)
class Engine:
    """A vLLM server with a prefix cache, and where it publishes the changes of the cache."""

    server: Server
    events: str
    replay: str

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def name(self) -> str:
        """As llmserve names the engine at this URL."""
        return self.url.removeprefix("http://")


@asynccontextmanager
async def engine(
    python: str, name: str, slots: int, cache_blocks: int, context_tokens: int = CONTEXT_TOKENS
) -> AsyncIterator[Engine]:
    """python : an interpreter that has vLLM.  cache_blocks : of BLOCK_TOKENS tokens"""
    ports = free_ports(2)
    events, replay = [f"tcp://127.0.0.1:{port}" for port in ports]
    bound = f"tcp://*:{ports[0]}"  # an address without a star is one that vLLM connects to
    published = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": bound, "replay_endpoint": replay}
    flags = ["--enable-prefix-caching", "--enable-prompt-tokens-details", "--block-size", str(BLOCK_TOKENS)]
    flags += ["--num-gpu-blocks-override", str(cache_blocks), "--kv-events-config", json.dumps(published)]
    flags += ["--hf-overrides", json.dumps({"max_position_embeddings": context_tokens})]
    async with vllm(python, name, slots, *flags, context_tokens=context_tokens) as server:
        yield Engine(server, events, replay)


@asynccontextmanager
async def engines(
    python: str, count: int, slots: int, cache_blocks: int, context_tokens: int = CONTEXT_TOKENS
) -> AsyncIterator[list[Engine]]:
    async with AsyncExitStack() as stack:
        starting = [engine(python, f"vLLM {index}", slots, cache_blocks, context_tokens) for index in range(count)]
        yield [await stack.enter_async_context(one) for one in starting]


@asynccontextmanager
async def reached(
    arrangement: str, engines: Sequence[Engine], router: str, *further: str, slots: int = 0
) -> AsyncIterator[list[str]]:
    """The URLs that take turns for the conversations of an arrangement. A server in front has learnt nothing.

    further : flags of llmserve.  slots : of each engine, for TOLD
    """
    urls = [one.url for one in engines]
    if arrangement == DIRECT:
        yield urls
        return
    if arrangement in POLICIES:
        flags = ["--policy", arrangement, "--log-level", "warning", "--worker-urls", *urls]
        if arrangement == "kv_aware":
            flags += flags_of("kv-event-source", [f"{one.url}={one.events}" for one in engines])
            flags += flags_of("kv-event-replay-source", [f"{one.url}={one.replay}" for one in engines])
            flags += ["--kv-event-block-size", str(BLOCK_TOKENS), "--kv-event-model", MODEL]

        def command(port: int) -> list[str]:
            (other,) = free_ports(1)
            return [router, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(other), *flags]

        async with running(NAMES[arrangement], command, ready="/health") as server:
            yield [server.url]
        return
    flags = ["--log-level", "warning", *flags_of("engine", urls), *further]
    if arrangement == TOLD:
        flags += ["--slots", str(slots)]
    if arrangement == EVENTS:
        flags += flags_of("kv-events", [f"{one.name}={one.events},{one.replay}" for one in engines])
    async with front_end(NAMES[arrangement], *flags) as server:
        yield [server.url]
