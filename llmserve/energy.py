"""Joules that the engines take: read from this machine's GPUs, or modelled from what the engines run.

    n       sequences that run together on an engine
    P(n)    W, its power: `Profile.power_w(n)` while it runs any, `Profile.idle_w` while it runs none
    J       joules, the sum over engines of the integral of P over the time that each is up

A static batch keeps all its rows until its last answer has ended, so a barrier engine runs the n that it began with.
Its prefill takes `Profile.prefill_j`, once, and P(n) counts from `Profile.prefill_s` after its start on. A refill
engine runs what it was sent, and what is beyond its slots waits inside; who is in prefill counts among the n, and
prefills have no joules of their own. The simulator counts in the same way (simulation/engine_model.py). A model says
what the profiled engine would have drawn in the time that this one really took.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import numpy as np

from bins.profile import Profile
from llmserve.cluster.journal import Step
from llmserve.engines.power import GpuEnergy
from llmserve.request import Batch, EngineInfo
from llmserve.scheduling.messages import BatchEnded, EngineLost, EngineReady, RequestEnded, StartBatch

SAMPLE_EVERY_S = 0.25  # between two readings of the GPUs: the age of the joules that are told


class EnergyMeter(Protocol):
    """Tells joules.

    source       how it knows: "nvml" (measured) or "modelled"
    of_all_work  whether all engines' work is in them, so that they can be shared among all requests and tokens
    """

    @property
    def source(self) -> str: ...

    @property
    def of_all_work(self) -> bool: ...

    def joules(self, now_s: float) -> float:
        """Since it was made; it never falls, and is told at once. now_s : on the cluster's clock."""
        ...


# ---- measured -----------------------------------------------------------------------------------------------------


class MeasuredEnergy:
    """What the GPUs of this machine that `GpuEnergy` counts have drawn, whoever used them.

    of_all_work  whether every engine runs on these GPUs
    """

    source = "nvml"

    def __init__(self, gpus: GpuEnergy, *, of_all_work: bool) -> None:
        self.of_all_work = of_all_work
        self._gpus = gpus
        self._joules = 0.0

    def joules(self, now_s: float) -> float:
        """As of the last reading in `sampling`: NVML takes milliseconds, and longer when its driver is busy."""
        return self._joules

    @contextlib.asynccontextmanager
    async def sampling(self, clock: Callable[[], float]) -> AsyncIterator[None]:
        """Read the GPUs every SAMPLE_EVERY_S inside the block, in a thread; nothing else does."""
        stop = asyncio.Event()

        async def sample() -> None:
            while not stop.is_set():
                self._joules = await asyncio.to_thread(self._read, clock)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), SAMPLE_EVERY_S)

        task = asyncio.create_task(sample())
        try:
            yield
        finally:
            stop.set()  # and not cancelled: NVML must not be left while a thread still reads
            await task

    def _read(self, clock: Callable[[], float]) -> float:
        return self._gpus.energy_j(clock())


# ---- modelled -----------------------------------------------------------------------------------------------------


class ModelledEnergy:
    """What engines of this profile take for what they run; `observe` listens to a journal from its first step on.

    All engines are taken to be of the one profile. They draw from EngineReady to EngineLost; between EngineClosed and
    EngineLost an engine is up and may still run something. O(1) a step. Raises ValueError on a profile whose energy is
    unknown.
    """

    source = "modelled"
    of_all_work = True

    def __init__(self, profile: Profile) -> None:
        if not profile.energy_known:
            raise ValueError(f"the profile {profile.name} tells no energy")
        self._profile = profile
        self._engines: dict[str, _Engine] = {}
        self._power_w = [profile.idle_w]  # by sequences, as far as it has been asked for

    def joules(self, now_s: float) -> float:
        return sum([engine.joules_at(now_s) for engine in self._engines.values()])

    def observe(self, step: Step) -> None:
        event, now_s = step.event, step.now_s
        if type(event) is EngineReady:
            self._find_up(event.engine, now_s)
        elif type(event) is RequestEnded or type(event) is BatchEnded or type(event) is EngineLost:
            engine = self._engines.get(event.engine)
            if engine is not None:  # one that was never ready runs nothing: the scheduler ignores such news too
                self._let_go(engine, event, now_s)
        for action in step.actions:
            if type(action) is StartBatch:
                engine = self._engines[action.engine]
                engine.start(action.batch)
                self._settle(engine, now_s)
                if engine.info.barrier:
                    engine.prefill(self._profile.prefill_s, self._profile.prefill_j)

    def _find_up(self, info: EngineInfo, now_s: float) -> None:
        """It is up, or it was already and has other slots."""
        engine = self._engines.get(info.name)
        if engine is None:
            engine = self._engines[info.name] = _Engine(info, now_s)
        engine.info, engine.up = info, True
        self._settle(engine, now_s)

    def _let_go(self, engine: _Engine, event: RequestEnded | BatchEnded | EngineLost, now_s: float) -> None:
        """However a request ended, it runs no more; a retry is a start of its own."""
        if type(event) is RequestEnded:
            engine.end(event.request_id)
        elif type(event) is BatchEnded:
            engine.end_batch(event.batch_id)
        else:
            engine.up = False
            engine.end_all()
        self._settle(engine, now_s)

    def _settle(self, engine: _Engine, now_s: float) -> None:
        """Charge the time that has passed at the old power; from now on it is what suits what runs."""
        engine.joules = engine.joules_at(now_s)
        engine.since_s = max(now_s, engine.since_s) if engine.sequences else now_s
        engine.power_w = self._power_of(engine.sequences) if engine.up else 0.0

    def _power_of(self, sequences: int) -> float:
        """Watts. Of more sequences than the profile knows of: as many as it does, for it could not run the others."""
        most = self._profile.slots_max
        n = sequences if most is None else min(sequences, most)
        known = self._power_w
        if n >= len(known):
            end = 2 * n + 1 if most is None else min(2 * n, most) + 1
            known += self._profile.power_w(np.arange(len(known), end)).tolist()
        return known[n]


class _Engine:
    """One engine's account.

    running  sequences of the requests on it, by request id: as many as a request has choices
    batch_id of the batch that it was sent last
    joules   until since_s; from then on it draws power_w. While a batch is in prefill, since_s is still to come
    """

    __slots__ = ("_sequences", "batch_id", "info", "joules", "power_w", "running", "since_s", "up")

    def __init__(self, info: EngineInfo, now_s: float) -> None:
        self.info = info
        self.up = False
        self.running: dict[int, int] = {}
        self.batch_id = 0
        self.joules = 0.0
        self.power_w = 0.0
        self.since_s = now_s
        self._sequences = 0  # sent to it and, on a barrier engine, still rows of its batch

    @property
    def sequences(self) -> int:
        """That run, as against those that wait inside."""
        return self._sequences if self.info.barrier else min(self._sequences, self.info.slots)

    def joules_at(self, now_s: float) -> float:
        return self.joules + self.power_w * max(0.0, now_s - self.since_s)

    def prefill(self, prefill_s: float, prefill_j: float) -> None:
        """A static batch begins with this instead of steps."""
        self.joules += prefill_j
        self.since_s += prefill_s

    def start(self, batch: Batch) -> None:
        self.batch_id = batch.id
        for request in batch.requests:
            self.running[request.id] = request.choices
            self._sequences += request.choices

    def end(self, request_id: int) -> None:
        """A request that is not here changes nothing: the engine had been lost with it."""
        sequences = self.running.pop(request_id, 0)
        if not self.info.barrier:
            self._sequences -= sequences
        elif not self.running:
            self._sequences = 0

    def end_batch(self, batch_id: int) -> None:
        """Only of the batch that runs; another's end is old news."""
        if batch_id == self.batch_id:
            self.end_all()

    def end_all(self) -> None:
        self.running.clear()
        self._sequences = 0
