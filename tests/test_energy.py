"""Joules: worked examples, against the simulator and in random worlds; in /metrics; in the benchmark's table."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from fake_nvml import FakeNvml, Gpu
from front import Front, StartFront, until
from prometheus_client.parser import text_string_to_metric_families

from bins.curve import Curve
from bins.dispatch import DispatchPlan, DispatchTable, Observed
from bins.profile import PROFILES, Profile
from llmserve import bench
from llmserve.cluster.journal import Header, Journal, Step
from llmserve.cluster.live import LiveCluster
from llmserve.cluster.simulated import SimulatedCluster
from llmserve.dispatch_config import DispatchConfig
from llmserve.energy import EnergyMeter, MeasuredEnergy, ModelledEnergy
from llmserve.engines.fake import FakeEngine
from llmserve.engines.power import GpuEnergy
from llmserve.errors import ConfigError
from llmserve.metrics import Metrics
from llmserve.policies import SchedulingConfig
from llmserve.request import Batch, EngineInfo, Request
from llmserve.scheduling.messages import (
    Action,
    BatchEnded,
    DispatchSolved,
    EngineClosed,
    EngineLost,
    EngineReady,
    Event,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    SolveDispatch,
    StartBatch,
    TimerFired,
)
from llmserve.serve import serving
from llmserve.settings import Config, EngineConfig, ServerConfig
from llmserve.simulate import Scenario, simulate
from llmserve.simulation.engine_model import ProfileEngine

IDLE_W = 60.0


def profile(**changes: Any) -> Profile:
    """100 + 50 n watts while n sequences run, 60 watts when idle."""
    fields = {"step_s": Curve.affine(0.0, 0.01), "step_j": Curve.affine(0.5, 1.0), "idle_w": IDLE_W, **changes}
    return Profile("plain", source="Made up.", energy_source="modelled", **fields)


def timed() -> Profile:
    return Profile.timed("timed", Curve.affine(0.0, 0.01), source="Made up.")


def power_w(sequences: int) -> float:
    return 100.0 + 50.0 * sequences


def barrier(slots: int = 4, name: str = "a") -> EngineReady:
    return EngineReady(EngineInfo(name, slots, True))


def refill(slots: int = 4, name: str = "a") -> EngineReady:
    return EngineReady(EngineInfo(name, slots, False, look_ahead=2))


def start(*ids: int, batch: int = 1, engine: str = "a", choices: int = 1) -> StartBatch:
    requests = tuple(Request(id_, choices=choices) for id_ in ids)
    return StartBatch(engine, Batch(batch, 0, requests, 0.0, len(ids)))


def ended(request_id: int, engine: str = "a", tokens: float = 10.0) -> RequestEnded:
    return RequestEnded(engine, request_id, "completed", tokens)


def broke_off(request_id: int, engine: str = "a") -> RequestEnded:
    return RequestEnded(engine, request_id, "failed", fault=True, retryable=True)


def modelled(*steps: tuple[float, Event | StartBatch], of: Profile | None = None) -> ModelledEnergy:
    """The energy after these events, in order. A start comes with a timer's event."""
    energy = ModelledEnergy({"": of or profile()})
    for now_s, event in steps:
        is_start = isinstance(event, StartBatch)
        energy.observe(Step(now_s, TimerFired() if is_start else event, (event,) if is_start else ()))
    return energy


# ---- modelled, by hand ----------------------------------------------------------------------------------------------


def test_an_idle_engine_draws_its_idle_power_from_the_time_it_is_ready():
    energy = modelled((3.0, barrier()))
    assert energy.joules(3.0) == 0.0
    assert energy.joules(10.0) == 7 * IDLE_W
    assert energy.joules(10.0) == 7 * IDLE_W, "reading must change nothing"


def test_a_barrier_engine_runs_all_its_rows_until_the_last_request_has_ended():
    energy = modelled(
        (0.0, barrier()), (2.0, start(1, 2, 3, 4)), (3.0, ended(1)), (5.0, ended(2)), (5.0, ended(3)), (6.0, ended(4))
    )
    assert energy.joules(10.0) == (2 + 4) * IDLE_W + 4 * power_w(4)


def test_a_barrier_engine_whose_batch_ends_at_once_is_idle_then():
    energy = modelled(
        (0.0, barrier()),
        (1.0, start(1, 2)),
        (4.0, BatchEnded("a", 1, {1: 5.0, 2: 9.0})),
        (4.0, start(3, batch=2)),
        (6.0, BatchEnded("a", 1, {1: 5.0, 2: 9.0})),  # stale: batch 2 runs on
        (7.0, BatchEnded("a", 2, {3: 9.0})),
    )
    assert energy.joules(8.0) == 2 * IDLE_W + 3 * power_w(2) + 3 * power_w(1)


def test_a_refill_engine_runs_all_requests_up_to_its_slots_and_the_rest_waits_inside():
    energy = modelled((0.0, refill(2)), (1.0, start(1, 2, 3)), (2.0, ended(2)), (4.0, ended(1)), (5.0, ended(3)))
    assert energy.joules(6.0) == 2 * IDLE_W + 3 * power_w(2) + power_w(1)


def test_an_engine_that_turns_out_to_have_more_slots_runs_the_waiting_requests():
    energy = modelled((0.0, refill(1)), (0.0, start(1, 2, 3)), (2.0, refill(8)), (3.0, ended(1)))
    assert energy.joules(4.0) == 2 * power_w(1) + power_w(3) + power_w(2)


def test_each_choice_of_a_request_is_a_sequence():
    energy = modelled((0.0, refill(8)), (0.0, start(1, 2, choices=3)), (1.0, ended(1)))
    assert energy.joules(2.0) == power_w(6) + power_w(3)


def of_two() -> dict[str, Profile]:
    """Model m draws 100 + 50 n watts, model k 10 + 100 n; idle power is 60 and 90 watts."""
    other = profile(step_j=Curve.affine(1.0, 0.1), idle_w=90.0)
    return {"m": profile(), "k": other}


def start_of(model: str, *ids: int, engine: str = "a", batch: int = 1) -> StartBatch:
    requests = tuple(Request(id_, model=model) for id_ in ids)
    return StartBatch(engine, Batch(batch, 0, requests, 0.0, len(ids), model))


def account(*steps: tuple[float, Event | StartBatch]) -> ModelledEnergy:
    energy = ModelledEnergy(of_two())
    for now_s, event in steps:
        is_start = isinstance(event, StartBatch)
        energy.observe(Step(now_s, TimerFired() if is_start else event, (event,) if is_start else ()))
    return energy


def test_each_model_draws_its_profiles_power_and_several_in_proportion_to_their_sequences():
    ready = EngineReady(EngineInfo("a", 4, False, models=("m", "k")))
    energy = account((0.0, ready), (1.0, start_of("m", 1)), (2.0, start_of("k", 2, 3, 4)), (5.0, ended(1)))
    together_w = (1 * 300 + 3 * 410) / 4
    assert energy.joules(5.0) == pytest.approx(90 + 150 + 3 * together_w)
    assert energy.joules(6.0) == pytest.approx(90 + 150 + 3 * together_w + 310)


def test_engines_that_share_a_gpu_idle_once():
    ready = [EngineReady(EngineInfo(name, 4, False, models=(name,), worker="gpu")) for name in ("m", "k")]
    energy = account((0.0, ready[0]), (1.0, ready[1]), (2.0, start_of("m", 1, engine="m")))
    assert energy.joules(2.0) == 60 + 90
    energy.observe(Step(3.0, TimerFired(), (start_of("k", 2, engine="k", batch=2),)))
    assert energy.joules(3.0) == 150 + 150
    assert energy.joules(4.0) == 300 + 150 + 110 - 90
    energy.observe(Step(4.0, EngineLost("k"), ()))
    energy.observe(Step(4.0, ended(1, engine="m"), ()))
    assert energy.joules(5.0) == 470 + 60


def test_joules_cover_all_work_only_if_every_model_has_a_profile():
    assert not ModelledEnergy(of_two()).of_all_work
    assert ModelledEnergy({"": profile(), **of_two()}).of_all_work


def test_a_lost_engine_draws_nothing_and_a_retry_runs_on_the_other():
    energy = modelled(
        (0.0, barrier()),
        (0.0, barrier(name="b")),
        (1.0, start(1, 2)),
        (3.0, EngineClosed("a")),  # requests run on
        (4.0, EngineLost("a")),
        (4.0, start(1, 2, engine="b")),
        (5.0, ended(1, "a")),  # stale
        (7.0, ended(1, "b")),
        (8.0, ended(2, "b")),
        (9.0, barrier()),
    )
    a_j = IDLE_W + 3 * power_w(2) + IDLE_W  # the last second: engine a is back
    b_j = 4 * IDLE_W + 4 * power_w(2) + 2 * IDLE_W
    assert energy.joules(10.0) == a_j + b_j


def test_a_request_that_runs_again_on_the_same_engine_counts_once_at_a_time():
    energy = modelled(
        (0.0, refill()), (0.0, start(1, 2)), (1.0, broke_off(1)), (3.0, start(1)), (4.0, ended(2)), (5.0, ended(1))
    )
    assert energy.joules(5.0) == power_w(2) + 2 * power_w(1) + power_w(2) + power_w(1)


def test_a_cancelled_request_runs_until_its_engine_has_ended_it():
    energy = modelled(
        (0.0, refill()), (0.0, start(1, 2)), (1.0, RequestCancelled(1)), (2.0, RequestEnded("a", 1, "cancelled"))
    )
    assert energy.joules(3.0) == 2 * power_w(2) + power_w(1)


def test_a_drained_engine_still_draws_power():
    energy = modelled((0.0, barrier()), (1.0, EngineClosed("a")))
    assert energy.joules(3.0) == 3 * IDLE_W


def test_events_of_an_engine_that_was_never_ready_are_ignored():
    assert modelled((1.0, EngineLost("a")), (1.0, ended(1))).joules(9.0) == 0.0


PREFILL = {"prefill_s": 2.0, "prefill_j": 340.0}


def test_a_static_batch_takes_its_prefills_joules_once_and_then_step_power():
    steps = ((0.0, barrier()), (1.0, start(1, 2, 3, 4)), (1.5, ended(1)), (8.0, BatchEnded("a", 1, {})))
    energy = modelled(*steps[:3], of=profile(**PREFILL))
    assert energy.joules(2.0) == IDLE_W + 340.0
    assert energy.joules(4.0) == IDLE_W + 340.0 + power_w(4)
    energy = modelled(*steps, of=profile(**PREFILL))
    assert energy.joules(10.0) == 3 * IDLE_W + 340.0 + 5 * power_w(4)
    answer_j = profile(**PREFILL).energy_j([[500]], [4])[0, 0]  # 500 steps of 10 ms after the prefill
    assert energy.joules(10.0) == pytest.approx(3 * IDLE_W + answer_j)


@pytest.mark.parametrize("end", [RequestEnded("a", 1, "cancelled"), EngineLost("a")], ids=["aborted", "lost"])
def test_a_batch_that_ends_in_its_prefill_leaves_the_next_batch_its_own_prefill(end: Event):
    energy = modelled(
        (0.0, barrier()),
        (0.0, start(1)),
        (1.0, end),
        (1.0, barrier()),
        (3.0, start(2, batch=2)),
        (9.0, ended(2)),
        of=profile(**PREFILL),
    )
    assert energy.joules(9.0) == 340.0 + 2 * IDLE_W + 340.0 + 4 * power_w(1)


def test_in_refill_slots_a_request_in_prefill_counts_as_running():
    energy = modelled(
        (0.0, refill()), (0.0, start(1)), (1.0, start(2)), (4.0, ended(1)), (5.0, ended(2)), of=profile(**PREFILL)
    )
    assert energy.joules(6.0) == power_w(1) + 3 * power_w(2) + power_w(1) + IDLE_W


def test_a_profile_without_energy_models_none():
    with pytest.raises(ValueError, match="the profile timed tells no energy"):
        ModelledEnergy({"": timed()})


def test_no_more_sequences_run_than_the_profile_knows():
    energy = modelled((0.0, refill(64)), (0.0, start(*range(50))), of=profile(slots_max=5))
    assert energy.joules(1.0) == power_w(5)


# ---- modelled, against other calculations ---------------------------------------------------------------------------


@pytest.mark.parametrize("static", [True, False], ids=["barrier", "refill"])
@pytest.mark.parametrize("prefill", [{}, {"prefill_s": 0.4, "prefill_j": 170.0}], ids=["plain", "prefill"])
def test_the_energy_of_simulated_engines_is_the_modelled_energy_of_their_journal(
    static: bool, prefill: dict[str, float]
):
    """Equal up to rounding."""
    h100 = replace(PROFILES["h100-llama-3.1-8b"], **prefill)
    rng = np.random.default_rng(7)
    count, slots = 600, 8
    lengths = np.maximum(1.0, rng.lognormal(4.0, 0.8, count)).tolist()
    infos = [EngineInfo(name, slots, static, look_ahead=0 if static else 2) for name in ("a", "b")]
    engines = [ProfileEngine(info, lengths, h100) for info in infos]
    scheduling = SchedulingConfig(bins=4, batch_size=slots, queue_requests_max=count).resolved(static)
    energy, ends_s = ModelledEnergy({"": h100}), []

    def listen(now_s: float, event: Event, actions: list[Action]) -> None:
        energy.observe(Step(now_s, event, tuple(actions)))
        ends_s.append(now_s)

    cluster = SimulatedCluster(Header(scheduling, tuple(lengths)).scheduler(), list(engines), on_step=listen)
    arrivals_s = np.cumsum(rng.exponential(0.05, count)).tolist()
    cluster.run((at_s, Request(id_, lengths[id_])) for id_, at_s in enumerate(arrivals_s))
    simulated_j = sum(engine.energy_j(ends_s[-1]) or 0.0 for engine in engines)
    assert simulated_j > 2 * ends_s[-1] * 90.0, "the engines must not only idle"
    assert energy.joules(ends_s[-1]) == pytest.approx(simulated_j, rel=1e-9)


class World:
    """A scheduler with three engines and random events; the world knows each engine's power."""

    def __init__(self, seed: int) -> None:
        self.now_s = 0.0
        self.rng = np.random.default_rng(seed)
        scheduling = SchedulingConfig(bins=2, batch_size=4, edges=(50.0,), circuit_faults_max=0, engine_wait_s=1e9)
        self._scheduler = scheduling.resolved(barrier=True).scheduler()
        self._slots = {"a": 4, "b": 3, "c": 2}
        self._drawing: set[str] = set()
        self._rows = 0  # rows of the barrier engine's batch
        self._arrived = 0

    def step(self) -> Step:
        """Make a random event happen."""
        event = self._event()
        actions = self._scheduler.handle(event, self.now_s)
        if isinstance(event, EngineReady):
            self._drawing.add(event.engine.name)
        elif isinstance(event, EngineLost):
            self._drawing.discard(event.engine)
        for action in actions:
            if isinstance(action, StartBatch) and action.engine == "a":
                self._rows = sum(request.choices for request in action.batch.requests)
        return Step(self.now_s, event, tuple(actions))

    def watts(self) -> float:
        return sum(self._watts_of(name) for name in self._drawing)

    def _watts_of(self, name: str) -> float:
        engine = self._scheduler.engines[name]
        running = sum(run.queued.request.choices for run in engine.running.values())
        sequences = self._rows if engine.info.barrier and running else min(running, engine.info.slots)
        return power_w(sequences) if sequences else IDLE_W

    def _event(self) -> Event:
        rng = self.rng
        name = str(rng.choice(["a", "b", "c"]))
        request_id = self._one_on(name)
        kinds = ["arrives", "ends", "fails", "batch ends", "leaves", "ready", "closed", "lost"]
        kind = rng.choice(kinds, p=[0.36, 0.3, 0.06, 0.06, 0.06, 0.08, 0.04, 0.04])
        if kind == "arrives":
            self._arrived += 1
            return RequestArrived(Request(self._arrived, float(rng.integers(1, 100)), choices=int(rng.integers(1, 3))))
        if kind == "ready":
            if name != "a":
                self._slots[name] = int(rng.integers(1, 5))
            return EngineReady(EngineInfo(name, self._slots[name], name == "a", look_ahead=2 * (name == "b")))
        if kind == "batch ends":
            runs = self._scheduler.engines["a"].running.values() if "a" in self._scheduler.engines else ()
            batch_id = next((run.batch_id for run in runs if rng.random() < 0.8), 1)  # or an old batch
            return BatchEnded("a", batch_id, {})
        events: dict[str, Event] = {
            "ends": ended(request_id, name),
            "fails": broke_off(request_id, name),
            "leaves": RequestCancelled(request_id),
            "closed": EngineClosed(name),
            "lost": EngineLost(name),
        }
        return events[str(kind)]

    def _one_on(self, name: str) -> int:
        """A request that the engine runs; sometimes one that it does not run."""
        engine = self._scheduler.engines.get(name)
        if engine is None or not engine.running or self.rng.random() < 0.2:
            return int(self.rng.integers(1, self._arrived + 2))
        return int(self.rng.choice(list(engine.running)))


@pytest.mark.parametrize("seed", range(8))
def test_joules_are_the_power_of_the_requests_that_the_scheduler_counts_as_running(seed: int):
    world, energy = World(seed), ModelledEnergy({"": profile()})
    expected_j = 0.0
    most_w = 0.0
    for _ in range(600):
        passed_s = float(world.rng.exponential())
        expected_j += world.watts() * passed_s
        world.now_s += passed_s
        energy.observe(world.step())
        most_w = max(most_w, world.watts())
        assert energy.joules(world.now_s) == pytest.approx(expected_j)
        assert energy.joules(world.now_s + 1) == pytest.approx(expected_j + world.watts())
    assert most_w > 2 * power_w(4), "several engines must run at once"


# ---- measured -------------------------------------------------------------------------------------------------------


async def sampled(energy: MeasuredEnergy, clock: Callable[[], float], joules: float) -> None:
    """Return once the energy has reached so many joules."""
    async with energy.sampling(clock):
        await until(lambda: energy.joules(clock()) == pytest.approx(joules))


async def test_measured_joules_are_the_gpus_counter_in_joules():
    gpu = Gpu(energy_mj=1_000)
    energy = MeasuredEnergy(GpuEnergy(FakeNvml(gpu)), of_all_work=True)
    gpu.energy_mj = 3_500
    assert energy.joules(1.0) == 0.0, "the counter has not been read yet"
    await sampled(energy, lambda: 1.0, 2.5)


async def test_reading_joules_does_not_wait_for_the_gpus():
    """The GPUs' driver does not answer, nor does the thread that reads it."""
    answers = threading.Event()
    gpu = Gpu(energy_mj=0)
    energy = MeasuredEnergy(GpuEnergy(FakeNvml(gpu)), of_all_work=True)
    threads: list[int] = []

    def slow_mj() -> int:
        threads.append(threading.get_ident())
        answers.wait(30)
        return 2_000

    gpu.energy_mj = slow_mj
    scraped = Scraped(energy)
    async with energy.sampling(lambda: 1.0):
        await until(lambda: bool(threads))
        assert scraped.samples("llmserve_energy") == {"llmserve_energy_joules_total{nvml}": 0.0}
        assert not answers.is_set()
        answers.set()
        await until(lambda: energy.joules(1.0) == 2.0)
    assert threading.get_ident() not in threads


async def test_power_is_sampled_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two scrapes the power rises and falls again: the trapezoids in between include that."""
    monkeypatch.setattr("llmserve.energy.SAMPLE_EVERY_S", 0.001)
    now_s = 0.0
    gpu = Gpu(power_mw=0)
    energy = MeasuredEnergy(GpuEnergy(FakeNvml(gpu)), of_all_work=True)

    async def rest_at(at_s: float, power_mw: int) -> None:
        nonlocal now_s
        now_s, gpu.power_mw = at_s, power_mw
        await asyncio.sleep(0.05)

    async with energy.sampling(lambda: now_s):
        for at_s, power_mw in ((0.0, 0), (1.0, 200_000), (2.0, 200_000), (3.0, 0)):
            await rest_at(at_s, power_mw)
    assert energy.joules(3.0) == pytest.approx(100 + 200 + 100)


# ---- /metrics -------------------------------------------------------------------------------------------------------


class FixedMeter:
    """Draws 50 W from time 0 on."""

    source = "modelled"

    def __init__(self, *, of_all_work: bool = True) -> None:
        self.of_all_work = of_all_work

    def joules(self, now_s: float) -> float:
        return 50.0 * now_s


class Scraped:
    """Metrics of a journal that the test writes, at a time that the test sets."""

    def __init__(self, *meters: EnergyMeter, energy_known: bool = True) -> None:
        self.now_s = 0.0
        header = Header(SchedulingConfig().resolved(barrier=True))
        cluster = LiveCluster(header.scheduler(), [], Journal(header), clock=lambda: self.now_s)
        self.metrics = Metrics(cluster, 8, meters, energy_known=energy_known)
        self._journal = cluster.journal

    def step(self, event: Event, *actions: Action) -> None:
        self._journal.append(self.now_s, event, actions)

    def samples(self, *prefixes: str) -> dict[str, float]:
        return samples(self.metrics.render().decode(), *prefixes)


def samples(text: str, *prefixes: str) -> dict[str, float]:
    """Samples of the exposition whose names begin with a prefix; a source stands in braces."""
    all_samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {
        sample.name + (f"{{{sample.labels['source']}}}" if "source" in sample.labels else ""): sample.value
        for sample in all_samples
        if sample.name.startswith(prefixes)
    }


def test_joules_are_shared_among_the_completed_requests_and_their_tokens():
    scraped = Scraped(FixedMeter())
    scraped.now_s = 2.0
    assert scraped.samples("llmserve_energy") == {"llmserve_energy_joules_total{modelled}": 100.0}
    for request in (Request(1), Request(2, choices=3), Request(3)):
        scraped.step(RequestArrived(request))
    scraped.step(ended(1, tokens=10.0))
    scraped.step(ended(2, tokens=5.0))  # tokens of each of its three choices
    scraped.step(RequestEnded("a", 3, "failed", 99.0))
    scraped.now_s = 3.0
    assert scraped.samples("llmserve_energy", "llmserve_output_tokens_total") == {
        "llmserve_energy_joules_total{modelled}": 150.0,
        "llmserve_energy_joules_per_output_token{modelled}": 150.0 / 25,
        "llmserve_energy_joules_per_request{modelled}": 150.0 / 2,
        "llmserve_output_tokens_total": 25.0,
    }


def test_requests_without_tokens_have_joules_per_request_and_none_per_token():
    scraped = Scraped(FixedMeter())
    scraped.step(RequestArrived(Request(1)))
    scraped.step(ended(1, tokens=0.0))
    assert sorted(scraped.samples("llmserve_energy")) == [
        "llmserve_energy_joules_per_request{modelled}",
        "llmserve_energy_joules_total{modelled}",
    ]


def test_joules_of_some_engines_are_not_divided_among_all_requests():
    scraped = Scraped(FixedMeter(of_all_work=False))
    scraped.step(RequestArrived(Request(1)))
    scraped.step(ended(1, tokens=10.0))
    scraped.now_s = 2.0
    assert scraped.samples("llmserve_energy") == {"llmserve_energy_joules_total{modelled}": 100.0}


def test_without_a_meter_there_are_no_energy_metrics_and_without_a_plan_no_dispatch_metrics():
    text = Scraped().metrics.render().decode()
    assert "energy" not in text
    assert "dispatch" not in text
    assert "arrival_rate" not in text


def plan(queues: int = 2, **fields: Any) -> DispatchPlan:
    table = DispatchTable((0, 1), (), (), (1.0,), (1.0,), 1.0)
    return DispatchPlan((0,) * (4 - queues) + tuple(range(queues)), (table,) * queues, **fields)


def observed(*rates_per_s: float) -> Observed:
    return Observed(rates_per_s, ((10.0,),) * len(rates_per_s), engines=1, slots=1, queues=1)


PLANNED = ("llmserve_dispatch", "llmserve_arrival_rate")


def test_the_current_plan_and_its_expectations_are_metrics():
    scraped = Scraped()
    scraped.step(TimerFired(), SolveDispatch(observed(0.0, 0.0)))
    assert scraped.samples(*PLANNED) == {"llmserve_dispatch_plans_total": 0.0}
    scraped.step(DispatchSolved(plan()))
    assert scraped.samples(*PLANNED) == {"llmserve_dispatch_plans_total": 1.0, "llmserve_dispatch_queues": 2.0}
    scraped.step(TimerFired(), SolveDispatch(observed(1.5, 0.25)))
    expected = {"latency_target_s": 2.0, "response_s_mean": 1.75, "power_w_mean": 310.0, "target_met": False}
    scraped.step(DispatchSolved(plan(1, **expected)))
    assert scraped.samples(*PLANNED) == {
        "llmserve_dispatch_plans_total": 2.0,
        "llmserve_arrival_rate_per_second": 1.75,
        "llmserve_dispatch_queues": 1.0,
        "llmserve_dispatch_response_seconds_expected": 1.75,
        "llmserve_dispatch_power_watts_expected": 310.0,
        "llmserve_dispatch_target_met": 0.0,
    }
    scraped.step(DispatchSolved(plan(1, **{**expected, "target_met": True})))
    assert scraped.samples("llmserve_dispatch_target_met") == {"llmserve_dispatch_target_met": 1.0}


def test_unknown_watts_are_no_metric():
    scraped = Scraped(energy_known=False)
    scraped.step(DispatchSolved(plan(1, response_s_mean=1.75, power_w_mean=0.4)))
    assert scraped.samples("llmserve_dispatch_response", "llmserve_dispatch_power") == {
        "llmserve_dispatch_response_seconds_expected": 1.75
    }


@pytest.mark.parametrize("fields", [{"response_s_mean": 1.0}, {"latency_target_s": 2.0}], ids=["target", "expectation"])
def test_a_target_is_neither_met_nor_missed_without_a_target_or_an_expectation(fields: dict[str, float]):
    scraped = Scraped()
    scraped.step(DispatchSolved(plan(**fields)))
    assert scraped.samples("llmserve_dispatch_target_met") == {}


# ---- a live server --------------------------------------------------------------------------------------------------


@pytest.fixture
def profile_file(tmp_path: Path) -> str:
    profile().save(tmp_path / "profile.json")
    return str(tmp_path / "profile.json")


async def scrape(front: Front, *prefixes: str) -> dict[str, float]:
    async with front.session.get(f"{front.url}/metrics") as response:
        return samples(await response.text(), *prefixes)


async def complete(front: Front, **fields: Any) -> None:
    async with front.post(**fields) as response:
        assert response.status == 200
        await response.read()


async def test_a_live_batch_draws_its_power_while_it_runs(start_front: StartFront, profile_file: str) -> None:
    """The bounds are exact: the engine runs at least its steps' time, and at most while the client waits."""
    total = "llmserve_energy_joules_total{modelled}"
    async with FakeEngine(slots=4, step_s=0.01, barrier=True) as engine:
        front = await start_front(
            engine,
            barrier=True,
            scheduling={"batch_size": 4, "release": "full", "bins": 1},
            dispatch=DispatchConfig(profile=(profile_file,)),
        )
        first_s = time.monotonic()
        metrics_before = await scrape(front, "llmserve_energy")
        began_s = time.monotonic()
        await asyncio.gather(*(complete(front, max_tokens=tokens) for tokens in (60, 5, 20, 40)))
        await until(lambda: not front.cluster.scheduler.requests)
        waited_s = time.monotonic() - began_s
        metrics_after = await scrape(front, "llmserve_energy")
        scraped_s = time.monotonic() - first_s
    assert sorted(metrics_before) == [total]
    most_j = waited_s * power_w(4) + (scraped_s - waited_s) * IDLE_W
    assert 60 * 0.01 * power_w(4) <= metrics_after[total] - metrics_before[total] <= most_j
    assert metrics_after["llmserve_energy_joules_per_request{modelled}"] * 4 == pytest.approx(metrics_after[total])
    assert metrics_after["llmserve_energy_joules_per_output_token{modelled}"] * 125 == pytest.approx(
        metrics_after[total]
    )


async def test_a_server_whose_release_follows_a_plan_has_its_metrics(
    start_front: StartFront, profile_file: str
) -> None:
    async with FakeEngine(slots=4, step_s=0.001, barrier=True) as engine:
        front = await start_front(
            engine,
            barrier=True,
            scheduling={"batch_size": 4, "release": "table", "bins": 2},
            dispatch=DispatchConfig(profile=(profile_file,), energy_weight=1.0),
        )
        for _ in range(12):
            await complete(front, max_tokens=5)
        await until(lambda: any(isinstance(step.event, DispatchSolved) for step in front.cluster.journal.steps))
        metrics = await scrape(front, *PLANNED)
    assert metrics["llmserve_dispatch_plans_total"] >= 1
    assert metrics["llmserve_dispatch_queues"] in (1.0, 2.0)


async def scrape_until(front: Front, name: str, value: float) -> dict[str, float]:
    """Energy metrics once `name` has this value: readings of the GPUs come with a delay."""
    async with asyncio.timeout(30):
        while (metrics := await scrape(front, "llmserve_energy")).get(name) != value:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return metrics


async def test_the_gpus_of_this_machine_are_measured_while_the_server_runs(
    start_front: StartFront, monkeypatch: pytest.MonkeyPatch, profile_file: str
) -> None:
    gpu = Gpu(energy_mj=0)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(gpu))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine, dispatch=DispatchConfig(profile=(profile_file,)))
        gpu.energy_mj = 12_000
        await complete(front, max_tokens=4)
        await until(lambda: not front.cluster.scheduler.requests)
        metrics = await scrape_until(front, "llmserve_energy_joules_total{nvml}", 12.0)
    assert metrics["llmserve_energy_joules_per_output_token{nvml}"] == 3.0
    assert metrics["llmserve_energy_joules_per_request{nvml}"] == 12.0
    assert metrics["llmserve_energy_joules_total{modelled}"] > 0


async def test_beside_a_remote_engine_the_joules_of_this_machine_are_not_divided(
    start_front: StartFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(energy_mj=0)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(gpu))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine, "http://engine.invalid:8001", wait=False)
        await until(lambda: any(front.cluster.engines_ready.values()))
        await complete(front, max_tokens=4)
        gpu.energy_mj = 12_000
        metrics = await scrape_until(front, "llmserve_energy_joules_total{nvml}", 12.0)
    assert metrics == {"llmserve_energy_joules_total{nvml}": 12.0}


# A stand-in for an interpreter that has vLLM: when asked with -c, it confirms that vLLM is installed.
STAND_IN = """#!{python}
import os, sys
if sys.argv[1] != "-c":
    port = sys.argv[sys.argv.index("--port") + 1]
    os.execv(sys.executable, [sys.executable, "-m", "llmserve.engines.fake", "--port", port])
"""


@pytest.mark.parametrize(
    ("replicas", "beside", "joules"), [(1, False, 100.0), (2, False, 101.0), (None, False, 111.0), (1, True, 111.0)]
)
async def test_only_the_gpus_that_engines_may_use_are_counted(
    replicas: int | None,
    beside: bool,
    joules: float,
    start_front: StartFront,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Replicas take one GPU each, the third GPU first; an engine that already runs here may use any visible GPU."""
    gpus = [Gpu(energy_mj=0, uuid=f"GPU-{name}") for name in "abcd"]
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*gpus))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0,1")
    (tmp_path / "python").write_text(STAND_IN.format(python=sys.executable))
    (tmp_path / "python").chmod(0o755)
    async with FakeEngine() as other:
        engines = EngineConfig(
            engine=("vllm", other.url) if beside else ("vllm",),
            model="m",
            replicas=replicas,
            engine_python=str(tmp_path / "python"),
            engine_log_folder=str(tmp_path),
        )
        front = await start_front(engines=engines)
        for gpu, drawn_j in zip(gpus, (1, 10, 100, 1000), strict=True):
            gpu.energy_mj = 1_000 * drawn_j
        metrics = await scrape_until(front, "llmserve_energy_joules_total{nvml}", joules)
    assert metrics == {"llmserve_energy_joules_total{nvml}": joules}


async def test_a_profile_without_energy_serves_without_joules(
    start_front: StartFront, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    timed().save(tmp_path / "profile.json")
    async with FakeEngine(slots=4, step_s=0.001, barrier=True) as engine:
        front = await start_front(
            engine,
            barrier=True,
            scheduling={"batch_size": 4, "release": "table", "bins": 1},
            dispatch=DispatchConfig(profile=(str(tmp_path / "profile.json"),)),
        )
        for _ in range(3):
            await complete(front, max_tokens=5)
        metrics = await scrape(front, "llmserve_energy", "llmserve_dispatch")
    assert "llmserve_dispatch_plans_total" in metrics
    assert not [name for name in metrics if "energy" in name or "power" in name]
    assert "the profile timed tells no energy" in caplog.text


def test_a_simulation_with_a_profile_without_energy_reports_none(tmp_path: Path) -> None:
    timed().save(tmp_path / "profile.json")
    scenario = Scenario(requests=50, barrier=True, profile=str(tmp_path / "profile.json"))
    summary = simulate(scenario, SchedulingConfig(batch_size=4, release="greedy"))
    assert summary.completed == 50
    assert (summary.energy_j, summary.energy_j_per_token, summary.power_w_mean) == (None, None, None)


async def test_nvml_is_shut_down_when_the_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(Gpu(energy_mj=0))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    async with FakeEngine() as engine:
        async with serving(Config(server=ServerConfig(port=0), engines=EngineConfig(engine=(engine.url,)))):
            assert nvml.open == 1
        assert nvml.open == 0


async def test_local_gpus_do_not_count_for_a_remote_engine(
    start_front: StartFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(Gpu(energy_mj=0)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    front = await start_front("http://engine.invalid:8001", wait=False)
    assert await scrape(front, "llmserve_energy") == {}


async def test_an_invalid_profile_is_an_error_for_every_release(start_front: StartFront) -> None:
    with pytest.raises(
        ConfigError, match=r"'h100' is neither a published profile nor a file; published ones are h100-llama"
    ):
        await start_front("http://127.0.0.1:9", wait=False, dispatch=DispatchConfig(profile=("h100",)))


# ---- the benchmark's table ------------------------------------------------------------------------------------------


def rows(**joules: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Rows of arrangements by name; each run answers two prompts with 10 and 30 tokens."""
    runs = {
        name: [bench.BenchRun(1.0, [10, 30], ["a", "a"], [0.5, 1.0], joules_of_run) for joules_of_run in of]
        for name, of in joules.items()
    }
    runs[bench.BASELINE.name] = runs.pop("plain")
    return bench.rows(runs, np.poly1d([0.01, 0.0]))


def test_joules_of_a_run_are_divided_by_its_tokens_and_requests_with_the_median_over_rounds():
    (row,) = rows(plain=[{"modelled": joules} for joules in (80.0, 800.0, 120.0)])
    assert (row["joules_per_token"], row["joules_per_request"], row["energy_source"]) == (3.0, 60.0, "modelled")


def test_measured_joules_precede_modelled_ones():
    (row,) = rows(plain=[{"modelled": 80.0, "nvml": 40.0}])
    assert (row["joules_per_token"], row["energy_source"]) == (1.0, "nvml")


def test_the_table_names_the_source_and_is_blank_without_one(capsys: pytest.CaptureFixture[str]):
    results = rows(plain=[{"modelled": 80.0}], direct=[{}])
    assert [row["energy_source"] for row in results] == [None, "modelled"]
    bench.print_table(results, "a title")
    output = capsys.readouterr().out
    assert "joules: modelled" in output
    assert "None" not in output
    bench.print_table(rows(plain=[{}]), "a title")
    assert "joules" not in capsys.readouterr().out


async def test_the_benchmark_reads_the_servers_counter_before_and_after_each_run(
    start_front: StartFront, profile_file: str
) -> None:
    async with FakeEngine(slots=4, step_s=0.01, model=bench.MODEL) as engine:
        front = await start_front(engine, slots=4, dispatch=DispatchConfig(profile=(profile_file,)))
        done = await bench.run(front.url, ["a", "b", "c", "d"], None)
        plain = await bench.run(engine.url, ["a"], None)
    assert plain.joules == {}
    assert done.joules["modelled"] >= 16 * 0.01 * power_w(4)  # 16 tokens each; exact, for the power is affine
    assert sum(done.lengths) == 64


async def test_a_server_without_metrics_has_no_joules() -> None:
    async with FakeEngine() as engine, aiohttp.ClientSession() as session:
        assert await bench.joules(session, f"{engine.url}/nowhere") == {}
