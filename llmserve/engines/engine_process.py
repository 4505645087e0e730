"""A local engine server as a child process: started, watched, restarted, and never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import aiohttp

from llmserve.engines import supervisor
from llmserve.errors import EngineStartError

log = logging.getLogger("llmserve")

LINES_KEPT = 400  # of its output, for the message when it fails
LAST_LINES = 12  # of them, shown
ERRORS_SHOWN = 5  # lines before those that name an exception: a server of several processes says the cause early
LINE_BYTES_MAX = 1 << 14
LINE_SHOWN = 300  # characters
LOG_BYTES_MAX = 64 << 20  # of a log file; then a fresh one
PROGRESS_EVERY_S = 10.0
START_TRIES = 3  # when somebody else took the port first
RESTART_PAUSE_S = (0.5, 30.0)  # first and longest
STABLE_S = 60.0  # a process that has lived this long is restarted without a long pause again
STOP_S = 10.0  # between asking it to stop and killing it

# Alone, isolated and without site-packages, so that it starts in a few milliseconds wherever we are started from.
SUPERVISOR = (sys.executable, "-I", "-S", supervisor.__file__)

PORT_TAKEN = re.compile(r"address already in use|EADDRINUSE|errno 98\b", re.IGNORECASE)
EXCEPTION = re.compile(r"(?:^|[\s\]])(?:\w+\.)*\w*(?:Error|Exception): .")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def free_ports(count: int) -> list[int]:
    """Different ports of the loopback interface that nobody listens on at this moment."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def free_port() -> int:
    return free_ports(1)[0]


class EngineProcess:
    """Runs `command(port)` on a free loopback port.

    `start()` returns when GET /health answers 200; afterwards a process that ends is started again on the same port,
    after a pause that doubles. It runs under a supervisor: all of it ends when we end, even when we are killed. The
    supervisor makes a process group of it, so that Ctrl-C in a terminal reaches only us; not a session, among which
    Linux shares its processors first (sched_autogroup): an engine that spins while it waits would leave us hardly any
    of its core.

    port         the first to try; any free one when not given
    environment  variables beside our own
    log_file     all that it says, this start's; the one before is kept as FILE.1
    """

    def __init__(
        self,
        name: str,
        command: Callable[[int], Sequence[str]],
        *,
        start_s: float,
        port: int | None = None,
        environment: Mapping[str, str] | None = None,
        log_file: Path | None = None,
    ) -> None:
        self.name = name
        self.port = port or free_port()
        self._command = command
        self._environment = {**os.environ, **(environment or {})}
        self._start_s = start_s
        self._log = _LogFile(log_file) if log_file is not None else None
        self._process: asyncio.subprocess.Process | None = None
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._reader: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()  # held by what ends it on purpose
        self._stopped = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """Of the supervisor, which leads the process's group."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Raises EngineStartError with the process's last lines when it ends, or is not healthy within `start_s`.

        A port that somebody else took before the process could is replaced by another.
        """
        self._open_log()
        for tries_left in reversed(range(START_TRIES)):
            try:
                await self._up()
                break
            except EngineStartError as error:
                if not tries_left or not any(PORT_TAKEN.search(line) for line in (*self._lines, str(error))):
                    raise
                log.info("%s found its port %d taken; trying another", self.name, self.port)
                self.port = free_port()
        self._watcher = asyncio.create_task(self._watch())

    async def restart(self) -> None:
        """End it and start it again at once on its port; returns when it is healthy. This counts as no crash.

        Raises EngineStartError when it does not come up; it is then tried again as after a crash.
        """
        async with self._changing:
            try:
                await self._unwatch()
                await self._end()
                await self._up()
            finally:
                if not self._stopped:
                    self._watcher = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Ask it to stop, kill it if it does not, and all that it has started. Harmless when it has ended."""
        self._stopped = True  # which a restart under way takes notice of
        async with self._changing:
            await self._unwatch()
            await self._end()
        if self._log is not None:
            self._log.close()

    # ---- up and down ----

    async def _up(self) -> None:
        """Start it and wait until it is healthy; nothing is left of it when this raises."""
        self._check_port()
        await self._spawn()
        try:
            async with asyncio.timeout(self._start_s):
                await self._until_healthy()
        except TimeoutError:
            await self._end()
            raise EngineStartError(self._told(f"was not ready within {self._start_s:.0f} s")) from None
        except BaseException:
            await self._end()
            raise

    def _check_port(self) -> None:
        """Whoever else answers on it must not be taken for ours."""
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self.port))
            except OSError as error:
                raise EngineStartError(f"{self.name}: port {self.port}: {error.strerror or error}") from error

    async def _end(self) -> None:
        if self._process is None:
            return
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)  # the supervisor passes it on to the command alone
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended(0.02), STOP_S)
        self._kill_group()
        await self._ended(0.02)
        if self._reader is not None:
            await asyncio.wait([self._reader], timeout=1.0)
            self._reader.cancel()

    async def _ended(self, look_every_s: float) -> None:
        """Not `Process.wait()`: with some event loops that also waits until nobody holds the output open."""
        assert self._process is not None
        while self._process.returncode is None:  # noqa: ASYNC110
            await asyncio.sleep(look_every_s)

    def _kill_group(self) -> None:
        """What may have outlived its supervisor, or must not outlive it."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _spawn(self) -> None:
        self._lines.clear()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *SUPERVISOR,
                *self._command(self.port),
                stdin=asyncio.subprocess.PIPE,  # the supervisor: it holds as long as we have this end open
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=self._environment,
            )
        except OSError as error:  # no memory, no process table entry
            raise EngineStartError(f"{self.name} cannot be started: {error}") from error
        self._reader = asyncio.create_task(self._read(self._process))

    async def _until_healthy(self) -> None:
        assert self._process is not None
        began_s = time.monotonic()
        said_s = began_s
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as session:
            while not await self._is_healthy(session):
                if self._stopped:
                    raise EngineStartError(f"{self.name} is being stopped")
                if self._process.returncode is not None:
                    assert self._reader is not None
                    await asyncio.wait([self._reader], timeout=1.0)
                    raise EngineStartError(self._told(self._ending()))
                if time.monotonic() - said_s >= PROGRESS_EVERY_S:
                    said_s = time.monotonic()
                    line = self._lines[-1] if self._lines else "it has said nothing yet"
                    log.info("%s is starting (%.0f s): %s", self.name, said_s - began_s, line[:LINE_SHOWN])
                await asyncio.sleep(0.05)

    async def _is_healthy(self, session: aiohttp.ClientSession) -> bool:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with session.get(f"{self.url}/health") as response:
                return response.status == 200
        return False

    # ---- the watch ----

    async def _watch(self) -> None:
        pause_s, longest_s = RESTART_PAUSE_S
        while True:
            since_s = time.monotonic()
            await self._ended(0.25)
            if time.monotonic() - since_s >= STABLE_S:
                pause_s = RESTART_PAUSE_S[0]
            trouble: str | None = self._told(f"{self._ending()}; starting it again in {pause_s:.1f} s")
            while trouble is not None:
                log.error("%s", trouble)
                self._kill_group()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
                try:
                    await self._up()
                    trouble = None
                except EngineStartError as error:
                    trouble = f"{error}\n    starting it again in {pause_s:.1f} s"
            log.warning("%s is up again", self.name)

    async def _unwatch(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)

    # ---- what it says ----

    def _open_log(self) -> None:
        if self._log is not None:
            try:
                self._log.open()
            except OSError as error:
                raise EngineStartError(f"the log of {self.name} cannot be written: {error}") from error

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Not line by line: progress bars end theirs with a carriage return, and a long one is no reason to stop."""
        assert process.stdout is not None
        rest = b""
        while chunk := await process.stdout.read(1 << 16):
            if self._log is not None:
                self._log.write(chunk)
            *lines, rest = re.split(rb"[\r\n]+", rest + chunk)
            rest = rest[-LINE_BYTES_MAX:]
            for line in lines:
                self._heard(line)
        self._heard(rest)

    def _heard(self, line: bytes) -> None:
        text = COLOUR.sub("", line.decode(errors="replace")).rstrip()
        if text:
            self._lines.append(text)
            log.debug("%s: %s", self.name, text)

    def _ending(self) -> str:
        assert self._process is not None
        status = self._process.returncode or 0
        number = (
            -status if status < 0 else status - 128
        )  # of the supervisor, or of the command as the supervisor tells it
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(number).name}"
        return f"ended with status {status}"

    def _told(self, what: str) -> str:
        """What happened to it, its last words, and where there are more."""
        lines = list(self._lines)
        earlier = [line for line in lines[:-LAST_LINES] if EXCEPTION.search(line)]
        words = [*list(dict.fromkeys(earlier))[-ERRORS_SHOWN:], *lines[-LAST_LINES:]]
        more = [f"(all of it is in {self._log.path})"] if self._log is not None else []
        return f"{self.name} {what}" + "".join(f"\n    {line[:LINE_SHOWN]}" for line in [*words, *more])


class _LogFile:
    """Appended to until it is too large; then, and at each opening, a fresh file takes its place, and it is FILE.1."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def open(self) -> None:
        """Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self.path.replace(f"{self.path}.1")
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)  # prompts may be logged
        self.close()
        self._descriptor = descriptor

    def write(self, data: bytes) -> None:
        """What cannot be written is left out: a full disk is no reason to stop an engine."""
        with contextlib.suppress(OSError):
            if self._descriptor is not None and os.fstat(self._descriptor).st_size > LOG_BYTES_MAX:
                self.open()
            if self._descriptor is not None:
                os.write(self._descriptor, data)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
