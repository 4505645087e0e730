"""The journal: every step of the scheduler, `(now_s, event, actions)`, in order.

The journal holds identifiers, lengths and times, never a prompt or an answer. A fresh scheduler of the same
configuration gives the same actions for the journal's events: `replay(header, steps) == steps`.

A journal file is JSON lines: a header, then one step a line. A server that starts again appends a header and its own
steps, so a file may hold several runs. `read` returns the last one.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import msgspec

from llmserve.errors import JournalError
from llmserve.runtime.private_file import appending
from llmserve.scheduling.lengths import Learned
from llmserve.scheduling.messages import Action, Event
from llmserve.scheduling.programs.programs import NOTHING_LEARNT, LearntPrograms
from llmserve.scheduling.scheduler import Scheduler
from llmserve.settings.policies import SchedulingConfig

VERSION = 14
READABLE = (4, 5, 6, 7, 8, 9, 10, 11, 12, 13, VERSION)
# Version 4 has one model, version 5 nothing learnt before: the defaults of the fields that they lack.
# Neither has ForecastsRevised. Tuned came with version 7,
# EngineExpected with version 8: before, no engine was expected, and requests were refused while none was up.
# Lines of jobs, and ReportDue, came with version 9, ServedElsewhere with version 10,
# refusals (RequestEnded, FailRequest) with version 11, engines that hold few models at once with version 12.
# Blocks of prompts, and CacheChanged, came with version 13. Before, requests had hashes of longer and longer beginnings
# of the prompt, from 256 characters on. Each is read as a block: engines are compared by how many of them they have.
# Programs of requests, and the tools that an answer calls, came with version 13, too.
# RequestAdopted came with version 14.
BEGINNINGS = b'"prefixes":[', b'"block_tokens":64.0,"blocks":['
BLOCKS_SINCE = 13
STEPS_MAX = 1_000  # more would push what each request needs out of the processor's caches
HEADER_START = b'{"scheduling":'  # the first field of a header; a step begins with its time

log = logging.getLogger("llmserve")

Line = TypeVar("Line")


class Header(msgspec.Struct, frozen=True):
    """The inputs of a replay besides the events.

    scores   a sample of the scores that bins sort by, for the first edges
    lengths  one equally likely length of each of the same forecasts; () when scores are lengths
    learnt   by model, from before the start, used instead of scores and lengths
    programs what was learnt of programs before the start
    """

    scheduling: SchedulingConfig
    scores: tuple[float, ...] = ()
    lengths: tuple[float, ...] = ()
    version: int = VERSION
    learnt: dict[str, Learned] = {}
    programs: LearntPrograms = NOTHING_LEARNT

    def scheduler(self) -> Scheduler:
        """A fresh scheduler."""
        return self.scheduling.scheduler(self.scores, self.lengths, learnt=self.learnt, programs=self.programs)


class _Grouped(msgspec.Struct):
    """groups : the serving groups of a scheduler that had several, in headers of 0.1.0"""

    groups: tuple[msgspec.Raw, ...] = ()


class Step(msgspec.Struct, frozen=True):
    now_s: float
    event: Event
    actions: tuple[Action, ...]


class Journal:
    """The last `steps_max` steps in memory, all of them in a file when `path` is given.

    `listeners` are called with each step: metrics and reports listen to the journal.
    """

    def __init__(self, header: Header, *, steps_max: int = STEPS_MAX, path: Path | None = None) -> None:
        self.header = header
        self.steps: deque[Step] = deque(maxlen=steps_max)
        self.listeners: list[Callable[[Step], None]] = []
        self._encoder = msgspec.json.Encoder()
        try:
            self._file = appending(path) if path is not None else None
        except OSError as error:
            raise JournalError(f"cannot write the journal {path}: {error.strerror}") from error
        self._write(header)

    def listen(self, listener: Callable[[Step], None]) -> None:
        self.listeners.append(listener)

    def unlisten(self, listener: Callable[[Step], None]) -> None:
        self.listeners.remove(listener)

    def append(self, now_s: float, event: Event, actions: Sequence[Action]) -> None:
        step = Step(now_s, event, tuple(actions))
        self.steps.append(step)
        self._write(step)
        for listener in self.listeners:
            try:
                listener(step)
            except Exception:  # a failing listener must not stop serving
                log.exception("a listener of the journal failed")

    def _write(self, line: Header | Step) -> None:
        if self._file is None:
            return
        try:
            self._file.write(self._encoder.encode(line) + b"\n")
            if isinstance(line, Header):
                self._file.flush()  # a killed process leaves a run that can be read
        except OSError as error:  # such as a full disk: serving goes on without a file
            log.error("the journal file ends here: %s", error)
            self._file = None

    def close(self) -> None:
        """Close the file; later steps stay in memory only."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                log.error("the journal file is not complete: %s", error)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def replay(header: Header, steps: Iterable[Step]) -> list[Step]:
    """The steps of a fresh scheduler that gets these events at these times."""
    scheduler = header.scheduler()
    return [Step(step.now_s, step.event, tuple(scheduler.handle(step.event, step.now_s))) for step in steps]


def read(path: Path) -> tuple[Header, list[Step]]:
    """The header and the steps of the last run in a file. Raises JournalError naming the line that cannot be read.

    A last line cut short by a crash is left out.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise JournalError(f"cannot read the journal {path}: {error.strerror}") from error
    data = data[: data.rfind(b"\n") + 1]
    if not data:
        raise JournalError(f"the journal {path} is empty")
    start = data.rfind(b"\n" + HEADER_START) + 1
    first, *rest = data[start:].splitlines()
    number = data.count(b"\n", 0, start) + 1
    header = _decode(first, Header, path, number)
    if header.version not in READABLE:
        raise JournalError(f"{path} has version {header.version} of the format; this is version {VERSION}")
    if _decode(first, _Grouped, path, number).groups:
        raise JournalError(
            f"{path}, of version {header.version} of the format, is of a server with several groups: llmserve 0.1.0 "
            "replays it"
        )
    if header.version < BLOCKS_SINCE:
        rest = [line.replace(*BEGINNINGS) for line in rest]
    return header, [_decode(line, Step, path, number + after) for after, line in enumerate(rest, start=1)]


def _decode(line: bytes, kind: type[Line], path: Path, number: int) -> Line:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.MsgspecError as error:
        raise JournalError(f"{path}, line {number}: {error}") from error
