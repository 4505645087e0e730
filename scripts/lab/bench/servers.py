"""Servers that a benchmark starts, and that end with it however that ends."""

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
from bench.client import MODEL
from llmserve.bench import Arrangement
from llmserve.engines import embedded
from llmserve.engines.engine_process import SUPERVISOR, free_port

MODEL_FOLDER = Path(embedded.__file__).with_name("model")
# vLLM's engine core and its worker wait for each other by spinning. As two processes they would leave two cores hardly
# any time for its own API server, let alone for what stands before it: a request then waits half a second for its first
# step. Here they are one process with one thread, which leaves the other core to the rest, as a GPU would; and where
# there are more cores than servers, one core is its own, for every process that is woken there would halt its steps.
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
"""Makes the words of a command line from a port."""


@dataclass(frozen=True)
class Server:
    """A child process that serves HTTP on a loopback port. It is the leader of a process group."""

    name: str
    port: int
    process: asyncio.subprocess.Process
    said: IO[bytes]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        """End it and all that it has started at once. Harmless when it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def until_ready(self, path: str) -> None:
        """Until GET `path` answers 200. Raises RuntimeError with its last words when that never comes."""
        until_s = time.monotonic() + START_S
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            while self.process.returncode is None and time.monotonic() < until_s:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                    async with session.get(self.url + path) as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(0.05)
        self.said.seek(0)
        raise RuntimeError(f"{self.name} did not start:\n{self.said.read()[-3000:].decode(errors='replace')}")


@asynccontextmanager
async def running(
    name: str, command: Command, *, ready: str, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Server]:
    """command(port) as a server that ends with this script, however that ends; ready: see Server.until_ready.

    Unlike an EngineProcess it is not restarted when it ends.
    """
    port = free_port()
    with tempfile.TemporaryFile() as said:
        process = await asyncio.create_subprocess_exec(
            *SUPERVISOR,
            *command(port),
            stdin=asyncio.subprocess.PIPE,
            stdout=said,
            stderr=said,
            env={**os.environ, **(environment or {})},
        )
        server = Server(name, port, process, said)
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
    """A module run by this interpreter."""
    return lambda port: [sys.executable, "-m", name, *words, "--port", str(port)]


def front_end(name: str, *flags: str) -> AbstractAsyncContextManager[Server]:
    """`llmserve serve` with these flags, ready."""
    return running(f"llmserve, {name}", module("llmserve", "serve", *flags), ready="/ready")


def embedded_engine(batch_size: int) -> AbstractAsyncContextManager[Server]:
    """The embedded engine: it runs static batches of at most `batch_size` requests."""
    command = module("llmserve.engines.embedded", "--batch-size-max", str(batch_size))
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
    """A timed engine in a process of its own."""
    return running(f"timed {model}", module("llmserve.engines.fake", "--model", model, *flags), ready="/health")


def vllm(python: str, name: str, slots: int, *flags: str, model: str = MODEL) -> AbstractAsyncContextManager[Server]:
    """A vLLM server on the CPU with the demo model, which it serves as `model`: float32, prefix caching off, so that a
    request costs the same each time. python : interpreter of an environment with vLLM in it
    """

    def command(port: int) -> list[str]:
        words = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL_FOLDER)]
        words += ["--served-model-name", model, "--host", "127.0.0.1", "--port", str(port)]
        words += ["--max-num-seqs", str(slots), "--max-model-len", "1024", "--enforce-eager", "--dtype", "float32"]
        return [*words, "--distributed-executor-backend", "uni", "--no-enable-prefix-caching", *flags]

    return running(name, command, ready="/health", environment=VLLM_ENVIRONMENT)


def flags_of(name: str, values: Sequence[str]) -> list[str]:
    """A flag that is repeated: --engine A --engine B."""
    return [word for value in values for word in (f"--{name}", value)]
