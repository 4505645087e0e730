"""`llmserve up` with the real vLLM as its engine: Ray starts, keeps and restarts vLLM, and a gateway answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from vllm_on_cpu import ARGS, MODEL, SETTINGS

from llmserve.engines.process import free_port

pytestmark = pytest.mark.vllm

START_S = 240.0
COUNT: Any = [{"role": "user", "content": "Count from 3 to 9."}]
ANSWER = "3, 4, 5, 6, 7, 8, 9"
Llmserve = Callable[..., str]


@pytest.fixture
def llmserve(tmp_path: Path) -> Iterator[Llmserve]:
    environment = {**os.environ, **SETTINGS, "XDG_STATE_HOME": str(tmp_path)}
    environment.pop("RAY_ADDRESS", None)

    def run(*words: str, check: bool = True) -> str:
        command = [sys.executable, "-m", "llmserve", *words]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=2 * START_S, check=False
        )
        assert done.returncode == 0 or not check, done.stdout + done.stderr
        return done.stdout

    yield run
    run("down", "real", "--drain-s", "1", check=False)


def test_vllm_under_ray_answers_through_a_gateway_and_comes_back_when_killed(
    llmserve: Llmserve, vllm_python: str, tmp_path: Path
) -> None:
    port, file = free_port(), tmp_path / "cluster.toml"
    file.write_text(f"""
        name = "real"
        [[engine]]
        name = "chat"
        kind = "vllm"
        model = "{MODEL}"
        python = "{vllm_python}"
        args = {json.dumps([*ARGS, "--served-model-name", str(MODEL), "--max-num-seqs", "4"])}
        [gateway]
        port = {port}
    """)
    assert f"http://127.0.0.1:{port}/v1" in llmserve("up", str(file), "--num-cpus", "2")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=START_S)
    until_s = time.monotonic() + START_S
    while not (models := [model.id for model in client.models.list()]):  # the gateway's next probe hears of the model
        assert time.monotonic() < until_s
        time.sleep(0.2)
    exact: Any = {"model": models[0], "messages": COUNT, "temperature": 0, "max_tokens": 80}
    assert client.chat.completions.create(**exact).choices[0].message.content == ANSWER

    def engine() -> dict[str, Any]:
        (row,) = [
            row for row in json.loads(llmserve("status", "real", "--json"))["processes"] if row["kind"] == "engine"
        ]
        return dict(row)

    before = engine()
    vllm = psutil.Process(before["pid"])
    below = [vllm, *vllm.children(recursive=True)]
    vllm.kill()
    assert psutil.wait_procs(below, timeout=START_S)[1] == [], "a process of the killed engine could still answer"
    assert client.chat.completions.create(**exact).choices[0].message.content == ANSWER, "it waits for the restart"
    with client.chat.completions.create(**exact, stream=True) as events:
        assert "".join([event.choices[0].delta.content or "" for event in events if event.choices]) == ANSWER
    while (after := engine())["state"] != "running":
        assert time.monotonic() < until_s
    assert after["restarts"] == before["restarts"] + 1
    llmserve("down", "real")
    with pytest.raises(openai.APIConnectionError):
        client.models.list()
