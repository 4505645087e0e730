"""Jobs of lines beside bursts of online requests, in simulated time: this scheduler and its rivals, and jobs alone.

    python scripts/lab jobs --output docs/results/jobs.json --figure docs/results/jobs.png

bursts  the scenarios of llm-d-batch-gateway#491, scaled (batch_jobs/workload.py): online requests alone; lines sent to
        the engine directly; lines behind online requests in the queue, which are not stopped and leave no reserve; an
        AIMD feeder, as the gateway has it, that adds one to its limit for each line, and one that adds one for each
        round; this scheduler with --line-stops 0, whose lines leave a reserve; and this scheduler. Seeds are not those
        with which all this was designed (101 to 108).
alone   a job with nobody beside it, over the engine driven directly with as many lines in flight as it has slots; on an
        engine that runs each batch to its end, over batches of all lines sorted by forecast, where forecasts are the
        real lengths, and where they have the error of the other runs
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
from kit.arguments import add_results, numbers, parser_of
from kit.progress import log
from kit.results import day_and_machine, rounded, write_json

from llmserve.scheduling.reserve import Reserve
from questions.jobs.drawing import draw_figure
from questions.jobs.simulated import Aimd, Limit, Outcome, driven_directly, idle_tokens_per_s, under_scheduler
from questions.jobs.workload import SLOTS, Workload, costs, draw, slot_s

BARRIER_BATCH = 8


def without_reserve(workload: Workload) -> Outcome:
    with patch.object(Reserve, "items_most", lambda reserve, now_s, wanted, slots, item_s: slots):
        return under_scheduler(workload, settings={"line_stops": 0.0})


RIVALS: dict[str, Callable[[Workload], Outcome]] = {
    "lines sent directly": lambda workload: driven_directly(workload, Limit(SLOTS)),
    "lines behind online requests": without_reserve,
    "AIMD, one more a line": lambda workload: driven_directly(workload, Aimd(lambda limit: 1.0, 0.0)),
    "AIMD, one more a round": lambda workload: driven_directly(workload, Aimd(lambda limit: 1.0 / limit, slot_s())),
    "no line is stopped": lambda workload: under_scheduler(workload, settings={"line_stops": 0.0}),
    "this scheduler": under_scheduler,
}


def bursts(seed: int) -> list[dict[str, Any]]:
    workload = draw(seed)
    alone = under_scheduler(replace(workload, jobs=[]))
    idle = idle_tokens_per_s(workload, alone)
    rows = []
    for name, run in RIVALS.items():
        outcome = run(workload)
        ends_s = outcome.jobs_end_s(workload)
        row = {
            "seed": seed,
            "scenario": name,
            "burst_ttft_p99_ratio": ratio(outcome, alone, 99.0, burst=True),
            "burst_ttft_p50_ratio": ratio(outcome, alone, 50.0, burst=True),
            "idle_ttft_p99_ratio": ratio(outcome, alone, 99.0, burst=False),
            "burst_ttft_p99_s": percentile(outcome, 99.0, burst=True),
            "alone_burst_ttft_p99_s": percentile(alone, 99.0, burst=True),
            "tokens_of_idle_slots": outcome.line_tokens_per_s(workload) / idle,
            "lines_stopped_per_online_request": outcome.stops
            / sum([at_s < ends_s[-1] for at_s in outcome.arrived_s.values()]),
            "lost_share_of_lines_time": outcome.lost_s / ((outcome.held_s + outcome.lost_s) or 1.0),
            "in_order": ends_s == sorted(ends_s),
            "jobs_end_s": ends_s,
            "windows_s": [window_s for window_s, _ in workload.jobs],
            "late_lines": len(outcome.failed),
        }
        log(f"seed {seed}: {name}: {row['burst_ttft_p99_ratio']:.3f} {row['tokens_of_idle_slots']:.3f}")
        rows.append(row)
    return rows


def percentile(outcome: Outcome, share: float, *, burst: bool) -> float:
    return float(np.percentile(outcome.ttft_s(burst=burst), share))


def ratio(outcome: Outcome, alone: Outcome, share: float, *, burst: bool) -> float:
    return percentile(outcome, share, burst=burst) / percentile(alone, share, burst=burst)


def job_alone(seed: int) -> dict[str, Any]:
    """Throughput of one job over the best that the engine can do."""
    drawn = draw(seed, online=False, jobs=1)
    endless = [msgspec.structs.replace(line, deadline_s=None) for line in drawn.jobs[0][1]]
    workload = replace(drawn, jobs=[(math.inf, endless)])
    direct_s = driven_directly(workload, Limit(SLOTS)).jobs_end_s(workload)[0]
    ours_s = under_scheduler(workload).jobs_end_s(workload)[0]
    known = [
        msgspec.structs.replace(line, predicted_tokens=workload.lengths[line.id], quantiles=()) for line in endless
    ]
    return {
        "seed": seed,
        "refill": direct_s / ours_s,
        "barrier_known_lengths": barrier(replace(workload, jobs=[(math.inf, known)])),
        "barrier_by_forecasts": barrier(workload),
    }


def barrier(workload: Workload) -> float:
    """Throughput of a job on an engine that runs each batch to its end, over batches of lines sorted by forecast."""
    ours_s = under_scheduler(workload, barrier=True, settings={"batch_size": BARRIER_BATCH}).jobs_end_s(workload)[0]
    lines = sorted(workload.jobs[0][1], key=lambda line: -(line.predicted_tokens or 0.0))
    lengths = [workload.lengths[line.id] for line in lines]
    batches = [lengths[first : first + BARRIER_BATCH] for first in range(0, len(lengths), BARRIER_BATCH)]
    return sum([costs().times.batch_s(max(batch), len(batch)) for batch in batches]) / ours_s


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians over the seeds, by scenario."""
    fields = ("burst_ttft_p99_ratio", "burst_ttft_p50_ratio", "idle_ttft_p99_ratio", "tokens_of_idle_slots")
    fields += ("lines_stopped_per_online_request", "lost_share_of_lines_time")
    found = []
    for name in RIVALS:
        own = [row for row in rows if row["scenario"] == name]
        medians = {field: statistics.median([row[field] for row in own]) for field in fields}
        late = sum([row["late_lines"] for row in own])
        found.append({"scenario": name, **medians, "in_order": all(row["in_order"] for row in own), "late_lines": late})
    return found


def main() -> None:
    parser = parser_of(__doc__)
    add_results(parser, "--figure")
    parser.add_argument("--seeds", type=numbers, default=(4, 5, 6), metavar="N,N", help="(default: 4,5,6)")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    alone: list[dict[str, Any]] = []
    for seed in args.seeds:
        alone.append(job_alone(seed))
        log(f"seed {seed}: a job alone {alone[-1]}")
        rows += bursts(seed)
        result = rounded({**day_and_machine(), "summary": summary(rows), "alone": alone, "rows": rows})
        write_json(args.output, result)
    if args.figure is not None:
        draw_figure(result, args.figure)
