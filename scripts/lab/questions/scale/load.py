"""The engine and the clients of load.c, and what a front-end between them costs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from kit.client import JSON_HEADERS, ask, session_of
from kit.servers import Server, running

from llmserve.errors import LLMServeError

SOURCE = Path(__file__).with_name("load.c")
PER_OCTAVE = 32  # as in load.c
WITHIN_S = 120.0
SHORT_EVERY_US = 10_000  # between the events of short streams; the engine sends the first one after as long


@dataclass(frozen=True)
class Load:
    """What clients ask: see load.c. every_us : between two events of a stream"""

    name: str
    kind: str
    count: int = 0
    rate_per_s: float = 0.0
    tokens: int = 16
    every_us: int = 20_000
    words: int = 0
    chars: int = 0

    def times(self, factor: int) -> Load:
        """So many times the streams or connections, which begin so many times as fast."""
        return (
            self
            if factor == 1
            else replace(
                self,
                name=f"{factor} x {self.name}",
                count=factor * self.count,
                rate_per_s=factor * self.rate_per_s,
            )
        )

    def shared(self, clients: int, seconds: float) -> list[str]:
        """The words of each of so many client processes."""
        told = {"kind": self.kind, "count": self.count // clients, "rate": self.rate_per_s / clients}
        told |= {"tokens": self.tokens, "every": self.every_us, "words": self.words, "chars": self.chars}
        return [f"{name}={value}" for name, value in {**told, "seconds": seconds}.items()]


class NoCompiler(LLMServeError):
    """load.c cannot be compiled."""


def built(folder: Path) -> Path:
    """The program of load.c. Raises NoCompiler."""
    compiler, program = shutil.which("cc"), folder / "load"
    if compiler is None:
        raise NoCompiler("a C compiler (cc) is needed: Debian's package is gcc")
    done = subprocess.run(
        [compiler, "-O2", "-o", str(program), str(SOURCE), "-lm"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise NoCompiler(done.stderr)
    return program


@asynccontextmanager
async def engines(program: Path, count: int) -> AsyncIterator[list[Server]]:
    async with contextlib.AsyncExitStack() as stack:

        def command(port: int) -> list[str]:
            return [str(program), "engine", f"port={port}"]

        starting = [running(f"engine {number}", command, ready="/health") for number in range(count)]
        yield [await stack.enter_async_context(one) for one in starting]


# ---- processor time -------------------------------------------------------------------------------------------------

Processes = Mapping[str, Sequence[psutil.Process]]
"""By what they do: "relays", "scheduler", "server"; "load": the engines."""


def all_of(server: Server) -> list[psutil.Process]:
    """The processes of a server, without the supervisor."""
    return psutil.Process(server.process.pid).children(recursive=True)


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    """Processor time so far, user and system.

    By /proc/PID/task/ID/schedstat, whose first number is nanoseconds; psutil knows hundredths of a second. The time of
    a thread that has ended is left out.
    """
    files = [file for process in processes for file in Path(f"/proc/{process.pid}/task").glob("*/schedstat")]
    if not files:
        times = [process.cpu_times() for process in processes]
        return sum(of.user + of.system for of in times)
    return sum(_first_number(file) for file in files) / 1e9


def _first_number(file: Path) -> int:
    try:
        return int(file.read_text(encoding="ascii").split()[0])
    except OSError:  # the thread has just ended
        return 0


def memory_bytes(processes: Sequence[psutil.Process]) -> int:
    return sum(process.memory_info().rss for process in processes)


# ---- a run ----------------------------------------------------------------------------------------------------------


class Clients:
    """The client processes of one run."""

    def __init__(self, processes: Sequence[asyncio.subprocess.Process]) -> None:
        self._processes = processes

    async def say(self, word: str) -> None:
        """Wait until all of them say so. Raises RuntimeError when one cannot go on."""
        for process in self._processes:
            await self._line(process, word)

    async def told(self) -> list[Mapping[str, Any]]:
        told = [json.loads(await self._line(process, "")) for process in self._processes]
        for process in self._processes:
            await process.wait()
        return told

    async def _line(self, process: asyncio.subprocess.Process, word: str) -> str:
        assert process.stdout is not None
        assert process.stderr is not None
        line = (await asyncio.wait_for(process.stdout.readline(), WITHIN_S)).decode().strip()
        if (line != word) if word else not line:
            raise RuntimeError(f"the clients stopped: {line} {(await process.stderr.read()).decode()}")
        return line


@asynccontextmanager
async def asking(program: Path, port: int, words: Sequence[str], key: str, count: int) -> AsyncIterator[Clients]:
    """So many client processes, which end with the block."""
    pipe = asyncio.subprocess.PIPE
    processes = [
        await asyncio.create_subprocess_exec(
            *(str(program), "clients", f"port={port}", f"key={key}", f"seed={number}", *words), stdout=pipe, stderr=pipe
        )
        for number in range(count)
    ]
    try:
        yield Clients(processes)
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def measured(
    load: Load, program: Path, port: int, processes: Processes, *, key: str, clients: int, seconds: float
) -> dict[str, float]:
    """What the load costs each kind of processes, and what its clients see. The figures of a quantity that the load
    does not have are left out.

    cpu_*_us : by event where streams last, else by request
    """
    idle = {name: memory_bytes(of) for name, of in processes.items()}
    async with asking(program, port, load.shared(clients, seconds), key, clients) as asked:
        await asked.say("steady")
        before, since_s = {name: cpu_s(of) for name, of in processes.items()}, time.perf_counter()
        held = {name: memory_bytes(of) for name, of in processes.items()}
        await asked.say("over")
        took_s = time.perf_counter() - since_s
        cores = {name: (cpu_s(of) - before[name]) / took_s for name, of in processes.items()}
        told = await asked.told()
    cores["load"] = cores.get("load", 0.0) + sum(one["cpu_s"] / one["seconds"] for one in told)
    rates = {name: sum(one[name] / one["seconds"] for one in told) for name in ("events", "ended", "reads")}
    by_s = rates["events"] if load.kind == "streams" else rates["ended"]
    numbers: dict[str, float] = {f"cpu_{name}_us": 1e6 * used / by_s for name, used in cores.items()}
    numbers["cpu_us"] = sum(numbers[f"cpu_{name}_us"] for name in cores if name != "load")
    numbers["cores"] = sum(used for name, used in cores.items() if name != "load")
    numbers |= {"cores_load": cores["load"], "failed": sum(one["failed"] for one in told)}
    numbers |= {"late": sum(one["late"] for one in told), "requests_per_s": rates["ended"]}
    if rates["events"]:
        numbers |= {"events_per_s": rates["events"], "events_a_read": rates["events"] / rates["reads"]}
        numbers |= quantiles("delay_ms", [one["delay"] for one in told])
    if load.kind == "streams":
        front = sum(held[name] - idle[name] for name in processes if name != "load")
        numbers["memory_kb_a_stream"] = front / 1024 / load.count
    return numbers | quantiles("first_ms", [one["first"] for one in told])


def quantiles(name: str, classes: Sequence[Mapping[str, int]]) -> dict[str, float]:
    """p50 and p99 in milliseconds, of histograms of load.c; {} without values."""
    counts: Counter[int] = Counter()
    for one in classes:
        counts.update({int(number): count for number, count in one.items()})
    ends, all_ = sorted(counts), sum(counts.values())
    told = {}
    for label, share in (("p50", 0.5), ("p99", 0.99)) if all_ else ():
        below = 0
        for number in ends:
            below += counts[number]
            if below >= math.ceil(share * all_):
                told[f"{name}_{label}"] = 2 ** ((number + 0.5) / PER_OCTAVE) / 1e3
                break
    return told


async def until_answered(url: str, key: str, model: str = "fake") -> None:
    """Ask once. Raises AssertionError when the answer is not a success."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}]}
    async with session_of() as session:
        assert (await ask(session, url, body, {**JSON_HEADERS, "authorization": f"Bearer {key}"})).answer


async def until_quiet(
    processes: Processes, *, pause_s: float = 0.3, share: float = 0.05, within_s: float = 20.0
) -> None:
    """Wait until the front-end rests: what the clients of the run before have left is put away."""
    ends_s, of = (
        time.perf_counter() + within_s,
        [one for name, all_ in processes.items() if name != "load" for one in all_],
    )
    before = cpu_s(of)
    while time.perf_counter() < ends_s:
        await asyncio.sleep(pause_s)
        before, last = cpu_s(of), before
        if before - last < share * pause_s:
            return
