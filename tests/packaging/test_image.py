"""The image, built by scripts/image and run as a cluster runs it: user 10001, a read-only root, SIGTERM."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
import pytest
import yaml
from server_process import Server

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
USER = 10001
# The root of the image, read-only but for what a runtime mounts; then the command as the image's user. `exec` all the
# way: a signal to the process that was started reaches the command.
RUN = """
set -e
mount --bind "$PLACE" "$PLACE"
mount --rbind /dev "$PLACE/dev"
mount -t proc proc "$PLACE/proc"
mount -t tmpfs -o mode=1777 tmpfs "$PLACE/tmp"
mount --bind "$STATE" "$PLACE/var/lib/llmserve"
mount -o remount,bind,ro "$PLACE"
exec chroot --userspec="$WHO" "$PLACE" /usr/bin/env -i -C "$FOLDER" "$@"
"""


@dataclass(frozen=True)
class Image:
    """place : its root, mounted.  settings : its configuration.  state : a folder for /var/lib/llmserve
    unpacked_mb, packed_mb : what scripts/image tells of its size
    """

    place: Path
    settings: dict[str, Any]
    state: Path
    unpacked_mb: int
    packed_mb: int

    def command(self, *words: str, user: str = "") -> list[str]:
        """What runs these words in the image. user : instead of the image's"""
        variables = {
            "PLACE": str(self.place),
            "STATE": str(self.state),
            "WHO": user or self.settings["User"],
            "FOLDER": self.settings["WorkingDir"],
        }
        environment = [f"{name}={value}" for name, value in variables.items()]
        inside = [*self.settings["Env"], *words]
        return ["env", *environment, "unshare", "--mount", "--propagation", "private", "sh", "-c", RUN, "sh", *inside]

    def run(self, *words: str, user: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(*words, user=user), capture_output=True, text=True, timeout=120)

    def serve(self, *flags: str) -> Server:
        program, command, *words = self.settings["Entrypoint"]
        assert command == "serve"
        own = ("--host", "127.0.0.1", "--port", "0")  # the host's network, where other tests have ports
        return Server(*words, *own, *flags, program=self.command(program))


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip("only root on Debian builds the image")
    name = f"localhost/llmserve-test:{os.getpid()}"
    done = subprocess.run([str(ROOT / "scripts" / "image"), name], capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.fullmatch(rf"{name}: (\d+) MB unpacked, (\d+) MB packed", done.stdout.splitlines()[-1])
    assert told is not None, done.stdout
    container = buildah("from", name)
    state = tmp_path_factory.mktemp("state")
    os.chown(state, USER, USER)
    try:
        settings = json.loads(buildah("inspect", "--type", "image", name))["Docker"]["config"]
        yield Image(Path(buildah("mount", container)), settings, state, int(told[1]), int(told[2]))
    finally:
        buildah("rm", container)
        buildah("rmi", name)


def buildah(*words: str) -> str:
    done = subprocess.run(["buildah", *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@contextmanager
def timed_engine(image: Image, *flags: str) -> Iterator[str]:
    """The URL of a timed engine, run from the image itself."""
    words = ("python", "-m", "llmserve.engines.timed", *flags, "--host", "127.0.0.1", "--port", "0")
    process = subprocess.Popen(image.command(*words), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.communicate(timeout=30)


DEMO = ("--model", "llmserve-demo")


def test_the_image_is_small(image: Image) -> None:
    assert image.packed_mb < 250


def test_the_image_serves_as_its_user_on_a_read_only_root_and_learns(image: Image) -> None:
    refused = image.run("touch", "/opt/llmserve/new", user="0:0")
    assert "Read-only file system" in refused.stderr
    with (
        timed_engine(image, *DEMO, "--step-s", "0.001") as engine,
        closing(image.serve("--engine", engine, "--anonymous", "--state", "/var/lib/llmserve/learnt")) as server,
    ):
        assert psutil.Process(server.process.pid).uids().real == USER
        for _ in range(3):
            answer, headers = server.chat("Count from 1 to 20.", max_tokens=5)
        assert answer["usage"]["completion_tokens"] == 5
        assert float(headers["x-llmserve-predicted-tokens"]) > 0
        port = server.url.rpartition(":")[2]
        check = image.settings["Healthcheck"]["Test"]
        assert check[0] == "CMD"
        assert image.run(*[word.replace("8000", port) for word in check[1:]]).returncode == 0
        assert server.stop(signal.SIGTERM) == 0
        assert (image.state / "learnt").exists(), "what was learnt outlives the container"
    assert image.run(*[word.replace("8000", port) for word in check[1:]]).returncode == 1, "nobody answers any more"


def test_sigterm_drains_what_runs_in_the_image(image: Image) -> None:
    assert image.settings.get("StopSignal") == "SIGTERM"
    question = {"messages": [{"role": "user", "content": "Count from 1 to 20."}], "max_tokens": 40, "stream": True}
    with (
        timed_engine(image, *DEMO, "--step-s", "0.1") as engine,
        closing(image.serve("--engine", engine, "--anonymous", "--drain-s", "60")) as server,
        urlopen(f"{server.url}/v1/chat/completions", json.dumps({"model": DEMO[1], **question}).encode()) as events,
    ):
        while not events.readline().startswith(b"data: "):
            pass  # comments, until the answer begins
        server.process.send_signal(signal.SIGTERM)
        rest = [line for line in events if line.startswith(b"data: ")]
        assert server.process.wait(timeout=60) == 0
    assert rest[-1] == b"data: [DONE]\n"
    assert len(rest) > 30, "the stream went on after the signal"


def test_the_image_takes_tokens_of_an_identity_provider_and_keeps_batch_jobs(image: Image) -> None:
    """The extras that it has: what a command says that needs them is not that they are missing."""
    extras = ("jwt", "cryptography", "sqlalchemy", "aiosqlite", "onnxruntime", "tokenizers", "aiohttp")
    assert image.run("python", "-c", f"import {', '.join(extras)}").stderr == ""


def test_the_commands_of_the_compose_files_start_in_the_image(image: Image) -> None:
    """Each service of this image, with other addresses, and files in their places."""
    keys = image.state / "keys"
    keys.write_text("me: sk-me\n")
    os.chown(keys, USER, USER)
    keys.chmod(0o600)
    engine_of = service("monitoring/compose.yaml", "engine")
    assert shlex.join(engine_of["entrypoint"]) == "python -m llmserve.engines.timed"
    with timed_engine(image, *engine_of["command"]) as engine:
        for file in ("compose.yaml", "monitoring/compose.yaml"):
            command = [
                re.sub(r"^http://\w+:8001$", engine, word).replace("/run/secrets/keys", "/var/lib/llmserve/keys")
                for word in service(file, "llmserve")["command"]
            ]
            metrics = command.index("--metrics-port") + 1
            command[metrics], command[command.index("--metrics-host") + 1] = "0", "127.0.0.1"
            with closing(image.serve(*command)) as server:
                assert server.stop(signal.SIGTERM) == 0, file


def service(file: str, name: str) -> dict[str, Any]:
    services: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / file).read_text())["services"]
    found: dict[str, Any] = services[name]
    return found
