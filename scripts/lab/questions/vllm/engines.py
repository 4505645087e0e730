"""Running vLLM servers with measured speeds, and the servers in front of them."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from kit.client import get_text
from kit.progress import log
from kit.servers import Server, flags_of, front_end, running, vllm
from make import demo_corpus

from bins.edges import equal_mass_edges
from llmserve.engines.process import free_port
from questions.vllm.arrangements import ROUTER_POLICIES, Arrangement
from questions.vllm.loads import Ints, Load, ServiceTime
from questions.vllm.passes import all_at_once, ask, send, session_of, shares, summary

MEMORY_SLOTS = 16
SMALL_CACHE = ["--num-gpu-blocks-override", "40", "--block-size", "32"]  # 1,280 tokens; an answer may need 1,024
CAPACITY_BURSTS = 3


@dataclass(frozen=True)
class Engines:
    """Running vLLM servers and their speeds. tokens : of the answer to each prompt.  requests_per_s : of a burst"""

    servers: list[Server]
    slots: int
    prompts: list[str]
    tokens: Ints
    service: ServiceTime
    requests_per_s: float
    vllm: str

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.servers]


def llmserve_flags(
    args: argparse.Namespace, arrangement: Arrangement, engines: Engines, state: Path | None = None
) -> list[str]:
    """state : folder of what llmserve's own forecasts are learnt in"""
    flags = ["--predictor", "none", "--log-level", "warning", *flags_of("engine", engines.urls)]
    flags += ["--state", str(state)] if arrangement.own else ["--memory-keys", "0"]
    if arrangement.way == "barrier":
        # Without a predictor llmserve has no bins before 256 requests have come, unless flags set the edges.
        edges = ",".join(f"{edge:g}" for edge in equal_mass_edges(engines.tokens, arrangement.bins))
        flags += ["--barrier", "--batch-size", str(engines.slots), "--bins", str(arrangement.bins)]
        return [*flags, *(["--edges", edges] if edges else [])]
    flags += ["--slots", str(engines.slots), "--order", arrangement.way]
    flags += [] if arrangement.bound else ["--no-memory-bound"]
    flags += ["--engine-priority"] if arrangement.ahead else []
    return flags if args.look_ahead is None else [*flags, "--look-ahead", str(args.look_ahead)]


@asynccontextmanager
async def front(
    args: argparse.Namespace, arrangement: Arrangement, engines: Engines, state: Path | None = None
) -> AsyncIterator[str]:
    """Yield the URL for the arrangement's requests. The server at this URL lives as long as the context."""
    if arrangement.way in ("direct", "priority"):
        yield engines.urls[0]
        return

    flags = llmserve_flags(args, arrangement, engines, state)

    def router(port: int) -> list[str]:
        words = [args.router, "--host", "127.0.0.1", "--port", str(port), "--policy", arrangement.way]
        words += ["--prometheus-port", str(free_port()), "--log-level", "warning"]
        return [*words, "--worker-urls", *engines.urls]

    way = arrangement.way
    routed = way in ROUTER_POLICIES
    checkout = args.before if arrangement.before else None
    served = running(way, router, ready="/health") if routed else front_end(way, *flags, checkout=checkout)
    async with served as server:
        yield server.url


async def capacity_per_s(engines: Engines, load: Load) -> float:
    """Requests per second of the engines with this load: the best of several bursts, sent directly in equal shares.

    The best burst counts, because other work on the machine can only slow a burst down.
    """
    placed = shares(load.tokens, len(engines.urls))
    rates = []
    for _ in range(CAPACITY_BURSTS):
        outcomes = await send([engines.urls[place] for place in placed], all_at_once(load.prompts))
        rates.append(summary(outcomes, load, engines.service)["tokens_per_s_saturated"])
    return max(rates) / float(load.tokens.mean())


@contextmanager
def kept_off_the_first_core(apart: bool) -> Iterator[None]:
    """If `apart`, keep this process and its children off the first core, which stands for an engine's GPU."""
    cores = os.sched_getaffinity(0)
    if apart:
        os.sched_setaffinity(0, cores - {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def engine_core_of(server: Server) -> int:
    """The id of the server's engine core, a process, which is also the id of its first thread, which computes."""
    processes = psutil.Process(server.process.pid).children(recursive=True)
    (engine_core,) = [process for process in processes if process.name().startswith("VLLM::EngineC")]
    return engine_core.pid


def move_engine_to_the_first_core(server: Server, core: int) -> None:
    """Move the computing thread of the server's engine core; the API server stays on the other cores."""
    os.sched_setaffinity(engine_core_of(server), {core})


# ---- starting and measuring the engines ----------------------------------------------------------------------------


@asynccontextmanager
async def started(args: argparse.Namespace, count: int, requests: int, *, small: bool) -> AsyncIterator[Engines]:
    """Start `count` vLLM servers; measure `requests` answer lengths, and service times. small : little memory"""
    slots = MEMORY_SLOTS if small else args.slots if count == 1 else args.slots_each
    cores = os.sched_getaffinity(0)
    apart = count < (os.cpu_count() or 1)
    async with AsyncExitStack() as stack:
        log(f"starting {count} vLLM server{'s' * (count > 1)}")
        stack.enter_context(kept_off_the_first_core(apart))
        servers = []
        for index in range(count):
            flags = ["--scheduling-policy", "priority", *(SMALL_CACHE if small else ())]
            server = vllm(args.vllm_python, f"vLLM {index}", slots, *flags)
            servers.append(await stack.enter_async_context(server))
        if apart:
            move_engine_to_the_first_core(servers[0], min(cores))
        urls = [server.url for server in servers]
        prompts = [example.prompt for example in demo_corpus.examples(requests, seed=args.seed, held_out=True)]
        placed = [urls[index % count] for index in range(requests)]
        await send(placed[:64], all_at_once(prompts[:64]))  # the first answers of a fresh server are slow
        outcomes = await send(placed, all_at_once(prompts))
        for outcome in outcomes:
            if outcome.failure:
                raise RuntimeError(f"vLLM itself failed: {outcome.failure}")
        tokens = np.array([outcome.tokens for outcome in outcomes])
        rate = len(outcomes) / max(outcome.latency_s for outcome in outcomes)
        service = await fit_service_time(urls[0], prompts, tokens)
        async with session_of() as session:
            version = json.loads(await get_text(session, f"{urls[0]}/version"))["version"]
        log(f"{requests} prompts, mean {tokens.mean():.0f} tokens, at most {tokens.max()}; {rate:.1f} requests/s")
        log(f"service time: {1e3 * service.start_s:.1f} ms + {1e3 * service.token_s:.2f} ms a token")
        yield Engines(servers, slots, prompts, tokens, service, rate, version)


async def fit_service_time(url: str, prompts: list[str], tokens: Ints, count: int = 16) -> ServiceTime:
    """Fitted to prompts spread evenly over the lengths. Each is sent three times, one request at a time."""
    chosen = np.argsort(tokens, kind="stable")[np.linspace(0, tokens.size - 1, min(count, tokens.size)).astype(int)]
    seconds: dict[int, list[float]] = {int(index): [] for index in chosen}
    async with session_of() as session:
        for _ in range(3):
            for index, times in seconds.items():
                question = all_at_once([prompts[index]])[0]
                times.append((await ask(session, url, question, time.perf_counter())).latency_s)
    medians = [statistics.median(times) for times in seconds.values()]
    return ServiceTime.fitted([int(tokens[index]) for index in seconds], medians)
