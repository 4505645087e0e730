"""Runs one process of a cluster on its node: writes its files, starts and reloads it, restarts it if it ends or hangs.

The process ends with its keeper, even when the keeper is killed: whoever starts the keeper again, perhaps on another
node, never finds an old process beside the new one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from pathlib import Path
from typing import Literal

import msgspec

from llmserve.engines.process import START_TRIES, STOP_S, EngineProcess
from llmserve.errors import EngineStartError
from llmserve.http.client import HttpClient
from llmserve.http.connecting import HttpError
from llmserve.machines.processes import Process, filled
from llmserve.runtime.lasting import lasting

log = logging.getLogger("llmserve")

LOOPBACK, ANYWHERE = "127.0.0.1", "0.0.0.0"
PAUSE_S = (0.5, 30.0)  # before a start that follows a failed one
STABLE_S = 5.0  # a process that has run for so long was no failed start: it is started again at once
RELOAD_S = 30.0
DRAIN_S = 45.0  # for a server's requests in flight, more than --drain-s

State = Literal["starting", "running", "stopped"]


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """A process, as its keeper sees it.

    url       where other nodes reach it
    pid       of its process group
    restarts  since the keeper started.  last_end : why the process ended last, in a line
    since_s   unix time of the keeper's start
    revision  of the description that the process follows
    """

    name: str
    state: State
    url: str
    node: str
    pid: int | None = None
    restarts: int = 0
    last_end: str = ""
    since_s: float = 0.0
    revision: int = 0


class Keeper:
    """Keeps a process running as it is described.

    address  of the node, at which other nodes reach it.  folder : of all processes of the cluster on this node
    """

    def __init__(
        self, process: Process, revision: int, *, address: str, node: str, folder: Path, admin_key: str
    ) -> None:
        self._described = process
        self._revision = revision
        self._address = process.host or address
        self._node = node
        self._folder = folder / process.name
        self._admin_key = admin_key
        self._newest: tuple[Process, int] | None = None  # description and revision that the process shall follow
        self._changing: asyncio.Task[None] | None = None
        self._state: State = "starting"
        self._since_s = time.time()
        self._starting: asyncio.Task[None] | None = None
        self._process = self._new_process(process.port)

    @property
    def url(self) -> str:
        return f"http://{self._address}:{self._process.port}"

    def status(self) -> Status:
        process = self._process
        return Status(
            name=self._described.name,
            state=self._state if process.healthy or self._state == "stopped" else "starting",
            url=self.url,
            node=self._node,
            pid=process.pid,
            restarts=process.restarts,
            last_end=process.last_end,
            since_s=self._since_s,
            revision=self._revision,
        )

    # ---- beginning and end ----

    def start(self) -> None:
        """Begin to start the process, and try again until it runs. Must be called inside the running event loop."""
        self._write_files(self._described)
        self._starting = self._until_started()

    def _until_started(self) -> asyncio.Task[None]:
        return lasting(f"the start of {self._described.name}", self._start)

    async def _start(self) -> None:
        pause_s, longest_s = PAUSE_S
        while True:
            try:
                await self._process.start()
                self._state = "running"
                return
            except EngineStartError as error:
                log.error("%s", error)
                self._process.last_end = str(error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    async def stop(self, within_s: float | None = None) -> None:
        """Stop the process; a server ends its running requests first, for as long as its settings say.

        within_s : after which the process is killed; None: DRAIN_S for a server, STOP_S for an engine
        """
        self._state = "stopped"
        for task in (self._changing, self._starting):
            await _cancelled(task)
        await self._process.stop(within_s)
        shutil.rmtree(self._folder, ignore_errors=True)

    # ---- changes ----

    def follow(self, process: Process, revision: int) -> None:
        """Follow another description: by a reload where that is enough, else by a restart on the same port.

        Returns at once; the status has the revision when the process follows. Of several the newest counts. Must be
        called inside the running event loop.
        """
        if revision <= self._revision:
            return
        if self._newest is None or revision > self._newest[1]:
            self._newest = process, revision
        if self._changing is None or self._changing.done():
            self._changing = asyncio.create_task(self._change())

    async def _change(self) -> None:
        while self._newest is not None and self._newest[1] > self._revision:
            process, revision = self._newest
            try:
                await self._apply(process)
            except OSError:  # the controller asks again
                log.exception("%s does not follow its new description", self._described.name)
                return
            self._revision = revision

    async def _apply(self, process: Process) -> None:
        self._write_files(process)
        before, self._described = self._described, process
        same_command = (before.words, before.environment) == (process.words, process.environment)
        if same_command and (before.files == process.files or await self._reload()):
            return
        port = self._process.port
        await _cancelled(self._starting)
        self._state = "starting"
        await self._process.stop()
        self._process = self._new_process(port)
        self._starting = self._until_started()

    async def _reload(self) -> bool:
        """Have the server read its files again, once it runs. False: it refuses these changes without a restart."""
        until_s = time.monotonic() + RELOAD_S
        while not self._process.healthy and time.monotonic() < until_s:  # noqa: ASYNC110 (no event to wait for)
            await asyncio.sleep(0.1)
        url, headers = f"http://{self._local}:{self._process.port}", {"authorization": f"Bearer {self._admin_key}"}
        try:
            async with HttpClient(url, connect_s=5.0, idle_s=RELOAD_S, answer_s=RELOAD_S) as client:
                answer = await client.answer("POST", "/admin/reload", headers, b"")
        except HttpError as error:
            log.warning("%s: no answer to a reload: %s", self._described.name, error)
            return False
        if answer.status != 200:
            log.warning("%s restarts: %s", self._described.name, answer.body.decode(errors="replace"))
        return answer.status == 200

    def _write_files(self, process: Process) -> None:
        """Each file whole or not at all, for the process may read at any time."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name, text in process.files.items():
            fresh = self._folder / f".{name}"
            with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
                file.write(filled([text], folder=self._folder)[0])
            fresh.replace(self._folder / name)

    # ---- the process ----

    @property
    def _local(self) -> str:
        """The address at which the process listens."""
        return LOOPBACK if self._address == LOOPBACK else ANYWHERE

    def _new_process(self, port: int) -> EngineProcess:
        described, host = self._described, self._local

        def command(port: int) -> list[str]:
            words = filled(described.words, host=host, port=port, folder=self._folder)
            return [*words, "--host", host] if described.kind != "engine" else words

        return EngineProcess(
            described.name,
            command,
            start_s=described.start_s,
            port=port,
            environment=described.environment,
            log_file=self._folder.with_suffix(".log"),
            stable_s=STABLE_S,
            tries=1 if described.port else START_TRIES,
            stop_s=STOP_S if described.kind == "engine" else DRAIN_S,
            hung_s=described.hung_s,
        )


async def _cancelled(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
