"""Runs batches of completions on one engine and measures each batch, as data for fitting a profile."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import msgspec

from bins.fitting import Observation
from llmserve.engines.openai import OpenAIEngine
from llmserve.engines.power import GpuEnergy
from llmserve.errors import CannotMeasure
from llmserve.http.client import HttpClient
from llmserve.request import EngineInfo
from llmserve.wire.event_stream import Usage, usage_of
from llmserve.wire.headers import BATCH_HEADER, BATCH_SIZE_HEADER

CONNECT_S = 60.0
SAMPLE_S = 0.05  # interval between readings of the GPUs
ANSWER_S_MAX = 900.0  # time limit of a batch

OnBatch = Callable[[int, int, Observation], None]
"""Called after each batch with the batch's number (from 1), the number of batches, and the observation."""


class Refused(CannotMeasure):
    """The engine refused the request with a status of 4xx."""


# ---- requests -----------------------------------------------------------------------------------------------------


async def first_model(url: str) -> str:
    """Return the engine's first model. Raises EngineError, or CannotMeasure when the engine serves no model."""
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

    def __init__(self, http: HttpClient, model: str, seed: int) -> None:
        self._http = http
        self._model = model
        self._prompts = random.Random(seed)
        self._batches = 0
        self._forces_lengths = True

    async def learn(self, tokens: int) -> None:
        """Test whether the engine accepts a forced length. Raises CannotMeasure when a request without it fails too."""
        try:
            await self.batch(1, tokens)
        except Refused:
            self._forces_lengths = False
            await self.batch(1, tokens)

    async def batch(self, size: int, tokens: int) -> float:
        """Run `size` completions at once. Returns the longest's output tokens. Raises CannotMeasure when one fails."""
        self._batches += 1
        # A static-batching engine forms its batches by these headers; other engines ignore the headers.
        headers = {BATCH_HEADER: f"profile-{self._batches}", BATCH_SIZE_HEADER: str(size)}
        return max(await asyncio.gather(*[self._complete(tokens, headers) for _ in range(size)]))

    async def _complete(self, tokens: int, headers: dict[str, str]) -> float:
        """Run one completion. Returns its output tokens."""
        fields = {"model": self._model, "prompt": self._prompt(), "max_tokens": tokens, "temperature": 0}
        if self._forces_lengths:
            fields |= {"min_tokens": tokens, "ignore_eos": True}
        headers = {"content-type": "application/json", **headers}
        answer = await self._http.answer("POST", "/v1/completions", headers, msgspec.json.encode(fields))
        if answer.status != 200:
            kind = Refused if 400 <= answer.status < 500 else CannotMeasure
            raise kind(f"the engine answers {answer.status}: {answer.body[:300].decode(errors='replace')}")
        counted = (usage_of(answer.body) or Usage()).completion_tokens
        if not counted and not self._forces_lengths:
            raise CannotMeasure("the engine neither returns usage.completion_tokens nor accepts min_tokens")
        return float(counted or tokens)

    def _prompt(self) -> str:
        """Return a short prompt with a unique first word, so that no engine has a cached prefix."""
        number = self._prompts.randrange(10**11, 10**12)
        return f"{number} is a number. Tell me all that you know about it:"


# ---- measuring ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeasuringPlan:
    """The batches of a measurement: each round runs every size with every length, in random order."""

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
        batches = [(size, tokens) for size in self.sizes for tokens in self.lengths]
        return [batch for _ in range(self.rounds) for batch in rng.sample(batches, len(batches))]


@dataclass(frozen=True)
class Measured:
    """The result of a measurement. idle_w : idle power in W; None if not measured."""

    model: str
    batches: list[Observation]
    idle_w: float | None


async def measure(
    url: str, model: str | None, plan: MeasuringPlan, energy: GpuEnergy | None, *, idle_s: float, on_batch: OnBatch
) -> Measured:
    """Run a plan's batches, after an unmeasured warm-up batch of the largest size.

    model : None: the engine's first model.  idle_s : seconds over which idle power is measured; 0: not measured.
    Raises CannotMeasure, EngineError, HttpError when the engine does not answer, or ValueError for a wrong URL.
    """
    base = url.rstrip("/").removesuffix("/v1")
    client_of_engine = HttpClient(base, connect_s=CONNECT_S, idle_s=ANSWER_S_MAX, answer_s=ANSWER_S_MAX)
    async with client_of_engine as http, sampling(energy):
        idle_w = await idle_power_w(energy, idle_s) if energy is not None and idle_s > 0 else None
        model = model or await first_model(url)
        client = Client(http, model, plan.seed)
        await client.learn(min(plan.lengths))
        await client.batch(max(plan.sizes), plan.output_tokens)
        observations: list[Observation] = []
        batches = plan.batches()
        for size, tokens in batches:
            observations.append(await observe(client, energy, size, tokens))
            on_batch(len(observations), len(batches), observations[-1])
    return Measured(model, observations, idle_w)


async def observe(client: Client, energy: GpuEnergy | None, size: int, tokens: int) -> Observation:
    """Run one batch and measure it."""
    began_s = time.monotonic()
    before_j = energy.energy_j(began_s) if energy is not None else 0.0
    longest = await client.batch(size, tokens)
    ended_s = time.monotonic()
    joules = energy.energy_j(ended_s) - before_j if energy is not None else 0.0
    return Observation(size, longest, ended_s - began_s, joules if joules > 0 else None)  # 0: the counter did not move


async def idle_power_w(energy: GpuEnergy, idle_s: float) -> float:
    """Wait for `idle_s` seconds and return the mean power in W."""
    began_s = time.monotonic()
    before_j = energy.energy_j(began_s)
    await asyncio.sleep(idle_s)
    ended_s = time.monotonic()
    return (energy.energy_j(ended_s) - before_j) / (ended_s - began_s)


@asynccontextmanager
async def sampling(energy: GpuEnergy | None) -> AsyncIterator[None]:
    """Sample the GPUs every SAMPLE_S inside the block, for GPUs whose power is integrated."""

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
