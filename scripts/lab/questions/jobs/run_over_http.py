"""Jobs of lines beside bursts of online requests, over HTTP: the real server, and an AIMD feeder as its rival.

    python scripts/lab jobs.run_over_http --output docs/results/jobs-http.json

The scenarios of llm-d-batch-gateway#491, scaled to a timed engine of 32 slots and 80 s (batch_jobs/over_http.py):
online requests alone, at the engine and at the server; lines by an AIMD feeder beside online requests at the engine;
and jobs of the server with windows near, middle and far. Run it on an idle machine: the time to first token is a step
of 30 ms.
"""

from __future__ import annotations

import asyncio
import statistics
from typing import Any

import numpy as np
from kit.arguments import add_results, numbers, parser_of
from kit.progress import log
from kit.results import day_and_machine, rounded, write_json

from questions.jobs.over_http import Seen, aimd, batches, by_the_server, drawn, idle_tokens, on_the_engine


async def measured(seed: int) -> list[dict[str, Any]]:
    load = drawn(seed)
    rows: list[dict[str, Any]] = []
    alone = await on_the_engine(load, None)
    rows.append(row_of(seed, "AIMD", await on_the_engine(load, aimd), alone, alone))
    through = await by_the_server(load, None)
    rows.append(row_of(seed, "this server", await by_the_server(load, batches), through, alone))
    rows.append(
        row_of(seed, "no line is stopped", await by_the_server(load, batches, "--line-stops", "0"), through, alone)
    )
    return rows


def row_of(seed: int, name: str, seen: Seen, alone: Seen, at_engine: Seen) -> dict[str, Any]:
    """alone : online requests without lines, by the same way"""
    p50_s = float(np.percentile(seen.burst_ttft_s, 50.0))
    p99_s, alone_s = [float(np.percentile(one.burst_ttft_s, 99.0)) for one in (seen, alone)]
    row = {
        "seed": seed,
        "scenario": name,
        "burst_ttft_p50_s": p50_s,
        "burst_ttft_p99_s": p99_s,
        "burst_ttft_p99_ratio": p99_s / alone_s,
        "tokens_of_idle_slots": seen.tokens / idle_tokens(at_engine),
    }
    log(f"{row}")
    return row


def main() -> None:
    parser = parser_of(__doc__)
    add_results(parser)
    parser.add_argument("--seeds", type=numbers, default=(1, 2, 3), metavar="N,N", help="(default: 1,2,3)")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for seed in args.seeds:
        rows += asyncio.run(measured(seed))
        summary = {
            name: {
                field: statistics.median([row[field] for row in rows if row["scenario"] == name])
                for field in ("burst_ttft_p99_ratio", "tokens_of_idle_slots")
            }
            for name in dict.fromkeys([row["scenario"] for row in rows])
        }
        write_json(args.output, rounded({**day_and_machine(), "summary": summary, "rows": rows}))
