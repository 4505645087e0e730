"""Many independent runs, in this process or in several."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from threadpoolctl import threadpool_limits

from llmserve.errors import LLMServeError

Task = TypeVar("Task")
Result = TypeVar("Result")


def in_processes(
    work: Callable[[Task], Result], tasks: Sequence[Task], jobs: int
) -> Generator[tuple[int, Result], None, None]:
    """(index of the task, its result), as they come. jobs : processes, >= 1.

    work, tasks and results are sent between processes. What a task raises is raised here. When that happens, or when
    this is closed or interrupted before its end, the processes are ended at once; they end by themselves when this one
    dies.
    Raises LLMServeError when one of them dies.
    """
    others = set(multiprocessing.active_children())
    # Fresh processes: a fork would share whatever threads this one has, such as a progress bar's.
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=context, initializer=_begin)
    try:
        index_of = {executor.submit(work, task): index for index, task in enumerate(tasks)}
        for done in as_completed(index_of):
            yield index_of[done], done.result()
        executor.shutdown()
    except BaseException as error:
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()
        executor.shutdown(cancel_futures=True)
        if isinstance(error, BrokenProcessPool):
            raise LLMServeError("a process that simulated has died; was there too little memory?") from error
        raise


def _begin() -> None:
    """A worker begins: it has one core."""
    threadpool_limits(1, user_api="blas")
    belong_to_parent()


def belong_to_parent() -> None:
    """From now on this process leaves Ctrl-C to its parent, and does not outlive it, however that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
