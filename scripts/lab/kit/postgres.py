"""A PostgreSQL cluster of one's own in a temporary folder, reached by a socket there; it ends with the block."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

USER = "postgres"


def programs() -> Path | None:
    """The folder of initdb and pg_ctl; None: PostgreSQL is not installed. Debian's folder is not in the PATH."""
    if (found := shutil.which("initdb")) is not None:
        return Path(found).resolve().parent
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return folders[-1].parent if folders else None


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """Start a cluster. Raises RuntimeError when PostgreSQL is not installed."""
    folder = programs()
    if folder is None:
        raise RuntimeError("PostgreSQL is not installed: apt-get install postgresql")
    with tempfile.TemporaryDirectory(prefix="llmserve-pg-") as home:
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            shutil.chown(home, USER)
        running = Cluster(folder, Path(home))
        running.start()
        try:
            yield running
        finally:
            running.stop()


class Cluster:
    """home : has the data and the socket"""

    def __init__(self, folder: Path, home: Path) -> None:
        self._folder, self._home = folder, home
        self._user = USER if os.geteuid() == 0 else None
        self._run("initdb", "--pgdata", str(home / "data"), "--auth", "trust", "--username", USER, "--no-sync")

    def start(self) -> None:
        options = f"-c listen_addresses='' -c unix_socket_directories={self._home} -c max_connections=200"
        data, log = str(self._home / "data"), str(self._home / "log")
        self._run("pg_ctl", "start", "--wait", "--pgdata", data, "--log", log, "--options", options)

    def stop(self, mode: str = "immediate") -> None:
        self._run("pg_ctl", "stop", "--wait", "--pgdata", str(self._home / "data"), "--mode", mode)

    def url(self, database: str) -> str:
        """The URL of a new, empty database."""
        self._run("createdb", "--host", str(self._home), "--username", USER, database)
        return f"postgresql://{USER}@/{database}?host={self._home}"

    def _run(self, program: str, *words: str) -> None:
        command = [str(self._folder / program), *words]
        done = subprocess.run(
            command, cwd=self._home, user=self._user, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        if done.returncode != 0:
            raise RuntimeError(f"{program} failed: {done.stderr.strip()}")
