"""A Ray of the cluster's own on this machine, for `llmserve up` without --address. It outlives the command.

Its head keeps its tables in RocksDB, so that a head that is started again knows its actors.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from llmserve.engines.process import free_port
from llmserve.errors import NoAnswer

START_S, STOP_S = 120.0, 10.0
LOST_AFTER = {  # a node that refuses three connections in 1.5 s is lost, and one that is silent for half a minute
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "3",
}
NICENESS = {"RAY_worker_niceness": "0"}  # Ray's own default, 15, would leave servers behind whatever else runs
OBJECTS_BYTES = 100 << 20  # Ray's object store, which llmserve does not use
READY = "Ray runtime started"
ADDRESS = re.compile(READY + r".*?--address='?([^'\s]+)'?\s", re.DOTALL)  # a head prints it in several pieces


class LocalRay(msgspec.Struct, frozen=True):
    """pid : of the process group of `ray start`"""

    address: str
    pid: int
    folder: str


def environment(folder: Path) -> dict[str, str]:
    """The variables of a head whose tables are kept in the folder. Ray's own names; the user's values win."""
    store = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(folder / "gcs")}
    return {**LOST_AFTER, **NICENESS, **store, **os.environ}


def head_command(folder: Path, port: int, cpus: int | None, gpus: int | None) -> list[str]:
    words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port", str(port)]
    words += ["--temp-dir", str(folder), "--object-store-memory", str(OBJECTS_BYTES), "--disable-usage-stats"]
    words += ["--include-dashboard", "false", "--include-log-monitor", "false", "--dashboard-agent-listen-port", "0"]
    words += ["--num-cpus", str(cpus)] if cpus is not None else []
    return words + (["--num-gpus", str(gpus)] if gpus is not None else [])


def running(state: Path) -> LocalRay | None:
    """The Ray that was started before and still runs. state : folder of the cluster's files"""
    try:
        ray = msgspec.json.decode((state / "ray.json").read_bytes(), type=LocalRay)
        os.killpg(ray.pid, 0)
    except (OSError, msgspec.MsgspecError):
        return None
    return ray


def start(state: Path, cpus: int | None, gpus: int | None) -> LocalRay:
    """Start Ray, and wait until it answers. Raises NoAnswer."""
    folder = Path(tempfile.mkdtemp(prefix="llmserve-ray-"))  # short: Ray's sockets are in it
    (folder / "gcs").mkdir()
    port = free_port()
    output = folder / "start.log"
    with output.open("wb") as file:
        process = subprocess.Popen(
            head_command(folder, port, cpus, gpus),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=environment(folder),
            start_new_session=True,
        )
    try:
        ray = LocalRay(_address(process, output), process.pid, str(folder))
        (state / "ray.json").write_bytes(msgspec.json.encode(ray))
    except BaseException:  # a Ray that is in no file would never be stopped
        _end(process.pid)
        raise
    return ray


def _address(process: subprocess.Popen[bytes], output: Path) -> str:
    """Wait until Ray has started. Raises NoAnswer."""
    until_s = time.monotonic() + START_S
    while (started := ADDRESS.search(words := output.read_text(errors="replace"))) is None:
        if process.poll() is not None or time.monotonic() > until_s:
            raise NoAnswer(f"Ray did not start; its logs are in {output.parent}:\n{words[-2000:]}")
        time.sleep(0.05)
    return started[1]


def stop(state: Path, ray: LocalRay) -> None:
    """Stop a Ray that `start` has started, and nothing else."""
    _end(ray.pid)
    (state / "ray.json").unlink(missing_ok=True)
    shutil.rmtree(ray.folder, ignore_errors=True)


def _end(group: int) -> None:
    until_s = time.monotonic() + STOP_S
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
            while time.monotonic() < until_s:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(group, os.WNOHANG)
                os.killpg(group, 0)
                time.sleep(0.05)
