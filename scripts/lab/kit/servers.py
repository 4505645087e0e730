"""Servers that a benchmark starts. They end with the benchmark, even when the benchmark is killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import aiohttp

import predictor
from kit.client import MODEL
from llmserve import demo as embedded
from llmserve.commands.bench import Arrangement
from llmserve.engines.process import SUPERVISOR, free_port

LAB = Path(__file__).resolve().parents[1]
MODEL_FOLDER = Path(embedded.__file__).with_name("model")
# vLLM's engine core and its worker wait for each other by spinning. Two such processes would leave hardly any time of
# two cores to vLLM's API server and to the front-end: a request then waits half a second for its first step. One
# process with one thread leaves the second core to all others, as a GPU would. Where there are more cores than servers,
# an engine gets a core of its own, because every other process that runs there would halt the engine's steps.
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
START_S, STOP_S = 300.0, 20.0

Command = Callable[[int], list[str]]
"""Port -> words of the command line."""


@dataclass(frozen=True)
class Server:
    """A child process that serves HTTP on a loopback port. The process leads its process group."""

    name: str
    port: int
    process: asyncio.subprocess.Process
    output: IO[bytes]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        """Kill the whole process group. Harmless when the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def until_ready(self, path: str) -> None:
        """Wait until GET `path` answers 200. Raises RuntimeError with the last output if it never does."""
        until_s = time.monotonic() + START_S
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            while self.process.returncode is None and time.monotonic() < until_s:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                    async with session.get(self.url + path) as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(0.05)
        self.output.seek(0)
        raise RuntimeError(f"{self.name} did not start:\n{self.output.read()[-3000:].decode(errors='replace')}")


@asynccontextmanager
async def running(
    name: str, command: Command, *, ready: str, environment: Mapping[str, str] | None = None, port: int | None = None
) -> AsyncIterator[Server]:
    """Run command(port) as a server until the context ends or this script is killed.

    ready : path that answers 200 once the server is ready. Unlike an EngineProcess, the server is never restarted.
    port : None: a free one
    """
    port = free_port() if port is None else port
    with tempfile.TemporaryFile() as output:
        process = await asyncio.create_subprocess_exec(
            *SUPERVISOR,
            *command(port),
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={**os.environ, **(environment or {})},
        )
        server = Server(name, port, process, output)
        try:
            await server.until_ready(ready)
            yield server
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), STOP_S)
            server.kill()
            await process.wait()


def module(name: str, *words: str) -> Command:
    """The command that runs a module with this interpreter."""
    return lambda port: [sys.executable, "-m", name, *words, "--port", str(port)]


def of_lab(name: str, *words: str) -> Command:
    """The command that runs a part of the laboratory."""
    return lambda port: [sys.executable, str(LAB), name, *words, "--port", str(port)]


def front_end(
    name: str, *flags: str, told: bool = True, checkout: str | None = None
) -> AbstractAsyncContextManager[Server]:
    """`llmserve serve` with these flags.

    told : False: the engines tell it nothing of themselves.  checkout : the folder whose llmserve it is; None: this one
    """
    command = module("llmserve", "serve", *flags) if told else of_lab("slots.untold", "serve", *flags)
    # Without PYTHONSAFEPATH, the working directory would come before the checkout.
    environment = {"PYTHONPATH": str(Path(checkout).resolve()), "PYTHONSAFEPATH": "1"} if checkout else None
    return running(f"llmserve, {name}", command, ready="/ready", environment=environment)


def embedded_engine(batch_size: int) -> AbstractAsyncContextManager[Server]:
    """The embedded engine: it runs static batches of at most `batch_size` requests."""
    command = module("llmserve.demo", "--batch-size-max", str(batch_size))
    return running("the embedded engine", command, ready="/health")


def batching_front_end(
    engine_url: str, arrangement: Arrangement, batch_size: int
) -> AbstractAsyncContextManager[Server]:
    """`llmserve serve` that forms the arrangement's batches for this engine. The first bin edges come from the training
    lengths of the demo predictor, even where clients send oracle lengths.
    """
    chosen = "none" if arrangement.lengths == "none" else str(predictor.DEMO)
    flags = ["--engine", engine_url, "--barrier", "--batch-size", str(batch_size), "--predictor", chosen]
    return front_end(arrangement.name, *flags, *arrangement.flags)


def fake_engine(model: str, *flags: str) -> AbstractAsyncContextManager[Server]:
    """A timed engine, which only waits as long as batches would take."""
    return running(f"timed {model}", module("llmserve.engines.timed", "--model", model, *flags), ready="/health")


def vllm(
    python: str,
    name: str,
    slots: int,
    *flags: str,
    model: str = MODEL,
    folder: Path = MODEL_FOLDER,
    context_tokens: int = 1024,
) -> AbstractAsyncContextManager[Server]:
    """A vLLM server on the CPU that serves the model of the folder (the demo model) under the name `model`.

    Weights are float32 and prefix caching is off, so that a request costs the same each time.
    python : interpreter of an environment that has vLLM.  context_tokens : of a prompt and its answer, at most
    """

    def command(port: int) -> list[str]:
        words = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        words += ["--served-model-name", model, "--host", "127.0.0.1", "--port", str(port)]
        words += ["--max-num-seqs", str(slots), "--max-model-len", str(context_tokens)]
        words += ["--enforce-eager", "--dtype", "float32"]
        return [*words, "--distributed-executor-backend", "uni", "--no-enable-prefix-caching", *flags]

    return running(name, command, ready="/health", environment=VLLM_ENVIRONMENT)


def flags_of(name: str, values: Sequence[str]) -> list[str]:
    """One flag for each value: --engine A --engine B."""
    return [word for value in values for word in (f"--{name}", value)]
