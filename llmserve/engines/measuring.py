"""Runs batches of completions on one engine, and measures each: what profiles are fitted to."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import aiohttp

from bins.fitting import Observation
from llmserve.engines.event_stream import usage_of
from llmserve.engines.openai_engine import OpenAIEngine
from llmserve.engines.power import GpuEnergy
from llmserve.errors import CannotMeasure
from llmserve.headers import BATCH_HEADER, BATCH_SIZE_HEADER
from llmserve.request import EngineInfo

SAMPLE_S = 0.05  # between readings of the GPUs
ANSWER_S_MAX = 900.0  # a batch without an end for so long is given up

OnBatch = Callable[[int, int, Observation], None]
"""Called after each batch with its number from 1, how many there are, and what was observed."""


class Refused(CannotMeasure):
    """It finds fault with the request: a status of 4xx."""


# ---- asking -------------------------------------------------------------------------------------------------------


async def first_model(url: str) -> str:
    """The first model that the engine serves. Raises EngineError, or CannotMeasure when it serves none."""
    engine = OpenAIEngine(EngineInfo(url, slots=1, barrier=False), url)
    try:
        health = await engine.probe()
    finally:
        await engine.close()
    if not health.models:
        raise CannotMeasure(f"{url} serves no model")
    return health.models[0].id


class Client:
    """Sends batches of completions to one engine."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, seed: int) -> None:
        self._session = session
        self._url = url.rstrip("/").removesuffix("/v1") + "/v1/completions"
        self._model = model
        self._prompts = random.Random(seed)
        self._batches = 0
        self._forces_lengths = True

    async def learn(self, tokens: int) -> None:
        """Find out whether answers can be forced to a length. Raises CannotMeasure when there are none either way."""
        try:
            await self.batch(1, tokens)
        except Refused:
            self._forces_lengths = False
            await self.batch(1, tokens)

    async def batch(self, size: int, tokens: int) -> float:
        """Run so many completions at once; the output tokens of the longest. Raises CannotMeasure when one fails."""
        self._batches += 1
        # A static-batching engine learns from these that they belong together; every other one ignores them.
        headers = {BATCH_HEADER: f"profile-{self._batches}", BATCH_SIZE_HEADER: str(size)}
        return max(await asyncio.gather(*[self._complete(tokens, headers) for _ in range(size)]))

    async def _complete(self, tokens: int, headers: dict[str, str]) -> float:
        """One completion's output tokens."""
        fields = {"model": self._model, "prompt": self._prompt(), "max_tokens": tokens, "temperature": 0}
        if self._forces_lengths:
            fields |= {"min_tokens": tokens, "ignore_eos": True}
        async with self._session.post(self._url, json=fields, headers=headers) as response:
            body = await response.read()
        if response.status != 200:
            kind = Refused if 400 <= response.status < 500 else CannotMeasure
            raise kind(f"the engine answers {response.status}: {body[:300].decode(errors='replace')}")
        counted = usage_of(body).completion_tokens
        if not counted and not self._forces_lengths:
            raise CannotMeasure("the engine tells no usage.completion_tokens, and takes no min_tokens")
        return float(counted or tokens)

    def _prompt(self) -> str:
        """Short, and unlike all others from its first word on: no engine has it in a cache."""
        number = self._prompts.randrange(10**11, 10**12)
        return f"{number} is a number. Tell me all that you know about it:"


# ---- measuring ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeasuringPlan:
    """Which batches run: in every round each size with each length, shuffled."""

    sizes: Sequence[int]
    output_tokens: int
    rounds: int
    seed: int

    @property
    def lengths(self) -> tuple[int, int]:
        return max(1, self.output_tokens // 4), self.output_tokens

    def batches(self) -> list[tuple[int, int]]:
        """(size, output tokens) in the order in which they run."""
        rng = random.Random(self.seed)
        every = [(size, tokens) for size in self.sizes for tokens in self.lengths]
        return [batch for _ in range(self.rounds) for batch in rng.sample(every, len(every))]


@dataclass(frozen=True)
class Measured:
    """idle_w : None: not measured."""

    model: str
    batches: list[Observation]
    idle_w: float | None


async def measure(
    url: str, model: str | None, plan: MeasuringPlan, energy: GpuEnergy | None, *, idle_s: float, on_batch: OnBatch
) -> Measured:
    """Run a plan's batches, after a largest one that does not count.

    model : None: the first that the engine serves.  idle_s : for so long idle power is measured; 0: not at all.
    Raises CannotMeasure, EngineError, or an aiohttp.ClientError when the engine cannot be reached.
    """
    timeout = aiohttp.ClientTimeout(total=ANSWER_S_MAX)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session, sampling(energy):
        idle_w = await idle_power_w(energy, idle_s) if energy is not None and idle_s > 0 else None
        model = model or await first_model(url)
        client = Client(session, url, model, plan.seed)
        await client.learn(min(plan.lengths))
        await client.batch(max(plan.sizes), plan.output_tokens)
        found: list[Observation] = []
        batches = plan.batches()
        for size, tokens in batches:
            found.append(await observe(client, energy, size, tokens))
            on_batch(len(found), len(batches), found[-1])
    return Measured(model, found, idle_w)


async def observe(client: Client, energy: GpuEnergy | None, size: int, tokens: int) -> Observation:
    """Run one batch and measure it."""
    began_s = time.monotonic()
    before_j = energy.energy_j(began_s) if energy is not None else 0.0
    longest = await client.batch(size, tokens)
    ended_s = time.monotonic()
    joules = energy.energy_j(ended_s) - before_j if energy is not None else 0.0
    return Observation(size, longest, ended_s - began_s, joules if joules > 0 else None)  # 0: the counter stood still


async def idle_power_w(energy: GpuEnergy, idle_s: float) -> float:
    """Mean watts over the next `idle_s` seconds."""
    began_s = time.monotonic()
    before_j = energy.energy_j(began_s)
    await asyncio.sleep(idle_s)
    ended_s = time.monotonic()
    return (energy.energy_j(ended_s) - before_j) / (ended_s - began_s)


@asynccontextmanager
async def sampling(energy: GpuEnergy | None) -> AsyncIterator[None]:
    """GPUs whose power is integrated are read all the while."""

    async def sample() -> None:
        while energy is not None:
            energy.sample(time.monotonic())
            await asyncio.sleep(SAMPLE_S)

    task = asyncio.create_task(sample())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
