"""Chats among prompts of a whole context, on a simulated vLLM: sent straight to the engine, and held in front of it.

    python scripts/lab simulated.long --output docs/results/simulated-long.json

Two engines. The costs of the first are about those that were fitted to the real vLLM on a CPU, with a cost of positions
under which a prompt of 15,000 tokens takes five seconds, as it does there (docs/results/simulated.md). Those of the
second are of the size of a large GPU's, with prompts of 120,000 tokens, which take ten seconds. Poisson arrivals; 2 %
are long prompts. A pass has the same requests in each way. The first tenth is not counted. Times are those of chats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from kit.arguments import parser_of
from kit.results import rounded, write_json
from kit.rows import Row, medians, ratio, select
from kit.tables import cells, show

from llmserve.live.journal import Header
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import Action, Event, RequestEnded
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.cluster import SimulatedCluster
from llmserve.simulation.engine_model import Costs
from llmserve.simulation.kv_engine import KVEngine, KVLimits
from questions.simulated.fit import costs_of

ORDERS = {"direct": "fffs", "boost": "boost", "in order of arrival": "fffs"}
"""The order of the scheduler by way; `direct` is sent to the engine at once."""
STRAIGHT = 10**6  # slots
LONG_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Setting:
    """An engine with its load. chat_tokens : least and most of a chat's prompt.  answer : median and sigma of a chat's
    answer
    """

    costs: Costs
    limits: KVLimits
    rate_per_s: float
    long_tokens: int
    long_answer: int
    chat_tokens: tuple[int, int]
    answer: tuple[float, float]


SETTINGS = {
    "CPU": Setting(
        costs_of(0.0042, 0.00023, 5e-7, 0.0003, 3.4e-5, 4e-8, 8), KVLimits(65_536, 2_048, 8), 3.85, 15_000, 16, (8, 30),
        (67.0, 0.9),
    ),
    "GPU": Setting(
        costs_of(0.0065, 4.8e-5, 5.2e-8, 0.0, 2.6e-5, 1.05e-9, 256), KVLimits(430_000, 8_192, 256), 2.1, 120_000, 200,
        (20, 1_000), (250.0, 0.8),
    ),
}  # fmt: skip
COLUMNS = {
    "engine": ("engine", ""),
    "way": ("way", ""),
    "first token mean (s)": ("first_s_mean", ".2f"),
    "p50": ("first_s_p50", ".2f"),
    "p95": ("first_s_p95", ".2f"),
    "p99": ("first_s_p99", ".2f"),
    "latency mean (s)": ("latency_s_mean", ".2f"),
    "long prompts": ("long_first_s_mean", ".2f"),
    "tokens/s": ("tokens_per_s", ".1f"),
}
RATIOS = ("first_s_mean", "first_s_p99", "latency_s_mean", "long_first_s_mean", "tokens_per_s")


def passed(setting: Setting, way: str, count: int, seed: int) -> dict[str, float]:
    """The figures of a pass."""
    rng, limits = np.random.default_rng(seed), setting.limits
    arrivals_s = np.cumsum(rng.exponential(1 / setting.rate_per_s, count))
    long = rng.random(count) < LONG_SHARE
    median, sigma = setting.answer
    answers = np.clip(rng.lognormal(math.log(median), sigma, count), 1, 12 * median)
    lengths = np.where(long, setting.long_answer, answers).round().astype(int)
    tokens = np.where(long, setting.long_tokens, rng.integers(*setting.chat_tokens, count)).tolist()
    scheduler = Header(SchedulingConfig(order=ORDERS[way]).resolved(False)).scheduler()
    first_s = np.zeros(count)
    engine = KVEngine(
        EngineInfo("vLLM", STRAIGHT if way == "direct" else limits.sequences, False, 0),
        lengths.tolist(),
        setting.costs,
        limits,
        texts=[((number, size),) for number, size in enumerate(tokens)],
        streaming=range(count),
        wants=scheduler.wants_first_token,
        on_first_token=first_s.__setitem__,
    )
    ended_s = np.zeros(count)

    def note(now_s: float, event: Event, actions: list[Action]) -> None:
        if isinstance(event, RequestEnded):
            ended_s[event.request_id] = now_s

    known = 0.0 if way == "direct" else 1.0  # of prompts that nobody knows, none is held
    requests = [Request(number, prompt_tokens=known * size) for number, size in enumerate(tokens)]
    SimulatedCluster(scheduler, [engine], on_step=note).run(zip(arrivals_s.tolist(), requests, strict=True))
    waits_s, counted = first_s - arrivals_s, np.arange(count) >= math.ceil(0.1 * count)
    chats = waits_s[counted & ~long]
    return {
        "first_s_mean": float(chats.mean()),
        **{f"first_s_p{q}": float(np.percentile(chats, q)) for q in (50, 95, 99)},
        "latency_s_mean": float((ended_s - arrivals_s)[counted & ~long].mean()),
        "long_first_s_mean": float(waits_s[counted & long].mean()),
        "tokens_per_s": float(lengths.sum() / ended_s.max()),
    }


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--requests", type=int, default=3_000, help="of each pass (%(default)s)")
    add("--seeds", type=int, default=8, help="passes of each way (%(default)s)")
    add("--first-seed", type=int, default=101, help="(%(default)s)")
    add("--output", type=Path, help="write the results as JSON")
    args = parser.parse_args()
    passes = [
        Row({"engine": name, "way": way, "seed": seed}, passed(setting, way, args.requests, seed))
        for name, setting in SETTINGS.items()
        for seed in range(args.first_seed, args.first_seed + args.seeds)
        for way in ORDERS
    ]
    rows = medians(passes, "seed")
    show("chats among long prompts", list(COLUMNS), cells(rows, COLUMNS))
    ratios = []
    for name in SETTINGS:
        direct = select(passes, engine=name, way="direct")
        for way in ORDERS:
            if way != "direct":
                own = select(passes, engine=name, way=way)
                ratios.append({"engine": name, "way": way} | {of: ratio(own, direct, of, "seed") for of in RATIOS})
    lines = [[one["engine"], one["way"], *[f"{one[name]:.2f}" for name in RATIOS]] for one in ratios]
    show("to direct", ("engine", "way", *RATIOS), lines, left=("way",))
    setting = {name: getattr(args, name) for name in ("requests", "seeds", "first_seed")}
    records = {"rows": [row.record for row in rows], "passes": [row.record for row in passes]}
    write_json(args.output, rounded({**setting, "ratios": ratios, **records}))


if __name__ == "__main__":
    main()
