"""What is being done, on stderr: a bar in a terminal, plain lines without one."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINES = 20  # of something that is counted, about, without a terminal


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def counted(total: int) -> Iterator[Callable[[str], None]]:
    """Gives what is called whenever one more of `total` is done, with what it was."""
    numbers, every = itertools.count(1), max(1, total // LINES)
    with _bar(total, MofNCompleteColumn()) as move:

        def done(what: str) -> None:
            number = next(numbers)
            if move is not None:
                move(what, number)
            elif number % every == 0 or number == total:
                say(f"{number} of {total}: {what}")

        yield done


@contextmanager
def shared() -> Iterator[Callable[[str, float], None]]:
    """Gives what is called with a part that begins, and the share of all that is done; without a terminal a line for
    each part.
    """
    begun_s = time.perf_counter()
    with _bar(1.0) as move:
        yield move or (lambda part, share: say(f"{time.perf_counter() - begun_s:6.0f} s  {part}"))


@contextmanager
def _bar(total: float, *counts: MofNCompleteColumn) -> Iterator[Callable[[str, float], None] | None]:
    """Moves a bar to where it is; None without a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), *counts, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=total)
        yield lambda what, completed: bar.update(task, description=what, completed=completed)
