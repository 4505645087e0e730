"""Measures the energy that this machine's GPUs draw, with NVML.

NVML comes with NVIDIA's driver; the package `nvidia-ml-py` (module pynvml) calls NVML. Both are optional: where
either is missing, `GpuEnergy.open()` returns None.

    energy = GpuEnergy.open()
    before_j = energy.energy_j(time.monotonic())
    ...                                             # energy.sample(time.monotonic()) every 50 ms or so
    drawn_j = energy.energy_j(time.monotonic()) - before_j

GPUs since Volta have an energy counter. The counter is updated every 100 ms or faster, so measure over a longer
time. For older GPUs the power is integrated over the calls of `sample`.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Sequence
from typing import Any, Protocol

log = logging.getLogger("llmserve")

Handle = Any
"""NVML's opaque handle of a GPU."""


class Nvml(Protocol):
    """The functions used of the module pynvml. Every function raises NVMLError."""

    @property
    def NVMLError(self) -> type[Exception]: ...
    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Handle: ...
    def nvmlDeviceGetUUID(self, handle: Handle) -> str: ...
    def nvmlDeviceGetName(self, handle: Handle) -> str: ...
    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Handle) -> int:
        """Millijoules since the driver was loaded."""
        ...

    def nvmlDeviceGetPowerUsage(self, handle: Handle) -> int:
        """Milliwatts."""
        ...


class GpuEnergy:
    """The total energy, in joules, that GPUs have drawn since this object was created.

    nvml     the module pynvml
    visible  CUDA_VISIBLE_DEVICES: indices, or beginnings of UUIDs; None: every GPU. Indices are in NVML's order, by
             PCI bus, which equals CUDA's order if all GPUs are alike or CUDA_DEVICE_ORDER=PCI_BUS_ID.

    counters  False: integrate the power of every GPU, for drivers whose counters stand still

    `names` are the names of the measured GPUs, possibly (). Raises nvml.NVMLError without a driver.
    """

    def __init__(self, nvml: Nvml, visible: str | None = None, *, counters: bool = True) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        kinds = (_CounterMeter, _PowerMeter) if counters else (_PowerMeter,)
        meters = [_meter_of(nvml, handle, kinds) for handle in visible_handles(nvml, visible)]
        self._meters = [meter for meter in meters if meter is not None]

    @classmethod
    def open(cls, visible: str | None = None) -> GpuEnergy | None:
        """Measure the GPUs named in `visible`; default: in this process's CUDA_VISIBLE_DEVICES, else all GPUs.

        Returns None without the package, the driver or a GPU.
        """
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return None
        try:
            energy = cls(nvml, os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible)
        except nvml.NVMLError as error:
            log.debug("no GPU can be measured: %s", error)
            return None
        if energy.names:
            return energy
        energy.close()
        return None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple([meter.name for meter in self._meters])

    @property
    def integrates(self) -> bool:
        """Whether the power of a GPU is integrated, so that its joules are as exact as the samples are frequent."""
        return any(isinstance(meter, _PowerMeter) for meter in self._meters)

    def sample(self, now_s: float) -> None:
        """Read the GPUs now. now_s : the time on any monotonic clock, the same clock in every call."""
        for meter in self._meters:
            meter.sample(now_s)

    def energy_j(self, now_s: float) -> float:
        """Return the joules since this object was created, or, for a GPU without a counter, since its first sample.

        Never falls. A GPU that cannot be read any more keeps its last value.
        """
        self.sample(now_s)
        return sum([meter.joules for meter in self._meters])

    def close(self) -> None:
        """Shut down NVML."""
        self._nvml.nvmlShutdown()


class _Meter:
    """The energy of one GPU. The first failed reading is logged. Later samples try again: a driver may come back."""

    def __init__(self, nvml: Nvml, handle: Handle, name: str) -> None:
        self.name = name
        self.joules = 0.0
        self._nvml = nvml
        self._handle = handle
        self._failed = False

    def sample(self, now_s: float) -> None:
        try:
            self._read(now_s)
        except self._nvml.NVMLError as error:
            self._miss()
            if not self._failed:
                log.warning("the energy of GPU %s cannot be read any more: %s", self.name, error)
            self._failed = True

    def _read(self, now_s: float) -> None:
        raise NotImplementedError

    def _miss(self) -> None:
        """Handle a failed reading."""


class _CounterMeter(_Meter):
    """Reads the GPU's energy counter, which is exact at any sampling interval."""

    def __init__(self, nvml: Nvml, handle: Handle, name: str) -> None:
        super().__init__(nvml, handle, name)
        self._last_mj = nvml.nvmlDeviceGetTotalEnergyConsumption(handle)

    def _read(self, now_s: float) -> None:
        counted_mj = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        # A smaller count means that the driver was reloaded or that the counter wrapped. The counter then starts at 0
        # again, and the energy between the last reading and the reset is lost.
        start_mj = self._last_mj if counted_mj >= self._last_mj else 0
        self.joules += (counted_mj - start_mj) / 1e3
        self._last_mj = counted_mj


class _PowerMeter(_Meter):
    """Integrates the GPU's power over samples with the trapezoid rule. A gap of failed readings adds no energy."""

    def __init__(self, nvml: Nvml, handle: Handle, name: str) -> None:
        super().__init__(nvml, handle, name)
        nvml.nvmlDeviceGetPowerUsage(handle)  # raises if the GPU reports no power
        self._last: tuple[float, float] | None = None  # time in s, power in W

    def _read(self, now_s: float) -> None:
        power_w = self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3
        if self._last is not None:
            last_s, last_w = self._last
            self.joules += (now_s - last_s) * (last_w + power_w) / 2
        self._last = now_s, power_w

    def _miss(self) -> None:
        self._last = None


def _meter_of(nvml: Nvml, handle: Handle, kinds: Sequence[type[_Meter]]) -> _Meter | None:
    """Return a meter of the first kind that the GPU supports, else None (a MIG instance reports neither)."""
    name = nvml.nvmlDeviceGetName(handle)
    for kind in kinds:
        try:
            return kind(nvml, handle, name)
        except nvml.NVMLError as error:
            log.debug("%s of GPU %s: %s", kind.__name__, name, error)
    log.warning("GPU %s reports neither energy nor power", name)
    return None


def visible_handles(nvml: Nvml, visible: str | None) -> list[Handle]:
    """Return the handles of the GPUs that CUDA would show. As in CUDA, an invalid entry ends the list."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    if visible is None:
        return handles
    uuids = [nvml.nvmlDeviceGetUUID(handle) for handle in handles]
    chosen: list[int] = []
    for entry in (entry.strip() for entry in visible.split(",")):
        index = _index_of(entry, uuids)
        if index is None:
            break
        if index not in chosen:
            chosen.append(index)
    return [handles[index] for index in chosen]


def _index_of(entry: str, uuids: list[str]) -> int | None:
    if entry.isascii() and entry.isdigit():
        return int(entry) if int(entry) < len(uuids) else None
    matches = [index for index, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None
