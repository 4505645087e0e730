"""What the forecasts of llmserve.forecast gain where llmserve serves nothing: real vLLM, alone and behind vllm-router.

    python scripts/lab forecasts --vllm-python .venv-vllm/bin/python --router .venv-router/bin/vllm-router \\
        --output docs/results/forecasts.json
    python scripts/lab forecasts --report --output docs/results/forecasts.json

One vLLM server runs the demo model with `--scheduling-policy priority`. Requests of one set of prompts, sent as one
burst, teach a forecaster of the library, which has learnt nothing before. Then bursts of another set are sent, all at
once, in turns: as they are, and with the priority that the forecast gives (`vllm_fields`), to vLLM and to vllm-router
in front of it. No prompt is in both sets. Answers come as a whole; latencies are counted from the burst's beginning.
The time of a forecast is in the latency. Ratios are taken round by round, and are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from kit import client
from kit.arguments import parser_of, whole
from kit.progress import log
from kit.results import day_and_machine, in_turn, rounded, write_json
from kit.rows import Row, medians, ratio, select
from kit.servers import running, vllm
from kit.studies import add_report, measure_or_report
from kit.tables import markdown
from scipy.stats import kendalltau

from llmserve import demo
from llmserve.engines.process import free_port
from llmserve.forecast import Forecaster, vllm_fields

VLLM, ROUTER = "vLLM", "vllm-router"
WAYS = (VLLM, ROUTER)
FORECASTS = {"no": False, "yes": True}
CASE = ("to", "forecasts", "round")
NUMBERS = ("latency_s_mean", "latency_s_p50", "latency_s_p99")
PROMPTS = Path(demo.__file__).with_name("prompts.txt")


@asynccontextmanager
async def routed(router: str, url: str) -> AsyncIterator[str]:
    """The URL of a vllm-router in front of one server."""

    def command(port: int) -> list[str]:
        words = [router, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
        return [*words, "--policy", "round_robin", "--log-level", "warning", "--worker-urls", url]

    async with running(ROUTER, command, ready="/health") as server:
        yield server.url


async def burst(url: str, prompts: Sequence[str], forecaster: Forecaster | None, *, teach: bool) -> list[Any]:
    """(seconds, tokens, forecast tokens) of each prompt's answer. Raises AssertionError for a failed request."""

    async with client.session_of(connections_kept=False) as session:
        began_s = time.perf_counter()

        async def one(prompt: str) -> tuple[float, int, float | None]:
            body = client.body_of(prompt)
            question = forecaster.ask(body) if forecaster is not None else None
            more = vllm_fields(question.forecast) if question is not None and not teach else {}
            reply = await client.ask(session, url, {**body, **more})
            seconds = time.perf_counter() - began_s
            if question is not None and teach:
                question.answered(reply.body)
            return seconds, reply.tokens, question.forecast.output_tokens if question is not None else None

        return await asyncio.gather(*[one(prompt) for prompt in prompts])


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    prompts = PROMPTS.read_text().splitlines()
    taught, asked = prompts[: args.taught], prompts[args.taught : args.taught + args.requests]
    flags = ("--scheduling-policy", "priority")
    passes = []
    async with vllm(args.vllm_python, VLLM, args.slots, *flags) as server, routed(args.router, server.url) as router:
        urls, forecaster = {VLLM: server.url, ROUTER: router}, Forecaster()
        await burst(server.url, taught, forecaster, teach=True)
        log(f"{args.taught} answers are learnt")
        cases = [(way, told) for way in WAYS for told in FORECASTS]
        for number in range(args.rounds):
            for way, told in in_turn(cases, number):
                answers = await burst(urls[way], asked, forecaster if FORECASTS[told] else None, teach=False)
                seconds, tokens, forecasts = zip(*answers, strict=True)
                values = (np.mean(seconds), np.median(seconds), np.quantile(seconds, 0.99))
                numbers = dict(zip(NUMBERS, map(float, values), strict=True))
                if FORECASTS[told]:
                    numbers["kendall_tau"] = float(kendalltau(forecasts, tokens).statistic)
                passes.append(Row(dict(zip(CASE, (way, told, number), strict=True)), numbers))
                log(f"{number + 1}/{args.rounds}: {way}, forecasts {told}: mean {numbers['latency_s_mean']:.2f} s")
    setting = {"rounds": args.rounds, "taught": args.taught, "requests": args.requests, "slots": args.slots}
    rows = [row.record for row in rows_of(passes)]
    results: dict[str, Any] = rounded(
        {**day_and_machine(), **setting, "rows": rows, "passes": [row.record for row in passes]}
    )
    write_json(args.output, results)
    return results


def rows_of(passes: Sequence[Row]) -> list[Row]:
    """A row for each way with and without forecasts: medians over the rounds, with ratios to those without."""
    found = []
    for row in medians(passes, "round"):
        own = select(passes, to=row["to"], forecasts=row["forecasts"])
        base = select(passes, to=row["to"], forecasts="no")
        found.append(
            Row(row.case, row.numbers, {"without": {name: ratio(own, base, name, "round") for name in NUMBERS}})
        )
    return found


def print_report(results: dict[str, Any]) -> None:
    head = ["to", "forecasts", "mean (s)", "p50 (s)", "p99 (s)", "mean", "p50", "p99", "Kendall's tau"]
    lines = []
    for row in (Row.of_record(record, CASE[:-1]) for record in results["rows"]):
        tau = row.numbers.get("kendall_tau")
        lines.append([*(row[name] for name in CASE[:-1]), *(f"{row[name]:.2f}" for name in NUMBERS)])
        lines[-1] += [*(f"{row.ratios['without'][name]:.2f}" for name in NUMBERS), "" if tau is None else f"{tau:.2f}"]
    print(markdown(head, lines))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--vllm-python", help="interpreter of an environment that has vLLM")
    parser.add_argument("--router", help="the command vllm-router")
    parser.add_argument("--slots", type=whole(1), default=8)
    parser.add_argument("--taught", type=whole(1), default=300, help="prompts whose answers teach the forecaster")
    parser.add_argument("--requests", type=whole(1), default=200, help="of a burst")
    parser.add_argument("--rounds", type=whole(1), default=3)
    add_report(parser)
    measure_or_report(parser, parser.parse_args(), measure, print_report, "vllm_python", "router")
