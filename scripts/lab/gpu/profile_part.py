"""Costs of steps and batches in seconds and joules, and the profile that is fitted to them."""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from bench.figures import BLUE, GREEN, GREY, ORANGE, log_ticks, new_figure, save
from bench.results import straight_line

from bins.fitting import Observation
from bins.profile import Profile
from gpu.machine import Machine, words_of
from gpu.plans import CampaignPlan
from gpu.steps import CampaignStep, Results
from llmserve.engines import measuring
from llmserve.profile import profile_of

SETTING = ("shapes", "rows", "contexts", "tokens", "rounds", "idle_s", "answers", "tokens_max", "seed")
LINE_BATCHES = (1, 8)  # sizes of the batches of Fig. 5
STEPS, BATCHES, LINE = "steps", "batches", "time against the longest answer"


def profile_name(shape: str) -> str:
    return f"h200-{shape}"


def steps(plan: CampaignPlan, machine: Machine) -> list[CampaignStep]:
    return [
        step
        for shape in plan.shapes
        for step in (
            CampaignStep(f"{shape}: {STEPS}", 150, partial(_step_times, plan, machine, shape)),
            CampaignStep(f"{shape}: {BATCHES}", 120, partial(_batches, plan, machine, shape)),
            CampaignStep(f"{shape}: {LINE}", 90, partial(_line, plan, machine, shape)),
        )
    ]


async def _step_times(plan: CampaignPlan, machine: Machine, shape: str) -> Any:
    words = ("--shape", shape, "--rows", words_of(plan.rows), "--contexts", words_of(plan.contexts))
    return await machine.alone("gpu.step_times", *words, timeout_s=300)


async def _batches(plan: CampaignPlan, machine: Machine, shape: str) -> Any:
    """As `llmserve profile` measures an engine, with the joules of the GPU's counter."""
    url = await machine.engine(shape, max(*plan.rows, *LINE_BATCHES), max(plan.tokens, plan.tokens_max))
    measured = await measuring.measure(
        url,
        shape,
        measuring.MeasuringPlan(plan.rows, plan.tokens, plan.rounds, plan.seed),
        machine.energy,
        idle_s=plan.idle_s,
        on_batch=lambda *_: None,
    )
    return {"idle_w": measured.idle_w, "batches": [asdict(batch) for batch in measured.batches]}


async def _line(plan: CampaignPlan, machine: Machine, shape: str) -> Any:
    """Fig. 5: batches of answers of one length each, in an order drawn anew."""
    url = await machine.engine(shape, max(*plan.rows, *LINE_BATCHES), max(plan.tokens, plan.tokens_max))
    lengths = np.linspace(plan.tokens_max / plan.answers, plan.tokens_max, plan.answers).astype(int).tolist()
    rng = random.Random(plan.seed)
    timeout = aiohttp.ClientTimeout(total=measuring.ANSWER_S_MAX)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        client = measuring.Client(session, url, shape, plan.seed)
        await client.learn(min(lengths))
        batches = []
        for size in LINE_BATCHES:
            for length in rng.sample(lengths, len(lengths)):
                batches.append(await measuring.observe(client, machine.energy, size, length))
    return [{"size": size, **_straight(batches, size)} for size in LINE_BATCHES]


def _straight(batches: Sequence[Observation], size: int) -> dict[str, Any]:
    points = sorted((batch.tokens, batch.seconds) for batch in batches if batch.size == size)
    token_s, besides_s, share = straight_line(*np.array(points).T)
    return {"points": points, "token_s": token_s, "besides_s": besides_s, "r_squared": share}


# ---- what comes of it ---------------------------------------------------------------------------------------------


def profile(results: Results, shape: str) -> Profile:
    """The profile of one model. Raises LookupError when its batches were not measured."""
    name = f"{shape}: {BATCHES}"
    if name not in results.steps:
        raise LookupError(f"{results.path} has no {name!r}: run the part profile first")
    measured = results.steps[name]
    batches = [Observation(**batch) for batch in measured["batches"]]
    run = results.runs[-1]
    origin = (
        f"Measured by scripts/lab/gpu/campaign.py, {run['date']}: {shape} of random weights on {run['device']}, "
        f"{len(batches)} batches of {min(batch.size for batch in batches)} to {max(batch.size for batch in batches)} "
        "sequences, prompts of a few tokens"
    )
    return profile_of(batches, name=profile_name(shape), origin=origin, idle_w=measured["idle_w"])


def draw(results: Results, path: Path, plan: CampaignPlan) -> None:
    """For each model: step times beside the floor; watts and tokens/s by size; time against the longest answer."""
    figure, axes = new_figure(len(plan.shapes), 4, width=15, height=3.4 * len(plan.shapes))
    for row, shape in zip(axes, plan.shapes, strict=True):
        if (timed := results.steps.get(f"{shape}: {STEPS}")) is not None:
            _draw_steps(row[0], [step for step in timed["steps"] if step["fused"]], shape)
        if (measured := results.steps.get(f"{shape}: {BATCHES}")) is not None:
            _draw_power(row[1], measured)
            _draw_rates(row[2], rates(measured))
        for color, line in zip((BLUE, ORANGE), results.steps.get(f"{shape}: {LINE}", ()), strict=False):
            tokens, seconds = np.array(line["points"]).T
            label = f"batches of {line['size']}, R² {line['r_squared']:.4f}"
            row[3].plot(tokens, seconds, "o", ms=4, color=color, label=label)
            row[3].plot(tokens, line["besides_s"] + line["token_s"] * tokens, color=color, lw=1)
            row[3].set(xlabel="output tokens of the longest answer", ylabel="seconds of a batch")
            row[3].legend()
    save(figure, path)


def _draw_steps(axes: Any, timed: Sequence[dict[str, float]], shape: str) -> None:
    for context, color in zip(sorted({step["context"] for step in timed}), (BLUE, ORANGE, GREEN, GREY), strict=False):
        points = sorted((step["rows"], step["step_s"], step["floor_s"]) for step in timed if step["context"] == context)
        rows, step_s, floor_s = np.array(points).T
        axes.plot(rows, 1e3 * step_s, "o-", ms=4, color=color, label=f"context {context:g}")
        axes.plot(rows, 1e3 * floor_s, ":", color=color)
    log_ticks(axes)
    axes.set(title=shape, xlabel="sequences in a step", ylabel="ms a step (dotted: memory's floor)", ylim=0)
    axes.legend()


def rates(measured: dict[str, Any]) -> dict[int, float]:
    """Output tokens a second by the size of the batch, of the longer batches: Multi-Bin's Fig. 1 (a)."""
    longest = max(batch["tokens"] for batch in measured["batches"])
    full: dict[int, list[float]] = defaultdict(list)
    for batch in measured["batches"]:
        if batch["tokens"] == longest:
            full[batch["size"]].append(batch["size"] * batch["tokens"] / batch["seconds"])
    return {size: statistics.median(full[size]) for size in sorted(full)}


def _draw_rates(axes: Any, tokens_per_s: dict[int, float]) -> None:
    axes.plot(list(tokens_per_s), list(tokens_per_s.values()), "o-", ms=4, color=BLUE)
    log_ticks(axes)
    axes.set(xlabel="sequences in a batch", ylabel="output tokens a second", ylim=0)


def _draw_power(axes: Any, measured: dict[str, Any]) -> None:
    batches = [batch for batch in measured["batches"] if batch["joules"]]
    axes.plot(
        [batch["size"] for batch in batches], [batch["joules"] / batch["seconds"] for batch in batches], "o", ms=4
    )
    if measured["idle_w"] is not None:
        axes.axhline(measured["idle_w"], color=GREY, ls="--", label="idle")
    log_ticks(axes)
    axes.set(xlabel="sequences in a batch", ylabel="watts", ylim=0)
    axes.legend()
