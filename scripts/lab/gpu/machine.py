"""The machine of a campaign: a GPU with its energy counter; for a rehearsal, a CPU with a pretended counter."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from bench import ROOT
from bench.progress import log
from bench.servers import module, running

from gpu.models import PROMPT_WORDS
from llmserve.engines.power import GpuEnergy, Handle

LAB = Path(__file__).parents[1]
PATHS = os.pathsep.join([str(LAB), str(ROOT), os.environ.get("PYTHONPATH", "")])
ENVIRONMENT = {"PYTHONPATH": PATHS}
PRETENDED_W = 240.0  # of the pretended GPU, idle and busy


class PretendedNvml:
    """The functions of pynvml that llmserve calls, for a GPU of constant power."""

    NVMLError = RuntimeError

    def nvmlInit(self) -> None:
        self._began_s = time.monotonic()

    def nvmlShutdown(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Handle:
        return index

    def nvmlDeviceGetUUID(self, handle: Handle) -> str:
        return "GPU-pretended"

    def nvmlDeviceGetName(self, handle: Handle) -> str:
        return "pretended GPU"

    def nvmlDeviceGetPowerUsage(self, handle: Handle) -> int:
        return int(1e3 * PRETENDED_W)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Handle) -> int:
        return int(self.nvmlDeviceGetPowerUsage(handle) * (time.monotonic() - self._began_s))


class Machine:
    """device   "cuda" or "cpu"
    energy   counter of the GPU; None where NVML counts nothing
    scratch  a folder that is deleted at the end
    """

    def __init__(self, device: str, energy: GpuEnergy | None, scratch: Path) -> None:
        self.device = device
        self.scratch = scratch
        self.energy = energy
        self._stack = AsyncExitStack()
        self._engine: tuple[str, int, int] | None = None
        self._url = ""

    @property
    def name(self) -> str:
        return ", ".join(self.energy.names) if self.energy is not None else f"{self.device}, without NVML"

    def joules(self) -> float | None:
        """Joules drawn since the start; None where NVML counts nothing."""
        return None if self.energy is None else self.energy.energy_j(time.monotonic())

    async def engine(self, shape: str, batch_size_max: int, tokens_max: float) -> str:
        """The URL of an engine of this shape, ready for answers of up to so many tokens.

        It runs until another one is asked for: only one uses the GPU.
        """
        engine = (shape, batch_size_max, PROMPT_WORDS + math.ceil(tokens_max) + 1)
        if self._engine != engine:
            await self.stop_engine()
            words = ("--shape", shape, "--device", self.device, "--batch-size-max", str(batch_size_max))
            command = module("gpu.engine", *words, "--columns", str(engine[2]))
            server = await self._stack.enter_async_context(
                running(f"the engine with {shape}", command, ready="/health", environment=ENVIRONMENT)
            )
            self._engine, self._url = engine, server.url
        return self._url

    async def stop_engine(self) -> None:
        self._engine = None
        await self._stack.aclose()

    async def alone(self, program: str, *words: str, timeout_s: float) -> Any:
        """Run a module in a process that has the GPU to itself; return the JSON of its last line.

        Raises RuntimeError with the end of its output, or TimeoutError.
        """
        await self.stop_engine()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", program, *words, "--device", self.device),
            env={**os.environ, **ENVIRONMENT},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(timeout_s):
                output, errors = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode:
            raise RuntimeError(f"{program} ended with {process.returncode}: {errors.decode(errors='replace')[-1500:]}")
        return json.loads(output.decode().strip().splitlines()[-1])


@asynccontextmanager
async def machine(device: str) -> AsyncIterator[Machine]:
    """The machine, and at the end no engine on it."""
    energy = GpuEnergy(PretendedNvml()) if device == "cpu" else GpuEnergy.open()
    if energy is None:
        log("NVML counts no joules here: the part energy will fail, the others have times only")
    with tempfile.TemporaryDirectory() as scratch:
        this = Machine(device, energy, Path(scratch))
        try:
            yield this
        finally:
            await this.stop_engine()
            if energy is not None:
                energy.close()


def words_of(values: Sequence[float]) -> str:
    return ",".join(f"{value:g}" for value in values)
