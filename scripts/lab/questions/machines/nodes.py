"""Several Ray nodes on one machine: a head that can be killed and started again, and worker nodes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from llmserve.engines.process import free_port
from llmserve.machines import local_ray

START_S = 120.0


class Node:
    """`ray start --block` and everything below it."""

    def __init__(self, words: list[str], output: Path, environment: dict[str, str]) -> None:
        self.words, self.output, self.environment = words, output, environment
        self.process = self._spawn()

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self.output.open("wb") as file:
            return subprocess.Popen(
                self.words,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=self.environment,
                start_new_session=True,
            )

    def wait(self) -> None:
        until_s = time.monotonic() + START_S
        while local_ray.READY not in self.output.read_text(errors="replace"):
            if self.process.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"a node did not start:\n{self.output.read_text()[-2000:]}")
            time.sleep(0.05)

    def start_again(self) -> None:
        self.process = self._spawn()
        self.wait()

    def kill(self) -> frozenset[int]:
        """kill -9 of the node's processes, all at once, as when its machine loses power. Returns their ids."""
        below: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.process.pid)
            below = [own, *own.children(recursive=True)]
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self.process.wait()
        return frozenset(process.pid for process in below)


class Nodes:
    """A head without resources, and worker nodes of `cpus` each."""

    def __init__(self, folder: Path, workers: int, cpus: int) -> None:
        self.folder = folder
        self._port, self._cpus = free_port(), cpus
        (folder / "gcs").mkdir()
        self.environment = local_ray.environment(folder)
        self.head = Node(local_ray.head_command(folder, self._port, 0, 0), folder / "head.log", self.environment)
        self.head.wait()
        self.address = f"{node_address()}:{self._port}"
        self.workers: list[Node] = []
        try:
            for number in range(workers):  # one after the other: several at once would start too slowly here
                self.workers.append(self._worker(number))
                self.workers[-1].wait()
        except RuntimeError:
            self.close()
            raise

    def _worker(self, number: int) -> Node:
        words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--address", self.address, "--block"]
        words += ["--num-cpus", str(self._cpus), "--num-gpus", "0", "--disable-usage-stats"]
        words += ["--object-store-memory", str(local_ray.OBJECTS_BYTES), "--include-log-monitor", "false"]
        words += ["--dashboard-agent-listen-port", "0"]
        return Node(words, self.folder / f"worker-{number}.log", self.environment)

    def close(self) -> None:
        for node in (*self.workers, self.head):
            node.kill()


def node_address() -> str:
    """The address that Ray gives to this machine's nodes."""
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())


@contextlib.contextmanager
def nodes(workers: int, cpus: int, logs: Path | None = None) -> Iterator[Nodes]:
    """logs : folder to which the logs of Ray and of the processes are copied at the end; None: they are lost"""
    folder = Path(tempfile.mkdtemp(prefix="llmserve-lab-"))
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    cluster = Nodes(folder, workers, cpus)
    try:
        yield cluster
    finally:
        cluster.close()
        if logs is not None:
            shutil.copytree(folder / "session_latest" / "logs", logs / "ray", dirs_exist_ok=True)
            shutil.copytree(folder / "state", logs / "processes", dirs_exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
