"""What wrong predictions cost, and when right predictions bring bins back: shuffled predictions on a live server.

    python scripts/lab prediction.trust --output docs/results/trust.json --figure docs/results/trust.png

Two servers share one embedded engine: one server has bins, the other a single bin. Block after block, both get the
same requests in turn, --concurrent at a time. Each request carries a prediction: the real length of its answer, or, in
the blocks in the middle, the length of another answer. The single-bin server answers first, and the demo model is
greedy, so the real lengths are known. The first bin edges come from the shipped predictor. After each block the
server's metrics tell whether it still trusts its predictions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
from kit import client
from kit.arguments import add_results, parser_of
from kit.figures import BLUE, ORANGE, YELLOW, new_figure, save
from kit.progress import log
from kit.results import machine, write_json
from kit.rows import Row, median, select, values
from kit.servers import batching_front_end, embedded_engine

from llmserve.commands.bench import Arrangement
from llmserve.demo import demo_corpus
from llmserve.wire.headers import PREDICTED_HEADER


async def measure(args: argparse.Namespace) -> list[Row]:
    """A row for each block. requests : that the server with bins has answered by the end of the block"""
    kinds = ["right"] * args.blocks[0] + ["shuffled"] * args.blocks[1] + ["right"] * args.blocks[2]
    examples = demo_corpus.examples(args.block * len(kinds), seed=args.seed, held_out=True)
    prompts = [example.prompt for example in examples]
    rng = random.Random(args.seed)
    blocks = []
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(embedded_engine(args.batch_size))
        binned, single = [
            (await stack.enter_async_context(batching_front_end(engine.url, arrangement, args.batch_size))).url
            for arrangement in (Arrangement("barrier", args.bins, "oracle"), Arrangement("barrier", 1, "none"))
        ]
        session = await stack.enter_async_context(client.session_of())
        for number, kind in enumerate(kinds):
            block = prompts[number * args.block : (number + 1) * args.block]
            lengths, single_s = await send(session, single, block, None, args.concurrent)
            predictions = lengths if kind == "right" else rng.sample(lengths, len(lengths))
            lengths_again, binned_s = await send(session, binned, block, predictions, args.concurrent)
            assert lengths_again == lengths, "the demo model answers greedily"
            rates = {"tokens_per_s": sum(lengths) / binned_s, "one_bin_tokens_per_s": sum(lengths) / single_s}
            case = {"predictions": kind, "requests": args.block * (number + 1)}
            row = Row(case, rates | await trust(session, binned))
            blocks.append(row)
            log(
                f"block {number + 1}/{len(kinds)}, {kind}: {row['tokens_per_s']:,.0f} tokens/s with bins, "
                f"{row['one_bin_tokens_per_s']:,.0f} with one; rank correlation {row['rank_correlation']:.2f}, "
                f"{'bins' if row['trusted'] else 'one bin'} in force"
            )
    return blocks


async def send(
    session: aiohttp.ClientSession, url: str, prompts: list[str], predictions: list[int] | None, concurrent: int
) -> tuple[list[int], float]:
    """Send all prompts, `concurrent` at a time. Return the lengths of the answers and the seconds of all together."""
    room = asyncio.Semaphore(concurrent)

    async def ask(index: int) -> int:
        headers = {PREDICTED_HEADER: str(predictions[index])} if predictions else {}
        async with room:
            return (await client.ask(session, url, client.body_of(prompts[index]), headers)).tokens

    began_s = time.perf_counter()
    lengths = await asyncio.gather(*(ask(index) for index in range(len(prompts))))
    return lengths, time.perf_counter() - began_s


async def trust(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """The rank correlation in the server's window, and whether the server trusts its predictions."""
    lines = (await client.get_text(session, f"{url}/metrics")).splitlines()
    metrics = dict(line.split(" ") for line in lines if line.startswith("llmserve_prediction_") and "{" not in line)
    return {
        "rank_correlation": float(metrics["llmserve_prediction_rank_correlation"]),
        "trusted": metrics["llmserve_prediction_trusted"] == "1.0",
    }


def throughput_ratio(block: Row) -> float:
    """Throughput with bins over throughput with one bin."""
    return float(block["tokens_per_s"] / block["one_bin_tokens_per_s"])


def summary(blocks: list[Row]) -> dict[str, Any]:
    """Median throughput ratios of the blocks in which trust did not change, and when trust was lost and found again."""
    trusted_before = [True, *values(blocks[:-1], "trusted")]
    steady = [
        Row({**block.case, "trusted": before}, {"ratio": throughput_ratio(block)})
        for block, before in zip(blocks, trusted_before, strict=True)
        if block["trusted"] == before
    ]

    def median_ratio(kind: str, trusted: bool) -> float | None:
        same = select(steady, predictions=kind, trusted=trusted)
        return round(median(same, "ratio"), 3) if same else None

    lost = next((block["requests"] for block in blocks if not block["trusted"]), None)
    later = (block["requests"] for block in blocks if lost and block["trusted"] and block["requests"] > lost)
    return {
        "right, bins": median_ratio("right", True),
        "shuffled, bins": median_ratio("shuffled", True),
        "shuffled, one bin": median_ratio("shuffled", False),
        "requests_when_lost": lost,
        "requests_when_found": next(later, None),
    }


def draw_figure(blocks: list[Row], path: Path) -> None:
    figure, ((top,), (bottom,)) = new_figure(2, 1, width=8.5, height=5.6, sharex=True, height_ratios=[3, 2])
    width = blocks[0]["requests"]
    ends, ratios = values(blocks, "requests"), [throughput_ratio(block) for block in blocks]
    top.step([0, *ends], [ratios[0], *ratios], color=BLUE, lw=2, label="with bins")
    top.axhline(1, color="#555555", lw=1.5, ls="--", label="one bin")
    top.set_ylabel("throughput, ratio to one bin")
    top.set_ylim(0, 1.15 * max(ratios))
    bottom.plot(ends, values(blocks, "rank_correlation"), "o-", color="#222222", ms=4)
    bottom.set_ylabel("rank correlation\nin the window")
    bottom.set_xlabel("requests")
    bottom.set_ylim(-0.25, 1.05)
    for axes in (top, bottom):
        for end, block in zip(ends, blocks, strict=True):
            if block["predictions"] == "shuffled":
                axes.axvspan(end - width, end, color=YELLOW, alpha=0.3, lw=0)
    for end, block in zip(ends, blocks, strict=True):
        if not block["trusted"]:
            bottom.plot([end], [block["rank_correlation"]], "o", color=ORANGE, ms=7)
    top.plot([], [], color=YELLOW, lw=8, label="predictions shuffled")
    top.legend(loc="lower right", ncols=3)
    bottom.plot([], [], "o", color=ORANGE, label="one bin in force")
    bottom.legend(loc="center left")
    top.set_title("Shuffled predictions: llmserve detects them, goes on with one bin, and returns to bins", fontsize=11)
    save(figure, path)


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--block", type=int, default=64, help="requests in a block (%(default)s)")
    add(
        "--blocks",
        type=int,
        nargs=3,
        default=[3, 6, 5],
        help="blocks with right, shuffled, and again right predictions",
    )
    add("--concurrent", type=int, default=64, help="requests at a time (%(default)s)")
    add("--bins", type=int, default=4)
    add("--batch-size", type=int, default=8)
    add("--seed", type=int, default=2027, help="draws the prompts")
    add("--results", type=Path, metavar="FILE", help="draw an earlier --output; nothing runs")
    add_results(parser, "--figure")
    args = parser.parse_args()
    if args.results:
        records = json.loads(args.results.read_text(encoding="utf-8"))["blocks"]
        blocks = [Row.of_record(record, ("predictions", "requests")) for record in records]
    else:
        blocks = asyncio.run(measure(args))
    totals = summary(blocks)
    print(json.dumps(totals, indent=1))
    if args.output:
        setting = {name: getattr(args, name) for name in ("block", "concurrent", "bins", "batch_size", "seed")}
        write_json(args.output, {**setting, **machine(), **totals, "blocks": [block.record for block in blocks]})
    if args.figure:
        draw_figure(blocks, args.figure)
