"""Energy that the GPUs of this machine have drawn, told by NVML.

NVML comes with NVIDIA's driver; the package `nvidia-ml-py` (module pynvml) speaks to it. Both are optional: where
either is missing, there is nothing to measure and `GpuEnergy.open()` is None.

    energy = GpuEnergy.open()
    before_j = energy.energy_j(time.monotonic())
    ...                                             # energy.sample(time.monotonic()) every 50 ms or so
    drawn_j = energy.energy_j(time.monotonic()) - before_j

GPUs since Volta count their energy themselves; the counter moves in steps of up to 100 ms, so what is measured should
take longer. Of older ones the power is sampled and integrated, as finely as `sample` is called.
"""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any, Protocol

log = logging.getLogger("llmserve")

Handle = Any
"""NVML's, opaque."""


class Nvml(Protocol):
    """What is used of the module pynvml. Every function raises NVMLError."""

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
    """Joules drawn by GPUs since this object was made, summed over them.

    nvml     the module pynvml
    visible  CUDA_VISIBLE_DEVICES: indices, or beginnings of UUIDs; None: every GPU. Indices are NVML's order, by PCI
             bus, which is CUDA's where GPUs are alike or CUDA_DEVICE_ORDER=PCI_BUS_ID.

    `names` are the GPUs'; () when none can be measured. Raises nvml.NVMLError where there is no driver.
    """

    def __init__(self, nvml: Nvml, visible: str | None = None) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        meters = [_meter_of(nvml, handle) for handle in _visible_handles(nvml, visible)]
        self._meters = [meter for meter in meters if meter is not None]

    @classmethod
    def open(cls, visible: str | None = None) -> GpuEnergy | None:
        """Of the GPUs that `visible` names; without it, that our own CUDA_VISIBLE_DEVICES names, else of all.

        None without the package, the driver or a GPU.
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

    def sample(self, now_s: float) -> None:
        """Read the GPUs now. now_s : on any clock that does not run backwards, the same one each time."""
        for meter in self._meters:
            meter.sample(now_s)

    def energy_j(self, now_s: float) -> float:
        """Joules until now: since this object was made, or, of a GPU without a counter, since its first sample.

        Never falls. A GPU that cannot be read any more stays at its last value.
        """
        self.sample(now_s)
        return sum([meter.joules for meter in self._meters])

    def close(self) -> None:
        """Let go of NVML."""
        self._nvml.nvmlShutdown()


class _Meter:
    """One GPU. A reading that fails is logged once; later ones are tried, for a driver may come back."""

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
        """A reading has failed."""


class _CounterMeter(_Meter):
    """By the GPU's own counter, which is exact however seldom it is read."""

    def __init__(self, nvml: Nvml, handle: Handle, name: str) -> None:
        super().__init__(nvml, handle, name)
        self._last_mj = nvml.nvmlDeviceGetTotalEnergyConsumption(handle)

    def _read(self, now_s: float) -> None:
        counted_mj = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        # It went backwards: the driver was loaded again, or the counter wrapped. Either way it counts from 0 again,
        # and what was drawn between the last reading and that is not known.
        start_mj = self._last_mj if counted_mj >= self._last_mj else 0
        self.joules += (counted_mj - start_mj) / 1e3
        self._last_mj = counted_mj


class _PowerMeter(_Meter):
    """By its power, integrated between samples with the trapezoid rule. A gap of failed readings counts nothing."""

    def __init__(self, nvml: Nvml, handle: Handle, name: str) -> None:
        super().__init__(nvml, handle, name)
        nvml.nvmlDeviceGetPowerUsage(handle)  # raises where there is no such reading either
        self._last: tuple[float, float] | None = None  # time in s, power in W

    def _read(self, now_s: float) -> None:
        power_w = self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3
        if self._last is not None:
            last_s, last_w = self._last
            self.joules += (now_s - last_s) * (last_w + power_w) / 2
        self._last = now_s, power_w

    def _miss(self) -> None:
        self._last = None


def _meter_of(nvml: Nvml, handle: Handle) -> _Meter | None:
    """By its counter where it has one, else by its power; None where it has neither (a part of a GPU, with MIG)."""
    name = nvml.nvmlDeviceGetName(handle)
    for kind in (_CounterMeter, _PowerMeter):
        try:
            return kind(nvml, handle, name)
        except nvml.NVMLError as error:
            log.debug("%s of GPU %s: %s", kind.__name__, name, error)
    log.warning("GPU %s tells neither its energy nor its power", name)
    return None


def _visible_handles(nvml: Nvml, visible: str | None) -> list[Handle]:
    """Handles of the GPUs that CUDA would show: as CUDA does it, nothing after an entry that names none."""
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
