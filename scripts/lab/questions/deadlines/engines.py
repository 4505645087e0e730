"""The engines: timed engines on two GPUs with two models each, or two real vLLM servers that share this machine."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import numpy as np
from kit.client import session_of
from kit.servers import fake_engine, vllm

from bins.curve import Curve
from bins.profile import Profile
from questions.deadlines.serving import Engines, ask
from questions.deadlines.traffic import Setting, Stream


@dataclass(frozen=True)
class Timed:
    """A batch of b requests whose longest answer has L tokens takes prefill_s + L (step_s + row_s b)."""

    prefill_s: float
    step_s: float
    row_s: float


WORKERS = 2
# An image classifier answers with one token, and its batch takes alpha b + beta, as in Table 4 of Shepherd.
TIMED = {"classifier": Timed(0.0, 0.040, 0.005), "chat": Timed(0.3, 0.020, 0.0005)}
FAKE = Setting(
    (
        Stream("images", "classifier", slo_s=0.4, rate_per_s=8.0, tokens=(1, 1), burst_per_s=90.0),
        Stream("chats", "chat", slo_s=4.0, rate_per_s=1.2, tokens=(30, 70)),
    ),
    seconds=18.0,
    burst_s=(6.0, 11.0),
    batch_size=16,
)


@asynccontextmanager
async def timed_engines(setting: Setting, timed: Mapping[str, Timed] = TIMED) -> AsyncIterator[Engines]:
    """Timed engines, each in a process of its own."""
    source = "the settings of the timed engine"
    profiles = {
        model: Profile.timed(model, Curve.affine(time_.row_s, time_.step_s), prefill_s=time_.prefill_s, source=source)
        for model, time_ in timed.items()
    }
    placed = []
    async with AsyncExitStack() as stack:
        for worker in range(WORKERS):
            for model, time_ in timed.items():
                flags = ["--barrier", "--slots", str(setting.batch_size), "--step-s", str(time_.step_s)]
                flags += ["--row-s", str(time_.row_s), "--prefill-s", str(time_.prefill_s)]
                server = await stack.enter_async_context(fake_engine(model, *flags))
                placed.append(f"gpu{worker}={server.url}")
        yield Engines(f"timed engines, {WORKERS} GPUs with {len(timed)} models each", placed, profiles)


VLLM = Setting(
    (
        Stream("completions", "quick", slo_s=0.6, rate_per_s=4.0, tokens=(8, 8), burst_per_s=26.0),
        Stream("essays", "thorough", slo_s=9.0, rate_per_s=0.3, tokens=(250, 350)),
    ),
    seconds=24.0,
    burst_s=(10.0, 14.0),
    batch_size=8,
)
PROBES = (8, 200)  # tokens of the answers with which batch times are measured
PROBED = (1, 2, 4, 8)  # sizes of the measured batches
PROBE_ROUNDS = 3


@asynccontextmanager
async def vllm_engines(setting: Setting, python: str) -> AsyncIterator[Engines]:
    """Two vLLM servers, which serve the demo model under two names. They are one worker, because they share this
    machine's cores, as two models share a GPU.
    """
    placed, profiles = [], {}
    async with AsyncExitStack() as stack:
        for model in [stream.model for stream in setting.streams]:
            server = await stack.enter_async_context(vllm(python, f"vLLM, {model}", setting.batch_size, model=model))
            placed.append(f"gpu0={server.url}")
            profiles[model] = await measured(server.url, model)
        yield Engines("two vLLM servers on the CPU, one GPU's worth", placed, profiles)


async def measured(url: str, model: str) -> Profile:
    """The profile of an idle engine, from median times of batches of PROBED sizes and PROBES tokens."""
    took_s: dict[tuple[int, int], list[float]] = defaultdict(list)
    async with session_of() as session:
        for _, size, tokens in itertools.product(range(PROBE_ROUNDS), PROBED, PROBES):
            began_s = time.perf_counter()
            replies = await asyncio.gather(*[ask(session, url, model, tokens) for _ in range(size)])
            assert all(reply.status == 200 for reply in replies), replies
            took_s[size, tokens].append(time.perf_counter() - began_s)
    return profile_of(model, {key: statistics.median(times) for key, times in took_s.items()})


def profile_of(model: str, took_s: Mapping[tuple[int, int], float]) -> Profile:
    """took_s : (batch size, tokens of an answer) -> seconds of a batch, with the same two lengths for all sizes"""
    sizes, (few, many) = sorted({size for size, _ in took_s}), sorted({tokens for _, tokens in took_s})
    steps = [(took_s[size, many] - took_s[size, few]) / (many - few) for size in sizes]
    rising = np.maximum.accumulate(np.maximum(steps, 1e-6))
    rest_s = [took_s[size, few] - few * step for size, step in zip(sizes, rising, strict=True)]
    prefill_s = max(0.0, statistics.median(rest_s))
    return Profile.timed(model, Curve.table(sizes, rising), prefill_s=prefill_s, source="measured before the rounds")
