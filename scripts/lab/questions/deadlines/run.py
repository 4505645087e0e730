"""Shares of deadlines met under the orders of llmserve, on live engines and in simulations.

    python scripts/lab deadlines fake \\
        --output docs/results/deadlines.json --figure docs/results/deadlines.png
    python scripts/lab deadlines vllm --vllm-python .venv-vllm/bin/python \\
        --output docs/results/deadlines-vllm.json --figure docs/results/deadlines-vllm.png
    python scripts/lab deadlines load --lengths "AlpacaEval=file:lengths.csv:tokens" \\
        --trace "Azure chat=azure_llm_2023_conv.csv.gz" \\
        --output docs/results/deadlines-load.json --figure docs/results/deadlines-load.png

fake, vllm: two streams with different deadlines and different models share GPUs that run one batch at a time. In the
middle the quick stream has a burst. Each order has its own `llmserve serve` and gets its requests over HTTP. All orders
get the same requests at the same times, in turn, round after round. `fake` uses timed engines on two GPUs with two
models each. `vllm` uses two real vLLM servers that share this machine, which counts as one GPU; the batch times of each
server are measured first. Before each run the server answers some requests without deadlines, to learn answer lengths.

The clients and the server's journal both count how requests end. The benchmark fails if the two counts differ, if a
request does not end exactly once, or if a GPU runs two batches at a time:

    in time    status 200, before the deadline by the client's clock
    late       status 200, after the deadline
    504        the server refused the request as too late
    preempted  requests that were preempted, by end; counted separately
    stopped    engine time of batches until they were preempted
    too late   engine time of batches without an answer in time

load: the scheduler alone, under a virtual clock: shares of deadlines met against load, where batches run to their end
and where slots refill. Answer lengths are predicted with an error (see PREDICTIONS). Clients stream only in the rows
that name streaming (see STREAMED), and not in fake and vllm: the scheduler cannot preempt an answer once its client has
received a byte.

Prints Markdown tables, medians over rounds or means over seeds. With --results FILE the script shows and draws an
earlier --output again, and runs nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from kit.arguments import add_results, exit_on, parser_of, whole
from kit.figures import save
from kit.results import rounded, with_rows, write_text
from kit.rows import Row

from llmserve.errors import LLMServeError
from questions.deadlines.engines import FAKE, VLLM, timed_engines, vllm_engines
from questions.deadlines.serving import POLICIES, measure
from questions.deadlines.simulated import CASE, PREDICTIONS, PROFILE, SLOS_S, load_figure, load_tables, simulated
from questions.deadlines.tables import live_from, live_result, live_tables
from questions.deadlines.timeline import timeline
from questions.deadlines.traffic import draw


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
        rows = await asyncio.to_thread(simulated, workloads_of(args), args.requests, args.seeds, args.jobs)
        common = {"requests": args.requests, "seeds": args.seeds, "predictions": PREDICTIONS, "slos_s": SLOS_S}
        return {"date": str(date.today()), **common, "cells": [row.record for row in rows]}
    setting = FAKE if args.part == "fake" else VLLM
    starting = timed_engines(setting) if args.part == "fake" else vllm_engines(setting, args.vllm_python)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.journals or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        async with starting as engines:
            runs = await measure(setting, engines, args.policies, args.rounds, args.seed, folder)
    return live_result(engines, setting, args.seed, runs)


def workloads_of(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    workloads: dict[str, dict[str, Any]] = {"lognormal": {}}  # the simulator's default lengths and step
    for field_, texts in (("lengths", args.lengths), ("trace", args.trace)):
        for text in texts:
            name, _, value = text.partition("=")
            workloads[name] = {field_: value, "profile": PROFILE}
    return workloads


def show(args: argparse.Namespace, result: Mapping[str, Any]) -> None:
    if args.part == "load":
        rows = [Row.of_record(record, CASE) for record in result["cells"]]
        tables, figure = load_tables(rows), lambda: load_figure(rows)
    else:
        engines, setting, runs = live_from(result)
        tables = live_tables(setting, runs)
        figure = lambda: timeline(engines, setting, runs, draw(setting, result["seed"] + 1))  # noqa: E731
    print("\n\n".join(tables))
    if args.figure:
        save(figure(), args.figure, dpi=140)


def parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("part", choices=("fake", "vllm", "load"))
    add("--vllm-python", metavar="PYTHON", help="interpreter of an environment with vLLM in it")
    add("--policies", type=policies, default=list(POLICIES), metavar="NAME;NAME;...", help="(default: all)")
    add("--rounds", type=whole(1), default=3, help="every policy has a run in each round (%(default)s)")
    add("--seed", type=int, default=2026, help="draws arrivals and lengths of fake and vllm (%(default)s)")
    add("--lengths", action="append", default=[], metavar="NAME=LENGTHS", help="load: as of `llmserve simulate`")
    add("--trace", action="append", default=[], metavar="NAME=FILE", help="load: as of `llmserve simulate`")
    add("--requests", type=whole(1), default=5000, help="load: requests of each run (%(default)s)")
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
