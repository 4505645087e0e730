"""Which group has which workers, on the way from one plan to another."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmserve.errors import ConfigError
from llmserve.machines.cluster_file import ClusterFile, read_cluster
from llmserve.machines.layout import Moves, gateways_plan, owners
from llmserve.machines.processes import Secrets, engines_of, gateway_process, group_process, workers_of
from llmserve.planning import HerdGroup, Plan

SECRETS = Secrets("sk-d", "sk-e", "sk-a")
TEXT = """
[[engine]]
name = "m"
kind = "timed"
model = "m"
replicas = 3

[[engine]]
name = "n"
kind = "timed"
model = "n"
"""


def cluster(tmp_path: Path, text: str = TEXT) -> ClusterFile:
    (tmp_path / "cluster.toml").write_text(text)
    return read_cluster(tmp_path / "cluster.toml")


def test_without_groups_all_engines_are_one_group(tmp_path: Path) -> None:
    file = cluster(tmp_path)
    (group,) = file.first_plan().groups
    assert set(group.workers) == {"m-0", "m-1", "m-2", "n-0"}
    assert set(owners(file, file.first_plan(), {}).values()) == {"all"}


def test_the_example_is_a_cluster() -> None:
    file = read_cluster(Path(__file__).parents[2] / "deploy" / "cluster.toml")
    assert [worker.gpus for worker in workers_of(file)] == [1, 1]
    assert all("--max-model-len" in process.words for process in engines_of(file, SECRETS).values())


def test_workers_follow_the_models_of_a_plan_and_stay_where_they_can(tmp_path: Path) -> None:
    file = cluster(tmp_path)
    plan = Plan((HerdGroup("a", 1, ("m",)), HerdGroup("b", 2, ("m",)), HerdGroup("c", 1, ("n",))))
    first = owners(file, plan, {})
    assert sorted(first.values()) == ["a", "b", "b", "c"]
    grown = Plan((HerdGroup("a", 2, ("m",)), HerdGroup("b", 1, ("m",)), HerdGroup("c", 1, ("n",))))
    second = owners(file, grown, first)
    assert sum(first[worker] != second[worker] for worker in first) == 1


def test_a_worker_that_changes_its_group_is_drained_first() -> None:
    moves = Moves({"w": "a"})
    assert moves.follow({"w": "b"}, {"a": set(), "b": set()}) == {}, "group a still has it"
    assert moves.follow({"w": "b"}, {"a": set(), "b": set()}) == {}
    assert moves.follow({"w": "b"}, {"a": {"w"}, "b": set()}) == {"w": "b"}


def test_a_group_without_a_server_has_nothing_to_drain() -> None:
    assert Moves({"w": "a"}).follow({"w": "b"}, {"b": set()}) == {"w": "b"}


def test_a_worker_that_no_group_needs_is_given_back() -> None:
    assert Moves({"w": "a"}).follow({}, {"a": {"w"}}) == {}


def test_engines_of_one_worker_share_its_gpus(tmp_path: Path) -> None:
    text = TEXT.replace('model = "m"\n', 'model = "m"\nworker = "gpu"\ngpus = 1\n')
    text = text.replace('model = "n"\n', 'model = "n"\nworker = "gpu"\nreplicas = 3\ngpus = 1\n')
    file = cluster(tmp_path, text)
    assert [(worker.name, worker.gpus) for worker in workers_of(file)] == [("gpu-0", 1), ("gpu-1", 1), ("gpu-2", 1)]
    assert {process.gpus for process in engines_of(file, SECRETS).values()} == {0.5}


def test_a_group_gets_its_engines_and_a_gateway_its_groups(tmp_path: Path) -> None:
    file = cluster(tmp_path)
    group = group_process(file, "a", {"m-0": ("m-0", "http://h:1")}, SECRETS)
    assert 'engine = ["m-0=http://h:1"]' in group.files["serve.toml"]
    assert group.near == ("m-0",)
    plan = Plan((HerdGroup("a", 1, ("m",), streams=(("chat", "n"),), workers=("m-0",)),))
    gateway = gateway_process(file, 1, 2, {"a": "http://h:2"}, "{}", None, SECRETS)
    assert 'engine = ["a=http://h:2"]' in gateway.files["serve.toml"]
    assert "limits_part = 0.5" in gateway.files["serve.toml"]
    assert gateway.port == 8001
    assert gateways_plan(plan, {"a"}).groups == (HerdGroup("a", 1, ("m",), (("chat", "n"),), ("a",)),)
    assert not any("sk-" in word for process in (group, gateway) for word in process.words), "no key in a command line"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "missing required field `engine`"),
        ('[[engine]]\nname = "m"\nkind = "vllm"', "engine m: needs a model"),
        ('[[engine]]\nname = "m"\nkind = "magic"', "Invalid enum value 'magic'"),
        ('[[engine]]\nname = "M x"\nkind = "embedded"', "lower-case letters"),
        (TEXT + '\n[[group]]\nname = "a"\ngpus = 1\nmodels = ["m"]\nworkers = ["x"]', "no engine is on a worker x"),
        (TEXT + "\n[serve.scheduling]\nbatch_sise = 2", "batch_sise"),
        (TEXT + "\n[serve.magic]\na = 2", "no section"),
        (TEXT + '\n[serve.engines]\nengine = ["http://h"]', "follow from the plan"),
        (TEXT + "\n[gateways]\ncount = 2", "unknown field `gateways`"),
    ],
)
def test_a_wrong_file_is_one_clear_error(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.toml: ") as error:
        cluster(tmp_path, text)
    assert message in str(error.value)
