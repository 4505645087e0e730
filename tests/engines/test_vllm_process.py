"""Arguments of a vLLM server, and settings that are refused before it starts."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from llmserve.engines.vllm import (
    Replica,
    check_model,
    check_python,
    goes_by_priority,
    plan,
    processes,
    ranks_of,
    slots_of,
    visible_gpus,
)
from llmserve.errors import ConfigError
from llmserve.runtime.installation import pip_install


def planned(
    model: str = "Qwen/Qwen3-8B", *args: str, slots: int | None = 256, count: int | None = None, gpus: str = ""
) -> list[Replica]:
    return plan(model, python="python3", slots=slots, args=args, count=count, gpus=gpus.split())


def test_a_server_is_started_as_a_module_with_the_users_arguments_at_the_end() -> None:
    (replica,) = planned("Qwen/Qwen3-8B", "--max-model-len", "1024", slots=64)
    assert replica.name == "vllm-0"
    assert " ".join(replica.command(8123)) == (
        "python3 -m vllm.entrypoints.openai.api_server --model Qwen/Qwen3-8B --served-model-name Qwen/Qwen3-8B "
        "--host 127.0.0.1 --port 8123 --max-num-seqs 64 --scheduling-policy priority "
        "--enable-prompt-tokens-details --max-model-len 1024"
    )
    assert replica.environment == {}


def value(replica: Replica, flag: str) -> str:
    words = replica.command(1)
    assert words.count(flag) == 1
    return words[words.index(flag) + 1]


def test_a_local_model_is_served_under_its_folders_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my-model").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path / "my-model")
    for text in (f"{tmp_path}/my-model", f"{tmp_path}/my-model/", "~/my-model", "."):
        assert value(planned(text)[0], "--served-model-name") == "my-model"
    assert value(planned("~/my-model")[0], "--model") == f"{tmp_path}/my-model"


def test_arguments_that_the_user_gives_vllm_are_not_repeated() -> None:
    (replica,) = planned("m", "--served-model-name", "mine", "other", "--max_num_seqs=8", slots=8)
    assert value(replica, "--served-model-name") == "mine"
    assert replica.command(1)[-4:] == ["--served-model-name", "mine", "other", "--max_num_seqs=8"]
    assert "--max-num-seqs" not in replica.command(1)


def test_vllm_goes_by_priority_unless_its_user_says_otherwise() -> None:
    assert value(planned("m")[0], "--scheduling-policy") == "priority"
    assert goes_by_priority(())
    (replica,) = planned("m", "--scheduling_policy=fcfs")
    assert "--scheduling-policy" not in replica.command(1)
    assert not goes_by_priority(("--scheduling_policy=fcfs",))
    assert goes_by_priority(("--scheduling-policy", "priority"))


@pytest.mark.parametrize(
    ("slots", "args", "expected"),
    [
        (None, "", None),
        (32, "", 32),
        (None, "--max-num-seqs 8", 8),
        (None, "--max-num-seqs=8 --enforce-eager", 8),
        (None, "--max_num_seqs 8", 8),
        (8, "--max-num-seqs 8", 8),
    ],
)
def test_slots_are_set_for_llmserve_or_for_vllm(slots: int | None, args: str, expected: int | None) -> None:
    assert slots_of(slots, args.split()) == expected


def test_without_a_setting_vllm_chooses_the_slots() -> None:
    (replica,) = planned("m", slots=None)
    assert "--max-num-seqs" not in replica.command(1)


def test_data_parallel_ranks_have_slots_each() -> None:
    assert [ranks_of(args.split()) for args in ("", "-dp 2", "--data-parallel-size=4 -tp 2")] == [1, 2, 4]


@pytest.mark.parametrize(
    ("slots", "args", "message"),
    [
        (16, "--max-num-seqs 8", "differ: 8 and 16"),
        (None, "--max-num-seqs 8 --max-num-seqs=16", "differ: 8 and 16"),
        (None, "--max-num-seqs many", "not 'many'"),
        (None, "--max-num-seqs 0", "not '0'"),
        (None, "--max-num-seqs", "not ''"),
    ],
)
def test_slots_that_contradict_each_other_are_refused(slots: int | None, args: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        slots_of(slots, args.split())


@pytest.mark.parametrize(
    ("gpus", "count", "args", "parts"),
    [
        ("0 1", None, "", ["0", "1"]),
        ("0 1 2 3", None, "--tensor-parallel-size 2", ["0,1", "2,3"]),
        ("0 1 2 3", None, "-tp=2 -pp 2", ["0,1,2,3"]),
        ("0 1 2 3 4", None, "--tensor_parallel_size=2", ["0,1", "2,3"]),
        ("0 1 2 3", 1, "", ["0"]),
        ("GPU-8a1 GPU-7b2", 2, "", ["GPU-8a1", "GPU-7b2"]),
        ("", None, "", [None]),
        ("", 2, "-tp 2", [None, None]),
    ],
)
def test_each_replica_has_its_own_gpus(gpus: str, count: int | None, args: str, parts: list[str | None]) -> None:
    replicas = planned("m", *args.split(), count=count, gpus=gpus)
    assert [replica.name for replica in replicas] == [f"vllm-{index}" for index in range(len(parts))]
    assert [replica.environment.get("CUDA_VISIBLE_DEVICES") for replica in replicas] == parts


@pytest.mark.parametrize(
    ("gpus", "count", "args", "message"),
    [
        ("0 1", 3, "", "3 of 1 GPUs each need 3 GPUs, there are 2"),
        ("0 1 2 3", 2, "-tp 4", "2 of 4 GPUs each need 8 GPUs, there are 4"),
        ("0 1", None, "-tp 4", "1 of 4 GPUs each need 4 GPUs, there are 2"),
        ("0 1", None, "-tp two", "--tensor-parallel-size must be a whole number of at least 1, not 'two'"),
        ("", None, "--port 8001", "--port is not allowed among vLLM's arguments: llmserve sets --port"),
        ("", None, "--host=0.0.0.0", "--host is not"),
        ("", None, "--model other", "--model is not"),
    ],
)
def test_impossible_gpus_are_refused(gpus: str, count: int | None, args: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned("m", *args.split(), count=count, gpus=gpus)


def test_replicas_get_different_ports_and_logs(tmp_path: Path) -> None:
    replicas = processes(planned(count=3), start_s=1, log_folder=tmp_path)
    assert [process.name for process in replicas] == ["vllm-0", "vllm-1", "vllm-2"]
    assert len({process.port for process in replicas}) == 3


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [("0,1", ["0", "1"]), ("2", ["2"]), ("", []), ("-1", []), ("0,-1,1", ["0"]), ("GPU-8a1, 3", ["GPU-8a1", "3"])],
)
def test_the_environment_lists_the_usable_gpus(visible: str, gpus: list[str]) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": visible}) == gpus


@pytest.mark.parametrize(
    ("script", "gpus"),
    [("printf '0\\n1\\n'", ["0", "1"]), ("echo 'no devices were found'; exit 6", []), ("echo nothing", []), (None, [])],
)
def test_otherwise_the_driver_lists_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, gpus: list[str]
) -> None:
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus({}) == gpus


def test_a_model_is_a_folder_with_a_configuration_or_looks_like_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.gguf").write_text("")
    monkeypatch.chdir(tmp_path)
    for model in ("good", "./good", f"{tmp_path}/good/", "./model.gguf", "gpt2", "Qwen/Qwen3-8B", "s3://bucket/a/b"):
        check_model(model)
    for model in ("/nowhere/model", "./none", "../none", "~/none", "a/b/c", "none/"):
        with pytest.raises(ConfigError, match=f"there is no model folder {model}"):
            check_model(model)
    with pytest.raises(ConfigError, match=r"the model folder empty has no config\.json"):
        check_model("empty")


def test_an_interpreter_without_vllm_is_refused_with_the_way_to_get_it(tmp_path: Path) -> None:
    pythons = {"has-it": "exit 0", "has-it-not": "exit 1"}
    for name, script in pythons.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    check_python(str(tmp_path / "has-it"))
    with pytest.raises(ConfigError, match=f"{re.escape(pip_install('vllm'))}.*--engine-python"):
        check_python(str(tmp_path / "has-it-not"))
    with pytest.raises(ConfigError, match="/nowhere/python cannot be run"):
        check_python("/nowhere/python")


def test_the_interpreter_reports_vllm_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vllm").mkdir()  # a folder of that name is not a package
    with pytest.raises(ConfigError, match="there is no vLLM"):
        check_python(sys.executable)
    (tmp_path / "vllm" / "__init__.py").write_text("raise SystemExit('imported')")
    check_python(sys.executable)
