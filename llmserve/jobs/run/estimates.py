"""Estimates, at its creation, of what a batch will take.

The lines of the first SAMPLE_BYTES are forecast like online requests, and stand for the rest of the file.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from llmserve.jobs.objects import BatchRow
from llmserve.jobs.run.jsonl import read_line
from llmserve.jobs.store.folder import Folder
from llmserve.jobs.store.rows import Part

SAMPLE_BYTES = 128 << 10
SAMPLE_LINES = 64
KEPT = 1024  # batches


class Work(NamedTuple):
    """Tokens of prompts and answers. model : of the first.  money, joules : None when prices or meters are missing"""

    model: str
    prompt_tokens: float
    output_tokens: float
    money: float | None
    joules: float | None

    def times(self, factor: float) -> Work:
        money = None if self.money is None else factor * self.money
        joules = None if self.joules is None else factor * self.joules
        return Work(self.model, factor * self.prompt_tokens, factor * self.output_tokens, money, joules)


class Forecaster(Protocol):
    """A source of forecasts for the requests of a file (jobs/submission.py)."""

    async def work_of(self, key: str, path: str, bodies: Sequence[bytes]) -> Work | None:
        """What these requests will take in total; None: no request can be read."""
        ...


class Estimates:
    """The estimates of the batches that were seen last."""

    def __init__(self, folder: Folder, forecaster: Forecaster) -> None:
        self._folder, self._forecaster = folder, forecaster
        self._known: OrderedDict[str, Work | None] = OrderedDict()  # by batch

    def known(self, batch_id: str) -> Work | None:
        return self._known.get(batch_id)

    async def of(self, batch: BatchRow, part: Part) -> Work | None:
        """The estimate; None when the beginning of the file has no request. part : of the input. Raises OSError."""
        if batch.id not in self._known:
            lines = await asyncio.to_thread(_beginning, self._folder.path / part.name)
            sample = lines[:: max(1, len(lines) // SAMPLE_LINES)]
            bodies = [body for line in sample if (body := _body(line)) is not None]
            work = await self._forecaster.work_of(batch.key, batch.endpoint, bodies) if bodies else None
            share = part.bytes / max(1, sum([len(line) for line in lines])) * len(lines) / max(1, len(bodies))
            self._known[batch.id] = work.times(share) if work is not None else None
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        return self._known[batch.id]


def _beginning(path: Path) -> list[bytes]:
    """The whole lines of the first SAMPLE_BYTES."""
    with open(path, "rb") as file:
        data = file.read(SAMPLE_BYTES)
        lines = data.splitlines(keepends=True)
        if len(data) == SAMPLE_BYTES and not data.endswith(b"\n"):
            lines.pop()
        return [line for line in lines if line.strip()]


def _body(line: bytes) -> bytes | None:
    try:
        return bytes(read_line(line).body)
    except msgspec.DecodeError:
        return None
