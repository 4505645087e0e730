"""A real engine's server as a child process of a test."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from llmserve.engines.process import SUPERVISOR, free_port

START_S = 240


@contextmanager
def running(
    command: Callable[[int], Sequence[str]],
    log: Path,
    settings: Mapping[str, str] | None = None,
    port: int | None = None,
) -> Iterator[str]:
    """Run command(port) until its end or the context's. Yields the base URL once /health answers.

    log : the file for the server's output.  settings : further environment variables.  port : None: a free one
    """
    port = free_port() if port is None else port
    words = [*SUPERVISOR, *command(port)]
    with log.open("ab") as out:
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=out, stderr=out, env={**os.environ, **(settings or {})}
        )
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
            time.sleep(0.05)
    raise AssertionError("the engine did not start:\n" + log.read_text(errors="replace")[-3000:])
