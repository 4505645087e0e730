"""Fair shares: a flood beside a modest client on the real server, and the gaps between shares in random worlds.

    python scripts/lab fair --output docs/results/fair.json

flood   8 slots of 0.4 s answers; one key keeps 200 requests in flight, another asks once a second: the modest key's
        latency and refusals and the flood's answers, with and without fair shares, under every order; also with a
        queue of 100 requests
worlds  random worlds of shares with random weights in simulated time: the gap in weighted service between any two
        shares that wait, over VTC's bound 2 max(w_p L_in, w_q M); with forecasts charged at the start, with real
        lengths charged there (no forecast can do better), and with tokens charged as they are generated (VTC without
        forecasts)
prefixes  8 slots beside a cache of 4 prompts' prefixes; 12 applications keep 10 requests in flight each, all with the
        application's system prompt: share of starts that find their prefix in the cache, with and without fair shares
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from collections import Counter, OrderedDict
from functools import partial
from pathlib import Path
from typing import Any, get_args

from kit import client
from kit.arguments import add_results, parser_of
from kit.progress import log
from kit.results import day_and_machine, read_parts, write_json
from kit.servers import fake_engine, front_end

from llmserve.request import EngineInfo
from llmserve.settings.policies import SchedulingConfig
from llmserve.settings.policy_names import ORDERS
from questions.fair.worlds import Ask, Charged, Clients, gaps

SLOTS, TOKENS, STEP_S = 8, 20, 0.02
IN_FLIGHT, QUEUE = 200, 100
CACHED, APPLICATIONS = 4, 12
PARTS = ("flood", "worlds", "prefixes")
AGAIN_S = 0.1  # after which a refused client of the flood asks again


async def flood(seconds: float) -> dict[str, Any]:
    rows = []
    for order in ORDERS:
        for fair_by in ("key", "none"):
            rows.append(await flooded(order, fair_by, None, seconds))
    for order in ("fffs", "boost"):
        for fair_by in ("key", "none"):
            rows.append(await flooded(order, fair_by, QUEUE, seconds))
    return {"seconds": seconds, "rows": rows}


def key_file(folder: str) -> str:
    path = Path(folder, "keys")
    path.touch(mode=0o600)
    path.write_text("flood: sk-1\nmodest: sk-2\n")
    return str(path)


async def flooded(order: str, fair_by: str, queue: int | None, seconds: float) -> dict[str, Any]:
    """One run on a server of its own."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--api-key-file", key_file(folder), "--order", order, "--fair-by", fair_by, "--slots", str(SLOTS)]
        flags += ["--queue-requests-max", str(queue)] if queue else []
        async with (
            fake_engine("fake", "--step-s", str(STEP_S), "--slots", str(SLOTS)) as engine,
            front_end("fair", "--engine", engine.url, "--log-level", "error", *flags) as front,
            client.session_of() as session,
        ):
            answers: Counter[str] = Counter()
            refused: Counter[str] = Counter()
            began_s = time.perf_counter()

            async def ask(name: str, key: str, number: int) -> float:
                body = {"model": "fake", "messages": [{"role": "user", "content": f"question {number} of {name}"}]}
                asked_s = time.perf_counter()
                headers = {"authorization": f"Bearer {key}"}
                reply = await client.ask(session, front.url, {**body, "max_tokens": TOKENS}, headers)
                (answers if reply.status == 200 else refused)[name] += 1
                return time.perf_counter() - asked_s

            async def keep_asking(number: int) -> None:
                while time.perf_counter() - began_s < seconds:
                    before = refused["flood"]
                    await ask("flood", "sk-1", number)
                    if refused["flood"] > before:
                        await asyncio.sleep(AGAIN_S)

            flooding = [asyncio.create_task(keep_asking(number)) for number in range(IN_FLIGHT)]
            await asyncio.sleep(1.0)
            modest = []
            while time.perf_counter() - began_s < seconds:
                modest.append(asyncio.create_task(ask("modest", "sk-2", len(modest))))
                await asyncio.sleep(1.0)
            within = answers["flood"]
            latencies_s = [await one for one in modest]
            await asyncio.gather(*flooding)
    row = {
        "order": order,
        "fair_by": fair_by,
        "queue": queue,
        "modest_p50_s": statistics.median(latencies_s),
        "modest_max_s": max(latencies_s),
        "modest_answered": answers["modest"],
        "modest_refused": refused["modest"],
        "flood_answers_per_s": within / seconds,
    }
    log(json.dumps(row))
    return row


def worlds(count: int) -> dict[str, Any]:
    largest, pairs, over = 0.0, 0, 0
    for seed in range(count):
        for gap, bound in gaps(seed):
            largest, pairs, over = max(largest, gap / bound), pairs + 1, over + (gap > bound)
        if seed % 500 == 499:
            log(f"{seed + 1} of {count} worlds: {over} of {pairs} gaps over the bound, the largest {largest:.2f} of it")
    rows = []
    for slots in (8, 32):
        for forecast in ("exact", "noisy"):
            p99 = {charged: p99_of_gaps(min(count, 200), slots, forecast, charged) for charged in get_args(Charged)}
            row = {"slots": slots, "forecasts": forecast, "p99_over_bound": p99}
            rows.append({**row, "ratio": p99["forecast"] / p99["generated"], "least": p99["length"] / p99["generated"]})
            log(json.dumps(rows[-1]))
    return {"worlds": count, "pairs": pairs, "over_the_bound": over, "largest_over_bound": largest, "charges": rows}


def p99_of_gaps(count: int, slots: int, forecast: str, charged: Charged) -> float:
    """99th percentile of the gaps in the first worlds, over VTC's bound."""
    worlds = [gaps(seed, 5.0, slots=(slots,), forecast=forecast, charged=charged) for seed in range(count)]
    return statistics.quantiles([gap / bound for found in worlds for gap, bound in found], n=100)[98]


def prefixes() -> dict[str, Any]:
    rows = []
    for order in ("fffs", "boost"):
        for fair in (True, False):
            rows.append({"order": order, "fair": fair, "hits": prefix_hits(order, fair=fair)})
            log(json.dumps(rows[-1]))
    return {"cached": CACHED, "applications": APPLICATIONS, "rows": rows}


def prefix_hits(order: str, *, fair: bool) -> float:
    rng = random.Random(1)
    cache: OrderedDict[int, None] = OrderedDict()
    counts: Counter[bool] = Counter()

    def started(ask: Ask, _computed: float) -> None:
        counts[ask.prefix in cache] += 1
        cache[ask.prefix] = None
        cache.move_to_end(ask.prefix)
        if len(cache) > CACHED:
            cache.popitem(last=False)

    config = SchedulingConfig(order=order).resolved(barrier=False)
    world = Clients(config.scheduler(), [EngineInfo("e", SLOTS, False)], lambda tokens: STEP_S * tokens, started)

    def keep_asking(prefix: int) -> None:
        tokens = max(1.0, round(50.0 * rng.lognormvariate(0.0, 0.8)))
        share = f"application {prefix}" if fair else ""
        world.ask(Ask(share, tokens, tokens, 1_000.0, prefix=prefix, then=partial(keep_asking, prefix)))

    for prefix in range(1, APPLICATIONS + 1):
        for _ in range(10):
            keep_asking(prefix)
    world.run(600.0)
    return counts[True] / counts.total()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--seconds", type=float, default=16.0, help="of each flood")
    parser.add_argument("--worlds", type=int, default=10_000)
    add_results(parser)
    args = parser.parse_args()
    result = read_parts(args.output)
    for part in args.parts:
        if part == "flood":
            found = asyncio.run(flood(args.seconds))
        else:
            found = worlds(args.worlds) if part == "worlds" else prefixes()
        result[part] = {**day_and_machine(), **found}
        write_json(args.output, result)
