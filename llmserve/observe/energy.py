"""Energy of the engines in joules: measured on this machine's GPUs, or modelled from the running requests.

    n       number of sequences that run together on an engine
    P(n)    power of the engine in W: `Profile.power_w(n)` for n > 0, `Profile.idle_w` for n = 0
    J       joules, the sum over engines of the integral of P over the time in which the engine is up

A static batch keeps all its rows until its last answer has ended, so n stays constant on a barrier engine. The prefill
of the batch takes `Profile.prefill_j` once, and P(n) counts from `Profile.prefill_s` after the start. On a refill
engine, requests beyond the slots wait inside and do not count. Requests in prefill count in n, and prefills have no
joules of their own. The simulator uses the same rules (simulation/engine_model.py). The modelled energy is the energy
of the profiled engine over the real durations of this engine.

Each model may have its own profile. While several models run on one engine, P(n) is the mean over the sequences of the
models' powers. Engines of one worker share a GPU: the GPU's idle power, the largest of its engines', counts once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from bins.profile import Profile
from llmserve.engines.power import GpuEnergy
from llmserve.live.journal import Step
from llmserve.request import Batch, EngineInfo, Request
from llmserve.runtime.lasting import lasting
from llmserve.scheduling.messages import BatchEnded, EngineLost, EngineReady, RequestAdopted, RequestEnded, StartBatch

SAMPLE_EVERY_S = 0.25  # interval between two readings of the GPUs, and the largest age of the reported joules


class EnergyMeter(Protocol):
    """A meter of the engines' energy.

    source       "nvml" (measured) or "modelled"
    of_all_work  whether the joules cover all engines, so that they can be shared among all requests and tokens
    """

    @property
    def source(self) -> str: ...

    @property
    def of_all_work(self) -> bool: ...

    def joules(self, now_s: float) -> float:
        """Return the joules since the meter was created, without I/O; never falls. now_s : on the cluster's clock."""
        ...


def meter_of_all(meters: Sequence[EnergyMeter]) -> EnergyMeter | None:
    """The first meter that covers all engines; None without one."""
    return next((meter for meter in meters if meter.of_all_work), None)


# ---- measured -----------------------------------------------------------------------------------------------------


class MeasuredEnergy:
    """The energy of this machine's GPUs that `GpuEnergy` measures, including the energy of other programs.

    of_all_work  whether every engine runs on these GPUs
    """

    source = "nvml"

    def __init__(self, gpus: GpuEnergy, *, of_all_work: bool) -> None:
        self.of_all_work = of_all_work
        self._gpus = gpus
        self._joules = 0.0

    def joules(self, now_s: float) -> float:
        """Return the last reading in `sampling`: NVML takes milliseconds, and longer when its driver is busy."""
        return self._joules

    @contextlib.asynccontextmanager
    async def sampling(self, clock: Callable[[], float]) -> AsyncIterator[None]:
        """Read the GPUs every SAMPLE_EVERY_S inside the block, in a thread. No other code reads the GPUs."""
        stop = asyncio.Event()

        async def sample() -> None:
            while not stop.is_set():
                self._joules = await asyncio.to_thread(self._read, clock)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), SAMPLE_EVERY_S)

        task = lasting("reading the energy of GPUs", sample)
        try:
            yield
        finally:
            stop.set()  # instead of cancelling: NVML must not be shut down while a thread still reads
            await task

    def _read(self, clock: Callable[[], float]) -> float:
        return self._gpus.energy_j(clock())


# ---- modelled -----------------------------------------------------------------------------------------------------


class ModelledEnergy:
    """The modelled energy of engines with known profiles. `observe` follows a journal from its first step on.

    An engine draws power from EngineReady to EngineLost. Between EngineClosed and EngineLost the engine is up and may
    still run requests. O(1) per step.

    profiles     by model; "": every other model
    of_all_work  whether every model has a profile; models without a profile draw no energy
    """

    source = "modelled"

    def __init__(self, profiles: Mapping[str, Profile]) -> None:
        """Raise ValueError on a profile without energy."""
        for profile in profiles.values():
            if not profile.energy_known:
                raise ValueError(f"the profile {profile.name} has no energy")
        self.of_all_work = "" in profiles
        self._powers = {model: _Power(profile) for model, profile in profiles.items()}
        self._engines: dict[str, _Engine] = {}
        self._gpus: dict[tuple[str, str], _Gpu] = {}  # by worker, or by engine for engines without a worker

    def joules(self, now_s: float) -> float:
        return sum([gpu.joules_at(now_s) for gpu in self._gpus.values()])

    def observe(self, step: Step) -> None:
        event, now_s = step.event, step.now_s
        if type(event) is EngineReady:
            self._set_up(event.engine, now_s)
        elif type(event) is RequestAdopted:
            adopts = self._engine_of(event.engine, now_s)
            adopts.run(event.request, event.request.model)
            self._settle(adopts, now_s)
        elif type(event) is RequestEnded or type(event) is BatchEnded or type(event) is EngineLost:
            engine = self._engines.get(event.engine)
            if engine is not None:  # the scheduler also ignores events of engines that were never ready
                self._end(engine, event, now_s)
        for action in step.actions:
            if type(action) is StartBatch:
                self._start(self._engines[action.engine], action.batch, now_s)

    def _set_up(self, info: EngineInfo, now_s: float) -> None:
        """Mark an engine as up, or update the slots of an engine that is up."""
        engine = self._engine_of(info, now_s)
        engine.info, engine.up = info, True
        powers = [self._power_of(model) for model in info.models or ("",)]
        engine.idle_w = max([power.profile.idle_w for power in powers if power is not None], default=0.0)
        self._settle(engine, now_s)

    def _engine_of(self, info: EngineInfo, now_s: float) -> _Engine:
        engine = self._engines.get(info.name)
        if engine is None:
            gpu_key = (info.worker, "") if info.worker else ("", info.name)
            engine = self._engines[info.name] = _Engine(info, self._gpus.setdefault(gpu_key, _Gpu(now_s)))
        return engine

    def _start(self, engine: _Engine, batch: Batch, now_s: float) -> None:
        engine.start(batch)
        self._settle(engine, now_s)
        power = self._power_of(batch.model)
        if engine.info.barrier and power is not None:
            engine.gpu.prefill(power.profile)

    def _end(self, engine: _Engine, event: RequestEnded | BatchEnded | EngineLost, now_s: float) -> None:
        """Remove ended requests, for any outcome. A retry is a new start."""
        if type(event) is RequestEnded:
            engine.end(event.request_id)
        elif type(event) is BatchEnded:
            engine.end_batch(event.batch_id)
        else:
            engine.up = False
            engine.end_all()
        self._settle(engine, now_s)

    def _settle(self, engine: _Engine, now_s: float) -> None:
        """Charge the elapsed time at the old power, then set the power of the requests that run now."""
        gpu = engine.gpu
        up = [sharer for sharer in gpu.engines if sharer.up]
        gpu.charge(now_s, is_busy=any(sharer.sequences for sharer in up))
        idle_w = max([sharer.idle_w for sharer in up], default=0.0)
        drawn_w = [self._drawn_w(sharer, idle_w) for sharer in up if sharer.sequences]
        gpu.power_w = sum(drawn_w) - idle_w * (len(drawn_w) - 1) if drawn_w else idle_w

    def _drawn_w(self, engine: _Engine, idle_w: float) -> float:
        """Return the power of a busy engine, its GPU's idle power included. idle_w : idle power of the GPU."""
        n, shares = engine.sequences, engine.by_model
        powers = [(count, self._power_of(model)) for model, count in shares.items()]
        if len(powers) == 1 and (only := powers[0][1]) is not None:
            return only.at(n)
        total = sum([count * (idle_w if power is None else power.at(n)) for count, power in powers])
        return total / sum(shares.values())

    def _power_of(self, model: str) -> _Power | None:
        return self._powers.get(model) or self._powers.get("")


class _Power:
    """Power in W by number of sequences, computed on demand."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._cached_w = [profile.idle_w]

    def at(self, sequences: int) -> float:
        """Return the power; above the profile's `slots_max` sequences, the power at `slots_max`."""
        most = self.profile.slots_max
        n = sequences if most is None else min(sequences, most)
        cached_w = self._cached_w
        if n >= len(cached_w):
            end = 2 * n + 1 if most is None else min(2 * n, most) + 1
            cached_w += self.profile.power_w(np.arange(len(cached_w), end)).tolist()
        return cached_w[n]


class _Gpu:
    """The energy account of a GPU, with one or several engines.

    joules   energy until since_s; from since_s on the GPU draws power_w. During a prefill, since_s is in the future
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
        """Charge until now. is_busy : requests run from now on; if False, an unfinished prefill is aborted."""
        self.joules = self.joules_at(now_s)
        self.since_s = max(now_s, self.since_s) if is_busy else now_s

    def prefill(self, profile: Profile) -> None:
        """Charge the prefill of a static batch, which precedes the steps."""
        self.joules += profile.prefill_j
        self.since_s += profile.prefill_s


class _Engine:
    """The requests of one engine.

    running  (model, sequences) of the engine's requests, by request id; one sequence per choice
    by_model sequences on the engine; on a barrier engine all rows of its batch, including ended rows
    batch_id id of the last batch sent to the engine
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
        """Number of running sequences, without the sequences that wait inside the engine."""
        sent = sum(self.by_model.values())
        return sent if self.info.barrier else min(sent, self.info.slots)

    def start(self, batch: Batch) -> None:
        self.batch_id = batch.id
        for request in batch.requests:
            self.run(request, batch.model)

    def run(self, request: Request, model: str) -> None:
        self.running[request.id] = (model, request.sequences)
        self.by_model[model] = self.by_model.get(model, 0) + request.sequences

    def end(self, request_id: int) -> None:
        """Remove a request. No effect for an unknown request, which was lost together with the engine."""
        model, sequences = self.running.pop(request_id, ("", 0))
        if self.info.barrier:
            if not self.running:
                self.by_model.clear()
        elif sequences:
            self.by_model[model] -= sequences
            if not self.by_model[model]:
                del self.by_model[model]

    def end_batch(self, batch_id: int) -> None:
        """Remove the requests of the running batch. No effect for an earlier batch."""
        if batch_id == self.batch_id:
            self.end_all()

    def end_all(self) -> None:
        self.running.clear()
        self.by_model.clear()
