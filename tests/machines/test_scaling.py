"""Replicas follow what the groups want and what the plan has workers for."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmserve.errors import ConfigError
from llmserve.estimates.engines_wanted import DOWN_AFTER_S
from llmserve.machines.cluster_file import ClusterFile, read_cluster
from llmserve.machines.layout import owners
from llmserve.machines.scaling import Scaling
from llmserve.planning import HerdGroup, Plan

TEXT = """
[[engine]]
name = "m"
kind = "timed"
model = "m"
replicas = 2
replicas_max = 5

[[engine]]
name = "n"
kind = "timed"
model = "n"
"""
LATER_S = DOWN_AFTER_S + 1.0


def cluster(tmp_path: Path, text: str = TEXT) -> ClusterFile:
    (tmp_path / "cluster.toml").write_text(text)
    return read_cluster(tmp_path / "cluster.toml")


def replicas(file: ClusterFile) -> list[int]:
    return [engine.replicas for engine in file.engine]


def test_replicas_grow_at_once_to_their_limit_and_shrink_when_fewer_were_wanted_for_five_minutes(
    tmp_path: Path,
) -> None:
    file, scaling = cluster(tmp_path), Scaling({}, 0.0)
    plan = file.first_plan()
    assert replicas(scaling.scaled(file, plan, 0.0)[0]) == [2, 1]
    scaling.received("all", {"m": 4, "n": 9}, 1.0)
    grown, larger = scaling.scaled(file, plan, 1.0)
    assert replicas(grown) == [4, 1], "n has no replicas_max"
    assert larger.groups[0].workers == ("m-0", "m-1", "n-0", "m-2", "m-3")
    assert set(owners(grown, larger, {})) == {"m-0", "m-1", "m-2", "m-3", "n-0"}
    scaling.received("all", {"m": 99}, 2.0)
    assert replicas(scaling.scaled(file, plan, 2.0)[0]) == [5, 1]
    scaling.received("all", {"m": 1}, 3.0)
    assert replicas(scaling.scaled(file, plan, DOWN_AFTER_S)[0]) == [5, 1]
    scaling.received("all", {"m": 1}, 2.0 + LATER_S)
    assert scaling.scaled(file, plan, 2.0 + LATER_S) == (file, plan)


def test_a_silent_group_and_another_controller_stop_nothing(tmp_path: Path) -> None:
    file, scaling = cluster(tmp_path), Scaling({"m": 4}, 0.0)
    assert replicas(scaling.scaled(file, file.first_plan(), DOWN_AFTER_S - 1.0)[0]) == [4, 1]
    assert replicas(scaling.scaled(file, file.first_plan(), LATER_S)[0]) == [2, 1]
    scaling.received("all", {"m": 3}, LATER_S)
    assert replicas(scaling.scaled(file, file.first_plan(), 9 * LATER_S)[0]) == [3, 1]


def test_a_plan_with_more_workers_starts_replicas(tmp_path: Path) -> None:
    file, scaling = cluster(tmp_path), Scaling({}, 0.0)
    plan = Plan((HerdGroup("a", 3, ("m",)), HerdGroup("b", 1, ("n",))))
    planned, same = scaling.scaled(file, plan, 0.0)
    assert replicas(planned) == [3, 1]
    assert same == plan
    assert sorted(owners(planned, same, {}).values()) == ["a", "a", "a", "b"]


def test_each_group_gets_the_workers_that_it_wants(tmp_path: Path) -> None:
    file, scaling = cluster(tmp_path), Scaling({}, 0.0)
    plan = Plan((HerdGroup("a", 1, ("m",)), HerdGroup("b", 1, (), (("night", "m"),)), HerdGroup("c", 1, ("n",))))
    scaling.received("a", {"m": 2}, 0.0)
    scaling.received("b", {"m": 3}, 0.0)
    grown, larger = scaling.scaled(file, plan, 0.0)
    assert replicas(grown) == [5, 1]
    assert [group.gpus for group in larger.groups] == [2, 3, 1]
    assert sorted(owners(grown, larger, {}).values()) == ["a", "a", "b", "b", "b", "c"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("replicas_max = 5", "replicas_max = 1", "less than replicas"),
        ("replicas_max = 5", 'replicas_max = 5\nworker = "gpu"', "share a worker"),
        ('model = "n"\n', 'model = "n"\n[planning]\ninstance = "i.json"\n', "cannot both be given"),
    ],
)
def test_a_wrong_limit_is_an_error(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cluster(tmp_path, TEXT.replace(old, new))
