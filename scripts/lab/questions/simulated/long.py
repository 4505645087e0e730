"""Chats among prompts of a whole context, on a simulated vLLM: sent straight to the engine, and held in front of it.

    python scripts/lab simulated.long --output docs/results/simulated-long.json

The costs are about those that were fitted to the real vLLM (docs/results/simulated.md), with a cost of positions under
which a prompt of 15,000 tokens takes five seconds, as it does there. Poisson arrivals; 2 % are long prompts. A pass has
the same requests in each way. The first tenth is not counted. Times are those of the chats.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from kit.arguments import parser_of
from kit.results import rounded, write_json
from kit.rows import Row, medians, ratio, select
from kit.tables import cells, show

from llmserve.live.journal import Header
from llmserve.request import EngineInfo, Request
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.cluster import SimulatedCluster
from llmserve.simulation.engine_model import Costs
from llmserve.simulation.kv_engine import KVEngine, KVLimits

WAYS = {"direct": ("fffs", 10**6), "boost": ("boost", 8), "in order of arrival": ("fffs", 8)}
"""The order, and the slots that the scheduler knows, by way."""
SLOTS = 8
LONG_SHARE, LONG_TOKENS, LONG_ANSWER = 0.02, 15_000, 16
CHAT_TOKENS = (8, 30)
LIMITS = KVLimits(65_536, 2_048, SLOTS)
COSTS = Costs(
    [0.0042 + 0.00023 * count for count in range(SLOTS + 1)],
    [0.0] * (SLOTS + 1),
    0.0003,
    prefill_s_per_token=3.4e-5,
    metered=False,
    prefill_s_per_context_token=4e-8,
    step_s_per_context_token=5e-7,
)
COLUMNS = {
    "way": ("way", ""),
    "first token mean (s)": ("first_s_mean", ".2f"),
    "p50": ("first_s_p50", ".2f"),
    "p95": ("first_s_p95", ".2f"),
    "p99": ("first_s_p99", ".2f"),
    "long prompts": ("long_first_s_mean", ".2f"),
    "seconds in all": ("ended_s", ".0f"),
}


def passed(way: str, count: int, rate_per_s: float, seed: int) -> dict[str, float]:
    """The figures of a pass."""
    rng = np.random.default_rng(seed)
    arrivals_s, long = np.cumsum(rng.exponential(1 / rate_per_s, count)), rng.random(count) < LONG_SHARE
    answers = np.where(long, LONG_ANSWER, np.clip(rng.lognormal(4.2, 0.9, count), 1, 900)).round().astype(int)
    tokens = np.where(long, LONG_TOKENS, rng.integers(*CHAT_TOKENS, count)).tolist()
    order, slots = WAYS[way]
    scheduler = Header(SchedulingConfig(order=order).resolved(False)).scheduler()
    first_s = np.zeros(count)
    engine = KVEngine(
        EngineInfo("vLLM", slots, False, 0),
        answers.tolist(),
        COSTS,
        LIMITS,
        texts=[((number, size),) for number, size in enumerate(tokens)],
        streaming=range(count),
        wants=scheduler.wants_first_token,
        on_first_token=first_s.__setitem__,
    )
    requests = [Request(number, prompt_tokens=float(size)) for number, size in enumerate(tokens)]
    SimulatedCluster(scheduler, [engine]).run(zip(arrivals_s.tolist(), requests, strict=True))
    waits_s, counted = first_s - arrivals_s, np.arange(count) >= math.ceil(0.1 * count)
    chats = waits_s[counted & ~long]
    return {
        "first_s_mean": float(chats.mean()),
        **{f"first_s_p{q}": float(np.percentile(chats, q)) for q in (50, 95, 99)},
        "long_first_s_mean": float(waits_s[counted & long].mean()),
        "ended_s": float(first_s.max()),
    }


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--requests", type=int, default=3_000, help="of each pass (%(default)s)")
    add("--rate", type=float, default=3.85, help="requests a second (%(default)s)")
    add("--seeds", type=int, default=8, help="passes of each way (%(default)s)")
    add("--output", type=Path, help="write the results as JSON")
    args = parser.parse_args()
    passes = [
        Row({"way": way, "seed": seed}, passed(way, args.requests, args.rate, seed))
        for seed in range(1, args.seeds + 1)
        for way in WAYS
    ]
    rows = medians(passes, "seed")
    show("chats among long prompts", list(COLUMNS), cells(rows, COLUMNS))
    direct = select(passes, way="direct")
    names = ("first_s_mean", "first_s_p99", "long_first_s_mean")
    ratios = {
        way: {name: ratio(select(passes, way=way), direct, name, "seed") for name in names}
        for way in WAYS
        if way != "direct"
    }
    lines = [[way, *[f"{found[name]:.2f}" for name in names]] for way, found in ratios.items()]
    show("to direct", ("way", *names), lines)
    setting = {name: getattr(args, name) for name in ("requests", "rate", "seeds")}
    records = {"rows": [row.record for row in rows], "passes": [row.record for row in passes]}
    write_json(args.output, rounded({**setting, "ratios": ratios, **records}))


if __name__ == "__main__":
    main()
