"""Fixtures of the demo engine's tests."""

from pathlib import Path

import pytest
from tiny_llama import save_tiny_llama


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Use one thread: on a busy machine several threads of tiny models would mostly wait for each other."""
    pytest.importorskip("torch").set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random model."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    save_tiny_llama(folder)
    return folder
