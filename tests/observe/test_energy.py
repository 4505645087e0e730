"""Modelled joules: worked examples, against the simulator and in random worlds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bins.curve import Curve
from bins.profile import PROFILES, Profile
from llmserve.live.journal import Header, Step
from llmserve.observe.energy import ModelledEnergy
from llmserve.request import Batch, EngineInfo, Request
from llmserve.scheduling.messages import (
    Action,
    BatchEnded,
    EngineClosed,
    EngineLost,
    EngineReady,
    Event,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    StartBatch,
    TimerFired,
)
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.cluster import SimulatedCluster
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
    with pytest.raises(ValueError, match="the profile timed has no energy"):
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
