"""A local engine server as a child process: started, watched, restarted, and never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence

import aiohttp

from llmserve.errors import EngineStartError

log = logging.getLogger("llmserve")

LOG_LINES = 40  # of its output, kept for the message when it fails
RESTART_PAUSE_S = (0.5, 30.0)  # first and longest
STABLE_S = 60.0  # a process that has lived this long is restarted without a long pause again
STOP_S = 5.0  # between asking it to stop and killing it


def free_port() -> int:
    """A port of the loopback interface that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class EngineProcess:
    """Runs `command(port)` on a free loopback port.

    `start()` returns when GET /health answers 200; afterwards a process that ends is started again on the same port,
    after a pause that doubles. It gets a process group of its own, so that Ctrl-C in a terminal reaches only us; the
    command must itself see to it that the child ends when we are killed.
    """

    def __init__(self, name: str, command: Callable[[int], Sequence[str]], *, start_s: float) -> None:
        self.name = name
        self.port = free_port()
        self._command = list(command(self.port))
        self._start_s = start_s
        self._process: asyncio.subprocess.Process | None = None
        self._lines: deque[str] = deque(maxlen=LOG_LINES)
        self._reader: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Raises EngineStartError with the process's last lines when it ends, or is not healthy within `start_s`."""
        await self._spawn()
        try:
            async with asyncio.timeout(self._start_s):
                await self._until_healthy()
        except TimeoutError:
            await self.stop()
            raise EngineStartError(
                f"{self.name} was not ready within {self._start_s:.0f} s{self._last_words()}"
            ) from None
        except BaseException:
            await self.stop()
            raise
        self._watcher = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Ask it to stop, kill it if it does not, and all that it has started. Harmless when it has ended."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        if self._process is None:
            return
        if self._process.returncode is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended(0.02), STOP_S)
        self._signal(signal.SIGKILL)  # the group: workers may outlive their leader
        await self._ended(0.02)
        if self._reader is not None:
            await asyncio.wait([self._reader], timeout=1.0)
            self._reader.cancel()

    async def _ended(self, look_every_s: float) -> None:
        """Not `Process.wait()`: with some event loops that also waits until nobody holds the output open."""
        assert self._process is not None
        while self._process.returncode is None:  # noqa: ASYNC110
            await asyncio.sleep(look_every_s)

    async def _spawn(self) -> None:
        self._lines.clear()
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = asyncio.create_task(self._read(self._process))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:  # a line longer than the reader's limit: it has been dropped
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self._lines.append(text)
            log.debug("%s: %s", self.name, text)

    async def _until_healthy(self) -> None:
        assert self._process is not None
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as session:
            while True:
                if self._process.returncode is not None:
                    assert self._reader is not None
                    await self._reader
                    raise EngineStartError(
                        f"{self.name} ended with status {self._process.returncode}{self._last_words()}"
                    )
                with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                    async with session.get(f"{self.url}/health") as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(0.05)

    async def _watch(self) -> None:
        pause_s, longest_s = RESTART_PAUSE_S
        while True:
            assert self._process is not None
            born_s = time.monotonic()
            await self._ended(0.25)
            if time.monotonic() - born_s >= STABLE_S:
                pause_s = RESTART_PAUSE_S[0]
            status, words = self._process.returncode, self._last_words()
            log.error("%s ended with status %s; starting it again in %.1f s%s", self.name, status, pause_s, words)
            self._signal(signal.SIGKILL)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
            try:
                await self._spawn()
            except OSError as error:  # no memory, no process table entry: the next round tries again
                log.error("%s cannot be started: %s", self.name, error)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _last_words(self) -> str:
        return "".join(f"\n    {line}" for line in list(self._lines)[-12:])
