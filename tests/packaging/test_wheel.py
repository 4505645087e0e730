"""The wheel in an empty environment: its files, and the commands that work without extras."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from server_process import Server

from llmserve import __version__
from llmserve.__main__ import COMMANDS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("bins", "llmserve", "predictor")
NO_CONNECTION = re.compile(r"NewConnectionError|ConnectTimeoutError|NameResolutionError|Network is unreachable")
CLEAN = {"PYTHONPATH": ""}  # otherwise the checkout would be imported


@dataclass(frozen=True)
class Installed:
    """wheel : the file.  folder : working directory of commands.  bin : the environment's programs."""

    wheel: Path
    folder: Path
    bin: Path

    def run(self, program: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.bin / program), *words]
        environment = {**os.environ, **CLEAN}
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=self.folder)


def pip(python: Path, *words: str) -> None:
    """Skips the test if no package index can be reached; fails it if pip fails otherwise."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--retries", "1", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, env={**os.environ, **CLEAN})
    if done.returncode and (match := NO_CONNECTION.search(done.stdout + done.stderr)):
        pytest.skip(f"pip reaches no index: {match[0]}")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Built from a copy, so that files of an earlier build are not included."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True, timeout=120)
    python = environment / "bin" / "python"
    pip(python, "wheel", "--no-deps", "--wheel-dir", str(folder / "dist"), str(folder))
    (wheel,) = (folder / "dist").iterdir()
    pip(python, "install", "--require-hashes", "--no-deps", "-r", str(ROOT / "requirements" / "server.lock"))
    pip(python, "install", "--no-deps", str(wheel))
    return Installed(wheel, tmp_path_factory.mktemp("elsewhere"), environment / "bin")


@pytest.fixture
def fake_engine(installed: Installed) -> Iterator[str]:
    """The URL of a fake engine started from the wheel."""
    words = ["-m", "llmserve.engines.timed", "--port", "0", "--model", "llmserve-demo", "--step-s", "0.001"]
    command, environment = [str(installed.bin / "python"), *words], {**os.environ, **CLEAN}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=installed.folder)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
    finally:
        process.kill()
        process.communicate()


def test_the_wheel_holds_every_file_of_the_packages_and_nothing_else(installed: Installed):
    files = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(installed.wheel) as wheel:
        packaged = {name for name in wheel.namelist() if not name.startswith(f"llmserve-{__version__}.dist-info/")}
    assert packaged == files
    assert {f"{package}/py.typed" for package in PACKAGES} < packaged
    assert {"llmserve/demo/model/model.safetensors", "predictor/demo/predictor.json"} < packaged


def test_the_environment_has_no_extra(installed: Installed):
    done = installed.run("python", "-c", "import bins, llmserve, predictor; print(llmserve.__file__)")
    assert done.stdout.startswith(str(installed.bin.parent))
    done = installed.run("python", "-c", "import torch")
    assert "No module named 'torch'" in done.stderr


def test_every_command_prints_its_flags_without_an_extra(installed: Installed):
    assert installed.run("llmserve", "--version").stdout == f"llmserve {__version__}\n"
    for command in COMMANDS:
        done = installed.run("llmserve", command, "--help")
        assert (done.returncode, done.stderr) == (0, ""), command
        assert done.stdout.startswith(f"usage: llmserve {command} ")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "serve --port 0",
            "the embedded engine needs torch: pip install 'llmserve[embedded]', or name a server with --engine URL",
        ),
        ("train --data absent.jsonl --output folder", "training needs torch: pip install 'llmserve[train]'"),
        ("plan --instance absent.json", "planning needs scipy: pip install 'llmserve[plan]'"),
        ("simulate --requests 100000000 --plot folder", "--plot needs matplotlib: pip install 'llmserve[plot]'"),
    ],
)
def test_a_command_that_needs_an_extra_says_so_in_one_line(words: str, line: str, installed: Installed):
    done = installed.run("llmserve", *words.split())
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"llmserve: {line}\n")


def test_a_simulation_needs_no_extra(installed: Installed):
    done = installed.run("llmserve", "simulate", "--requests", "100", "--json")
    assert (done.returncode, done.stderr) == (0, "")


def test_an_answer_is_served_with_the_demo_predictors_forecast(installed: Installed, fake_engine: str):
    place = "import predictor; print(predictor.DEMO)"
    demo = installed.run("python", "-c", place).stdout.strip()
    program = [str(installed.bin / "llmserve")]
    with closing(Server("--engine", fake_engine, "--predictor", demo, environment=CLEAN, program=program)) as server:
        answer, headers = server.chat("Count from 1 to 20.", max_tokens=5)
        assert answer["usage"]["completion_tokens"] == 5
        assert float(headers["x-llmserve-predicted-tokens"]) > 0
        assert server.stop(signal.SIGTERM) == 0
