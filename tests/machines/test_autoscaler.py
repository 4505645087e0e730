"""Replicas that find no room make Ray's own autoscaler add nodes, here as processes on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from questions.machines.nodes import Node

from llmserve.engines.process import free_port
from llmserve.machines import local_ray

pytestmark = pytest.mark.slow

HEAD = "f" * 51 + "00000"  # the id that Ray's provider of processes gives to its head
HEAD_TYPE = "ray.head.default"
NODES_MAX = 2
EMPTY = {
    **{key: {} for key in ("auth", "docker", "file_mounts")},
    **{key: [] for key in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
    **{f"{name}_commands": [] for name in ("initialization", "setup", "head_setup", "worker_setup")},
    **{f"{name}_start_ray_commands": [] for name in ("head", "worker")},
}
"""What Ray asks of a cluster whose nodes it reaches by SSH."""
FILE = """
name = "scaled"
host = "127.0.0.1"

[[engine]]
name = "chat"
kind = "timed"
model = "chat"
replicas = 1
replicas_max = 2
cpus = 1
args = ["--step-s", "0.05", "--slots", "4"]

[gateway]
port = {port}
"""


def autoscaling(port: int) -> dict[str, Any]:
    """Ray's configuration: a head with one CPU, and at most NODES_MAX further nodes with one CPU each."""
    provider = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
    worker = {"resources": {"CPU": 1, "object_store_memory": local_ray.OBJECTS_BYTES}, "node_config": {}}
    return {
        "cluster_name": "scaled",
        "max_workers": NODES_MAX,
        "provider": {
            "type": "external",
            "module": provider,
            "gcs_address": f"127.0.0.1:{port}",
            "head_node_id": HEAD,
            "launch_multiple": True,
        },
        "available_node_types": {
            HEAD_TYPE: {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
            "worker": {**worker, "min_workers": 0, "max_workers": NODES_MAX},
        },
        "head_node_type": HEAD_TYPE,
        "file_mounts_sync_continuously": False,
        "idle_timeout_minutes": 5,
        "upscaling_speed": 10.0,
        **EMPTY,
    }


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of a Ray whose autoscaler may start nodes."""
    with tempfile.TemporaryDirectory(prefix="llmserve-scaled-", ignore_cleanup_errors=True) as name:
        folder, port = Path(name), free_port()
        (folder / "gcs").mkdir()
        file = folder / "autoscaling.json"
        file.write_text(json.dumps(autoscaling(port)))
        environment = local_ray.environment(folder) | {
            "RAY_FAKE_CLUSTER": "1",
            "RAY_enable_autoscaler_v2": "1",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_CLOUD_INSTANCE_ID": HEAD,
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD,
        }
        words = [*local_ray.head_command(folder, port, 1, 0), "--autoscaling-config", str(file)]
        head = Node(words, folder / "head.log", environment)
        monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
        try:
            head.wait()
            yield f"127.0.0.1:{port}"
        finally:
            head.kill()


def llmserve(*words: str) -> str:
    command = [sys.executable, "-m", "llmserve", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def chat(port: int) -> int:
    body = {"model": "chat", "max_tokens": 40, "messages": [{"role": "user", "content": "hello"}]}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        return int(json.load(response)["usage"]["completion_tokens"])


@contextmanager
def keep_asking(ask: Callable[[], int], clients: int) -> Iterator[list[int]]:
    """The answers so far, of clients that ask again and again until the end of the block."""
    answers: list[int] = []
    over = threading.Event()

    def client() -> None:
        while not over.is_set():
            answers.append(ask())

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_what_requests_want_beyond_the_nodes_makes_ray_add_nodes(address: str, tmp_path: Path) -> None:
    port, file = free_port(), tmp_path / "cluster.toml"
    file.write_text(FILE.replace("{port}", str(port)))
    at = ("--address", address)
    llmserve("up", str(file), *at)  # the engine fills the head: the group and the gateway need a node already

    def rows() -> dict[str, dict[str, Any]]:
        return {row["name"]: row for row in json.loads(llmserve("status", "scaled", "--json", *at))["processes"]}

    assert set(rows()) == {"chat-0", "group-all", "gateway-0"}
    with keep_asking(lambda: chat(port), clients=24) as answers:
        until_s = time.monotonic() + 90
        while rows().get("chat-1", {}).get("state") != "running":
            assert time.monotonic() < until_s, rows()
    assert set(answers) == {40}, "every request was answered in full"
    nodes = {row["node"] for row in rows().values()}
    assert len(nodes) == 1 + NODES_MAX
    llmserve("down", "scaled", *at)
