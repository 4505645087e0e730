"""Progress on stderr: a bar in a terminal, plain lines without one."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINES = 20  # that a counter prints without a terminal, about


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def counted(total: int) -> Iterator[Callable[[str], None]]:
    """Yield a function to call whenever one of `total` items is done; its argument describes the item."""
    numbers, every = itertools.count(1), max(1, total // LINES)
    with _bar(total, MofNCompleteColumn()) as move:

        def done(item: str) -> None:
            number = next(numbers)
            if move is not None:
                move(item, number)
            elif number % every == 0 or number == total:
                log(f"{number} of {total}: {item}")

        yield done


@contextmanager
def shared() -> Iterator[Callable[[str, float], None]]:
    """Yield a function to call when a part begins, with the part's name and the share of all work that is done.

    Without a terminal each part prints a line, with the time left if the rest goes on as the work since the first part.
    """
    begun_s = time.perf_counter()
    first: tuple[float, float] | None = None  # time and share of the first part: work that is resumed begins later

    def line(part: str, share: float) -> None:
        nonlocal first
        now_s = time.perf_counter() - begun_s
        first = first or (now_s, share)
        log(f"{now_s:6.0f} s  {_left(now_s - first[0], share - first[1], 1.0 - share):17}  {part}")

    with _bar(1.0) as move:
        yield move or line


def _left(seconds: float, share: float, rest: float) -> str:
    """Return the time that the rest of the work takes if `share` of all work took `seconds`; "" if that is unknown."""
    if share <= 0 or rest <= 0:
        return ""
    left_s = seconds * rest / share
    return f"about {left_s:.0f} s left" if left_s < 100 else f"about {left_s / 60:.0f} min left"


@contextmanager
def _bar(total: float, *counts: MofNCompleteColumn) -> Iterator[Callable[[str, float], None] | None]:
    """Yield a function that moves the bar, with a description and the completed amount; None without a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), *counts, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=total)
        yield lambda text, completed: bar.update(task, description=text, completed=completed)
