"""The load of a scenario, and engines of several kinds."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from test_simulate import scheduling

from bins.curve import Curve
from bins.profile import Profile
from llmserve.commands.simulate import Scenario, prepare, run, simulate
from llmserve.simulation.engine_model import Costs
from llmserve.simulation.report import Recorder
from llmserve.simulation.scenario import engines

# ---- load ----


@pytest.mark.parametrize(
    ("values", "capacity_per_s"),
    [
        ({"barrier": True}, 128 / (1 + 19 * 128 / 129)),
        ({"barrier": True, "engines": 3, "prefill_s": 4.0}, 3 * 128 / (4 + 1 + 19 * 128 / 129)),
        ({"slots": 64}, 64 / 10.5),
        ({"slots": 64, "engines": 3, "prefill_s": 4.0}, 3 * 64 / (4 + 10.5)),
    ],
)
def test_load_1_is_the_rate_of_full_engines(values: dict[str, object], capacity_per_s: float) -> None:
    """The longest of B lengths uniform on [1, 20] has mean 1 + 19 B / (B + 1) (Multi-Bin, eq. 17): the time of a batch
    of one bin. A refill slot takes an answer's own length, 10.5 on average.
    """
    scenario = Scenario(lengths="uniform:1,20", load=0.5, **{"step_s": 1.0, **values})  # type: ignore[arg-type]
    work = prepare(scenario, scheduling(batch_size=128))
    # The mean of 40,000 lengths is exact to 1 % (four standard deviations), the longest of many far more exact.
    rel = 2e-3 if scenario.barrier else 1e-2
    assert work.arrival_rate_per_s == pytest.approx(0.5 * capacity_per_s, rel=rel)
    assert work.trace.rate_per_s == pytest.approx(work.arrival_rate_per_s, rel=0.03)


def test_the_load_of_a_profile_uses_the_step_of_a_full_batch() -> None:
    scenario = Scenario(lengths="constant:1", load=0.7, profile="p4-googlenet", barrier=True)
    work = prepare(scenario, scheduling(batch_size=32))
    assert work.arrival_rate_per_s == pytest.approx(0.7 * 32 / (0.3051e-3 * 32 + 1.0524e-3))


def test_the_load_of_refill_slots_uses_the_step_of_all_slots_and_the_prefills() -> None:
    scenario = Scenario(lengths="constant:10", load=0.7, profile="p4-googlenet", slots=32)
    work = prepare(scenario, scheduling(batch_size=8))
    assert work.arrival_rate_per_s == pytest.approx(0.7 * 32 / (10 * (0.3051e-3 * 32 + 1.0524e-3)))
    costs = Costs.constant(0.1, 2.0, 4, prefill_s_per_token=0.01)
    assert costs.slot_s(30.0, 4, 50.0) == pytest.approx(2.0 + 0.5 + 3.0)


@pytest.mark.parametrize("values", [{"slots": 8}, {"slots": 32, "engines": 2, "prefill_s": 0.5}])
def test_at_load_0_97_refill_slots_are_97_percent_busy(values: dict[str, Any]) -> None:
    """Little's law: occupied slots = arrivals per second x seconds that each occupies a slot. Steps take the same time
    for any number of sequences. Lengths are cut off at 500 tokens, so that runs differ little.
    """
    summary = simulate(
        Scenario(requests=20_000, load=0.97, lengths="lognormal:5.2,0.8,500", seed=3, **values),
        scheduling(release="greedy"),
    )
    assert summary.utilisation == pytest.approx(0.97, abs=0.02)


def test_refill_slots_are_stable_just_below_load_1_and_not_above() -> None:
    def waiting_s(load: float) -> float:
        return simulate(Scenario(requests=10_000, load=load, seed=2), scheduling(release="greedy")).waiting_s_p50

    assert waiting_s(1.2) > 50 * waiting_s(0.97)


def test_one_bin_is_stable_just_below_load_1_and_not_above() -> None:
    def latency_s(load: float) -> float:
        scenario = Scenario(requests=20_000, load=load, barrier=True, seed=2)
        return simulate(scenario, scheduling(bins=1)).latency_s_p50

    assert latency_s(1.3) > 10 * latency_s(0.8)


# ---- engines of several kinds ----


@pytest.fixture
def profiles(tmp_path: Path) -> tuple[str, str]:
    """Profiles of engines whose tokens take 1 s and 2 s."""
    paths = tmp_path / "fast.json", tmp_path / "slow.json"
    for path, step_s in zip(paths, (1.0, 2.0), strict=True):
        Profile.timed(path.stem, Curve.affine(0, step_s), source="a test").save(path)
    return str(paths[0]), str(paths[1])


@pytest.mark.parametrize("barrier", [True, False])
def test_each_engine_has_the_costs_of_its_own_profile(profiles: tuple[str, str], barrier: bool) -> None:
    """Two simultaneous requests of 10 tokens: one takes 10 s, the other 20 s."""
    scenario = Scenario(
        requests=2, arrival_rate=np.inf, lengths="constant:10", engine=profiles, barrier=barrier, slots=1
    )
    config = scheduling(bins=1, batch_size=1).resolved(barrier)
    work = prepare(scenario, config)
    recorder = Recorder(2)
    summary = run(scenario, config, work, recorder=recorder)
    assert sorted(recorder.ended_s) == [10.0, 20.0]
    assert summary.slowdown_p99 == pytest.approx(2.0, rel=0.02), "relative to the time alone on the fastest engine"
    assert summary.utilisation == pytest.approx((0.5 + 1) / 2)


def test_engines_are_counted_and_have_their_own_slots(profiles: tuple[str, str]) -> None:
    fast, slow = profiles
    scenario = Scenario(engine=(f"2x{fast}:3", slow), slots=5, load=1.0, lengths="constant:4")
    config = scheduling(bins=1).resolved(barrier=False)
    built = engines(scenario, config, [])
    assert [(engine.info.name, engine.info.slots, engine.costs.step_s[1]) for engine in built] == [
        ("engine0", 3, 1.0),
        ("engine1", 3, 1.0),
        ("engine2", 5, 2.0),
    ]
    assert prepare(scenario, config).arrival_rate_per_s == pytest.approx(2 * 3 / 4 + 5 / 8)


def test_a_barrier_engine_with_fewer_slots_takes_a_batch_in_parts(profiles: tuple[str, str]) -> None:
    scenario = Scenario(
        requests=4, arrival_rate=np.inf, lengths="constant:10", engine=(f"{profiles[0]}:2",), barrier=True
    )
    summary = simulate(scenario, scheduling(bins=1, batch_size=4))
    assert summary.elapsed_s == 20.0
    generous = msgspec.structs.replace(scenario, engine=(f"{profiles[0]}:9",))
    assert engines(generous, scheduling(batch_size=4).resolved(barrier=True), [])[0].info.slots == 4
