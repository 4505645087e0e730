"""The GPU of a campaign: what NVML tells about it, and who else uses it. A rehearsal has a pretended GPU."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from llmserve.engines.power import GpuEnergy, Handle, Nvml, visible_handles

T = TypeVar("T")

GIB = 2**30
FREE_GIB = 2.0  # that the driver itself may hold on a GPU without work
BUSY_PERCENT = 5
WATCHED_S, LOOKS = 1.0, 10  # how long utilisation is watched before a campaign, and how often it is read
COUNTER_S = 1.0  # within which a counter of energy must move: an idle GPU draws tens of watts
DATA_CENTRE = {"NVIDIA", "Tesla", "GeForce", "Quadro", "Graphics", "Device"}  # words that tell no GPU from another
MEMORY_OR_BOARD = re.compile(r"^(\d+GB|HBM\d\w*|SXM\d*)$")


@dataclass(frozen=True, slots=True)
class Device:
    """name, memory_gib : as NVML tells them."""

    name: str
    memory_gib: float

    @property
    def key(self) -> str:
        """The short name, for folders and profiles: h100 for an "NVIDIA H100 80GB HBM3"."""
        words = re.split(r"[\s-]+", self.name)
        kept = [word for word in words if word not in DATA_CENTRE and not MEMORY_OR_BOARD.match(word)]
        return re.sub(r"[^a-z0-9.]+", "-", "-".join(kept).lower()).strip("-") or "gpu"

    def __str__(self) -> str:
        return f"{self.name}, {self.memory_gib:.0f} GiB"


class DeviceNvml(Nvml, Protocol):
    """The further functions of the module pynvml that a campaign calls."""

    def nvmlDeviceGetMemoryInfo(self, handle: Handle) -> Any:
        """`total` and `used`, in bytes."""
        ...

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Handle) -> Sequence[Any]: ...
    def nvmlDeviceGetUtilizationRates(self, handle: Handle) -> Any:
        """`gpu`, the percentage of time in which a kernel ran."""
        ...


@dataclass(frozen=True)
class Gpu:
    """device   the GPU
    energy   its joules; None where NVML tells neither energy nor power
    others   what used it before the campaign; "": nothing
    visible  CUDA_VISIBLE_DEVICES of all processes of the campaign, which use this one GPU
    """

    device: Device
    energy: GpuEnergy | None
    others: str
    visible: str

    @property
    def energy_by(self) -> str:
        if self.energy is None:
            return "no energy: NVML tells none"
        return "integrated power" if self.energy.integrates else "energy counter"


def gpu_of(nvml: DeviceNvml, *, counter_s: float = COUNTER_S, watched_s: float = WATCHED_S) -> Gpu:
    """The first GPU that CUDA shows. Raises nvml.NVMLError without a driver, LookupError without a GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    nvml.nvmlInit()
    handles = visible_handles(nvml, visible)
    if not handles:
        raise LookupError(f"NVML shows no GPU {visible!r}")
    memory = nvml.nvmlDeviceGetMemoryInfo(handles[0])
    device = Device(nvml.nvmlDeviceGetName(handles[0]), round(memory.total / GIB, 1))
    others = others_on(nvml, handles[0], watched_s)
    return Gpu(device, _energy(nvml, visible, counter_s), others, visible)


def gpu_here() -> Gpu:
    """The GPU of this machine, by NVML; where NVML is missing, by torch and without energy."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        return gpu_of(nvml)
    except Exception as error:  # ImportError, or NVML's own errors
        reason = f"{type(error).__name__}: {error}"
    code = "import json, torch; p = torch.cuda.get_device_properties(0); print(json.dumps([p.name, p.total_memory]))"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    if asked.returncode:
        raise LookupError(f"no GPU is found: {reason}; torch: {asked.stderr.strip().splitlines()[-1:]}")
    name, memory_bytes = json.loads(asked.stdout)
    return Gpu(Device(name, round(memory_bytes / GIB, 1)), None, f"unknown, as NVML is missing ({reason})", "0")


def others_on(nvml: DeviceNvml, handle: Handle, watched_s: float = WATCHED_S) -> str:
    """What uses the GPU now; "" if nothing does.

    In a container the processes of others do not show, so memory and utilisation count, too.
    """
    found = []
    if processes := _asked(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle):
        found.append(f"{len(processes)} other process{'es' if len(processes) > 1 else ''}")
    memory = _asked(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    if memory is not None and memory.used > FREE_GIB * GIB:
        found.append(f"{memory.used / GIB:.1f} GiB of memory in use")
    busy = []
    for _ in range(LOOKS):
        rates = _asked(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
        busy.append(0 if rates is None else rates.gpu)
        time.sleep(watched_s / LOOKS)
    if max(busy) > BUSY_PERCENT:
        found.append(f"busy for {max(busy)} % of the time")
    return ", ".join(found)


def _asked(nvml: Nvml, ask: Callable[[Handle], T], handle: Handle) -> T | None:
    try:
        return ask(handle)
    except nvml.NVMLError:  # not supported here
        return None


def _energy(nvml: Nvml, visible: str, counter_s: float) -> GpuEnergy | None:
    """The GPU's counter; its integrated power, where it has no counter or the counter stands still."""
    energy = GpuEnergy(nvml, visible)
    if energy.names and not energy.integrates:
        time.sleep(counter_s)
        if energy.energy_j(time.monotonic()) <= 0:
            energy.close()
            energy = GpuEnergy(nvml, visible, counters=False)
    if energy.names:
        return energy
    energy.close()
    return None


@dataclass
class PretendedNvml:
    """NVML of a pretended GPU of constant power, for a rehearsal.

    counter  False: NVML tells no energy.  moves : False: it tells always the same
    """

    name: str = "Pretended GPU"
    power_w: float = 240.0
    counter: bool = True
    moves: bool = True
    processes: int = 0
    used_gib: float = 0.5
    busy_percent: int = 0

    NVMLError = RuntimeError

    def __post_init__(self) -> None:
        self._began_s = time.monotonic()

    def nvmlInit(self) -> None:
        pass

    def nvmlShutdown(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Handle:
        return index

    def nvmlDeviceGetUUID(self, handle: Handle) -> str:
        return "GPU-pretended"

    def nvmlDeviceGetName(self, handle: Handle) -> str:
        return self.name

    def nvmlDeviceGetPowerUsage(self, handle: Handle) -> int:
        return int(1e3 * self.power_w)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Handle) -> int:
        if not self.counter:
            raise self.NVMLError("Not Supported")
        return int(1e3 * self.power_w * (time.monotonic() - self._began_s)) if self.moves else 5_000_000

    def nvmlDeviceGetMemoryInfo(self, handle: Handle) -> Any:
        return _Readings(total=80 * GIB, used=int(self.used_gib * GIB))

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Handle) -> Sequence[Any]:
        return [None] * self.processes

    def nvmlDeviceGetUtilizationRates(self, handle: Handle) -> Any:
        return _Readings(gpu=self.busy_percent)


class _Readings:
    def __init__(self, **readings: int) -> None:
        self.__dict__.update(readings)
