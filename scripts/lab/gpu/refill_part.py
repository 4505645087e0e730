"""A burst before an engine whose slots refill: in order of arrival, and under `boost`, for short answers first."""

from __future__ import annotations

import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from kit.figures import BLUE, GREY, new_figure, save
from kit.servers import front_end

from gpu.bins_part import ORACLE, all_at_once, joules_per_token
from gpu.machine import Machine
from gpu.plans import CampaignPlan
from gpu.steps import CampaignStep, Results
from llmserve.commands.simulate import Scenario, prepare
from llmserve.settings.policies import SchedulingConfig

SETTING = ("shape", "burst", "lengths", "seed")
FIRST, REST = 3, 6  # values of the steps
PART = "refill"
ORDERS = ("fffs", "boost")
ARRIVAL = ORDERS[0]  # first formed, first served: every request forms a batch of its own as it arrives
PERCENTILES = (50, 95)


def steps(plan: CampaignPlan, machine: Machine) -> list[CampaignStep]:
    return [
        CampaignStep(
            PART,
            _name(order, slots),
            FIRST if slots == plan.slots[0] else REST,
            22.0,
            partial(_measure, plan, machine, slots, order),
            f"{plan.shape}, {slots} slots refill",
            plan.start_s[plan.shape] + 5.0,
        )
        for slots in plan.slots
        for order in ORDERS
    ]


def _name(order: str, slots: int) -> str:
    return f"{slots} slots: {order}"


async def _measure(plan: CampaignPlan, machine: Machine, slots: int, order: str) -> Any:
    """All requests at once, with their real lengths as predictions."""
    scenario = Scenario(requests=plan.burst, arrival_rate=math.inf, lengths=plan.lengths, seed=plan.seed)
    work = prepare(scenario, SchedulingConfig().resolved(barrier=False))
    tokens = [math.ceil(length) for length in work.trace.output_tokens]
    engine = await machine.refill_engine(plan.shape, slots, max(plan.tokens_max, *tokens))
    flags = ["--engine", engine.url, "--no-barrier", "--slots", str(slots), "--order", order]
    async with front_end(order, *flags, "--predictor", "none", "--memory-keys", "0") as server:
        began_s, before_j = time.perf_counter(), machine.joules()
        answered, latencies_s = await all_at_once(server.url, plan.shape, tokens, [float(count) for count in tokens])
        seconds, after_j = time.perf_counter() - began_s, machine.joules()
    return {
        **{"slots": slots, "order": order, "predictions": ORACLE, "requests": len(tokens)},
        **{"seconds": seconds, "tokens_per_s": sum(answered) / seconds},
        "joules_per_token": joules_per_token(before_j, after_j, sum(answered)),
        "latency_s_mean": float(np.mean(latencies_s)),
        **{f"latency_s_p{percent}": float(np.percentile(latencies_s, percent)) for percent in PERCENTILES},
        "latencies_s": sorted(latencies_s),
    }


# ---- what comes of it ---------------------------------------------------------------------------------------------


def rows(results: Results) -> list[dict[str, Any]]:
    """By slots and order."""
    return sorted(results.steps.values(), key=lambda row: (row["slots"], ORDERS.index(row["order"])))


def draw(results: Results, path: Path, plan: CampaignPlan) -> None:
    """For each number of slots: the share of requests that were answered within a time."""
    measured = rows(results)
    counts = sorted({row["slots"] for row in measured}) or [plan.slots[0]]
    figure, (panels,) = new_figure(1, len(counts), width=1.2 + 3.6 * len(counts), height=3.4)
    for axes, slots in zip(panels, counts, strict=True):
        for row in measured:
            if row["slots"] == slots:
                shares = np.arange(1, len(row["latencies_s"]) + 1) / len(row["latencies_s"])
                color = GREY if row["order"] == ARRIVAL else BLUE
                axes.plot(row["latencies_s"], shares, color=color, label=row["order"])
        axes.set(title=f"{slots} slots", xlabel="seconds after the burst", ylabel="share answered", ylim=(0, 1))
        axes.legend()
    save(figure, path)
