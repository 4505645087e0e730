"""Checks input files: small ones in a thread, others in a process of low priority. Keys take turns, one file at a time.

The findings are stored beside the file, so a file is checked once for all of its batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from llmserve.jobs.objects import BatchRow, LineError
from llmserve.jobs.run import input_index
from llmserve.jobs.run.input_index import Index, Report, Rules
from llmserve.jobs.run.validation import INPUT_DAMAGED, LINES_MAX, Task, validate
from llmserve.jobs.store.folder import Folder
from llmserve.jobs.store.owner import OwnerStore
from llmserve.jobs.store.rows import Part

THREAD_BYTES = 256 << 10  # takes milliseconds; a process takes a second to start


class InputChecker:
    """Checks of input files, each done once. tokens_queued_max : of a key's batches in progress; 0: no limit"""

    def __init__(
        self, folder: Folder, *, line_bytes_max: int, prompt_chars_max: int, tokens_queued_max: int = 0
    ) -> None:
        self._folder = folder
        self._line_bytes_max, self._prompt_chars_max = line_bytes_max, prompt_chars_max
        self._tokens_queued_max = tokens_queued_max
        self._small, self._large = Turns(), Turns()

    async def checked(self, batch: BatchRow, part: Part) -> tuple[Report, Index]:
        """What is in the input of a batch, and where. The index is empty when there are errors. Raises OSError."""
        rules = Rules(
            endpoint=batch.endpoint,
            size=part.bytes,
            crc=part.crc,
            line_bytes_max=self._line_bytes_max,
            prompt_chars_max=self._prompt_chars_max,
            lines_max=LINES_MAX,
        )
        path, index = self._folder.path / part.name, self._folder.index(part.name, batch.endpoint)
        if (found := await asyncio.to_thread(_known, path, index, rules)) is not None:
            return found
        task = Task(path=str(path), index=str(index), rules=rules)
        is_small = part.bytes <= THREAD_BYTES
        async with (self._small if is_small else self._large).turn(batch.key):
            if (found := await asyncio.to_thread(_known, path, index, rules)) is not None:
                return found  # another batch of the file has had its turn
            report = await asyncio.to_thread(validate, task) if is_small else await _in_process(task)
        found = await asyncio.to_thread(_known, path, index, rules)
        return found if found is not None else (report, input_index.EMPTY)

    async def too_much(self, store: OwnerStore, batch: BatchRow, report: Report) -> list[LineError]:
        """The error of a batch with which its key would have too many tokens queued; as OpenAI's."""
        most = self._tokens_queued_max
        if not most:
            return []
        queued = await store.tokens_queued(batch.key)
        if queued + report.tokens <= most:
            return []
        message = (
            f"Enqueued token limit reached: {queued:,} tokens are queued, and this batch has {report.tokens:,}; the "
            f"limit is {most:,}. Try again when batches in progress have ended."
        )
        return [LineError("token_limit_exceeded", message)]


def _known(path: Path, index: Path, rules: Rules) -> tuple[Report, Index] | None:
    """What is known of a file without reading it. Runs in a thread. Raises OSError."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        size = -1
    if size < rules.size:
        return Report(lines=0, tokens=0, errors=[LineError("input_damaged", INPUT_DAMAGED)]), input_index.EMPTY
    return input_index.read(index, rules)


class Turns:
    """A queue in which the keys take turns: a key waits for one check of another key at most."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._busy = False

    @contextlib.asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[None]:
        if self._busy:
            granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(key, deque()).append(granted)
            try:
                await granted
            except asyncio.CancelledError:
                if granted.done() and not granted.cancelled():
                    self._next()
                raise
        self._busy = True
        try:
            yield
        finally:
            self._next()

    def _next(self) -> None:
        self._busy = False
        while self._waiting:
            key, row = self._waiting.popitem(last=False)
            granted = row.popleft()
            if row:
                self._waiting[key] = row  # behind the other keys
            if not granted.done():
                self._busy = True
                granted.set_result(None)
                return


async def _in_process(task: Task) -> Report:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "llmserve.jobs.run.validation"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, problems = await process.communicate(msgspec.json.encode(task))
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode != 0:
        lines = problems.decode(errors="replace").strip().splitlines()
        raise OSError(f"the input cannot be checked: {lines[-1] if lines else f'status {process.returncode}'}")
    return msgspec.json.decode(output, type=Report)
