#!/usr/bin/env python
"""Deadlines kept: the orders of llmserve beside each other, on engines that serve, and in simulations.

    python scripts/lab/benchmark_deadlines.py fake \\
        --output docs/results/deadlines.json --figure docs/results/deadlines.png
    python scripts/lab/benchmark_deadlines.py vllm --vllm-python .venv-vllm/bin/python \\
        --output docs/results/deadlines-vllm.json --figure docs/results/deadlines-vllm.png
    python scripts/lab/benchmark_deadlines.py load --lengths "AlpacaEval=file:lengths.csv:tokens" \\
        --trace "Azure chat=azure_llm_2023_conv.csv.gz" \\
        --output docs/results/deadlines-load.json --figure docs/results/deadlines-load.png

fake, vllm: two streams with deadlines of their own, each of another model, share GPUs that run one batch at a time; in
the middle the quick one comes in a burst. Every order is a `llmserve serve` of its own that is asked over HTTP; all get
the same requests at the same times, in turn, round after round. Engines are timed ones, two GPUs with two models each
(fake), or two real vLLM servers that share this machine (vllm; it is given as one GPU, and each server's batch times
are measured first). Before a round's clock starts the server answers some requests without deadlines, so that it knows
how long answers are.

What became of each request is counted twice, by its client and in the server's journal, and it is an error where the
two differ, where a request did not end exactly once, or where a GPU ran two batches at a time:

    in time   200, before its deadline by the client's clock
    late      200, after it
    504       the server says that it is too late
    preempted requests that ran, were stopped for others, and ended in one of these ways; counted by themselves
    stopped   engine time of batches before they were stopped for others
    too late  engine time of batches of which no answer was in time

load: the scheduler alone, under a virtual clock: shares of deadlines met against load, where batches run to their end
and where slots refill; answer lengths predicted with an error (see PREDICTIONS). Nobody streams but where a row says so
(see STREAMED), as in fake and vllm: an answer of which a client has seen a byte cannot be stopped for others.

Prints Markdown tables, medians over rounds or means over seeds. With --results FILE an earlier --output is shown and
drawn again, and nothing runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from bench.arguments import add_results, exit_on, parser_of, whole
from bench.figures import save
from bench.results import rounded, with_rows, write_text
from deadlines.engines import FAKE, VLLM, timed_engines, vllm_engines
from deadlines.serving import POLICIES, measure
from deadlines.simulated import PREDICTIONS, PROFILE, SLOS_S, Cell, load_figure, load_tables, simulated
from deadlines.tables import live_from, live_result, live_tables
from deadlines.timeline import timeline
from deadlines.traffic import draw

from llmserve.errors import LLMServeError


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    if args.part == "vllm" and not (args.vllm_python or args.results):
        parser().error("vllm needs --vllm-python, the interpreter of an environment with vLLM in it")
    with exit_on(LLMServeError, OSError, ValueError):
        result = json.loads(args.results.read_text()) if args.results else asyncio.run(measured_part(args))
    result = json.loads(json.dumps(rounded(result)))
    write_text(args.output, with_rows(result, "cells" if args.part == "load" else "runs"))
    show(args, result)


async def measured_part(args: argparse.Namespace) -> dict[str, Any]:
    if args.part == "load":
        cells = await asyncio.to_thread(simulated, workloads_of(args), args.requests, args.seeds, args.jobs)
        common = {"requests": args.requests, "seeds": args.seeds, "predictions": PREDICTIONS, "slos_s": SLOS_S}
        return {"date": str(date.today()), **common, "cells": [asdict(cell) for cell in cells]}
    setting = FAKE if args.part == "fake" else VLLM
    up = timed_engines(setting) if args.part == "fake" else vllm_engines(setting, args.vllm_python)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.journals or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        async with up as engines:
            runs = await measure(setting, engines, args.policies, args.rounds, args.seed, folder)
    return live_result(engines, setting, args.seed, runs)


def workloads_of(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    made: dict[str, dict[str, Any]] = {"lognormal": {}}  # the simulator's default lengths and step
    for field_, texts in (("lengths", args.lengths), ("trace", args.trace)):
        for text in texts:
            name, _, value = text.partition("=")
            made[name] = {field_: value, "profile": PROFILE}
    return made


def show(args: argparse.Namespace, result: Mapping[str, Any]) -> None:
    if args.part == "load":
        cells = [Cell(**cell) for cell in result["cells"]]
        tables, draw_it = load_tables(cells), lambda: load_figure(cells)
    else:
        what, setting, runs = live_from(result)
        tables = live_tables(setting, runs)
        draw_it = lambda: timeline(what, setting, runs, draw(setting, result["seed"] + 1))  # noqa: E731
    print("\n\n".join(tables))
    if args.figure:
        save(draw_it(), args.figure, dpi=140)


def parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("part", choices=("fake", "vllm", "load"))
    add("--vllm-python", metavar="PYTHON", help="interpreter of an environment with vLLM in it")
    add("--policies", type=policies, default=list(POLICIES), metavar="NAME;NAME;...", help="(default: all)")
    add("--rounds", type=whole(1), default=3, help="in each of which every policy has a run (%(default)s)")
    add("--seed", type=int, default=2026, help="draws arrivals and lengths of fake and vllm (%(default)s)")
    add("--lengths", action="append", default=[], metavar="NAME=LENGTHS", help="load: as `llmserve simulate` has them")
    add("--trace", action="append", default=[], metavar="NAME=FILE", help="load: as `llmserve simulate` has it")
    add("--requests", type=whole(1), default=5000, help="load: of each run (%(default)s)")
    add("--seeds", type=whole(1), default=3, help="load: runs of each case (%(default)s)")
    add("--jobs", type=whole(1), default=1, help="load: processes (%(default)s)")
    add("--journals", type=Path, metavar="FOLDER", help="keep the servers' journals there")
    add_results(parser, "--figure")
    add("--results", type=Path, metavar="FILE", help="show an earlier --output; nothing runs")
    return parser


def policies(text: str) -> list[str]:
    names = [name.strip() for name in text.split(";")]
    for name in names:
        if name not in POLICIES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of: {'; '.join(POLICIES)}")
    return names


if __name__ == "__main__":
    main()
