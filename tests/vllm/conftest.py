"""One real vLLM server on the CPU with the demo model, for all tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

import pytest
from front import StartFront
from vllm_on_cpu import running_vllm

from llmserve.settings.tree import LiveConfig

SLOTS = 4


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
    log = tmp_path_factory.mktemp("vllm") / "log"
    args = ["--served-model-name", "llmserve-demo", "--max-num-seqs", str(SLOTS)]
    with running_vllm(vllm_python, log, *args, "--enable-auto-tool-choice", "--tool-call-parser", "hermes") as url:
        yield url
