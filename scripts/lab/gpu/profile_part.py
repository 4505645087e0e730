"""Costs of steps and batches in seconds and joules, and the profile that is fitted to them."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from kit.figures import BLUE, GREEN, GREY, ORANGE, log_ticks, new_figure, save
from kit.results import straight_line

from bins.fitting import Observation
from bins.profile import Profile
from gpu.machine import Machine, words_of
from gpu.plans import CampaignPlan
from gpu.steps import CampaignStep, NotYet, Results
from llmserve.commands.profile import profile_of
from llmserve.engines import measuring
from llmserve.engines.measuring import MeasuringPlan
from llmserve.http.client import HttpClient

SETTING = ("contexts", "tokens", "rounds", "batch_s", "idle_s", "answers", "tokens_max", "seed")
LINE_BATCHES = (1, 8)  # sizes of the batches of Fig. 5
SETTLING_S = 2.0  # until a GPU that has worked draws what it draws idle
FIRST, REST, LAST = 1, 6, 7  # values of the steps
PART = "profile"
STEPS, BATCHES, LINE = "steps", "batches", "time against the longest answer"


def steps(plan: CampaignPlan, machine: Machine) -> list[CampaignStep]:
    """Of each model its batches and its steps. The batches of the last model come last, because the next part uses the
    same engine. Those of another model come before its steps: an engine's start finds out what runs on this machine.
    """
    values = [FIRST] + [REST] * (len(plan.rows) - 2) + [LAST]
    made = []
    for rows, value in zip(plan.rows, values, strict=True):
        for shape in plan.shapes:
            both = [_batched(plan, machine, shape, rows, value), _timed(plan, machine, shape, rows, value)]
            both = both[::-1] if shape == plan.shapes[-1] else both
            made += [step for step in both if value != REST or BATCHES not in step.name]  # no more for the profile
    return [*made, *[_lined(plan, machine, shape) for shape in plan.shapes]]


def _timed(plan: CampaignPlan, machine: Machine, shape: str, rows: tuple[int, ...], value: int) -> CampaignStep:
    about_s = plan.start_s[shape] + 1.0 * len(rows) * len(plan.contexts)
    return CampaignStep(
        PART, name_of(shape, STEPS, rows), value, about_s, partial(_step_times, plan, machine, shape, rows)
    )


def _batched(plan: CampaignPlan, machine: Machine, shape: str, rows: tuple[int, ...], value: int) -> CampaignStep:
    lasts_s = plan.batch_s * (1.3 if shape == plan.shape else 1.8)  # a batch of the larger model lasts longer
    about_s = SETTLING_S + plan.idle_s + 2 * plan.rounds * len(rows) * lasts_s
    measure = partial(_batches, plan, machine, shape, rows)
    return CampaignStep(PART, name_of(shape, BATCHES, rows), value, about_s, measure, shape, plan.start_s[shape])


def _lined(plan: CampaignPlan, machine: Machine, shape: str) -> CampaignStep:
    about_s = 0.5 * len(LINE_BATCHES) * plan.answers * (1.0 if shape == plan.shape else 4.0)
    measure = partial(_line, plan, machine, shape)
    return CampaignStep(PART, f"{shape}: {LINE}", REST, about_s, measure, shape, plan.start_s[shape])


def name_of(shape: str, what: str, rows: Sequence[int]) -> str:
    return f"{shape}: {what} of {', '.join(map(str, rows))}"


def profile_name(device: str, shape: str) -> str:
    """device : its short name"""
    return f"{device}-{shape}"


async def _step_times(plan: CampaignPlan, machine: Machine, shape: str, rows: tuple[int, ...]) -> Any:
    words = ("--shape", shape, "--rows", words_of(rows), "--contexts", words_of(plan.contexts))
    measured = await machine.alone("gpu.step_times", *words, levels=True)
    for note in measured.pop("notes"):
        machine.note(note)
    return measured


async def _batches(plan: CampaignPlan, machine: Machine, shape: str, rows: tuple[int, ...]) -> Any:
    """As `llmserve profile` measures an engine, with each batch repeated for batch_s seconds."""
    engine = await machine.engine(shape, max(rows), max(plan.tokens, plan.tokens_max))
    sizes = [size for size in rows if size <= engine.batch_size_max]
    if not sizes:
        engine.need(max(rows))
    batches = MeasuringPlan(sizes, plan.tokens, plan.rounds, plan.seed)
    async with _client(engine.url, shape, plan) as client:
        idle_w = None
        if machine.energy is not None:
            await asyncio.sleep(min(SETTLING_S, plan.idle_s))
            idle_w = await measuring.idle_power_w(machine.energy, plan.idle_s)
        await client.learn(min(batches.lengths))
        await client.batch(max(sizes), plan.tokens)  # warms up
        measured = [await _observe(client, machine, size, tokens, plan.batch_s) for size, tokens in batches.batches()]
    return {"idle_w": idle_w, "batches": [asdict(batch) for batch in measured]}


@asynccontextmanager
async def _client(url: str, shape: str, plan: CampaignPlan) -> AsyncIterator[measuring.Client]:
    most_s = measuring.ANSWER_S_MAX
    async with HttpClient(url, connect_s=measuring.CONNECT_S, idle_s=most_s, answer_s=most_s) as http:
        yield measuring.Client(http, shape, plan.seed)


async def _observe(client: measuring.Client, machine: Machine, size: int, tokens: int, least_s: float) -> Observation:
    """The mean of equal batches, one after the other for at least so many seconds."""
    began_s, before_j = time.monotonic(), machine.joules()
    count, longest = 0, 0.0
    while not count or time.monotonic() - began_s < least_s:
        longest = await client.batch(size, tokens)
        count += 1
    seconds, after_j = time.monotonic() - began_s, machine.joules()
    drawn_j = 0.0 if before_j is None or after_j is None else after_j - before_j
    return Observation(size, longest, seconds / count, drawn_j / count if drawn_j > 0 else None)


async def _line(plan: CampaignPlan, machine: Machine, shape: str) -> Any:
    """Fig. 5: batches of answers of one length each, in an order drawn anew."""
    engine = await machine.engine(shape, max(LINE_BATCHES), max(plan.tokens, plan.tokens_max))
    lengths = np.linspace(plan.tokens_max / plan.answers, plan.tokens_max, plan.answers).astype(int).tolist()
    rng = random.Random(plan.seed)
    async with _client(engine.url, shape, plan) as client:
        await client.learn(min(lengths))
        for size in LINE_BATCHES:
            await client.batch(size, min(lengths))  # warms up
        batches = [
            await measuring.observe(client, machine.energy, size, length)
            for size in LINE_BATCHES
            for length in rng.sample(lengths, len(lengths))
        ]
    return [{"size": size, **_straight(batches, size)} for size in LINE_BATCHES]


def _straight(batches: Sequence[Observation], size: int) -> dict[str, Any]:
    points = sorted((batch.tokens, batch.seconds) for batch in batches if batch.size == size)
    token_s, besides_s, share = straight_line(*np.array(points).T)
    return {"points": points, "token_s": token_s, "besides_s": besides_s, "r_squared": share}


# ---- what comes of it ---------------------------------------------------------------------------------------------


def batches_of(results: Results, shape: str) -> dict[str, Any] | None:
    """The batches that the profile is fitted to, of several sizes; None if they were not measured."""
    first = name_of(shape, BATCHES, ())
    measured = (value for name, value in results.steps.items() if name.startswith(first))
    return next((value for value in measured if len({batch["size"] for batch in value["batches"]}) > 1), None)


def step_times(results: Results, shape: str) -> list[dict[str, Any]]:
    """All timed steps of the model, by rows and context."""
    first = name_of(shape, STEPS, ())
    timed = [step for name, value in results.steps.items() if name.startswith(first) for step in value["steps"]]
    return sorted(timed, key=lambda step: (step["rows"], step["context"]))


def prefill_times(results: Results, shape: str) -> list[dict[str, Any]]:
    first = name_of(shape, STEPS, ())
    timed = [step for name, value in results.steps.items() if name.startswith(first) for step in value["prefills"]]
    return sorted(timed, key=lambda prefill: prefill["rows"])


def copied(results: Results, shape: str) -> float | None:
    """Bytes a second of a copy, at which the floors of the model's steps were computed."""
    first = name_of(shape, STEPS, ())
    return next((value["copy_bytes_per_s"] for name, value in results.steps.items() if name.startswith(first)), None)


def profile(results: Results, shape: str, device: str) -> Profile:
    """The profile of one model. device : its short name.  Raises NotYet when its batches were not measured."""
    measured = batches_of(results, shape)
    if measured is None:
        raise NotYet(f"the batches of {shape} are not measured, from which the profile follows")
    batches = [Observation(**batch) for batch in measured["batches"]]
    origin = (
        f"Measured by scripts/lab/gpu/campaign.py, {results.runs[0]['date']}: {shape} of random weights on "
        f"{results.device}, {len(batches)} batches of {min(batch.size for batch in batches)} to "
        f"{max(batch.size for batch in batches)} sequences, prompts of a few tokens"
    )
    return profile_of(batches, name=profile_name(device, shape), origin=origin, idle_w=measured["idle_w"])


def draw(results: Results, path: Path, plan: CampaignPlan) -> None:
    """For each model: step times beside the floor; watts and tokens/s by size; time against the longest answer."""
    figure, axes = new_figure(len(plan.shapes), 4, width=15, height=3.4 * len(plan.shapes))
    for row, shape in zip(axes, plan.shapes, strict=True):
        if timed := step_times(results, shape):
            _draw_steps(row[0], timed, shape)
        if (measured := batches_of(results, shape)) is not None:
            _draw_power(row[1], measured)
            _draw_rates(row[2], rates(measured))
        for color, line in zip((BLUE, ORANGE), results.steps.get(f"{shape}: {LINE}", ()), strict=False):
            tokens, seconds = np.array(line["points"]).T
            label = f"batches of {line['size']}, R² {line['r_squared']:.4f}"
            row[3].plot(tokens, seconds, "o", ms=4, color=color, label=label)
            row[3].plot(tokens, line["besides_s"] + line["token_s"] * tokens, color=color, lw=1)
            row[3].set(xlabel="output tokens of the longest answer", ylabel="seconds of a batch")
            row[3].legend()
        for panel in row:
            panel.set_visible(panel.has_data())
    save(figure, path)


def _draw_steps(axes: Any, timed: Sequence[dict[str, float]], shape: str) -> None:
    for context, color in zip(sorted({step["context"] for step in timed}), (BLUE, ORANGE, GREEN, GREY), strict=False):
        points = sorted((step["rows"], step["step_s"], step["floor_s"]) for step in timed if step["context"] == context)
        rows, step_s, floor_s = np.array(points).T
        axes.plot(rows, 1e3 * step_s, "o-", ms=4, color=color, label=f"context {context:g}")
        axes.plot(rows, 1e3 * floor_s, ":", color=color)
    log_ticks(axes)
    axes.set(title=shape, xlabel="sequences in a step", ylabel="ms a step (dotted: the floor)", ylim=0)
    axes.legend()


def rates(measured: dict[str, Any]) -> dict[int, float]:
    """Output tokens a second by the size of the batch, of the longer batches: Multi-Bin's Fig. 1 (a)."""
    longest = max(batch["tokens"] for batch in measured["batches"])
    full: dict[int, list[float]] = defaultdict(list)
    for batch in measured["batches"]:
        if batch["tokens"] == longest:
            full[batch["size"]].append(batch["size"] * batch["tokens"] / batch["seconds"])
    return {size: statistics.median(full[size]) for size in sorted(full)}


def joules_per_token(measured: dict[str, Any]) -> dict[int, float]:
    """By the size of the batch, of the longer batches whose joules were measured."""
    longest = max(batch["tokens"] for batch in measured["batches"])
    drawn: dict[int, list[float]] = defaultdict(list)
    for batch in measured["batches"]:
        if batch["tokens"] == longest and batch["joules"]:
            drawn[batch["size"]].append(batch["joules"] / (batch["size"] * batch["tokens"]))
    return {size: statistics.median(drawn[size]) for size in sorted(drawn)}


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
