"""Joules for each token at low load, by the GPU's counter: releases that wait for a larger batch beside greedy."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from kit import client
from kit.figures import BLUE, GREEN, GREY, new_figure, save
from kit.servers import Server, front_end

from gpu import profile_part
from gpu.machine import Machine
from gpu.plans import CampaignPlan
from gpu.shapes import prompt_for
from gpu.steps import CampaignStep, NotYet, Results
from llmserve.commands.simulate import Scenario, prepare, run
from llmserve.engines.power import GpuEnergy
from llmserve.live import journal
from llmserve.scheduling.messages import DispatchSolved
from llmserve.settings.dispatch import DispatchConfig
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.workload import Trace
from llmserve.wire.headers import PREDICTED_HEADER

SETTING = ("shape", "energy_batch", "energy_s", "lengths", "loads", "seed")
FIRST, REST = 2.5, 4  # values of the steps: at the first load, and at the others
PART = "energy"
RELEASES = ("greedy", "full", "table")
PERCENTILE, STRETCH = 95.0, 2.0  # the target of table: this percentile of the latency, so many times greedy's
WITHIN = 0.05  # of the forecast's saving
REQUESTS_LEAST = 10
DRAIN_S = 120.0


def steps(plan: CampaignPlan, machine: Machine, costs: Results, results: Results) -> list[CampaignStep]:
    """greedy comes first at each load: the latency target of table follows from what it took."""
    return [
        CampaignStep(
            PART,
            _name(release, load),
            FIRST if load == plan.loads[0] else REST,
            plan.energy_s + 7.0,
            partial(_measure, plan, machine, costs, results, release, load),
            plan.shape,
            plan.start_s[plan.shape],
        )
        for load in plan.loads
        for release in RELEASES
    ]


def _name(release: str, load: float) -> str:
    return f"{release} at load {load:g}"


async def _measure(
    plan: CampaignPlan, machine: Machine, costs: Results, results: Results, release: str, load: float
) -> Any:
    if machine.energy is None:
        raise LookupError("NVML counts no joules on this machine")
    profile = profile_part.profile(costs, plan.shape, machine.device.key)
    path = machine.scratch / "profile.json"
    profile.save(path)
    target_s = None
    if release == "table":
        greedy = results.steps.get(_name("greedy", load))
        if greedy is None:
            raise NotYet("the target follows from greedy's latency, which is not measured")
        target_s = STRETCH * greedy["latency_s_p95"]
    scheduling = SchedulingConfig(batch_size=plan.energy_batch, bins=1, release=release).resolved(barrier=True)
    scenario = _scenario(plan, load, path, scheduling)
    dispatch = DispatchConfig(latency_target_s=target_s, latency_target_percentile=PERCENTILE if target_s else None)
    work = prepare(scenario, scheduling)
    forecast = run(scenario, scheduling, work, dispatch=dispatch)
    engine = await machine.engine(plan.shape, plan.energy_batch, max(plan.tokens_max, *work.trace.output_tokens))
    engine.need(plan.energy_batch)
    flags = ["--engine", engine.url, "--barrier", "--batch-size", str(plan.energy_batch), "--bins", "1"]
    flags += ["--release", release, "--profile", str(path)]
    flags += ["--predictor", "none", "--memory-keys", "0", "--drain-s", str(DRAIN_S)]
    if target_s is not None:
        flags += ["--latency-target-s", f"{target_s:.6g}", "--latency-target-percentile", f"{PERCENTILE:g}"]
    journal_path = machine.scratch / f"{release}-{load:g}.jsonl"
    journal_path.unlink(missing_ok=True)
    async with front_end(f"{release} at load {load:g}", *flags, "--journal", str(journal_path)) as server:
        measured = await _serve(server, machine.energy, plan, work.trace)
    plans = [step.event.plan for step in journal.read(journal_path)[1] if isinstance(step.event, DispatchSolved)]
    known = [plan for plan in plans if plan.power_w_mean is not None]
    return {
        **{"release": release, "load": load, "requests": len(work.trace), "latency_target_s": target_s, **measured},
        **{"forecast_joules_per_token": forecast.energy_j_per_token, "forecast_latency_s_p95": forecast.latency_s_p95},
        **{"plan_power_w": known[-1].power_w_mean if known else None, "plans": len(plans)},
    }


def _scenario(plan: CampaignPlan, load: float, profile: Path, scheduling: SchedulingConfig) -> Scenario:
    """As many requests as arrive in energy_s: how many that are depends on the profile."""
    scenario = Scenario(requests=1, load=load, lengths=plan.lengths, barrier=True, profile=str(profile), seed=plan.seed)
    rate_per_s = prepare(scenario, scheduling).arrival_rate_per_s
    return msgspec.structs.replace(scenario, requests=max(REQUESTS_LEAST, round(plan.energy_s * rate_per_s)))


async def _serve(server: Server, energy: GpuEnergy, plan: CampaignPlan, trace: Trace) -> dict[str, float]:
    """Every request at its time; then SIGTERM, so that what still waits in a bin is released.

    Joules are the GPU's from the first arrival to the last end, idle and busy.
    """
    at_s = [float(arrival_s - trace.arrivals_s[0]) for arrival_s in trace.arrivals_s]
    gap_s = at_s[-1] / len(at_s)
    tokens = [math.ceil(length) for length in trace.output_tokens]

    async with client.session_of() as session:

        async def send(index: int, due_s: float) -> tuple[float, float]:
            if index == len(tokens):
                server.process.send_signal(signal.SIGTERM)  # its supervisor passes it on
                return 0.0, 0.0
            body = client.body_of(prompt_for(tokens[index]), model=plan.shape)
            reply = await client.ask(session, server.url, body, headers={PREDICTED_HEADER: str(tokens[index])})
            assert reply.tokens == tokens[index], "an answer has another length than it was told"
            ended_s = time.perf_counter()
            return ended_s - due_s, energy.energy_j(time.monotonic())

        before_j, began_s = energy.energy_j(time.monotonic()), time.perf_counter()
        answered = (await client.at_their_times([*at_s, at_s[-1] + gap_s], send))[:-1]
    seconds = time.perf_counter() - began_s
    latencies_s, joules = np.array(answered).T
    drawn_j = float(joules.max()) - before_j
    return {
        **{"seconds": seconds, "joules": drawn_j, "joules_per_token": drawn_j / sum(tokens)},
        **{"latency_s_mean": float(latencies_s.mean()), "latency_s_p95": float(np.percentile(latencies_s, PERCENTILE))},
    }


# ---- what comes of it ---------------------------------------------------------------------------------------------


def savings(results: Results) -> list[dict[str, Any]]:
    """Joules a token of each release, and what it saves of greedy's: measured and foretold."""
    rows = list(results.steps.values())
    greedy = {row["load"]: row for row in rows if row["release"] == "greedy"}
    return [
        {
            **row,
            "saved": 1 - row["joules_per_token"] / base["joules_per_token"],
            "forecast_saved": 1 - row["forecast_joules_per_token"] / base["forecast_joules_per_token"],
        }
        for row in rows
        if (base := greedy.get(row["load"])) is not None
    ]


def draw(results: Results, path: Path, plan: CampaignPlan) -> None:
    """For each load: joules a token against the latency's 95th percentile, measured and foretold."""
    loads = sorted({row["load"] for row in results.steps.values()}) or plan.loads
    figure, (panels,) = new_figure(1, len(loads), width=1.2 + 3.6 * len(loads), height=3.6)
    for axes, load in zip(panels, loads, strict=True):
        for release, color in zip(RELEASES, (GREY, BLUE, GREEN), strict=True):
            row = results.steps.get(_name(release, load))
            if row is not None:
                axes.plot(row["latency_s_p95"], row["joules_per_token"], "o", color=color, label=release)
                foretold = row["forecast_latency_s_p95"], row["forecast_joules_per_token"]
                axes.plot(*foretold, "o", mfc="none", color=color)
        axes.set(title=f"load {load:g}", xlabel="95th percentile of latency (s)", ylabel="J a token (hollow: foretold)")
        axes.set(xlim=0, ylim=0)
        axes.legend()
    save(figure, path)


def unforetold(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those whose saving is further from the forecast than WITHIN."""
    return [row for row in rows if abs(row["saved"] - row["forecast_saved"]) > WITHIN]
