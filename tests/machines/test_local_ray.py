"""A Ray that `llmserve up` starts on this machine, played by a small program."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmserve.errors import NoAnswer
from llmserve.machines import local_ray

Head = Callable[[str], None]


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Head:
    """Sets the program that is started in place of Ray's head."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def becomes(program: str) -> None:
        words = [sys.executable, "-c", f"import sys, time\n{program}"]
        monkeypatch.setattr(local_ray, "head_command", lambda folder, port, cpus, gpus: words)

    return becomes


def test_a_head_that_prints_its_address_in_pieces_has_started_when_the_address_is_whole(
    head: Head, tmp_path: Path
) -> None:
    head("""
for piece in ("Ray runtime started.\\n", "Next steps\\n  ray start --address='10.0.0.1", ":63791'\\n", "Done.\\n"):
    print(piece, end="", flush=True)
    time.sleep(0.2)
time.sleep(60)
""")
    ray = local_ray.start(tmp_path, None, None)
    try:
        assert ray.address == "10.0.0.1:63791"
        assert local_ray.running(tmp_path) == ray
    finally:
        local_ray.stop(tmp_path, ray)
    assert local_ray.running(tmp_path) is None


def test_a_head_that_ends_is_told_with_its_last_words(head: Head, tmp_path: Path) -> None:
    head("sys.exit('the port 63791 is taken')")
    with pytest.raises(NoAnswer, match="the port 63791 is taken"):
        local_ray.start(tmp_path, None, None)
    assert local_ray.running(tmp_path) is None


def test_a_start_that_is_interrupted_leaves_no_head(
    head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Watched(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

    def interrupted(process: object, output: Path) -> str:
        raise KeyboardInterrupt

    head("time.sleep(60)")
    monkeypatch.setattr(subprocess, "Popen", Watched)
    monkeypatch.setattr(local_ray, "_address", interrupted)
    with pytest.raises(KeyboardInterrupt):
        local_ray.start(tmp_path, None, None)
    (process,) = started
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
