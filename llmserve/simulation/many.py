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
    """Yield (index of a task, its result) in the order of completion. jobs : number of processes, >= 1.

    Functions, tasks and results are pickled between processes. An exception of a task is raised here. After an
    exception, or when this generator is closed early, the processes are terminated at once; they also end when the
    parent process dies. Raises LLMServeError when a process dies.
    """
    earlier_children = set(multiprocessing.active_children())
    # Spawned, because a fork would share the threads of this process, such as the progress bar's.
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=context, initializer=_begin)
    try:
        index_of = {executor.submit(work, task): index for index, task in enumerate(tasks)}
        for done in as_completed(index_of):
            yield index_of[done], done.result()
        executor.shutdown()
    except BaseException as error:
        for child in set(multiprocessing.active_children()) - earlier_children:
            child.terminate()
        executor.shutdown(cancel_futures=True)
        if isinstance(error, BrokenProcessPool):
            raise LLMServeError("a simulating process has died; was there too little memory?") from error
        raise


def _begin() -> None:
    threadpool_limits(1, user_api="blas")  # each process has one core
    belong_to_parent()


def belong_to_parent() -> None:
    """Make this process ignore Ctrl-C, and end when its parent ends in any way."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
