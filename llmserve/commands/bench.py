"""Measure the throughput gain of bins on a real engine that runs batches to completion, and their cost with refill.

    llmserve bench --output docs/results/throughput.json --figure docs/results/throughput.png
    llmserve bench --engine http://127.0.0.1:8001 --refill-slots 10 \\
        --output docs/results/throughput-vllm.json --figure docs/results/throughput-vllm.png

All requests arrive at once. One embedded engine serves all arrangements in turn, in every round: no bins; bins by the
shipped predictor, by risk and by median; bins by oracle lengths (the demo model decodes greedily, so its lengths are
known after the first run); windows, which have no bins. Each arrangement has its own `llmserve serve` in front of the
engine. The prompts are held out: neither the model nor the predictor was trained on these prompts. Every round repeats
the prompts, so the servers' memory of earlier answers is switched off.

With --engine, another server of the demo model (such as vLLM) replaces the embedded engine, and two arrangements are
added: the engine without llmserve, and llmserve refilling the engine's slots without a barrier.

The results also show the gain implied by the lengths. A batch takes as long as its longest answer, so the implied time
of an arrangement is the sum over its batches of the cost of the longest answer. The cost by length is measured first,
on the engine alone, with full batches of fixed lengths. Batches are read from the receipts in the answers' headers.

Joules are the change of llmserve's counter in /metrics during a run: measured if the engine's GPUs are on this machine
(nvml), else modelled with --profile. Without both, and for an engine without llmserve, there are no joules.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import platform
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from llmserve.commands import asking
from llmserve.engines.dialects import MODELS_PATH
from llmserve.engines.probing import models_of
from llmserve.engines.process import EngineProcess
from llmserve.errors import ConfigError
from llmserve.http.client import HttpClient
from llmserve.runtime.extras import need_embedded, need_plot, need_predictor
from llmserve.wire.headers import BATCH_HEADER, BATCH_SIZE_HEADER

MODEL = "llmserve-demo"
COST_TOKENS = (1, 30, 60, 120, 240, 480)  # of the batches that show how long a batch takes by its tokens
ENERGY_SOURCES = ("nvml", "modelled")  # label `source` of the counter, the better source first


@dataclass(frozen=True)
class Arrangement:
    """How requests reach the engine.

    mode     "direct", "refill", "barrier" or "window" (a barrier without bins)
    lengths  lengths used by bins and windows: "none" (one bin), "risk" or "median" (of the predictor), or "oracle"
    """

    mode: str
    bins: int
    lengths: str

    @property
    def name(self) -> str:
        if self.mode == "direct":
            return "engine directly"
        if self.mode == "window":
            return f"window, {self.lengths}"
        bins = "no bins" if self.bins == 1 else f"{self.bins} bins, {self.lengths}"
        return bins if self.mode == "barrier" else f"refill, {bins}"

    @property
    def flags(self) -> list[str]:
        by = ["--bins-by", self.lengths] if self.lengths in ("risk", "median") else []
        release = "window" if self.mode == "window" else "greedy"
        return ["--bins", str(self.bins), "--release", release, "--memory-keys", "0", *by]


BASELINE = Arrangement("barrier", 1, "none")


@dataclass
class BenchRun:
    """One run of all prompts. lengths and batches by prompt; seconds from the first request to the last answer.

    joules  of the engine during the run, by source
    """

    seconds: float
    lengths: list[int]
    batches: list[str]
    latencies_s: list[float]
    joules: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        return sum(self.lengths) / self.seconds

    @property
    def longest(self) -> list[int]:
        """Tokens of the longest answer of each batch."""
        longest: dict[str, int] = defaultdict(int)
        for batch, length in zip(self.batches, self.lengths, strict=True):
            longest[batch] = max(longest[batch], length)
        return list(longest.values())


@asynccontextmanager
async def embedded_engine(batch_size: int) -> AsyncIterator[str]:
    def command(port: int) -> list[str]:
        words = [sys.executable, "-m", "llmserve.demo", "--port", str(port)]
        return [*words, "--batch-size-max", str(batch_size)]

    process = EngineProcess("the embedded engine", command, start_s=120)
    await process.start()
    try:
        yield process.url
    finally:
        await process.stop()


@asynccontextmanager
async def front_end(
    engine_url: str, arrangement: Arrangement, args: argparse.Namespace, *flags: str
) -> AsyncIterator[str]:
    """Run `llmserve serve` with the arrangement's flags and `flags` in front of the engine. Yields the base URL."""
    if arrangement.mode == "direct":
        yield engine_url
        return

    def command(port: int) -> list[str]:
        words = [sys.executable, "-m", "llmserve", "serve", "--engine", engine_url, "--port", str(port)]
        words += ["--barrier"] if arrangement.mode in ("barrier", "window") else ["--slots", str(args.refill_slots)]
        words += ["--batch-size", str(args.batch_size), *arrangement.flags, *flags]
        # The predictor's training lengths give the first edges, also with oracle lengths.
        return [*words, "--predictor", "none" if arrangement.lengths == "none" else args.predictor]

    process = EngineProcess(arrangement.name, command, start_s=120)
    await process.start()
    try:
        async with client_of(process.url) as client, asyncio.timeout(60):
            while (await client.answer("GET", "/ready")).status != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        yield process.url
    finally:
        await process.stop()


def check_engine(url: str) -> None:
    """Raise NoAnswer or ConfigError if no engine at this URL serves the demo model, whose prompts are sent."""
    listed = models_of(asking.ask(url, MODELS_PATH, None, {}))
    models = [model.id for model in listed.models] if listed is not None else []
    if MODEL not in models:
        raise ConfigError(f"bench needs an engine that serves {MODEL}: {url} has {', '.join(models) or 'no model'}")


def client_of(url: str) -> HttpClient:
    """A client that waits for answers for as long as they take."""
    return HttpClient(url, connect_s=60.0, idle_s=math.inf, answer_s=math.inf, headers_kept=[BATCH_HEADER.encode()])


async def chat(
    client: HttpClient, fields: Mapping[str, Any], headers: Mapping[str, str]
) -> tuple[dict[str, Any], Mapping[bytes, bytes]]:
    """The answer to a chat with the demo model, and its headers."""
    body = msgspec.json.encode({"model": MODEL, "temperature": 0, **fields})
    headers = {"content-type": "application/json", **headers}
    answer = await client.answer("POST", "/v1/chat/completions", headers, body)
    assert answer.status == 200, answer.body
    return msgspec.json.decode(answer.body), answer.headers


async def run(url: str, prompts: list[str], oracle: list[int] | None) -> BenchRun:
    """Send all prompts at once. oracle: lengths to send as the client's predictions."""
    async with client_of(url) as client:
        before_j = await joules(client)
        began_s = time.perf_counter()

        async def complete(index: int) -> tuple[int, str, float]:
            messages = [{"role": "user", "content": prompts[index]}]
            headers = {"x-llmserve-predicted-tokens": str(oracle[index])} if oracle else {}
            answer, told = await chat(client, {"messages": messages}, headers)
            batch = told.get(BATCH_HEADER.encode(), b"alone %d" % index).decode("latin-1")
            return answer["usage"]["completion_tokens"], batch, time.perf_counter() - began_s

        results = await asyncio.gather(*(complete(index) for index in range(len(prompts))))
        seconds = time.perf_counter() - began_s
        after_j = await joules(client)
    lengths, batches, latencies_s = zip(*results, strict=True)
    used_j = {source: after_j[source] - before_j[source] for source in before_j}
    return BenchRun(seconds, list(lengths), list(batches), list(latencies_s), used_j)


async def joules(client: HttpClient) -> dict[str, float]:
    """Return the value of the server's energy counter by source; {} without a counter."""
    answer = await client.answer("GET", "/metrics")
    text = answer.body.decode() if answer.status == 200 else ""
    return {
        sample.labels["source"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "llmserve_energy_joules_total"
    }


async def batch_cost(
    engine_url: str, batch_size: int, rounds: int = 5, lengths: Sequence[int] = COST_TOKENS
) -> np.poly1d:
    """Return the seconds of a full batch as a quadratic polynomial of its tokens: start, step, and growth of steps.

    lengths : tokens of the measured batches
    """
    seconds: dict[int, list[float]] = {length: [] for length in lengths}
    async with client_of(engine_url) as client:

        async def complete(length: int, batch: str) -> None:
            messages = [{"role": "user", "content": "Count from 1 to 9."}]
            fields = {"messages": messages, "max_tokens": length, "ignore_eos": True}
            answer, _ = await chat(client, fields, {BATCH_HEADER: batch, BATCH_SIZE_HEADER: str(batch_size)})
            assert answer["usage"]["completion_tokens"] == length, answer

        for number, length in itertools.product(range(rounds), lengths):
            began_s = time.perf_counter()
            await asyncio.gather(*(complete(length, f"cost-{number}-{length}") for _ in range(batch_size)))
            seconds[length].append(time.perf_counter() - began_s)
    medians = [statistics.median(seconds[length]) for length in lengths]
    return np.poly1d(np.polyfit(lengths, medians, deg=2))


def drawn_prompts(count: int, seed: int) -> list[str]:
    """Prompts that the demo model was not trained on. They recur only if more are wanted than there are."""
    prompts = (files("llmserve.demo") / "prompts.txt").read_text(encoding="utf-8").splitlines()
    rng, drawn = random.Random(seed), list[str]()
    while len(drawn) < count:
        drawn += rng.sample(prompts, min(len(prompts), count - len(drawn)))
    return drawn


async def measure(args: argparse.Namespace) -> tuple[dict[str, list[BenchRun]], np.poly1d]:
    prompts = drawn_prompts(args.requests, args.seed)
    arrangements = [BASELINE]
    arrangements += [Arrangement("barrier", bins, how) for bins in args.bins for how in ("risk", "median", "oracle")]
    arrangements += [Arrangement("window", 1, how) for how in ("risk", "oracle")]
    if args.engine:
        arrangements += [Arrangement("direct", 1, "none"), Arrangement("refill", max(args.bins), "risk")]
    runs: dict[str, list[BenchRun]] = {arrangement.name: [] for arrangement in arrangements}
    async with AsyncExitStack() as stack:
        engine_url = args.engine or await stack.enter_async_context(embedded_engine(args.batch_size))
        flags = ["--profile", args.profile] if args.profile else []
        urls = [
            await stack.enter_async_context(front_end(engine_url, arrangement, args, *flags))
            for arrangement in arrangements
        ]
        await run(urls[0], prompts[:16], None)  # warms the engine up
        cost = await batch_cost(engine_url, args.batch_size)
        lengths: list[int] | None = None
        for number in range(args.rounds):
            for arrangement, url in zip(arrangements, urls, strict=True):
                result = await run(url, prompts, lengths if arrangement.lengths == "oracle" else None)
                lengths = lengths or result.lengths
                runs[arrangement.name].append(result)
                print(
                    f"round {number + 1}/{args.rounds}: {arrangement.name}: {result.tokens_per_s:,.0f} tokens/s",
                    file=sys.stderr,
                )
    return runs, cost


def rows(runs: dict[str, list[BenchRun]], cost: np.poly1d) -> list[dict[str, Any]]:
    """Return medians per arrangement. Gains are relative to "no bins" in the same round: a slow machine slows both."""
    plain = runs[BASELINE.name]
    return [
        {
            "arrangement": name,
            "tokens_per_s": round(statistics.median(run.tokens_per_s for run in rounds), 1),
            "gain": round(
                statistics.median(a.tokens_per_s / b.tokens_per_s for a, b in zip(rounds, plain, strict=True)), 3
            ),
            "gain_implied": _implied(name, rounds, plain, cost),
            "latency_s_mean": round(statistics.median(statistics.mean(run.latencies_s) for run in rounds), 2),
            "seconds": round(statistics.median(run.seconds for run in rounds), 2),
            **_energy(rounds),
        }
        for name, rounds in runs.items()
    ]


def _energy(rounds: list[BenchRun]) -> dict[str, Any]:
    """Return medians over the rounds, from the best source that all rounds have; None without a source."""
    source = next((source for source in ENERGY_SOURCES if all(source in run.joules for run in rounds)), None)
    by_token = by_request = None
    if source is not None:
        by_token = round(statistics.median(run.joules[source] / sum(run.lengths) for run in rounds), 4)
        by_request = round(statistics.median(run.joules[source] / len(run.lengths) for run in rounds), 2)
    return {"joules_per_token": by_token, "joules_per_request": by_request, "energy_source": source}


def _implied(name: str, rounds: list[BenchRun], plain: list[BenchRun], cost: np.poly1d) -> float | None:
    """Return the gain implied by the lengths; None without a barrier, where batches do not determine the time."""
    if name.startswith(("engine", "refill")):
        return None

    def seconds(run: BenchRun) -> float:
        return float(sum(cost(length) for length in run.longest))

    return round(statistics.median(seconds(b) / seconds(a) for a, b in zip(rounds, plain, strict=True)), 3)


def print_table(results: list[dict[str, Any]], title: str) -> None:
    sources = sorted({row["energy_source"] for row in results} - {None})
    caption = f"joules: {', '.join(sources)}" if sources else None
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    names = ("output tokens/s", "gain", "implied by lengths", "J/token", "J/request", "mean latency (s)")
    table.add_column("arrangement", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right")
    for row in results:
        table.add_row(
            row["arrangement"],
            f"{row['tokens_per_s']:,.0f}",
            f"{row['gain']:.2f}x",
            f"{row['gain_implied']:.2f}x" if row["gain_implied"] else "",
            "" if row["joules_per_token"] is None else f"{row['joules_per_token']:.3g}",
            "" if row["joules_per_request"] is None else f"{row['joules_per_request']:.3g}",
            f"{row['latency_s_mean']:.1f}",
        )
    Console().print(table)


def draw(results: list[dict[str, Any]], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colors = {"risk": "#3b7dd8", "median": "#7fa8de", "oracle": "#2a9d5c"}
    kinds = [row["arrangement"].rpartition(", ")[2] for row in results]
    figure, axes = plt.subplots(figsize=(1.6 + 1.1 * len(results), 4.2), layout="constrained")
    axes.bar(
        range(len(results)),
        [row["gain"] for row in results],
        color=[colors.get(kind, "#8c8c8c") for kind in kinds],
        width=0.7,
    )
    implied = [row["gain_implied"] or float("nan") for row in results]
    axes.plot(range(len(results)), implied, "k_", markersize=26, label="implied by the lengths")
    highest = [max(row["gain"], row["gain_implied"] or 0.0) for row in results]
    for place, row in enumerate(results):
        axes.text(place, 0.06, f"{row['tokens_per_s']:,.0f}\ntokens/s", ha="center", color="white", fontsize=9)
        axes.text(place, highest[place] + 0.03, f"{row['gain']:.2f}x", ha="center")
    axes.set_xticks(range(len(results)), [row["arrangement"].replace(", ", "\n") for row in results])
    axes.set_ylabel("throughput over batches without bins")
    axes.set_ylim(0, 1.15 * max(highest))
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


# ---- the command --------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=400, help="requests of a run")
    parser.add_argument("--batch-size", type=int, default=8, help="requests of a batch")
    parser.add_argument("--bins", type=int, nargs="+", default=[8], help="numbers of bins to compare with no bins")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each arrangement, in turn")
    parser.add_argument("--seed", type=int, default=2026, help="seed of the prompts")
    parser.add_argument(
        "--engine", metavar="URL", help="of another engine that serves the demo model (default: the embedded one)"
    )
    parser.add_argument("--refill-slots", type=int, default=10, help="requests in flight on a refill engine")
    parser.add_argument("--predictor", metavar="FOLDER", help="of the predictor (default: the demo predictor)")
    parser.add_argument("--profile", metavar="FILE", help="profile of the engine, for joules (see `llmserve profile`)")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    parser.add_argument("--figure", type=Path, help="write the results as PNG")


def main(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit status. Raises LLMServeError, before any start if an extra is missing."""
    if args.engine is None:
        need_embedded()
    need_predictor("a trained predictor")
    need_plot(args.figure, "--figure")
    if args.engine is not None:
        check_engine(args.engine)
    if args.predictor is None:
        import predictor

        args.predictor = str(predictor.DEMO)
    runs, cost = asyncio.run(measure(args))
    results = rows(runs, cost)
    engine = f"Engine at {args.engine}" if args.engine else "Embedded engine"
    title = f"{engine}, {args.requests} requests at once, batches of {args.batch_size}"
    print_table(results, title)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        setting: dict[str, Any] = {
            "requests": args.requests,
            "batch_size": args.batch_size,
            "rounds": args.rounds,
            "seed": args.seed,
            "profile": args.profile,
        }
        machine = {"python": platform.python_version(), "cores": os.cpu_count()}
        batch = {"batch_ms": {length: round(1e3 * float(cost(length)), 1) for length in (1, 60, 240, 480)}}
        args.output.write_text(json.dumps({**setting, **machine, **batch, "rows": results}, indent=2) + "\n")
    if args.figure:
        draw(results, title, args.figure)
    return 0
