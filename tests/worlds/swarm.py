"""Runs many worlds in several processes until a number or a time is reached."""

from __future__ import annotations

import itertools
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field

from worlds.run import Violation, judge

from llmserve.simulation.many import belong_to_parent

BLOCK = 20  # worlds per task of a process
WORLD_S_MAX = 60.0  # CPU seconds; a world that takes longer counts as endless


@dataclass(slots=True)
class Findings:
    """violations : (seed, message), in the order of their discovery."""

    worlds: int = 0
    steps: int = 0
    violations: list[tuple[int, str]] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        self.worlds += other.worlds
        self.steps += other.steps
        self.violations += other.violations


def explore(seeds: range) -> Findings:
    """Run and check each of these worlds."""
    findings = Findings()
    for seed in seeds:
        findings.worlds += 1
        try:
            findings.steps += judge(seed)
        except Violation as violation:
            findings.violations.append((seed, str(violation)))
    return findings


def swarm(
    first_seed: int,
    *,
    count: int | None,
    seconds: float | None,
    jobs: int,
    on_progress: Callable[[Findings, Findings], None],
) -> Findings:
    """Explore worlds from `first_seed` on, up to a count or for a time. None: no limit.

    on_progress gets all findings and the latest. Ctrl-C ends the search and keeps its findings.
    """
    findings = Findings()
    until_s = None if seconds is None else time.monotonic() + seconds
    blocks = _blocks(first_seed, count)
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin)
    running: set[Future[Findings]] = set()
    try:
        while True:
            if until_s is None or time.monotonic() < until_s:
                running |= {pool.submit(_explore, block) for block in itertools.islice(blocks, 2 * jobs - len(running))}
            if not running:
                return findings
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                findings.add(future.result())
                on_progress(findings, future.result())
    except KeyboardInterrupt:
        return findings
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _blocks(first_seed: int, count: int | None) -> Iterator[range]:
    last = None if count is None else first_seed + count
    for first in itertools.count(first_seed, BLOCK):
        if last is not None and first >= last:
            return
        yield range(first, first + BLOCK if last is None else min(first + BLOCK, last))


def _begin() -> None:
    """Set up a process: the parent handles Ctrl-C and the end; a world that never ends is a violation."""
    belong_to_parent()
    signal.signal(signal.SIGVTALRM, _give_up)


def _explore(seeds: range) -> Findings:
    findings = Findings()
    for seed in seeds:
        signal.setitimer(signal.ITIMER_VIRTUAL, WORLD_S_MAX)
        findings.add(explore(range(seed, seed + 1)))
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
    return findings


def _give_up(number: int, frame: object) -> None:
    raise TimeoutError(f"the world has not ended after {WORLD_S_MAX:g} s")
