#!/usr/bin/env python3
"""Measure the tables and figures of a paper again, beside the numbers that the paper prints.

    python scripts/reproduce.py                   # list the papers
    python scripts/reproduce.py smdp              # two to five minutes
    python scripts/reproduce.py batchmonitor      # six to nine minutes
    python scripts/reproduce.py multibin --gsm8k FILE   # fifteen to twenty minutes on two cores
    python scripts/reproduce.py multibin-engines        # fifteen minutes; run nothing else meanwhile
    python scripts/reproduce.py shepherd --trace FILE   # twenty minutes on two cores
    python scripts/reproduce.py smdp --quick --output-folder /tmp/smdp

Writes three things into the output folder: results/NAME.json (a row for each number: the expected number and its kind,
the measured number, its confidence interval), papers/NAME.md, and the figures papers/NAME-*.png. Prints how many rows
agree, and each row that does not. --quick takes at most a minute of processor time. No reproduction needs a GPU;
figures and intervals need pip install '.[train]'. multibin-engines also measures vLLM on the CPU if VLLM_PYTHON names
an interpreter that has vLLM.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent / "lab"))

from kit.arguments import parser_of
from kit.progress import shared
from papers.page import About, Page, disagreements, write_page
from papers.rows import Report, Rows

from llmserve.errors import ConfigError

DOCS = Path("docs")
EXTRA = ("matplotlib", "scipy")  # of the extra `train`, not needed to serve


@dataclass(frozen=True, slots=True)
class Reproduction:
    """How a paper is measured, and its page. measure : (seed, quick, report) -> rows"""

    measure: Callable[[int, bool, Report], Rows]
    page: Page


@dataclass(frozen=True, slots=True)
class Options:
    """The options that only some reproductions take.

    jobs   processes that simulate
    gsm8k  file of answers, for Fig. 6 of multibin
    trace  file of function calls, for shepherd
    """

    jobs: int
    gsm8k: Path | None
    trace: Path | None = None


def _plain(page_module: str, measure_module: str, _: Options) -> Reproduction:
    """Return a reproduction that takes no options."""
    page, module = (import_module(f"papers.{name}") for name in (page_module, measure_module))
    return Reproduction(module.measure, Page(page.TITLE, page.opening, page.SECTIONS, page.REASONS))


def _multibin(options: Options) -> Reproduction:
    from papers.multibin import page
    from papers.multibin.simulated import measure

    with_options = partial(measure, jobs=options.jobs, gsm8k_file=options.gsm8k)
    sections = page.sections(with_answers=options.gsm8k is not None)
    return Reproduction(with_options, Page(page.TITLE, page.opening, sections, page.REASONS))


def _shepherd(options: Options) -> Reproduction:
    from papers.shepherd import page
    from papers.shepherd.measure import measure

    with_options = partial(measure, jobs=options.jobs, trace=options.trace)
    opening = partial(page.opening, traced=options.trace is not None)
    return Reproduction(with_options, Page(page.TITLE, opening, page.SECTIONS, page.REASONS))


MULTIBIN, SHEPHERD = "multibin", "shepherd"
TAKEN_BY = {"jobs": (MULTIBIN, SHEPHERD), "gsm8k": (MULTIBIN,), "trace": (SHEPHERD,)}
REPRODUCTIONS: dict[str, tuple[str, Callable[[Options], Reproduction]]] = {
    "smdp": (
        "SMDP-based dynamic batching (Xu, Zhou, Niu), journal and conference version",
        partial(_plain, "smdp.page", "smdp.measure"),
    ),
    "batchmonitor": (
        "BatchMonitor and BatchDispatcher (Khan, Yu, Kim, Seo)",
        partial(_plain, "batchmonitor.page", "batchmonitor.measure"),
    ),
    MULTIBIN: ("Multi-Bin Batching (Guldogan, Kunde, Lee, Pedarsani): the simulations", _multibin),
    "multibin-engines": (
        "Multi-Bin Batching: the figures on a real engine, here on the CPU",
        partial(_plain, "multibin.engines_page", "multibin.engines"),
    ),
    SHEPHERD: ("Shepherd (Zhang, Tang, Khandelwal, Stoica): FLEX, Clockwork and Nexus", _shepherd),
}


def main(words: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "name", nargs="?", choices=list(REPRODUCTIONS), help="paper to reproduce; none: list the papers"
    )
    parser.add_argument("--output-folder", type=Path, help=f"(default {DOCS})")
    parser.add_argument(
        "--quick", action="store_true", help="fewer samples and cases, at most a minute of processor time"
    )
    parser.add_argument(
        "--redraw", action="store_true", help="write the page and its figures again from the stored numbers"
    )
    parser.add_argument("--seed", type=int, default=1, help="at least 0 (default 1)")
    parser.add_argument(
        "--jobs", type=int, help="processes that simulate, for multibin and shepherd (default: one a core)"
    )
    parser.add_argument(
        "--gsm8k", type=Path, metavar="FILE", help="answers, for Fig. 6 of multibin (JSON lines, .gz too)"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="function calls a minute, for shepherd (Azure's CSV, .gz too)"
    )
    args = parser.parse_args(words)
    if args.name is None:
        for name, (text, _) in REPRODUCTIONS.items():
            print(f"{name:17} {text}")
        return
    for option, names in TAKEN_BY.items():
        if getattr(args, option) is not None and args.name not in names:
            parser.error(f"--{option} is of use to {' and '.join(names)} only")
    if args.jobs is not None and args.jobs < 1:
        parser.error(f"--jobs must be at least 1, not {args.jobs}")
    if args.seed < 0:
        parser.error(f"--seed must be at least 0, not {args.seed}")
    if args.quick and args.output_folder is None:
        parser.error(f"--quick needs --output-folder: {DOCS} holds the numbers of full runs")
    folder: Path = args.output_folder or DOCS
    results, page = folder / "results" / f"{args.name}.json", folder / "papers" / f"{args.name}.md"
    about = _stored(parser, results, page) if args.redraw else None
    measured = args if about is None else parser.parse_args(shlex.split(about.command)[2:])
    chosen = _load(args.name, Options(args.jobs or os.cpu_count() or 1, measured.gsm8k, measured.trace))
    try:
        results.parent.mkdir(parents=True, exist_ok=True)
        page.parent.mkdir(exist_ok=True)
    except OSError as error:
        parser.error(f"--output-folder: cannot make {results.parent}: {error.strerror}")
    if about is None:
        try:
            about = _measure(chosen, args, results)
        except ConfigError as error:
            parser.error(str(error))
    rows = Rows.read(results)  # rounded, so that --redraw writes the same page
    write_page(args.name, chosen.page, rows, about, page.parent)
    _print_verdict(rows, about, page)


def _stored(parser: argparse.ArgumentParser, results: Path, page: Path) -> About:
    """Return how the stored rows were measured, from their page. Exits if there are none."""
    try:
        if results.is_file():
            return About.read(page.read_text(encoding="utf-8"))
        parser.error(f"--redraw: there is no {results}")
    except (OSError, ValueError) as error:
        parser.error(f"--redraw: {page}: {error}")


def _measure(chosen: Reproduction, args: argparse.Namespace, results: Path) -> About:
    """Measure and write the rows. Raises ConfigError if a file that the reproduction needs cannot be read."""
    begun_s = time.perf_counter()
    with shared() as report:
        rows = chosen.measure(args.seed, args.quick, report)
    rows.write(results)
    return About(
        command=_command(args),
        machine=f"{os.cpu_count()} shared CPU cores",
        seed=args.seed,
        seconds=time.perf_counter() - begun_s,
        quick=args.quick,
        date=datetime.date.today(),
    )


def _print_verdict(rows: Rows, about: About, page: Path) -> None:
    """Print how many rows agree, and the rows that do not agree."""
    counts = ", ".join(f"{agree} of {compared} {kind}" for kind, (agree, compared) in rows.counts().items())
    print(f"{page}: agree {counts}")
    if off := disagreements(rows):
        print(f"{len(off)} do not agree{' (a quick run has few samples)' if about.quick else ''}:")
        for line in off:
            print(f"  {line}")


def _load(name: str, options: Options) -> Reproduction:
    try:
        return REPRODUCTIONS[name][1](options)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in EXTRA:
            raise
        sys.exit(f"reproduce.py {name} needs {error.name}: pip install '.[train]'")


def _command(args: argparse.Namespace) -> str:
    words = ["python", "scripts/reproduce.py", args.name]
    words += ["--quick"] if args.quick else []
    words += ["--output-folder", str(args.output_folder)] if args.output_folder else []
    words += ["--seed", str(args.seed)] if args.seed != 1 else []
    words += ["--jobs", str(args.jobs)] if args.jobs is not None else []
    words += ["--gsm8k", args.gsm8k.name] if args.gsm8k is not None else []  # the name only: folders are private
    words += ["--trace", args.trace.name] if args.trace is not None else []
    return shlex.join(words)


if __name__ == "__main__":
    main()
