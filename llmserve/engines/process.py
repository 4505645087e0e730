"""A local engine server as a child process: started, watched, restarted, and ended together with llmserve."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from llmserve.engines import supervisor
from llmserve.engines.hanging import hang
from llmserve.errors import EngineStartError
from llmserve.http.client import HttpClient
from llmserve.http.connecting import HttpError
from llmserve.runtime.lasting import lasting

log = logging.getLogger("llmserve")

OUTPUT_LINES = 400  # last lines of output, stored for the error message
LAST_LINES = 12  # last lines shown in the error message
ERRORS_SHOWN = 5  # earlier lines shown that name an exception: a server of several processes logs the cause early
LINE_BYTES_MAX = 1 << 14
LINE_SHOWN = 300  # characters of a line that are shown
LOG_BYTES_MAX = 64 << 20  # size at which a log file is rotated
PROGRESS_EVERY_S = 10.0
START_TRIES = 3  # when another process takes the port first
RESTART_PAUSE_S = (0.5, 30.0)  # first and longest pause before a restart
STABLE_S = 60.0  # after this run time the pause before a restart is the first one again
HEALTH_S = 2.0  # longest wait for /health
STOP_S = 10.0  # between SIGTERM and SIGKILL

# `-I -S` (isolated, without site-packages): the supervisor starts in a few milliseconds, from any folder.
SUPERVISOR = (sys.executable, "-I", "-S", supervisor.__file__)

PORT_TAKEN = re.compile(r"address already in use|EADDRINUSE|errno 98\b", re.IGNORECASE)
EXCEPTION = re.compile(r"(?:^|[\s\]])(?:\w+\.)*\w*(?:Error|Exception): .|\[Errno -?\d+\]")
CAUSE_LINES = 4  # last lines in which a start's progress looks for an exception: what is tried again, and why
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def free_ports(count: int) -> list[int]:
    """Return different ports of the loopback interface that are free at this moment."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def free_port() -> int:
    return free_ports(1)[0]


class EngineProcess:
    """Runs `command(port)` on a free loopback port.

    `start()` returns when GET /health answers 200. Later, a process that ends is restarted on the same port, after a
    pause that doubles. A supervisor runs the command, and ends the command and all its children when llmserve ends,
    even when llmserve is killed. The supervisor leads a process group, so that Ctrl-C in a terminal reaches llmserve
    only. The group is not a session: Linux divides its processors among sessions first (sched_autogroup), so an engine
    that spins while it waits would take most of a shared core.

    port         the first port to try; default: any free port
    environment  variables in addition to llmserve's own
    key_variable the process gets a random API key in this variable, and keeps it at a restart: other users of this
                 machine cannot read a variable, unlike a flag. `api_key`: the key; None: none was asked for
    log_file     output since the last start; the output of the start before is in FILE.1
    stop_s       between SIGTERM and SIGKILL
    tries        of the first start, each on another port
    stable_s     a process that has run for so long is restarted after the first pause again
    hung_s       a process whose GET /health gives no answer of any status for so long is killed and restarted; 0: never

    healthy      whether the process runs, and GET /health has answered since its start
    restarts     after an unexpected end.  last_end : how the process ended last, in a line; "": it has not
    """

    def __init__(
        self,
        name: str,
        command: Callable[[int], Sequence[str]],
        *,
        start_s: float,
        port: int | None = None,
        environment: Mapping[str, str] | None = None,
        key_variable: str | None = None,
        log_file: Path | None = None,
        stable_s: float = STABLE_S,
        tries: int = START_TRIES,
        stop_s: float = STOP_S,
        hung_s: float = 0.0,
    ) -> None:
        self.name = name
        self.healthy, self.restarts, self.last_end = False, 0, ""
        self._stable_s, self._tries, self._stop_s, self._hung_s = stable_s, tries, stop_s, hung_s
        self.port = port or free_port()
        self._command = command
        self.api_key = "sk-" + secrets.token_urlsafe(32) if key_variable is not None else None
        self._environment = {**os.environ, **(environment or {})}
        if key_variable is not None and self.api_key is not None:
            self._environment[key_variable] = self.api_key
        self._start_s = start_s
        self._log = _LogFile(log_file) if log_file is not None else None
        self._process: asyncio.subprocess.Process | None = None
        self._lines: deque[str] = deque(maxlen=OUTPUT_LINES)
        self._reader: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._ending_lock = asyncio.Lock()  # held by `restart` and `stop`
        self._stopped = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """The process id of the supervisor, which leads the process group."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Start the process and wait until it is healthy. If another process takes the port first, try another port.

        Raises EngineStartError with the last lines of output when the process ends or is not healthy within `start_s`.
        """
        self._open_log()
        for tries_left in reversed(range(self._tries)):
            try:
                await self._start_once()
                break
            except EngineStartError as error:
                if not tries_left or not any(PORT_TAKEN.search(line) for line in (*self._lines, str(error))):
                    raise
                log.info("%s: port %d is in use; trying another port", self.name, self.port)
                self.port = free_port()
        self._watcher = self._watching()

    async def restart(self) -> None:
        """Restart the process at once on its port and wait until it is healthy. Not counted as a crash.

        Raises EngineStartError when the start fails; the process is then restarted as after a crash.
        """
        async with self._ending_lock:
            try:
                await self._stop_watcher()
                await self._terminate()
                await self._start_once()
            finally:
                if not self._stopped:
                    self._watcher = self._watching()

    async def stop(self, within_s: float | None = None) -> None:
        """Stop the process (SIGTERM, then SIGKILL) and all its children. No effect when the process has ended.

        within_s : between the two signals, instead of `stop_s`
        """
        self._stop_s = self._stop_s if within_s is None else within_s
        self._stopped = True  # a restart in progress reads this flag
        async with self._ending_lock:
            await self._stop_watcher()
            await self._terminate()
        if self._log is not None:
            self._log.close()

    # ---- start and stop ----

    async def _start_once(self) -> None:
        """Start the process and wait until it is healthy. On an error, no process remains."""
        self._check_port()
        await self._spawn()
        try:
            async with asyncio.timeout(self._start_s):
                await self._wait_healthy()
            self.healthy = True
        except TimeoutError:
            await self._terminate()
            raise EngineStartError(self._failure(f"was not ready within {self._start_s:.0f} s")) from None
        except BaseException:
            await self._terminate()
            raise

    def _check_port(self) -> None:
        """Raise EngineStartError if the port is in use: another server must not be mistaken for this engine."""
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self.port))
            except OSError as error:
                raise EngineStartError(f"{self.name}: port {self.port}: {error.strerror or error}") from error

    async def _terminate(self) -> None:
        self.healthy = False
        if self._process is None:
            return
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)  # the supervisor forwards SIGTERM to the command only
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wait_ended(0.02), self._stop_s)
        self._kill_group()
        await self._wait_ended(0.02)
        if self._reader is not None:
            await asyncio.wait([self._reader], timeout=1.0)
            self._reader.cancel()

    async def _wait_ended(self, poll_every_s: float) -> None:
        """Wait for the supervisor. On some event loops `Process.wait()` also waits until the output is closed."""
        assert self._process is not None
        while self._process.returncode is None:  # noqa: ASYNC110
            await asyncio.sleep(poll_every_s)

    def _kill_group(self) -> None:
        """Kill all processes that have outlived the supervisor, or the supervisor with all its children."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _spawn(self) -> None:
        self._lines.clear()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *SUPERVISOR,
                *self._command(self.port),
                stdin=asyncio.subprocess.PIPE,  # the supervisor ends the command when this pipe is closed
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=self._environment,
            )
        except OSError as error:  # out of memory or of process ids
            raise EngineStartError(f"{self.name} cannot be started: {error}") from error
        self._reader = asyncio.create_task(self._read(self._process))

    async def _wait_healthy(self) -> None:
        assert self._process is not None
        began_s = time.monotonic()
        logged_s = began_s
        client = HttpClient(self.url, connect_s=HEALTH_S, idle_s=HEALTH_S, answer_s=HEALTH_S)
        try:
            while not await self._is_healthy(client):
                if self._stopped:
                    raise EngineStartError(f"{self.name} is being stopped")
                if self._process.returncode is not None:
                    assert self._reader is not None
                    await asyncio.wait([self._reader], timeout=1.0)
                    raise EngineStartError(self._failure(self._ending()))
                if time.monotonic() - logged_s >= PROGRESS_EVERY_S:
                    logged_s = time.monotonic()
                    log.info("%s is starting (%.0f s): %s", self.name, logged_s - began_s, self._progress())
                await asyncio.sleep(0.05)
        finally:
            await client.close()

    async def _is_healthy(self, client: HttpClient) -> bool:
        with contextlib.suppress(HttpError):
            response = await client.request(client.opening("GET", "/health", {}))
            response.close()
            return response.status == 200
        return False

    # ---- restarts ----

    def _watching(self) -> asyncio.Task[None]:
        return lasting(f"the watch of the process of {self.name}", self._keep_running)

    async def _keep_running(self) -> None:
        """Restart the process whenever it ends. Runs until cancelled."""
        pause_s, longest_s = RESTART_PAUSE_S
        while True:
            since_s = time.monotonic()
            hung = await self._end_or_hang()
            self.healthy, self.last_end = False, hung or self._ending()
            self.restarts += 1
            if time.monotonic() - since_s >= self._stable_s:
                pause_s = RESTART_PAUSE_S[0]
            failure: str | None = self._failure(f"{self.last_end}; restarting in {pause_s:.1f} s")
            while failure is not None:
                log.error("%s", failure)
                self._kill_group()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
                try:
                    await self._start_once()
                    failure = None
                except EngineStartError as error:
                    failure = f"{error}\n    restarting in {pause_s:.1f} s"
            log.warning("%s is up again", self.name)

    async def _end_or_hang(self) -> str:
        """Wait until the process ends, or hangs and is killed: then return this in words."""
        ending = asyncio.create_task(self._wait_ended(0.25))
        waited = {ending, asyncio.create_task(hang(self.url, self._hung_s))} if self._hung_s else {ending}
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waited:
                task.cancel()
        if ending.done():
            return ""
        self._kill_group()
        await self._wait_ended(0.02)
        return f"was killed, for it had not answered /health for {self._hung_s:g} s"

    async def _stop_watcher(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)

    # ---- output ----

    def _open_log(self) -> None:
        if self._log is not None:
            try:
                self._log.open()
            except OSError as error:
                raise EngineStartError(f"the log of {self.name} cannot be written: {error}") from error

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Read output in chunks: progress bars end lines with a carriage return, and lines may be of any length."""
        assert process.stdout is not None
        rest = b""
        while chunk := await process.stdout.read(1 << 16):
            if self._log is not None:
                self._log.write(chunk)
            *lines, rest = re.split(rb"[\r\n]+", rest + chunk)
            rest = rest[-LINE_BYTES_MAX:]
            for line in lines:
                self._add_line(line)
        self._add_line(rest)

    def _add_line(self, line: bytes) -> None:
        text = COLOUR.sub("", line.decode(errors="replace")).rstrip()
        if text:
            self._lines.append(text)
            log.debug("%s: %s", self.name, text)

    def _progress(self) -> str:
        """The last line of output, after a line just before it that names an exception."""
        *earlier, last = list(self._lines)[-CAUSE_LINES:] or ["no output yet"]
        causes = [line for line in earlier if EXCEPTION.search(line)]
        return "; ".join(line[:LINE_SHOWN] for line in [*causes[-1:], last])

    def _ending(self) -> str:
        assert self._process is not None
        status = self._process.returncode or 0
        # A negative status is the supervisor's signal; the supervisor returns 128 + N for the command's signal N.
        number = -status if status < 0 else status - 128
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(number).name}"
        return f"ended with status {status}"

    def _failure(self, reason: str) -> str:
        """Return an error message with the last lines of output and the path of the log."""
        lines = list(self._lines)
        earlier = [line for line in lines[:-LAST_LINES] if EXCEPTION.search(line)]
        shown = [*list(dict.fromkeys(earlier))[-ERRORS_SHOWN:], *lines[-LAST_LINES:]]
        more = [f"(the full log is {self._log.path})"] if self._log is not None else []
        return f"{self.name} {reason}" + "".join(f"\n    {line[:LINE_SHOWN]}" for line in [*shown, *more])


class _LogFile:
    """A log that is rotated: at each `open`, and when the file is too large, the old file is renamed to FILE.1."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def open(self) -> None:
        """Rotate the old file and open a new one. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self.path.replace(f"{self.path}.1")
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)  # prompts may be logged
        self.close()
        self._descriptor = descriptor

    def write(self, data: bytes) -> None:
        """Append data. Write errors are ignored: a full disk must not stop an engine."""
        with contextlib.suppress(OSError):
            if self._descriptor is not None and os.fstat(self._descriptor).st_size > LOG_BYTES_MAX:
                self.open()
            if self._descriptor is not None:
                os.write(self._descriptor, data)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
