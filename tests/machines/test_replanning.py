"""Plans by the rates of all gateways together."""

from __future__ import annotations

import asyncio

import pytest

from llmserve import planning as herd
from llmserve.machines.replanning import GroupRates, Replanning
from llmserve.planning import Instance, Model, Plan, Stream

EVERY_S = 10.0


@pytest.fixture
def instance() -> Instance:
    return Instance(
        streams=(Stream("all", "m", rate_per_s=90.0, slo_s=1.0), Stream("all", "n", rate_per_s=20.0, slo_s=1.0)),
        models=tuple([Model(name, 30.0, 20.0, 0.0, batch_size_max=1) for name in ("m", "n")]),
        gpus=4,
        gpu_memory_gb=40.0,
        group_gpus_max=3,
        groups=2,
    )


def gpus(plan: Plan) -> dict[tuple[str, ...], int]:
    return {group.models: group.gpus for group in plan.groups}


async def planned(replanning: Replanning, first: Plan, rates: dict[str, float]) -> Plan | None:
    """The plan after a window in which two gateways had half of these rates each."""
    for _ in range(2):
        replanning.observe([("all", model, round(rate * EVERY_S / 2)) for model, rate in rates.items()])
    plan = replanning.plan(first, EVERY_S + 0.1)
    for _ in range(200):
        if plan is not None:
            break
        await asyncio.sleep(0.01)
        plan = replanning.plan(first, EVERY_S + 0.2)
    return plan


async def test_groups_follow_the_sum_of_the_gateways_rates(instance: Instance) -> None:
    first = herd.plan(instance)
    assert gpus(first) == {("m",): 3, ("n",): 1}
    plan = await planned(Replanning(instance, EVERY_S), first, {"m": 20.0, "n": 90.0})
    assert plan is not None
    assert gpus(plan) == {("m",): 1, ("n",): 3}


async def test_rates_as_planned_change_nothing(instance: Instance) -> None:
    assert await planned(Replanning(instance, EVERY_S), herd.plan(instance), {"m": 90.0, "n": 20.0}) is None


async def test_rates_that_no_plan_can_serve_leave_the_groups_as_they_are(instance: Instance) -> None:
    assert await planned(Replanning(instance, EVERY_S), herd.plan(instance), {"m": 9_000.0, "n": 9_000.0}) is None


def test_random_fluctuations_ask_for_no_plan() -> None:
    rates = GroupRates(1.0, (("s", "m", 4.0),))
    for window, count in enumerate([4, 8, 1, 7, 2, 6, 9], start=1):
        for _ in range(count):
            rates.observe("s", "m")
        assert rates.end_window(float(window)) is None
    for _ in range(40):
        rates.observe("s", "m")
    assert rates.end_window(8.0) == (("s", "m", 40.0),)


def test_rates_that_a_plan_was_asked_for_ask_for_none_again() -> None:
    rates = GroupRates(10.0, (("", "m", 3.0), ("", "n", 3.0)))
    for end_s, wanted in ((10.0, (("", "m", 6.0),)), (20.0, None)):
        for _ in range(60):
            rates.observe("", "m")
        assert rates.end_window(end_s) == wanted
    assert rates.end_window(30.0) is None, "a window without arrivals asks for nothing"


def test_streams_beyond_the_limit_are_counted_by_their_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmserve.machines.replanning.STREAMS_MAX", 2)
    rates = GroupRates(1.0)
    for stream in ("a", "b", "c", "d"):
        for _ in range(20):
            rates.observe(stream, "m")
    assert rates.end_window(1.0) == (("", "m", 40.0), ("a", "m", 20.0), ("b", "m", 20.0))
