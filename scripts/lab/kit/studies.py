"""Studies of real servers: measured once, and shown again from what was written."""

from __future__ import annotations

import argparse
import asyncio
import resource
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import uvloop

from kit.results import read_parts

Results = dict[str, Any]


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run on uvloop, because the load generator must take little time from the measured servers."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


def add_report(parser: argparse.ArgumentParser, written: str = "write the results as JSON") -> None:
    """Add --output, whose help is `written`, and --report."""
    parser.add_argument("--output", type=Path, metavar="FILE", help=written)
    parser.add_argument("--report", action="store_true", help="measure nothing: print the tables of --output")


def measure_or_report(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    measure: Callable[[argparse.Namespace], Coroutine[Any, Any, Results]],
    print_report: Callable[[Results], None],
    *needed: str,
) -> None:
    """Measure and print, or with --report print what --output holds. Exits with a usage error where a flag is missing.

    needed : names of the arguments without which nothing can be measured
    """
    if args.report:
        if args.output is None or not args.output.exists():
            parser.error("--report needs the --output of an earlier run")
        print_report(read_parts(args.output))
        return
    for name in needed:
        if not getattr(args, name):
            parser.error(f"--{name.replace('_', '-')} is needed to measure")

    async def work() -> None:
        print_report(await measure(args))

    run(work())
