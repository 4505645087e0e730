"""Joules that the engines take: read from this machine's GPUs, or modelled from what the engines run.

    n       sequences that run together on an engine
    P(n)    W, its power: `Profile.power_w(n)` while it runs any, `Profile.idle_w` while it runs none
    J       joules, the sum over engines of the integral of P over the time that each is up

A static batch keeps all its rows until its last answer has ended, so a barrier engine runs the n that it began with.
Its prefill takes `Profile.prefill_j`, once, and P(n) counts from `Profile.prefill_s` after its start on. A refill
engine runs what it was sent, and what is beyond its slots waits inside; who is in prefill counts among the n, and
prefills have no joules of their own. The simulator counts in the same way (simulation/engine_model.py). A model says
what the profiled engine would have drawn in the time that this one really took.

Models may have profiles of their own. While several run on one engine, P(n) is the mean of theirs over the sequences.
Engines of one worker share a GPU: what it draws while it idles, the greatest of theirs, counts once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
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
    """What engines of these profiles take for what they run; `observe` listens to a journal from its first step on.

    Engines draw from EngineReady to EngineLost; between EngineClosed and EngineLost an engine is up and may still run
    something. O(1) a step.

    profiles     by model; "": of every other model
    of_all_work  whether there is one for every model; what runs of others is taken to draw nothing
    """

    source = "modelled"

    def __init__(self, profiles: Mapping[str, Profile]) -> None:
        """Raises ValueError on a profile whose energy is unknown."""
        for profile in profiles.values():
            if not profile.energy_known:
                raise ValueError(f"the profile {profile.name} tells no energy")
        self.of_all_work = "" in profiles
        self._powers = {model: _Power(profile) for model, profile in profiles.items()}
        self._engines: dict[str, _Engine] = {}
        self._gpus: dict[tuple[str, str], _Gpu] = {}  # by worker, or by engine where it has none

    def joules(self, now_s: float) -> float:
        return sum([gpu.joules_at(now_s) for gpu in self._gpus.values()])

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
                self._start(self._engines[action.engine], action.batch, now_s)

    def _find_up(self, info: EngineInfo, now_s: float) -> None:
        """It is up, or it was already and has other slots."""
        engine = self._engines.get(info.name)
        if engine is None:
            place = (info.worker, "") if info.worker else ("", info.name)
            engine = self._engines[info.name] = _Engine(info, self._gpus.setdefault(place, _Gpu(now_s)))
        engine.info, engine.up = info, True
        powers = [self._power_of(model) for model in info.models or ("",)]
        engine.idle_w = max([power.profile.idle_w for power in powers if power is not None], default=0.0)
        self._settle(engine, now_s)

    def _start(self, engine: _Engine, batch: Batch, now_s: float) -> None:
        engine.start(batch)
        self._settle(engine, now_s)
        power = self._power_of(batch.model)
        if engine.info.barrier and power is not None:
            engine.gpu.prefill(power.profile)

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
        gpu = engine.gpu
        up = [each for each in gpu.engines if each.up]
        gpu.charge(now_s, is_busy=any(each.sequences for each in up))
        idle_w = max([each.idle_w for each in up], default=0.0)
        drawn_w = [self._drawn_w(each, idle_w) for each in up if each.sequences]
        gpu.power_w = sum(drawn_w) - idle_w * (len(drawn_w) - 1) if drawn_w else idle_w

    def _drawn_w(self, engine: _Engine, idle_w: float) -> float:
        """While it runs something; its GPU's idling counts. idle_w : of the GPU."""
        n, shares = engine.sequences, engine.by_model
        powers = [(count, self._power_of(model)) for model, count in shares.items()]
        if len(powers) == 1 and (only := powers[0][1]) is not None:
            return only.at(n)
        total = sum([count * (idle_w if power is None else power.at(n)) for count, power in powers])
        return total / sum(shares.values())

    def _power_of(self, model: str) -> _Power | None:
        return self._powers.get(model) or self._powers.get("")


class _Power:
    """Watts by sequences, as far as they have been asked for."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._known = [profile.idle_w]

    def at(self, sequences: int) -> float:
        """Of more sequences than the profile knows of: as many as it does, for it could not run the others."""
        most = self.profile.slots_max
        n = sequences if most is None else min(sequences, most)
        known = self._known
        if n >= len(known):
            end = 2 * n + 1 if most is None else min(2 * n, most) + 1
            known += self.profile.power_w(np.arange(len(known), end)).tolist()
        return known[n]


class _Gpu:
    """An account, of an engine or of several that share it.

    joules   until since_s; from then on it draws power_w. While a batch is in prefill, since_s is still to come
    """

    __slots__ = ("engines", "joules", "power_w", "since_s")

    def __init__(self, now_s: float) -> None:
        self.engines: list[_Engine] = []
        self.joules = 0.0
        self.power_w = 0.0
        self.since_s = now_s

    def joules_at(self, now_s: float) -> float:
        return self.joules + self.power_w * max(0.0, now_s - self.since_s)

    def charge(self, now_s: float, *, is_busy: bool) -> None:
        """is_busy : something runs from now on; else a prefill that has not ended yet never will."""
        self.joules = self.joules_at(now_s)
        self.since_s = max(now_s, self.since_s) if is_busy else now_s

    def prefill(self, profile: Profile) -> None:
        """A static batch begins with this instead of steps."""
        self.joules += profile.prefill_j
        self.since_s += profile.prefill_s


class _Engine:
    """What runs on one engine.

    running  (model, sequences) of the requests on it, by request id: as many as a request has choices
    by_model sequences that were sent to it and, on a barrier engine, are still rows of its batch
    batch_id of the batch that it was sent last
    """

    __slots__ = ("batch_id", "by_model", "gpu", "idle_w", "info", "running", "up")

    def __init__(self, info: EngineInfo, gpu: _Gpu) -> None:
        self.info = info
        self.gpu = gpu
        gpu.engines.append(self)
        self.up = False
        self.idle_w = 0.0
        self.running: dict[int, tuple[str, int]] = {}
        self.by_model: dict[str, int] = {}
        self.batch_id = 0

    @property
    def sequences(self) -> int:
        """That run, as against those that wait inside."""
        sent = sum(self.by_model.values())
        return sent if self.info.barrier else min(sent, self.info.slots)

    def start(self, batch: Batch) -> None:
        self.batch_id = batch.id
        for request in batch.requests:
            self.running[request.id] = (batch.model, request.choices)
            self.by_model[batch.model] = self.by_model.get(batch.model, 0) + request.choices

    def end(self, request_id: int) -> None:
        """A request that is not here changes nothing: the engine had been lost with it."""
        model, sequences = self.running.pop(request_id, ("", 0))
        if self.info.barrier:
            if not self.running:
                self.by_model.clear()
        elif sequences:
            self.by_model[model] -= sequences
            if not self.by_model[model]:
                del self.by_model[model]

    def end_batch(self, batch_id: int) -> None:
        """Only of the batch that runs; another's end is old news."""
        if batch_id == self.batch_id:
            self.end_all()

    def end_all(self) -> None:
        self.running.clear()
        self.by_model.clear()
