"""A small NVML with the interface of pynvml: the test sets the GPUs' power and energy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


class NVMLError(Exception):
    """Like pynvml's."""


@dataclass
class Gpu:
    """None: no such reading. Functions are called at each reading. lost: every reading fails."""

    energy_mj: int | Callable[[], int] | None = None
    power_mw: int | Callable[[], int] | None = None
    uuid: str = "GPU-0"
    name: str = "Fake H100"
    lost: bool = False


class FakeNvml:
    NVMLError = NVMLError

    def __init__(self, *gpus: Gpu, driver: bool = True) -> None:
        self.gpus = gpus
        self.open = 0
        self._driver = driver

    def nvmlInit(self) -> None:
        if not self._driver:
            raise NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, handle: Gpu) -> str:
        return handle.uuid

    def nvmlDeviceGetName(self, handle: Gpu) -> str:
        return handle.name

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Gpu) -> int:
        return self._reading(handle, handle.energy_mj)

    def nvmlDeviceGetPowerUsage(self, handle: Gpu) -> int:
        return self._reading(handle, handle.power_mw)

    def _reading(self, handle: Gpu, value: int | Callable[[], int] | None) -> int:
        if handle.lost:
            raise NVMLError("GPU is lost")
        if value is None:
            raise NVMLError("Not Supported")
        return value() if callable(value) else value
