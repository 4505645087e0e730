"""Runs the lines of a file through a cluster in this process.

A result is in its file before it counts, so a second run continues where the first ended and repeats no line that has a
result. The lines are a job without a window: without online requests they take every slot.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np

from llmserve.calls.in_flight import Head, Receipt
from llmserve.errors import ConfigError, RequestError
from llmserve.gateway.bodies import BodyLimits
from llmserve.gateway.draft import Draft
from llmserve.gateway.endpoints import ENDPOINTS
from llmserve.gateway.stages import Admission, named, reading, refuse_streams, routed, served
from llmserve.jobs.run.item_queue import ItemQueue, Shapes, arranged
from llmserve.jobs.run.jsonl import answer_row, answer_tokens, line_of, refusal_row, row_id
from llmserve.jobs.run.local_file import Numbered, results_of
from llmserve.jobs.run.refusals import BUSY, is_final, reason_of
from llmserve.live.cluster import LiveCluster

log = logging.getLogger("llmserve")

JOB = "file"
SAFE_S = 1.0  # results are forced to the disk so often
MODELS_MAX = 256  # that are told apart
UNLIMITED = BodyLimits(**dict.fromkeys(BodyLimits.__struct_fields__, 1 << 30))
UNKNOWN_TOKENS = 256.0  # forecast of an answer before the first one has ended


class Results:
    """The files of results. Rows are written at once, and forced to the disk by `force`."""

    def __init__(self, output: Path, errors: Path) -> None:
        """Raises ConfigError when a file cannot be written."""
        try:
            self._files: list[IO[bytes]] = [open(path, "ab", buffering=0) for path in (output, errors)]  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from error

    def write(self, row: bytes, *, failed: bool) -> None:
        """Raises OSError, such as for a full disk."""
        file, rest = self._files[failed], memoryview(row)
        while rest:
            rest = rest[file.write(rest) :]

    def force(self) -> None:
        for file in self._files:
            os.fsync(file.fileno())

    def close(self) -> None:
        self.force()
        for file in self._files:
            file.close()


class LocalRun:
    """A run of a file.

    total, done, failed  lines; `done` includes earlier runs, and those that have failed
    """

    def __init__(self, path: Path, lines: Sequence[Numbered], output: Path, errors: Path) -> None:
        """Raises ConfigError when the results are not of this file."""
        numbers = {line.custom_id: number for number, line in enumerate(lines)}
        completed, failed = results_of(output), results_of(errors)
        strange = [custom_id for custom_id in (*completed, *failed) if custom_id not in numbers]
        if strange:
            raise ConfigError(f"{output} has results of another file: {strange[0]!r} is not in {path}")
        self.total, self.done, self.failed = len(lines), len({*completed, *failed}), len(failed)
        self._path, self._lines = path, lines
        ended = {numbers[custom_id] for custom_id in (*completed, *failed)}
        self._left = [number for number in range(len(lines)) if number not in ended]
        self._results = Results(output, errors)
        self._lost: Counter[int] = Counter()
        self._changed = asyncio.Event()
        self._trouble: OSError | None = None
        self._slots = 0
        self._items = ItemQueue(slots=lambda model: self._slots)

    @property
    def models(self) -> set[str]:
        """That lines name which have no result yet; "": none is named."""
        return {self._lines[number].model for number in self._left}

    def waits_for(self, cluster: LiveCluster) -> str:
        """Why lines cannot run now, in words; "": nothing is in the way."""
        if not any(cluster.engines_ready.values()):
            return f"waiting for {', '.join(cluster.engines_ready)}"
        now_s, waits = time.monotonic(), []
        for sub_queue in self._items.sub_queues:
            if sub_queue.model and not cluster.fleet.is_up(sub_queue.model):
                waits.append(f"no engine of {sub_queue.model!r} is up")
            elif (why := sub_queue.why_parked(now_s)) is not None:
                waits.append(f"{sub_queue.model!r}: {why}")
        return ", ".join(waits)

    def seconds_left(self) -> float | None:
        """None before the first answer."""
        if self.done == self.total or not self._items.has_rate:
            return None
        now_s = time.monotonic()
        return self._items.forecast(JOB, now_s, lambda model: float("inf"), now_s).ends_at_s - now_s

    async def run(self, cluster: LiveCluster, *, slots: int, barrier: bool) -> None:
        """Run all lines that have no result yet. Raises OSError when the results cannot be written."""
        self._slots = slots
        tokens = [float(self._lines[number].tokens_max or UNKNOWN_TOKENS) for number in self._left]
        models = ["", *sorted(self.models - {""})[:MODELS_MAX]]
        places = {model: place for place, model in enumerate(models)}
        of_models = np.array([places.get(self._lines[number].model, 0) for number in self._left], np.uint16)
        prefixes = np.zeros(len(tokens), np.uint64)
        shapes = Shapes(np.array(self._left, np.int64), np.array(tokens), prefixes, of_models)
        lines = arranged(shapes, barrier=barrier, slots=slots)
        self._items.add(JOB, float("inf"), lines, models=models)
        admission = Admission(
            body=[reading(UNLIMITED, cluster.calls.secret), refuse_streams],
            last=[named(cluster), served(cluster), routed(cluster.routes)],
        )
        try:
            with open(self._path, "rb") as source:  # noqa: ASYNC230 (a few lines at a time, of a local file)
                while self.done < self.total:
                    self._submit(cluster, admission, source)
                    self._changed.clear()
                    try:
                        async with asyncio.timeout(SAFE_S):
                            await self._changed.wait()
                    except TimeoutError:
                        self._results.force()
                    if self._trouble is not None:
                        raise self._trouble
        finally:
            self._results.close()

    def _submit(self, cluster: LiveCluster, admission: Admission, source: IO[bytes]) -> None:
        for handed in self._items.take(time.monotonic()):
            line = self._lines[handed.number]
            source.seek(line.offset)
            client = _Line(self, handed.number)
            try:
                request = line_of(source.read(line.size))
                draft = Draft(ENDPOINTS[request.url], body=bytes(request.body), background=True)
                draft.after_tokens = handed.after_tokens
                admission.read(draft)
                cluster.calls.submit(admission.decide(draft), client)
            except RequestError as error:
                self.refused(handed.number, error)
            except Exception as error:
                log.error("line %r failed", line.custom_id, exc_info=error)
                self.refused(handed.number, RequestError("llmserve failed on this request", code="internal_error"))

    # ---- results ----

    def answered(self, number: int, head: Head) -> None:
        if head.status in BUSY:
            self._again(number, "engine_busy", 0.0)
            return
        if head.status < 400 and (sub_queue := self._items.sub_queue_of(JOB, number)) is not None:
            sub_queue.clear()
        body = head.body or b""
        name = f"llmserve-{head.receipt.request_id}"
        row = answer_row(row_id(JOB, number), self._lines[number].custom_id, head.status, name, body)
        self._write(number, row, failed=head.status >= 400, tokens=answer_tokens(body))

    def refused(self, number: int, error: RequestError) -> None:
        if not is_final(error, self._lost, number):
            self._again(number, reason_of(error), error.retry_after_s or 0.0)
            return
        self._write(number, refusal_row(row_id(JOB, number), self._lines[number].custom_id, "", error), failed=True)

    def _again(self, number: int, reason: str, retry_after_s: float) -> None:
        """Return a line for another try, and park the lines of its model."""
        sub_queue = self._items.sub_queue_of(JOB, number)
        self._items.back(JOB, number)
        if sub_queue is not None:
            sub_queue.park(reason, time.monotonic(), retry_after_s)

    def _write(self, number: int, row: bytes, *, failed: bool, tokens: float = 0.0) -> None:
        try:
            self._results.write(row, failed=failed)
        except OSError as error:
            self._trouble = error
        else:
            self.done += 1
            self.failed += failed
            self._items.ended(JOB, number, time.monotonic(), tokens)
        self._changed.set()


class _Line:
    """The client of a line, which takes a whole answer at once."""

    __slots__ = ("_number", "_run")

    listens = False

    def __init__(self, run: LocalRun, number: int) -> None:
        self._run, self._number = run, number

    async def writable(self) -> None:
        """Always."""

    def begin(self, head: Head) -> None:
        self._run.answered(self._number, head)

    def write(self, data: bytes) -> bool:
        raise AssertionError("a line is no stream")

    def end(self) -> None:
        raise AssertionError("a line is no stream")

    def fail(self, error: RequestError, receipt: Receipt | None) -> None:
        self._run.refused(self._number, error)
