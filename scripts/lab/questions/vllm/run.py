"""What llmserve in front of real vLLM servers costs and gains, compared with vLLM alone and vLLM's own priorities.

    python scripts/lab vllm --vllm-python .venv-vllm/bin/python --router .venv-router/bin/vllm-router \\
        --trace azure_llm_2023_conv.csv.gz --output docs/results/vllm.json --figures docs/results/vllm
    python scripts/lab vllm --report --output docs/results/vllm.json --figures docs/results/vllm

The script starts the vLLM servers (the demo model, float32, prefix caching off, so that a request costs the same each
time) and sends them held-out prompts of the demo model. Answers are greedy. A first pass measures the length of each
answer. Later passes send predictions of the lengths, to llmserve in a header, to vLLM as the request's priority:

    oracle      the length
    predicted   the length times a lognormal error, with the Kendall's tau of the trained predictor on people's prompts
    random      the lengths, shuffled over the prompts

In each round of a part all arrangements get the same requests at the same times, with the same predictions. Rounds
differ in all three, and each round begins with another arrangement. Each pass through llmserve or vllm-router starts a
new server, so that no pass learns from an earlier pass. llmserve's own forecasts are off (--predictor none
--memory-keys 0), because all rounds use the same prompts. vLLM always runs with --scheduling-policy priority; requests
without a priority are first come, first served.

    idle          one request at a time: the latency that llmserve adds
    burst         all requests at once
    poisson-X     Poisson arrivals at X times the capacity, which is the requests per second of a burst of the same
                  requests, sent directly to vLLM at the beginning of the round (the best of three bursts); the number
                  of arrivals and their total time are the same for every seed
    trace         arrivals and lengths of stretches of a trace (--trace: as of llmserve simulate). Lengths
                  are scaled so that the longest is the demo model's longest answer, arrivals to 0.9 of the capacity
    routers       two vLLM servers; llmserve beside vllm-router (--router), Poisson arrivals at 0.9
    barrier       llmserve runs batches of 8 to their end, with 8 bins and with one bin, all requests at once; lengths
                  and the edges of the bins are known
    memory        all at once, on a server whose KV cache is far too small for its slots: the gain of holding requests
                  back
    own           all at once, with llmserve's own forecasts and no trained predictor: a cold server, and servers with
                  the --state of another server that answered as many other prompts, or the same prompts
    ahead-X       Poisson arrivals at X times the capacity; llmserve without priorities beside llmserve whose requests
                  carry their turns as priorities, so that more of them may be sent ahead
    kill          two vLLM servers behind llmserve; one is killed when half of the requests are answered

A request's service time is a + b n for n output tokens, fitted to requests sent one at a time. Slow-down is latency
over service time. The deadline of a request is 0.5 s plus 5 times its service time after its arrival; "deadlines met"
counts all requests. Only `edf` gets deadlines. It drops late requests with 504. These requests miss their deadlines and
have no latency, so compare edf's latencies only together with its share of deadlines met. In the burst, edf's deadlines
are ten minutes plus 5 times the predicted service time: no request is dropped, and the order follows the predictions.

With --more the rounds are added to those of --output, and all rows are made anew; so a long part can be measured in
several runs. Tokens a step are those of all answers over the steps of vLLM's engine: how full the slots were, however
fast the machine was at the time.

With --before each of llmserve's arrangements is measured twice in a round: with this checkout's llmserve, and with that
of another checkout, such as one of a commit before a change.

Each part replaces its own section of --output, so parts can be run one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from kit.arguments import parser_of
from kit.progress import log
from kit.results import machine, write_json
from kit.studies import run

from questions.vllm.arrangements import ORDERS, PARTS, arrangements_of
from questions.vllm.engines import Engines, started
from questions.vllm.figures import draw_figures
from questions.vllm.killed import kill
from questions.vllm.parts import (
    LOADS,
    REQUESTS,
    REQUESTS_LOAD,
    ROUNDS,
    ROUNDS_LOAD,
    at_once_or_poisson,
    idle,
    prompts_of,
    requests_of,
    rounds_of,
    trace,
)
from questions.vllm.report import print_report, read_results

SERVERS = {"routers": 2, "kill": 2}  # all other parts: 1
MEASURES = {"idle": idle, "trace": trace, "kill": kill}  # all other parts: at_once_or_poisson


def estimate_s(args: argparse.Namespace, part: str, requests_per_s: float) -> float:
    """Rough wall time of a part. requests_per_s : of a burst"""
    requests = requests_of(args, part)
    if part == "idle":
        return requests * 0.2
    share_of_burst = {**LOADS, "barrier": 0.6}.get(part, 1.0)
    pass_s = requests / requests_per_s / share_of_burst + 5
    arrangements = arrangements_of(part, args.orders, args.ways)
    return rounds_of(args, part) * pass_s * (len(arrangements) * (1 + bool(args.before)) + (part in LOADS))


def runnable(args: argparse.Namespace) -> list[str]:
    """The parts of --parts whose required flags are set, in their order."""
    parts = [part for part in PARTS if part in args.parts]
    for part, value, flag in (("trace", args.trace, "--trace FILE"), ("routers", args.router, "--router PATH")):
        if part in parts and not value:
            log(f"{part} is skipped: it needs {flag}")
            parts.remove(part)
    return parts


async def measure(args: argparse.Namespace) -> None:
    parts = runnable(args)
    estimated = False
    for count, small in ((1, False), (1, True), (2, False)):
        together = [part for part in parts if SERVERS.get(part, 1) == count and (part == "memory") == small]
        if not together:
            continue
        requests = max(64, *(prompts_of(args, part) for part in together))
        async with started(args, count, requests, small=small) as engines:
            if not estimated:
                for part in parts:
                    log(f"{part}: about {estimate_s(args, part, engines.requests_per_s) / 60:.1f} min")
                estimated = True
            for part in together:
                began_s = time.monotonic()
                section = await MEASURES.get(part, at_once_or_poisson)(args, part, engines)
                log(f"{part} took {(time.monotonic() - began_s) / 60:.1f} min")
                write(args.output, part, setting_of(args, part, engines) | section)


def setting_of(args: argparse.Namespace, part: str, engines: Engines) -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m"),
        **machine(),
        "vllm": engines.vllm,
        "servers": len(engines.servers),
        "load": LOADS.get(part),
        "slots": engines.slots,
        "look_ahead": args.look_ahead,
        "engine_core_apart": len(engines.servers) < (os.cpu_count() or 1),
        "requests": requests_of(args, part),
        "rounds": rounds_of(args, part),
        "seed": args.seed,
        "service_time": {"start_s": round(engines.service.start_s, 5), "token_s": round(engines.service.token_s, 6)},
    }


def write(path: Path, part: str, section: dict[str, Any]) -> None:
    """Replace the section of the part. All other sections stay, in the order of the parts."""
    results = json.loads(path.read_text()) if path.exists() else {}
    results[part] = section
    write_json(path, {name: results[name] for name in PARTS if name in results})


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--vllm-python", help="interpreter of an environment with vLLM in it")
    add("--router", help="the executable vllm-router, for the part routers")
    add("--trace", type=Path, help="trace as of llmserve simulate, for the part trace")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(default: all)")
    add("--orders", nargs="+", choices=ORDERS, default=list(ORDERS), help="llmserve's orders (default: all)")
    add("--ways", nargs="+", default=(), metavar="WAY", help="arrangements, by way: direct, priority, boost, ... (all)")
    add("--requests", type=int, help=f"requests of every pass (default: {REQUESTS}, else {REQUESTS_LOAD})")
    add("--rounds", type=int, help=f"rounds of every part (default: {ROUNDS}, else {ROUNDS_LOAD})")
    add("--more", action="store_true", help="add the rounds to those of --output")
    add("--slots", type=int, default=8, help="requests that a vLLM server runs at once (%(default)s)")
    add("--slots-each", type=int, default=4, help="slots of each of two vLLM servers (%(default)s)")
    add("--look-ahead", type=int, help="llmserve's --look-ahead (default: llmserve's default)")
    add("--before", metavar="CHECKOUT", help="measure the llmserve of this folder, too")
    add("--seed", type=int, default=2028, help="draws prompts, their order, arrivals and predictions")
    add("--output", type=Path, help="write the results as JSON; the sections of other parts stay")
    add("--figures", metavar="PREFIX", help="draw PREFIX-burst.png, PREFIX-load.png, PREFIX-routers.png")
    add("--report", action="store_true", help="measure nothing: tables and figures from --output")
    args = parser.parse_args()
    if not args.report and not args.vllm_python:
        parser.error("--vllm-python is needed to measure")
    if args.output is None:
        parser.error("--output is needed")
    if not args.report:
        run(measure(args))
    results = read_results(args.output)
    print_report(results)
    if args.figures:
        draw_figures(results, args.figures)
