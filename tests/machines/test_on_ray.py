"""`llmserve up`, `status` and `down` with a real Ray on this machine, as a user calls them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmserve.engines.process import free_port

pytestmark = pytest.mark.slow

FILE = """
name = "test"

[[engine]]
name = "chat"
kind = "timed"
model = "chat"
replicas = 2
args = ["--step-s", "0.005"]

[gateway]
port = {port}
"""
Llmserve = Callable[..., str]


@pytest.fixture
def llmserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Llmserve]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def run(*words: str) -> str:
        command = [sys.executable, "-m", "llmserve", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    yield run
    subprocess.run([sys.executable, "-m", "llmserve", "down", "test"], capture_output=True, timeout=240, check=False)


def chat(port: int, **fields: Any) -> dict[str, Any]:
    body = {"model": "chat", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}], **fields}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def rows(llmserve: Llmserve) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(llmserve("status", "test", "--json"))["processes"]}


def test_up_serves_what_is_killed_comes_back_and_down_leaves_nothing(llmserve: Llmserve, tmp_path: Path) -> None:
    port = free_port()
    file = tmp_path / "cluster.toml"
    file.write_text(FILE.replace("{port}", str(port)))
    assert f"http://127.0.0.1:{port}/v1" in llmserve("up", str(file), "--num-cpus", "2")
    assert chat(port)["usage"]["completion_tokens"] == 4
    before = rows(llmserve)
    assert {name: row["state"] for name, row in before.items()} == dict.fromkeys(
        ("chat-0", "chat-1", "group-all", "gateway-0"), "running"
    )

    keeper = psutil.Process(before["group-all"]["pid"]).ppid()
    os.kill(keeper, signal.SIGKILL)
    assert chat(port)["usage"]["completion_tokens"] == 4, "the request waits for its group"
    until_s = time.monotonic() + 60
    while (after := rows(llmserve))["group-all"].get("pid") == before["group-all"]["pid"]:
        assert time.monotonic() < until_s
    assert after["chat-0"]["pid"] == before["chat-0"]["pid"], "engines go on, and are taken again"
    assert "group-all" in llmserve("status", "test")

    engines = [psutil.Process(after[name]["pid"]).parent() for name in ("chat-0", "chat-1")]
    actors = engines[0].parent().children()
    kept = [
        actor for actor in actors if any(name in str(actor.cmdline()) for name in ("ControllerActor", "StoreActor"))
    ]
    assert len(kept) == 2
    for actor in (*kept, *engines):
        actor.kill()
    assert chat(port)["usage"]["completion_tokens"] == 4, "the controller goes on, although nobody asks it"

    file.write_text(FILE.replace("{port}", str(port)).replace("replicas = 2", "replicas = 1"))
    llmserve("up", str(file))
    until_s = time.monotonic() + 60
    while "chat-1" in rows(llmserve):
        assert time.monotonic() < until_s
    assert chat(port)["usage"]["completion_tokens"] == 4

    processes = [psutil.Process(row["pid"]) for row in rows(llmserve).values()]
    llmserve("down", "test")
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)
    ray = [process for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(process.info["cmdline"])]
    assert ray == []


def test_a_commands_output_is_free_of_rays_messages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ray._private.worker import print_to_stdstream

    from llmserve.machines import on_ray

    message = {"lines": ["There are tasks with infeasible resource requests"], "pid": "raylet", "is_err": False}
    monkeypatch.setattr(on_ray, "connect", lambda address, cluster: None)
    with on_ray.connected("127.0.0.1:6379", "test"):
        print_to_stdstream(message, ignore_prefix=False)
    print("the report")
    output = capsys.readouterr()
    assert output.out == "the report\n"
    assert "infeasible" in output.err
