#!/usr/bin/env python
"""What wrong predictions cost, and that right ones win their bins back: shuffled predictions through the live server.

    python scripts/lab/benchmark_trust.py --output docs/results/trust.json --figure docs/results/trust.png

One embedded engine, two servers in front of it: one with bins, one with a single bin. The same requests go to both in
turn, block after block, so many at a time. Each brings its prediction along: its answer's real length (the demo model
answers greedily, so it is known once it has answered), or, in the blocks between, the length of some other answer.
The server is told nothing of this; its first edges come from the shipped predictor. After each block its metrics log
whether it still trusts its predictions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
from bench import client
from bench.arguments import add_results, parser_of
from bench.figures import new_figure, save
from bench.progress import log
from bench.results import machine, write_json
from bench.servers import batching_front_end, embedded_engine

from llmserve.bench import Arrangement
from llmserve.engines.embedded import demo_corpus
from llmserve.headers import PREDICTED_HEADER


@dataclass
class Block:
    """requests : sent to the server with bins by the end of this block. tokens_per_s : with bins, and with one bin."""

    predictions: str
    requests: int
    tokens_per_s: float
    one_bin_tokens_per_s: float
    rank_correlation: float
    trusted: bool

    @property
    def ratio(self) -> float:
        return self.tokens_per_s / self.one_bin_tokens_per_s


async def measure(args: argparse.Namespace) -> list[Block]:
    kinds = ["right"] * args.blocks[0] + ["shuffled"] * args.blocks[1] + ["right"] * args.blocks[2]
    drawn = demo_corpus.examples(args.block * len(kinds), seed=args.seed, held_out=True)
    prompts = [example.prompt for example in drawn]
    draw = random.Random(args.seed)
    blocks = []
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(embedded_engine(args.batch_size))
        binned, single = [
            (await stack.enter_async_context(batching_front_end(engine.url, arrangement, args.batch_size))).url
            for arrangement in (Arrangement("barrier", args.bins, "oracle"), Arrangement("barrier", 1, "none"))
        ]
        session = await stack.enter_async_context(client.session_of())
        for number, kind in enumerate(kinds):
            these = prompts[number * args.block : (number + 1) * args.block]
            lengths, single_s = await send(session, single, these, None, args.concurrent)
            told = lengths if kind == "right" else draw.sample(lengths, len(lengths))
            same, binned_s = await send(session, binned, these, told, args.concurrent)
            assert same == lengths, "the demo model answers greedily"
            rank, trusted = await trust(session, binned)
            tokens = sum(lengths)
            block = Block(kind, args.block * (number + 1), tokens / binned_s, tokens / single_s, rank, trusted)
            blocks.append(block)
            log(
                f"block {number + 1}/{len(kinds)}, {kind}: {block.tokens_per_s:,.0f} tokens/s with bins, "
                f"{block.one_bin_tokens_per_s:,.0f} with one; rank correlation {rank:.2f}, "
                f"{'bins' if trusted else 'one bin'} in force"
            )
    return blocks


async def send(
    session: aiohttp.ClientSession, url: str, prompts: list[str], told: list[int] | None, concurrent: int
) -> tuple[list[int], float]:
    """All prompts, `concurrent` at a time; the answers' lengths and the seconds that it took."""
    room = asyncio.Semaphore(concurrent)

    async def ask(index: int) -> int:
        headers = {PREDICTED_HEADER: str(told[index])} if told else {}
        async with room:
            return (await client.ask(session, url, client.body_of(prompts[index]), headers)).tokens

    began_s = time.perf_counter()
    lengths = await asyncio.gather(*(ask(index) for index in range(len(prompts))))
    return lengths, time.perf_counter() - began_s


async def trust(session: aiohttp.ClientSession, url: str) -> tuple[float, bool]:
    """The rank correlation in the server's window, and whether it trusts its predictions."""
    lines = (await client.get_text(session, f"{url}/metrics")).splitlines()
    values = dict(line.split(" ") for line in lines if line.startswith("llmserve_prediction_") and "{" not in line)
    return float(values["llmserve_prediction_rank_correlation"]), values["llmserve_prediction_trusted"] == "1.0"


def summary(blocks: list[Block]) -> dict[str, Any]:
    """Medians of the ratio to one bin, by what was in force during the whole of a block."""
    in_force = [True, *[block.trusted for block in blocks[:-1]]]
    held = [(block, before) for block, before in zip(blocks, in_force, strict=True) if block.trusted == before]

    def median(kind: str, trusted: bool) -> float | None:
        ratios = [block.ratio for block, before in held if block.predictions == kind and before == trusted]
        return round(statistics.median(ratios), 3) if ratios else None

    lost = next((block.requests for block in blocks if not block.trusted), None)
    return {
        "right, bins": median("right", True),
        "shuffled, bins": median("shuffled", True),
        "shuffled, one bin": median("shuffled", False),
        "requests_when_lost": lost,
        "requests_when_found": next(
            (block.requests for block in blocks if lost and block.trusted and block.requests > lost), None
        ),
    }


def draw_figure(blocks: list[Block], path: Path) -> None:
    figure, ((top,), (bottom,)) = new_figure(2, 1, width=8.5, height=5.6, sharex=True, height_ratios=[3, 2])
    width = blocks[0].requests
    ends = [block.requests for block in blocks]
    top.step([0, *ends], [b.ratio for b in blocks[:1] + blocks], color="#3b7dd8", lw=2, label="with bins")
    top.axhline(1, color="#555555", lw=1.5, ls="--", label="one bin")
    top.set_ylabel("throughput, ratio to one bin")
    top.set_ylim(0, 1.15 * max(block.ratio for block in blocks))
    bottom.plot(ends, [block.rank_correlation for block in blocks], "o-", color="#222222", ms=4)
    bottom.set_ylabel("rank correlation\nin the window")
    bottom.set_xlabel("requests")
    bottom.set_ylim(-0.25, 1.05)
    for axes in (top, bottom):
        for end, block in zip(ends, blocks, strict=True):
            if block.predictions == "shuffled":
                axes.axvspan(end - width, end, color="#f3c98b", alpha=0.55, lw=0)
    for end, block in zip(ends, blocks, strict=True):
        if not block.trusted:
            bottom.plot([end], [block.rank_correlation], "o", color="#c0392b", ms=7)
    top.plot([], [], color="#f3c98b", lw=8, label="predictions shuffled")
    top.legend(loc="lower right", ncols=3)
    bottom.plot([], [], "o", color="#c0392b", label="one bin in force")
    bottom.legend(loc="center left")
    top.set_title("Predictions that rank nothing cost no throughput, and bins come back by themselves", fontsize=11)
    save(figure, path)


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--block", type=int, default=64, help="requests in a block (%(default)s)")
    add("--blocks", type=int, nargs=3, default=[3, 6, 5], help="with right, shuffled and again right predictions")
    add("--concurrent", type=int, default=64, help="requests at a time (%(default)s)")
    add("--bins", type=int, default=4)
    add("--batch-size", type=int, default=8)
    add("--seed", type=int, default=2027, help="draws the prompts")
    add_results(parser, "--figure")
    args = parser.parse_args()
    blocks = asyncio.run(measure(args))
    found = summary(blocks)
    print(json.dumps(found, indent=1))
    if args.output:
        setting = {name: getattr(args, name) for name in ("block", "concurrent", "bins", "batch_size", "seed")}
        result = {**setting, **machine(), **found, "blocks": [asdict(block) for block in blocks]}
        write_json(args.output, result)
    if args.figure:
        draw_figure(blocks, args.figure)


if __name__ == "__main__":
    main()
