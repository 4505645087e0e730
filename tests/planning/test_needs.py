"""A GPU's goodput, and the GPUs that streams need: as single streams, and as columns by the million."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from instances import instance, instance_of_rates, without_time

from llmserve.errors import ConfigError
from llmserve.planning import Instance, Model, Plan, Stream, StreamColumns, goodputs_per_s, plan, streams_of
from llmserve.planning import instance as instance_module


def test_a_gpus_goodput_is_that_of_the_largest_batch_that_ends_within_the_slo() -> None:
    """ResNet18 of Table 4: 0.22 b + 3.74 ms. A batch of 20 ends in 8.14 ms; in 1 s one of 128, the largest allowed."""
    model = Model("RN18", 0.1, 0.22, 3.74)
    streams = tuple(Stream(f"{slo_s}", "RN18", rate_per_s=100.0, slo_s=slo_s) for slo_s in (0.00396, 0.00814, 1.0))
    problem = Instance(streams, (model,), 4, 16.0, 4, 1)
    expected = [1 / 0.00396, 20 / 0.00814, 128 / (128 * 0.00022 + 0.00374)]
    assert goodputs_per_s(problem, streams_of(problem)) == pytest.approx(expected)
    assert [stream.gpus_needed for stream in plan(problem).streams] == pytest.approx(
        [100 / goodput for goodput in expected]
    )


def test_a_measured_goodput_needs_no_slo() -> None:
    problem = Instance((Stream("s", "m", rate_per_s=30.0),), (Model("m", 1, 1, 1, goodput_per_s=20.0),), 4, 16.0, 4, 1)
    assert plan(problem).models[0].gpus_needed == 1.5


def test_columns_and_single_streams_are_the_same_instance() -> None:
    problem = instance_of_rates([10.0, 8.0, 3.0])
    assert isinstance(problem.streams, tuple)
    columns = StreamColumns(
        np.array([stream.name for stream in problem.streams]),
        np.array([stream.model for stream in problem.streams]),
        np.array([stream.rate_per_s for stream in problem.streams]),
    )
    by_columns = plan(msgspec.structs.replace(problem, streams=columns))
    assert without_time(by_columns) == without_time(plan(problem))


def test_a_plan_of_many_streams_stays_small_and_knows_their_groups(tmp_path: Path) -> None:
    count = 100_000
    names, models = [f"s{k}" for k in range(count)], [f"m{k % 3}" for k in range(count)]
    problem = instance([0.0] * 3)
    problem = msgspec.structs.replace(problem, streams=StreamColumns(names, models, gpus_needed=np.full(count, 1e-5)))
    solution = plan(problem)
    solution.save(tmp_path / "plan.json")
    assert (tmp_path / "plan.json").stat().st_size < 2_000
    assert solution.streams == ()
    assert sum(model.streams for model in solution.models) == count
    assert Plan.load(tmp_path / "plan.json").group_of("s99999", "m0") == solution.models[0].group


def test_streams_whose_hashes_are_equal_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the step the hash of a stream is that of its name alone."""
    monkeypatch.setattr(instance_module, "HASH_STEP", 0)
    models = (Model("a", 1.0, 1.0, 1.0), Model("b", 1.0, 1.0, 1.0))
    streams = (Stream("s", "a", gpus_needed=0.1), Stream("s", "b", gpus_needed=0.1))
    problem = Instance(streams, models, gpus=2, gpu_memory_gb=8.0, group_gpus_max=2, groups=2)
    assert streams_of(problem).model.tolist() == [0, 1]
    with pytest.raises(ConfigError, match="stream 's' of model 'b' is there twice"):
        streams_of(msgspec.structs.replace(problem, streams=(*streams, streams[1])))
