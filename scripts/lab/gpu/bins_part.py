"""Throughput of batches that run to their end: gains of bins and windows, measured and foretold by the simulator."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from kit import client
from kit.figures import BLUE, GREY, ORANGE, log_ticks, new_figure, save
from kit.rows import Row, select, values
from kit.servers import Server, front_end

from bins.edges import equal_mass_edges
from gpu import profile_part
from gpu.machine import Machine
from gpu.plans import CampaignPlan
from gpu.shapes import prompt_for
from gpu.steps import CampaignStep, Results
from llmserve.commands.simulate import Scenario, prepare, run
from llmserve.settings.policies import SchedulingConfig
from llmserve.wire.headers import PREDICTED_HEADER

SETTING = ("shape", "batches", "lengths", "sigma", "seed")
FIRST, REST = 2, 6  # values of the steps
PART = "bins"
ORACLE = "oracle"
WINDOW = 0  # in place of a number of bins
PREDICTED = "predicted"
PUBLISHED = {(ORACLE, 4): 1.45, (ORACLE, 32): 1.70, (PREDICTED, 4): 1.08}  # Multi-Bin, Fig. 7 and 11, batches of 8
WITHIN = 0.05  # of the forecast
BATCH_S = 0.8  # estimate of a batch of 32 to its end


def steps(plan: CampaignPlan, machine: Machine, costs: Results) -> list[CampaignStep]:
    """costs : of the part profile, from which the forecasts follow."""
    first_size, first_bins = plan.batch_sizes[0], plan.bins[0]
    return [
        CampaignStep(
            PART,
            _name(size, bins, predictions),
            FIRST if size == first_size and bins in (1, first_bins, WINDOW) else REST,
            3.0 + BATCH_S * plan.batches * (1.0 if bins == 1 else 0.55),
            partial(_measure, plan, machine, costs, size, bins, predictions),
            plan.shape,
            plan.start_s[plan.shape],
        )
        for size in plan.batch_sizes
        for predictions, arrangements in ((ORACLE, (1, *plan.bins, WINDOW)), (PREDICTED, (*plan.bins, WINDOW)))
        for bins in arrangements
    ]


def _name(size: int, bins: int, predictions: str) -> str:
    what = "a window" if bins == WINDOW else f"{bins} bins" if bins > 1 else "one bin"
    return f"batches of {size}: {what}, {predictions}"


def scenario_of(plan: CampaignPlan, size: int, predictions: str, profile: str | None) -> Scenario:
    """All requests at once, for one engine that runs batches to their end."""
    return Scenario(
        requests=plan.batches * size,
        arrival_rate=math.inf,
        lengths=plan.lengths,
        predictions=ORACLE if predictions == ORACLE else f"lognormal:{plan.sigma}",
        barrier=True,
        profile=profile,
        seed=plan.seed,
    )


def scheduling_of(size: int, bins: int) -> SchedulingConfig:
    if bins == WINDOW:
        return SchedulingConfig(batch_size=size, release="window").resolved(barrier=True)
    return SchedulingConfig(batch_size=size, bins=bins, release="greedy").resolved(barrier=True)


async def _measure(plan: CampaignPlan, machine: Machine, costs: Results, size: int, bins: int, predictions: str) -> Any:
    """The same requests, with the same predictions, before the engine and in the simulator."""
    profile = profile_part.profile(costs, plan.shape, machine.device.key)
    path = machine.scratch / "profile.json"
    profile.save(path)
    scenario, scheduling = scenario_of(plan, size, predictions, str(path)), scheduling_of(size, bins)
    work = prepare(scenario, scheduling)
    forecast = run(scenario, scheduling, work)
    tokens = [math.ceil(length) for length in work.trace.output_tokens]
    assert work.predictions is not None
    edges = equal_mass_edges(work.scores, bins) if bins > 1 else ()  # with which the simulated scheduler begins
    engine = await machine.engine(plan.shape, size, max(plan.tokens_max, *tokens))
    engine.need(size)
    async with _front(engine.url, size, bins, edges) as server:
        began_s, before_j = time.perf_counter(), machine.joules()
        answered, _ = await all_at_once(server.url, plan.shape, tokens, work.predictions.medians.tolist())
        seconds, after_j = time.perf_counter() - began_s, machine.joules()
    return {
        **{"batch_size": size, "bins": bins, "predictions": predictions, "requests": len(tokens)},
        **{"seconds": seconds, "tokens_per_s": sum(answered) / seconds},
        "joules_per_token": joules_per_token(before_j, after_j, sum(answered)),
        **{
            "forecast_tokens_per_s": forecast.output_tokens_per_s,
            "forecast_joules_per_token": forecast.energy_j_per_token,
        },
    }


def _front(url: str, size: int, bins: int, edges: Sequence[float]) -> AbstractAsyncContextManager[Server]:
    """`llmserve serve` without a predictor: the predictions come with the requests."""
    flags = ["--engine", url, "--barrier", "--batch-size", str(size), "--predictor", "none", "--memory-keys", "0"]
    if bins == WINDOW:
        flags += ["--release", "window"]
    else:
        flags += ["--release", "greedy", "--bins", str(bins)]
        flags += ["--edges", ",".join(f"{edge:.6g}" for edge in edges)] if edges else []
    return front_end(f"{bins} bins", *flags)


async def all_at_once(
    url: str, model: str, tokens: Sequence[int], predicted: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Output tokens of each answer, and its seconds after all were sent.

    Raises AssertionError when a request gets anything else, or another length.
    """
    began_s = time.perf_counter()

    async def one(session: aiohttp.ClientSession, length: int, forecast: float) -> tuple[int, float]:
        body, headers = client.body_of(prompt_for(length), model=model), {PREDICTED_HEADER: f"{max(1.0, forecast):.6g}"}
        reply = await client.ask(session, url, body, headers=headers)
        return reply.tokens, time.perf_counter() - began_s

    async with client.session_of() as session:
        answers = await asyncio.gather(*[one(session, *ask) for ask in zip(tokens, predicted, strict=True)])
    answered, latencies_s = [answer[0] for answer in answers], [answer[1] for answer in answers]
    assert answered == list(tokens), "the engine's answers have other lengths than they were told"
    return answered, latencies_s


def joules_per_token(before_j: float | None, after_j: float | None, tokens: int) -> float | None:
    return None if before_j is None or after_j is None else (after_j - before_j) / tokens


# ---- what comes of it ---------------------------------------------------------------------------------------------


def gains(results: Results) -> list[Row]:
    """Throughput over one bin's: measured, foretold, and the paper's where it says one."""
    case = ("batch_size", "bins", "predictions")
    rows = [Row.of_record(step, case) for step in results.steps.values()]
    return [
        Row(
            row.case,
            {
                "tokens_per_s": row["tokens_per_s"],
                "gain": row["tokens_per_s"] / base["tokens_per_s"],
                "forecast": row["forecast_tokens_per_s"] / base["forecast_tokens_per_s"],
                "joules_per_token": row["joules_per_token"],
                "forecast_joules_per_token": row["forecast_joules_per_token"],
                "published": PUBLISHED.get((row["predictions"], row["bins"])) if row["batch_size"] == 8 else None,
            },
        )
        for row in rows
        for base in select(rows, batch_size=row["batch_size"], bins=1)
    ]


def draw(results: Results, path: Path, plan: CampaignPlan) -> None:
    """For each size of batch: gains by number of bins, measured and foretold."""
    rows = gains(results)
    sizes = sorted({row["batch_size"] for row in rows}) or [plan.batch_sizes[0]]
    figure, (panels,) = new_figure(1, len(sizes), width=1.2 + 3.4 * len(sizes), height=3.6)
    for axes, size in zip(panels, sizes, strict=True):
        axes.axhline(1.0, color=GREY, lw=0.8)
        for predictions, color in ((ORACLE, BLUE), (PREDICTED, ORANGE)):
            of_bins = [row for row in select(rows, batch_size=size, predictions=predictions) if row["bins"] != WINDOW]
            of_bins.sort(key=lambda row: row["bins"])
            counts = values(of_bins, "bins")
            axes.plot(counts, values(of_bins, "gain"), "o-", ms=4, color=color, label=predictions)
            axes.plot(counts, values(of_bins, "forecast"), ":", color=color)
            for row in select(rows, batch_size=size, predictions=predictions, bins=WINDOW):
                axes.axhline(row["gain"], color=color, lw=1, ls="--")
        log_ticks(axes)
        axes.set(title=f"batches of {size}", xlabel="bins (dashed: a window)", ylabel="gain over one bin")
        axes.legend()
    panels[0].set_ylabel("gain over one bin (dotted: foretold)")
    save(figure, path)


def unforetold(rows: Sequence[Row]) -> list[Row]:
    """The rows whose measured gain is further from the forecast than WITHIN."""
    return [row for row in rows if abs(row["gain"] / row["forecast"] - 1) > WITHIN]
