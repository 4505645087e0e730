"""Instances and plans as files, and errors for invalid ones."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from instances import instance, instance_of_rates, table_5, without_time

from llmserve.errors import ConfigError
from llmserve.planning import HerdGroup, Instance, Model, Plan, StreamColumns, plan


def test_an_instance_and_its_plan_are_loaded_as_they_were_saved(tmp_path: Path) -> None:
    problem = instance_of_rates([10.0, 8.0])
    problem.save(tmp_path / "instance.json")
    assert Instance.load(tmp_path / "instance.json") == problem
    solution = plan(problem)
    solution.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == solution


def test_columns_of_arrays_are_saved_as_lists(tmp_path: Path) -> None:
    problem = table_5(5, seed=0, groups=2)
    problem.save(tmp_path / "instance.json")
    loaded = Instance.load(tmp_path / "instance.json")
    assert without_time(plan(loaded)) == without_time(plan(problem))


def test_a_plan_written_by_hand_needs_only_groups(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    groups = [
        {"name": "a", "gpus": 1, "models": ["m", "n"]},
        {"name": "b", "gpus": 2, "models": [], "streams": [["x", "n"]]},
    ]
    path.write_text(json.dumps({"groups": groups}))
    loaded = Plan.load(path)
    assert loaded.groups[1] == HerdGroup("b", 2, (), (("x", "n"),))
    assert [loaded.group_of(*pair) for pair in (("x", "n"), ("y", "n"), ("x", "m"), ("x", "o"))] == [
        "b",
        "a",
        "a",
        None,
    ]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("gpu", 4, "unknown key 'gpu'; did you mean gpus?"),
        ("streams.0.rate_per_sec", 4, "streams[0]: unknown key 'rate_per_sec'; did you mean rate_per_s?"),
        ("models.1.memory", 4, "models[1]: unknown key 'memory'; did you mean memory_gb?"),
        ("streams.0.rate_per_s", -1, "streams[0].rate_per_s: expected `float` >= 0.0"),
        ("streams.0.slo_s", 0, "streams[0].slo_s: expected `float` > 0.0"),
        ("models.0.batch_size_max", 0, "models[0].batch_size_max: expected `int` >= 1"),
        ("gpus", "many", "gpus: expected `int`, got `str`"),
        ("affinity_max", 0.5, "affinity_max: expected `float` >= 1.0"),
        ("streams.0.model", "m7", "stream 's0': unknown model 'm7'; did you mean m"),
        ("streams.1", {"name": "s0", "model": "m0", "gpus_needed": 1}, "stream 's0' of model 'm0' is there twice"),
        ("models.1.name", "m0", "model 'm0' is there twice"),
        ("models", [], "models: at least one model is needed"),
        ("models.1.memory_gb", 17, "model 'm1' takes 17 GB, and a GPU has 16 GB"),
        ("streams.0.gpus_needed", 1, "stream 's0': gpus_needed cannot be given with rate_per_s"),
        ("streams.0.rate_per_s", None, "stream 's0': either rate_per_s or gpus_needed is needed"),
        ("streams.0.slo_s", None, "stream 's0': rate_per_s needs slo_s, because its model has no goodput_per_s"),
        ("streams.0.slo_s", 0.0105, "no batch of model 'm0' meets its SLO of 0.0105 s; one request takes 0.011 s"),
        ("streams", {"name": ["a"], "model": []}, "streams: there are 1 names and 0 models"),
        ("streams", {"name": ["a"], "model": ["m0"], "rate_per_s": []}, "there are 1 names and 0 of rate_per_s"),
        ("streams", {"name": ["a"], "model": ["m0"], "rate": [1]}, "unknown key 'rate'; did you mean rate_per_s?"),
    ],
)  # fmt: skip
def test_an_invalid_instance_is_refused_by_name(tmp_path: Path, path: str, value: object, message: str) -> None:
    document = {
        "streams": [{"name": f"s{k}", "model": f"m{k}", "rate_per_s": 5.0, "slo_s": 0.1} for k in range(2)],
        "models": [{"name": f"m{k}", "memory_gb": 4.0, "alpha_ms": 1.0, "beta_ms": 10.0} for k in range(2)],
        "gpus": 4, "gpu_memory_gb": 16.0, "group_gpus_max": 2, "groups": 2,
    }  # fmt: skip
    place: object = document
    *outer, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in outer:
        place = place[part]  # type: ignore[index]
    place[last] = value  # type: ignore[index]
    file = tmp_path / "instance.json"
    file.write_text(json.dumps(document))
    with pytest.raises(ConfigError) as caught:
        plan(Instance.load(file))
    assert message in str(caught.value)


def test_numbers_are_checked_in_instances_built_in_python_too() -> None:
    for changes, message in (
        ({"gpus": 0}, "gpus must be a finite number of at least 1, not 0"),
        ({"gpu_memory_gb": math.nan}, "gpu_memory_gb must be a finite number above 0, not nan"),
        ({"streams": StreamColumns(["s"], ["m0"], gpus_needed=np.array([-1.0]))}, "'s': gpus_needed must be a finite"),
        ({"streams": StreamColumns(["s"], ["m0"], [1.0], np.array([0.0]))}, "slo_s must be a finite number above 0"),
        ({"models": (Model("m0", 1.0, 0.0, 1.0),)}, "model 'm0': alpha_ms must be a finite number above 0, not 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            plan(msgspec.structs.replace(instance([0.1]), **changes))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ('{"groups": [], "grups": 1}', "unknown key 'grups'; did you mean groups?"),
        ('{"groups": [{"name": "a", "gpus": 1, "models": [], "model": 1}]}', "groups[0]: unknown key 'model'"),
        ('{"groups": [{"name": "a", "gpus": 0, "models": []}]}', "groups[0].gpus: expected `int` >= 1"),
        ('{"groups": [{"name": "a", "gpus": 1, "models": ["m", "m"]}]}', "model 'm' is there twice"),
        ('{"groups": [], "version": 2}', "version: invalid enum value 2"),
    ],
)
def test_an_unusable_plan_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        Plan.load(path)
    assert message in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the plan .*nowhere\.json: No such file"):
        Plan.load(tmp_path / "nowhere.json")
    with pytest.raises(ConfigError, match=r"cannot write the plan .*: No such file"):
        Plan(()).save(tmp_path / "no" / "plan.json")


def test_a_file_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b'{"groups": [{"name": "\xff", "gpus": 1, "models": []}]}')
    with pytest.raises(ConfigError, match="is not JSON: 'utf-8' codec"):
        Plan.load(path)
