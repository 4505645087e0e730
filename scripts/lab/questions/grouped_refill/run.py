"""Is it better to hand over freed slots of vLLM in groups than one by one?

    python scripts/lab grouped_refill --vllm-python .venv-vllm/bin/python \\
        --output docs/results/grouped-refill.json --plot docs/results/grouped-refill.png
    python scripts/lab grouped_refill --report --output docs/results/grouped-refill.json

Prompts interrupt the decoding of running sequences. If freed slots stay empty until several are free, whose requests
then start together, decoding is interrupted less often, but fewer sequences run. Threshold-based exclusive batching
(EB+; Zhang et al., ICML 2026) expects a gain where memory bandwidth is scarce.

The script sends requests directly to vLLM on the CPU, whose engine has one core: at most 8 or 16 at a time, with a new
group as soon as 1, a quarter or a half of the slots are free (grouped_refill/slots.py). Prompts have 256 to 1,024
tokens. The model (20 M weights, float32) is made on the spot. Within a round, all groups get the same requests at the
same times, and each round begins with another group. Servers:

    default        chunked prefill, at most 2,048 tokens in a step
    small budget   at most 256 tokens in a step
    large budget   at most 16,384 tokens in a step
    whole prompts  no chunked prefill

Loads:

    burst      all requests at once; answers have 48 tokens in the mean
    short      the same with 8 tokens in the mean (server default, 8 slots)
    poisson-X  Poisson arrivals at X times the capacity, which is that of single slots while requests wait (server
               default, 8 slots)

tokens/s are of wall time, and of the time that the engine's thread computed: as long as requests run it always
computes, and this time leaves out other processes on its core. The verdict goes by it.

Before the loads the script measures the time of a step of decoding by the number of sequences, which tells whether
decoding is memory-bound, and the time that decoding loses by prompts that come alone or together. From these times
follows the length of answers above which groups lose (grouped_refill/costs.py).

Each server replaces its own part of --output, so servers can be measured one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import uvloop
from kit import client
from kit.arguments import add_results, parser_of, whole
from kit.client import get_text
from kit.progress import log
from kit.results import day_and_machine, in_turn, rounded, with_rows, write_text
from kit.rows import Row, median, select

from questions.grouped_refill import costs
from questions.grouped_refill.engine import SETTINGS, Engine, make_model, read_bytes_per_s, started
from questions.grouped_refill.passes import Load, burst, one_pass, steps, summary
from questions.grouped_refill.report import Results, draw, print_report
from questions.grouped_refill.slots import GroupedSlots

SLOTS = (8, 16)
TOKENS_MEAN, TOKENS_MEAN_SHORT = 48, 8
REQUESTS = {8: 36, 16: 48}
POISSON = {"poisson-0.7": 0.7, "poisson-0.9": 0.9}


def groups_of(slots: int) -> tuple[int, ...]:
    return (1, slots // 4, slots // 2)


async def take_turns(args: argparse.Namespace, engine: Engine, case: dict[str, Any], load: Load) -> list[Row]:
    """One pass with each group. case : setting, load, slots, round"""
    rows = []
    slots, number = case["slots"], case["round"]
    for group in in_turn(groups_of(slots), number):
        before, before_s = await steps(engine.url), engine.cpu_s()
        answers = await one_pass(engine.url, load, GroupedSlots(slots, group))
        cpu_s = engine.cpu_s() - before_s
        done = [after - first for after, first in zip(await steps(engine.url), before, strict=True)]
        numbers = {
            **summary(answers, slots),
            "tokens_per_cpu_s": float(load.tokens.sum()) / cpu_s,
            "steps": done[0],
            "steps_with_prompts": done[1],
        }
        rows.append(Row({**case, "group": group}, numbers))
        log(
            f"{case['setting']}, round {number + 1}/{args.rounds}: {case['load']}, {slots} slots, groups of {group}: "
            f"{numbers['tokens_per_s']:.1f} tokens/s ({numbers['tokens_per_cpu_s']:.1f} of CPU time), "
            f"latency {numbers['latency_s_mean']:.2f} s mean"
        )
    return rows


async def measure_loads(args: argparse.Namespace, engine: Engine, setting: str, vocabulary: int) -> list[Row]:
    """Rows of all passes on this server."""
    rows: list[Row] = []
    every = setting == "default"
    for number in range(args.rounds):
        rng = np.random.default_rng([args.seed, number])

        def made(slots: int, tokens_mean: int, rng: np.random.Generator = rng) -> Load:
            return burst(args.requests or REQUESTS[slots], tokens_mean, rng, vocabulary)

        for slots in SLOTS:
            case = {"setting": setting, "load": "burst", "slots": slots, "round": number}
            rows += await take_turns(args, engine, case, made(slots, TOKENS_MEAN))
        case["slots"] = SLOTS[0]
        if every:
            rows += await take_turns(args, engine, case | {"load": "short"}, made(SLOTS[0], TOKENS_MEAN_SHORT))
        capacity = median(select(rows, load="burst", slots=SLOTS[0], group=1), "requests_per_s_saturated")
        for load, share in POISSON.items() if every else ():
            timed = made(SLOTS[0], TOKENS_MEAN).at_poisson_times(share * capacity, rng)
            rows += await take_turns(args, engine, case | {"load": load}, timed)
    return rows


async def measure(args: argparse.Namespace) -> None:
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        weights = make_model(folder, args.seed)
        read_gb_per_s = read_bytes_per_s() / 1e9
        for setting in args.settings:
            begin_s = time.monotonic()
            async with started(args.vllm_python, setting, folder) as engine, client.session_of() as session:
                version = json.loads(await get_text(session, f"{engine.url}/version"))["version"]
                rng = np.random.default_rng(args.seed)
                known = weights["tokens_known"]
                await one_pass(engine.url, burst(8, 8, rng, known), GroupedSlots(8, 1))  # a fresh server is slow
                spent = await costs.measured(engine.url, known, args.rounds, rng)
                rows = await measure_loads(args, engine, setting, known)
            section = {
                **day_and_machine(), **weights, "vllm": version, "flags": SETTINGS[setting], "seed": args.seed,
                "requests": args.requests or REQUESTS, "rounds": args.rounds, "tokens_mean": TOKENS_MEAN,
                "read_gb_per_s": read_gb_per_s, "costs": asdict(spent),
            }  # fmt: skip
            write(args.output, setting, section, rows)
            log(f"{setting} took {(time.monotonic() - begin_s) / 60:.1f} min")


def write(path: Path, setting: str, section: dict[str, Any], rows: Sequence[Row]) -> None:
    """Replace what was measured with this setting. All other settings stay."""
    earlier = Results.read(path)
    settings = {**earlier.settings, setting: section}
    kept = [row for row in earlier.rows if row["setting"] != setting]
    records = [row.record for row in (*kept, *rows)]
    ordered = {name: settings[name] for name in SETTINGS if name in settings}
    write_text(path, with_rows(rounded({"settings": ordered, "rows": records}), "rows"))


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--vllm-python", help="interpreter of an environment with vLLM in it")
    add("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="servers (default: all)")
    add("--rounds", type=whole(1), default=2, help="rounds of every load, and repeats of the costs (%(default)s)")
    add("--requests", type=whole(33), help="requests of each pass (default: 36 with 8 slots, 48 with 16)")
    add("--seed", type=int, default=2026, help="draws weights, prompts, lengths and arrivals (%(default)s)")
    add("--report", action="store_true", help="measure nothing: print and draw --output")
    add_results(parser, "--plot")
    args = parser.parse_args(argv)
    if args.output is None:
        parser.error("--output is needed")
    if not args.report:
        if not args.vllm_python:
            parser.error("--vllm-python is needed to measure")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(measure(args))
    results = Results.read(args.output)
    print_report(results)
    if args.plot:
        draw(results, args.plot)
