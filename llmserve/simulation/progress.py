"""The progress of runs: a bar in a terminal, otherwise plain lines. On stderr, because results go to stdout."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress

ARRIVALS_A_LINE = 250_000  # requests per line, for a single run without a terminal
LINES = 20  # approximate number of lines, for several runs without a terminal


class RunsProgress:
    """Shows the progress inside a `with` block. runs : total number, one after another or in parallel."""

    def __init__(self, runs: int) -> None:
        self._runs = runs
        self._ended = 0
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("simulating"), BarColumn(), TimeRemainingColumn())
            counted = (*columns, MofNCompleteColumn(), TextColumn("runs"))
            self._bar = Progress(*(counted if runs > 1 else columns), console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("", total=runs)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def arrived(self, count: int, of: int) -> None:
        """Report the requests of the current run that have arrived. of : requests of the run."""
        if self._bar is not None:
            self._bar.update(self._task, completed=self._ended + count / of)
        elif self._runs == 1 and count % ARRIVALS_A_LINE == 0:
            print(f"{count:,} requests have arrived", file=sys.stderr)

    def ended(self) -> None:
        """Report the end of a run."""
        self._ended += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self._ended)
        elif self._runs > 1 and (self._ended % -(-self._runs // LINES) == 0 or self._ended == self._runs):
            print(f"{self._ended} of {self._runs} runs are done", file=sys.stderr)
