"""Validates input files one at a time: small ones in a thread, others in a process of low priority."""

from __future__ import annotations

import asyncio
import contextlib
import sys

import msgspec

from llmserve.jobs.contract import BatchRow, LineError
from llmserve.jobs.folder import Folder
from llmserve.jobs.rows import Part
from llmserve.jobs.validation import Report, Task, validate
from llmserve.jobs.work_store import WorkStore

THREAD_BYTES = 256 << 10  # takes milliseconds; a process takes a second to start


class Checking:
    """tokens_queued_max : of the batches of one key that are in progress; 0: no limit"""

    def __init__(
        self, folder: Folder, *, line_bytes_max: int, prompt_chars_max: int, tokens_queued_max: int = 0
    ) -> None:
        self._folder = folder
        self._line_bytes_max, self._prompt_chars_max = line_bytes_max, prompt_chars_max
        self._tokens_queued_max = tokens_queued_max
        self._gate = asyncio.Lock()

    async def check(self, batch: BatchRow, part: Part) -> Report:
        """Read the input of a batch and write its index. Raises OSError."""
        task = Task(
            path=str(self._folder.path / part.name),
            size=part.bytes,
            endpoint=batch.endpoint,
            index=str(self._folder.index(batch.id)),
            line_bytes_max=self._line_bytes_max,
            prompt_chars_max=self._prompt_chars_max,
        )
        async with self._gate:
            if part.bytes <= THREAD_BYTES:
                return await asyncio.to_thread(validate, task)
            return await _in_process(task)

    async def too_much(self, store: WorkStore, batch: BatchRow, report: Report) -> list[LineError]:
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


async def _in_process(task: Task) -> Report:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "llmserve.jobs.validation"),
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
