"""Invalid settings of releases and of their plans."""

from __future__ import annotations

from pathlib import Path

import pytest
from configured import load_config
from test_releases import PLANNED

from bins.curve import Curve
from bins.profile import Profile
from llmserve.errors import ConfigError
from llmserve.settings.dispatch import DispatchConfig
from llmserve.settings.policies import SchedulingConfig


@pytest.mark.parametrize("release", ["soon", "static", "static:0", "static:x", "static:2.5", "Table", "tables", ""])
def test_an_unknown_release_is_an_error_that_names_it(release: str) -> None:
    with pytest.raises(ConfigError, match=f"^release .*not {release!r}$"):
        load_config({"release": release}, {}, None)


def test_static_batches_larger_than_the_largest_are_an_error() -> None:
    with pytest.raises(ValueError, match="static:9: a batch has at most 8 requests"):
        SchedulingConfig(release="static:9").resolved(barrier=True).scheduler()
    SchedulingConfig(release="static:8").resolved(barrier=True).scheduler()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"rate_headroom": "1.5"}, "rate_headroom .*at most 1, not '1.5'"),
        ({"rate_headroom": "0"}, "rate_headroom .*more than 0, at most 1, not '0'"),
        ({"rate_factor": "1"}, "rate_factor .*more than 1, not '1'"),
        ({"batch_wait_s": "-1"}, "batch_wait_s .*at least 0, not '-1'"),
        ({"energy_weight": "-1"}, "energy_weight .*at least 0, not '-1'"),
        ({"energy_weight": "nan"}, "energy_weight: the number must be finite"),
        ({"latency_target_s": "0"}, "latency_target_s .*more than 0, not '0'"),
        ({"latency_target_percentile": "100"}, "latency_target_percentile .*less than 100, not '100'"),
        ({"latency_target_percentile": "5"}, "latency_target_percentile .*at least 50, less than 100, not '5'"),
    ],
)
def test_a_setting_out_of_its_range_is_an_error_that_names_it(flags: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(flags, {}, None)


@pytest.mark.parametrize("release", PLANNED)
def test_a_release_that_follows_plans_needs_a_profile(release: str) -> None:
    scheduling = SchedulingConfig(release=release).resolved(barrier=True)
    with pytest.raises(ValueError, match=f"release {release} needs --profile"):
        DispatchConfig().solver(scheduling, barrier=True)
    assert DispatchConfig(profile=("h100-llama-3.1-8b",)).solver(scheduling, barrier=True) is not None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"energy_weight": 1.0, "latency_target_s": 2.0}, "either an energy weight or a latency target"),
        ({"latency_target_percentile": 95.0}, "latency_target_percentile has no effect without latency_target_s"),
        ({"profile": ("h100-llama-3.1",)}, "'h100-llama-3.1' is neither a shipped profile nor a file; did you mean"),
    ],
)
def test_settings_that_contradict_each_other_are_an_error(values: dict[str, object], message: str) -> None:
    dispatch = DispatchConfig(**{"profile": ("h100-llama-3.1-8b",), **values})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        dispatch.solver(SchedulingConfig(release="table").resolved(barrier=True), barrier=True)


@pytest.mark.parametrize(
    ("release", "values", "message"),
    [
        ("greedy", {"energy_weight": 20.0}, "energy_weight has no effect under release greedy, only under table$"),
        (
            "static:4",
            {"latency_target_s": 9.0},
            "latency_target_s has no effect under release static:4, only under tab",
        ),
        (
            "rate-headroom",
            {"latency_target_s": 9.0},
            "latency_target_s has .* under release rate-headroom, only under table and deadline",
        ),
        ("rate-headroom", {"energy_weight": 1.0}, "energy_weight has no effect under release rate-headroom"),
        ("deadline", {"energy_weight": 1.0}, "energy_weight has no effect under release deadline, only under table$"),
        (
            "deadline",
            {"latency_target_s": 9.0, "latency_target_percentile": 95.0},
            "latency_target_percentile has no effect under release deadline, only under table$",
        ),
    ],
)
def test_a_setting_that_the_release_does_not_use_is_an_error_that_names_both(
    release: str, values: dict[str, float], message: str
) -> None:
    scheduling = SchedulingConfig(release=release).resolved(barrier=True)
    with pytest.raises(ValueError, match=message):
        DispatchConfig(profile=("h100-llama-3.1-8b",), **values).solver(scheduling, barrier=True)  # type: ignore[arg-type]


def test_energy_is_no_objective_if_the_profile_does_not_know_it(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    Profile.timed("box", Curve.affine(1e-4, 1e-2), source="a test").save(path)

    def solver(release: str, **values: float) -> object:
        scheduling = SchedulingConfig(release=release).resolved(barrier=True)
        return DispatchConfig(profile=(str(path),), **values).solver(scheduling, barrier=True)  # type: ignore[arg-type]

    for release in PLANNED:
        assert solver(release) is not None
    assert solver("deadline", latency_target_s=9.0) is not None
    with pytest.raises(ValueError, match="energy_weight: the profile box has no energy"):
        solver("table", energy_weight=1.0)
    with pytest.raises(ValueError, match="latency_target_s: the profile box has no energy"):
        solver("table", latency_target_s=9.0)


def test_a_percentile_is_refused_where_only_the_mean_can_be_planned() -> None:
    dispatch = DispatchConfig(profile=("h100-llama-3.1-8b",), latency_target_s=5.0, latency_target_percentile=95.0)
    scheduling = SchedulingConfig(release="table")
    assert dispatch.solver(scheduling.resolved(barrier=True), barrier=True) is not None
    with pytest.raises(ValueError, match="latency_target_percentile: plans for refill engines"):
        dispatch.solver(scheduling.resolved(barrier=False), barrier=False)


@pytest.mark.parametrize("release", ["full", "static:4", "timeout", "greedy"])
def test_other_releases_need_no_plans(release: str) -> None:
    scheduling = SchedulingConfig(release=release).resolved(barrier=True)
    for dispatch in (DispatchConfig(), DispatchConfig(profile=("h100-llama-3.1-8b",))):  # metrics may need a profile
        assert dispatch.solver(scheduling, barrier=True) is None
