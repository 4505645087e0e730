"""The real llama.cpp on the CPU with the demo model: a server with four slots for all tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest
from llama_cpp import binary_of, running_llama, write_model

SLOTS = 4

StartLlama = Callable[..., AbstractContextManager[str]]
"""start_llama(*arguments, slots=1, port=None): a context with the server's base URL."""


@pytest.fixture(scope="session")
def start_llama(tmp_path_factory: pytest.TempPathFactory) -> StartLlama:
    python = os.environ.get("LLAMA_PYTHON")
    if not python:
        pytest.skip("LLAMA_PYTHON is not set: run ./scripts/test, which builds llama.cpp in an environment of its own")
    folder: Path = tmp_path_factory.mktemp("llama")
    write_model(python, folder / "demo.gguf")
    return partial(running_llama, binary_of(python), folder / "demo.gguf", folder / "log")


@pytest.fixture(scope="session")
def llama_url(start_llama: StartLlama) -> Iterator[str]:
    """The base URL of a server with SLOTS slots."""
    with start_llama(slots=SLOTS) as url:
        yield url
