"""One real vLLM server on the CPU with the demo model, for all tests of this folder."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from front import StartFront
from vllm_on_cpu import ARGS, MODEL, SETTINGS

from llmserve.engines.engine_process import SUPERVISOR, free_port
from llmserve.settings import LiveConfig

SLOTS = 4
START_S = 240


@pytest.fixture
def start_front(start_front: StartFront) -> StartFront:
    """Probe vLLM as rarely as a server does: each probe costs milliseconds there."""
    return partial(start_front, live=LiveConfig())


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The interpreter of an environment with vLLM, which VLLM_PYTHON names; scripts/test creates one."""
    python = os.environ.get("VLLM_PYTHON")
    if not python:
        pytest.skip("VLLM_PYTHON is not set: run ./scripts/test, which installs vLLM in an environment of its own")
    return python


@pytest.fixture(scope="session")
def vllm_url(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server's base URL."""
    port = free_port()
    command = [vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL), "--port", str(port)]
    command += ["--served-model-name", "llmserve-demo", "--host", "127.0.0.1", "--max-num-seqs", str(SLOTS)]
    command += [*ARGS, "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    log = tmp_path_factory.mktemp("vllm") / "log"
    settings = {**os.environ, **SETTINGS, "VLLM_ENABLE_RESPONSES_API_STORE": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen([*SUPERVISOR, *command], stdin=subprocess.PIPE, stdout=out, stderr=out, env=settings)
    try:
        _await_healthy(process, port, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def _await_healthy(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s and process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.25)
    raise AssertionError("vLLM did not start:\n" + log.read_text(errors="replace")[-3000:])
