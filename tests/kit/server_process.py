"""`llmserve serve` in its own process, as a user starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

START_S = 300.0


class Server:
    """A `llmserve serve` child and its output.

    environment : additional variables.  program : the llmserve of another installation.
    """

    def __init__(
        self,
        *flags: str,
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = (sys.executable, "-m", "llmserve"),
    ) -> None:
        self.process = subprocess.Popen(
            [*program, "serve", "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self.said: list[str] = []
        self.url = self._await_ready()
        self.children = psutil.Process(self.process.pid).children(recursive=True)

    def _await_ready(self) -> str:
        """Raises AssertionError if the process ends, or is not ready in time."""
        assert self.process.stdout is not None
        alarm = threading.Timer(START_S, self.process.kill)
        alarm.start()
        try:
            for line in self.process.stdout:
                self.said.append(line)
                if line.startswith("llmserve is ready: "):
                    return line.split()[3].removesuffix("/v1")
        finally:
            alarm.cancel()
        raise AssertionError("the server was not ready, or ended before:\n" + "".join(self.said))

    def chat(self, content: str, **fields: Any) -> tuple[dict[str, Any], Any]:
        body = {"model": "llmserve-demo", "messages": [{"role": "user", "content": content}], **fields}
        request = urllib.request.Request(f"{self.url}/v1/chat/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response), response.headers

    def chat_when_up(self, content: str, within_s: float, **fields: Any) -> dict[str, Any]:
        """Ask again while no engine is up."""
        until_s = time.monotonic() + within_s
        while True:
            try:
                return self.chat(content, **fields)[0]
            except urllib.error.HTTPError as error:
                if error.code != 503 or time.monotonic() > until_s:
                    raise
                time.sleep(0.2)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=40)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def all_ended(processes: list[psutil.Process], within_s: float = 10.0) -> bool:
    """Whether the processes have ended, including unreaped zombies."""
    until_s = time.monotonic() + within_s
    while any(_is_alive(process) for process in processes) and time.monotonic() < until_s:
        time.sleep(0.02)
    return not any(_is_alive(process) for process in processes)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def failed_start(*flags: str, within_s: float = 120.0, **environment: str) -> tuple[int, str]:
    """Exit status and standard error of a `llmserve serve` that cannot start."""
    done = subprocess.run(
        [sys.executable, "-m", "llmserve", "serve", *flags],
        capture_output=True,
        text=True,
        timeout=within_s,
        env={**os.environ, **environment},
    )
    return done.returncode, done.stderr
