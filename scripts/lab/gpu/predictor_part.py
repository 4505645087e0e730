"""Times of the length predictor on the GPU and on the CPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from kit.figures import BLUE, new_figure, save

from gpu.machine import Machine
from gpu.plans import CampaignPlan
from gpu.steps import CampaignStep, Results

SETTING = ("prompts",)
VALUE = 5  # of the step
PART = "predictor"
TIMES = "times"


def steps(plan: CampaignPlan, machine: Machine, folder: Path | None) -> list[CampaignStep]:
    """folder : of an exported predictor; None: the demo's."""
    return [CampaignStep(PART, TIMES, VALUE, 40.0, partial(_measure, plan, machine, folder))]


async def _measure(plan: CampaignPlan, machine: Machine, folder: Path | None) -> Any:
    words = ["--predictor", str(folder)] if folder else []
    return await machine.alone("gpu.predictor_times", "--prompts", str(plan.prompts), *words)


def rows(results: Results) -> dict[str, dict[str, float]]:
    """Seconds of a prompt alone and prompts a second, by where the model runs."""
    times = results.steps.get(TIMES, {})
    return {where: value for where, value in times.items() if isinstance(value, dict)}


def draw(results: Results, path: Path, plan: CampaignPlan) -> None:
    figure, (panels,) = new_figure(1, 2, width=9, height=3.0)
    measured = rows(results)
    for axes, name, scale, label in zip(
        panels,
        ("alone_s", "prompts_per_s"),
        (1e3, 1.0),
        ("ms for one prompt", "prompts a second, many at once"),
        strict=True,
    ):
        axes.barh(list(measured), [scale * row[name] for row in measured.values()], color=BLUE)
        axes.set(xlabel=label)
    save(figure, path)
