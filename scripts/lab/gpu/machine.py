"""The machine of a campaign: one GPU, and the engines and programs that run on it one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kit import ROOT
from kit.progress import log
from kit.servers import Server, module, running

from gpu.device import Device, Gpu, PretendedNvml, gpu_here, gpu_of
from gpu.shapes import PROMPT_WORDS
from gpu.steps import within
from llmserve.engines.measuring import sampling
from llmserve.engines.power import GpuEnergy
from llmserve.engines.process import SUPERVISOR

T = TypeVar("T")

LAB = Path(__file__).parents[1]
START_S = 75.0  # of an engine; one that takes longer hangs
KILLED_S = 5.0  # that a killed process may take to end
LEVELS = ((), ("--no-compile",), ("--no-compile", "--no-graphs"))
"""Flags of engines and programs, from the fastest to the surest."""


class OutOfSlots(Exception):
    """The engine runs fewer sequences at once than a step needs."""


@dataclass(frozen=True)
class RunningEngine:
    """batch_size_max : what fits into memory, possibly less than was asked for"""

    url: str
    batch_size_max: int

    def need(self, batch_size: int) -> None:
        if batch_size > self.batch_size_max:
            raise OutOfSlots(f"batches of {batch_size} do not fit into memory, only of {self.batch_size_max}")


@dataclass(frozen=True)
class _Wanted:
    """What an engine must run: size : of its largest batch, or its slots.  columns : of a prompt with its answer"""

    shape: str
    refill: bool
    size: int
    columns: int

    def serves(self, other: _Wanted) -> bool:
        """Whether an engine for this runs the other, too. The number of slots changes what a refill engine does."""
        large_enough = self.size == other.size if self.refill else self.size >= other.size
        return (
            (self.shape, self.refill) == (other.shape, other.refill) and large_enough and self.columns >= other.columns
        )

    @property
    def words(self) -> list[str]:
        words = ["--shape", self.shape, "--batch-size-max", str(self.size), "--columns", str(self.columns)]
        return [*words, "--refill"] if self.refill else words


class Machine:
    """kind      "cuda" or "cpu"
    scratch   a folder that is deleted at the end
    engines   the module that runs an engine

    Engines and programs run with the fastest flags of LEVELS that work: where a start fails or hangs, the next surer
    flags are tried, and kept if they work.
    """

    def __init__(
        self, kind: str, gpu: Gpu, scratch: Path, *, engines: str = "gpu.engine", start_s: float = START_S
    ) -> None:
        self.kind = kind
        self.scratch = scratch
        self._gpu = gpu
        self._engines = engines
        self._start_s = start_s
        self._stack = AsyncExitStack()
        self._running: _Wanted | None = None
        self._engine = RunningEngine("", 0)
        self._server: Server | None = None
        self._level = 0
        self._notes: list[str] = []
        self._notes_path = scratch / "notes.json"

    @property
    def device(self) -> Device:
        return self._gpu.device

    @property
    def energy(self) -> GpuEnergy | None:
        """Counter of the GPU; None where NVML counts nothing."""
        return self._gpu.energy

    @property
    def facts(self) -> dict[str, Any]:
        """What a run must say about the GPU, beside its name."""
        return {"energy": self._gpu.energy_by, **({"others": self._gpu.others} if self._gpu.others else {})}

    def joules(self) -> float | None:
        """Joules drawn since the start; None where NVML counts nothing."""
        return None if self.energy is None else self.energy.energy_j(time.monotonic())

    def note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)

    def taken_notes(self) -> list[str]:
        """The notes since the last call, and those of the engine that runs."""
        notes = list(dict.fromkeys([*self._notes, *self._engine_notes()]))
        self._notes.clear()
        return notes

    async def engine(self, shape: str, batch_size_max: int, tokens_max: float) -> RunningEngine:
        """An engine with static batches of this shape, ready for answers of up to so many tokens.

        It runs until another one is asked for: only one uses the GPU.
        """
        return await self._ready(shape, False, batch_size_max, tokens_max)

    async def refill_engine(self, shape: str, slots: int, tokens_max: float) -> RunningEngine:
        """An engine whose slots refill, otherwise as `engine`."""
        return await self._ready(shape, True, slots, tokens_max)

    async def _ready(self, shape: str, refill: bool, size: int, tokens_max: float) -> RunningEngine:
        wanted = _Wanted(shape, refill, size, PROMPT_WORDS + math.ceil(tokens_max) + 1)
        if self._running is None or not self._running.serves(wanted):
            await self.stop_engine()
            words = [*wanted.words, "--device", self.kind]
            self._engine = await self._surest(f"the engine with {shape}", lambda flags: self._start([*words, *flags]))
            self._running = wanted
        return self._engine

    async def _start(self, words: Sequence[str]) -> RunningEngine:
        self._notes_path.unlink(missing_ok=True)
        command = module(self._engines, *words, "--notes", str(self._notes_path))
        start = self._stack.enter_async_context(
            running("the engine", command, ready="/health", environment=self._environment)
        )
        self._server = server = await within(self._start_s, start, self.kill)
        size = int(self._notes_path.with_suffix(".size").read_text())
        return RunningEngine(server.url, size)

    async def stop_engine(self) -> None:
        """End the engine at once. Its answers have all come, and a slow end would be time of the GPU."""
        self._notes += self._engine_notes()
        self._notes_path.unlink(missing_ok=True)
        self.kill()
        if self._server is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._server.process.wait(), KILLED_S)
            self._server = None
        await self._stack.aclose()

    def kill(self) -> None:
        """End every process that this one has started, with all of theirs, at once."""
        self._running = None
        for pid in _descendants():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                group = os.getpgid(pid)
                os.killpg(group, signal.SIGKILL) if group != os.getpgrp() else os.kill(pid, signal.SIGKILL)

    async def alone(self, program: str, *words: str, levels: bool = False) -> Any:
        """Run a module in a process that has the GPU to itself; return the JSON of its last line.

        levels : the program takes the flags of LEVELS
        Raises RuntimeError with the end of its output.
        """
        await self.stop_engine()
        if not levels:
            return await self._alone(program, *words)
        return await self._surest(program, lambda flags: self._alone(program, *words, *flags))

    async def _alone(self, program: str, *words: str) -> Any:
        process = await asyncio.create_subprocess_exec(
            *(*SUPERVISOR, sys.executable, "-m", program, *words, "--device", self.kind),
            env={**os.environ, **self._environment},
            stdin=asyncio.subprocess.PIPE,  # its end tells the supervisor that this process has ended
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None and process.stderr is not None  # noqa: PT018
        output, errors = await asyncio.gather(process.stdout.read(), process.stderr.read())
        if await process.wait():
            raise RuntimeError(f"{program} ended with {process.returncode}: {errors.decode(errors='replace')[-1500:]}")
        return json.loads(output.decode().strip().splitlines()[-1])

    async def _surest(self, what: str, start: Callable[[Sequence[str]], Awaitable[T]]) -> T:
        """The first success, with surer flags each time. Later starts begin with what worked after a failure."""
        for level in range(self._level, len(LEVELS)):
            try:
                started = await start(LEVELS[level])
            except Exception as error:  # a crash, or a start that hung
                self.kill()
                await self._stack.aclose()
                reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
                log(f"{what}: failed with {' '.join(LEVELS[level]) or 'all that is fast'}: {error}")
                if level + 1 == len(LEVELS):
                    raise
                self.note(f"{what} failed and now runs with {' '.join(LEVELS[level + 1])}: {reason[0][:300]}")
            else:
                self._level = level
                return started
        raise AssertionError("unreachable")

    @property
    def _environment(self) -> dict[str, str]:
        return {
            "PYTHONPATH": os.pathsep.join([str(LAB), str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # NVML's order
            "CUDA_VISIBLE_DEVICES": self._gpu.visible,
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # a pool of compilers takes long to start, and may hang
            "HF_HUB_OFFLINE": "1",
        }

    def _engine_notes(self) -> list[str]:
        return json.loads(self._notes_path.read_text()) if self._notes_path.exists() else []


@asynccontextmanager
async def machine(kind: str, nvml: PretendedNvml | None = None) -> AsyncIterator[Machine]:
    """The machine, and at the end no process on it. nvml : of a rehearsal on a CPU

    The GPU is sampled all the time, for one whose power is integrated. Raises LookupError without a GPU.
    """
    gpu = gpu_here() if nvml is None else gpu_of(nvml)
    if gpu.others:
        log(f"THE GPU IS NOT FREE: {gpu.others}. The results say so.")
    log(f"{gpu.device}; {gpu.energy_by}")
    with tempfile.TemporaryDirectory() as scratch:
        this = Machine(kind, gpu, Path(scratch))
        try:
            async with sampling(gpu.energy if gpu.energy is not None and gpu.energy.integrates else None):
                yield this
        finally:
            await this.stop_engine()
            if gpu.energy is not None:
                gpu.energy.close()


def words_of(values: Sequence[float]) -> str:
    return ",".join(f"{value:g}" for value in values)


def _descendants() -> list[int]:
    """All processes that this one has started, and all of theirs."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found, grown = [], [os.getpid()]
    while grown:
        grown = [child for pid in grown for child in children.get(pid, ())]
        found += grown
    return found


def _parents() -> Iterator[tuple[int, int]]:
    """(process, its parent) of every process."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                status = Path("/proc", name, "stat").read_text()
                yield int(name), int(status.rpartition(")")[2].split()[1])
