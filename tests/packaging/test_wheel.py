"""The wheel in an empty environment: its files, and the commands that work without extras."""

from __future__ import annotations

import json
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
from urllib.error import HTTPError
from urllib.request import urlopen

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
    """wheel : the file.  folder : working directory of commands.  bin : the environment's programs.
    size_mb : of what was installed
    """

    wheel: Path
    folder: Path
    bin: Path
    size_mb: float

    def pip_install(self, extra: str) -> str:
        """What adds an extra to this environment, as its commands say."""
        return f"{self.bin / 'python'} -m pip install '{self.wheel}[{extra}]'"

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
    pip(Path(sys.executable), "wheel", "--no-deps", "--wheel-dir", str(folder / "dist"), str(folder))
    (wheel,) = (folder / "dist").iterdir()
    return environment(wheel, "server", tmp_path_factory)


@pytest.fixture(scope="module")
def installed_in_an_image(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """With the extras of deploy/Dockerfile."""
    return environment(installed.wheel, "image", tmp_path_factory)


def environment(wheel: Path, lock: str, folders: pytest.TempPathFactory) -> Installed:
    """A new environment with the wheel and the packages of a lock."""
    place = folders.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True, timeout=120)
    python = place / "bin" / "python"
    before = size_mb(place)
    pip(python, "install", "--require-hashes", "--no-deps", "-r", str(ROOT / "requirements" / f"{lock}.lock"))
    pip(python, "install", "--no-deps", str(wheel))
    return Installed(wheel, folders.mktemp("elsewhere"), place / "bin", size_mb(place) - before)


def size_mb(folder: Path) -> float:
    """What the files take on a disk with blocks of 4 KiB."""
    blocks = sum([-(-path.stat().st_size // 4096) for path in folder.rglob("*") if path.is_file()])
    return blocks * 4096 / 2**20


@pytest.fixture
def fake_engine() -> Iterator[str]:
    """The URL of a timed engine, which the extra `timed` of the tests' own environment runs."""
    words = ["-m", "llmserve.engines.timed", "--port", "0", "--model", "llmserve-demo", "--step-s", "0.001"]
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True, cwd=ROOT)
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
    ("words", "line", "extra"),
    [
        (
            "serve --port 0",
            "no engine answers on this machine (ports 8000, 8001, 8080, 11434, 1234, 30000): name one with "
            "--engine URL, or for the demo model",
            "embedded",
        ),
        ("train --data absent.jsonl --output folder", "training needs torch:", "train"),
        (
            "serve --engine http://127.0.0.1:9 --predictor folder",
            "a trained predictor needs onnxruntime:",
            "predictor",
        ),
        (
            "serve --engine http://127.0.0.1:9 --store postgresql://host/name --store-folder folder",
            "--store needs sqlalchemy:",
            "jobs",
        ),
        ("plan --instance absent.json", "planning needs scipy:", "plan"),
        ("simulate --requests 100000000 --plot folder", "--plot needs matplotlib:", "plot"),
    ],
)
def test_a_command_that_needs_an_extra_says_so_in_one_line(words: str, line: str, extra: str, installed: Installed):
    done = installed.run("llmserve", *words.split())
    told = f"llmserve: {line} {installed.pip_install(extra)}\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", told)


def test_a_simulation_needs_no_extra(installed: Installed):
    done = installed.run("llmserve", "simulate", "--requests", "100", "--json")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_base_is_small(installed: Installed):
    assert installed.size_mb < 130


def test_an_answer_is_served_without_an_extra_and_teaches(installed: Installed, fake_engine: str, tmp_path: Path):
    program = [str(installed.bin / "llmserve")]
    words = ("--engine", fake_engine, "--state", str(tmp_path / "state"))
    with closing(Server(*words, environment=CLEAN, program=program)) as server:
        for _ in range(3):
            answer, headers = server.chat("Count from 1 to 20.", max_tokens=5)
        assert answer["usage"]["completion_tokens"] == 5
        assert float(headers["x-llmserve-predicted-tokens"]) > 0
        with pytest.raises(HTTPError) as refusal:
            urlopen(f"{server.url}/v1/batches", timeout=30)
        message = json.loads(refusal.value.read())["error"]["message"]
        assert message == "this server keeps no files and batches: it needs the extra llmserve[jobs]"
        assert server.stop(signal.SIGTERM) == 0
    assert sorted(path.name for path in (tmp_path / "state").iterdir())


def test_a_store_whose_packages_are_gone_is_not_forgotten(installed: Installed, tmp_path: Path):
    (tmp_path / "jobs.sqlite").touch()
    done = installed.run("llmserve", "serve", "--engine", "http://127.0.0.1:9", "--state", str(tmp_path))
    line = "jobs.sqlite of --state needs sqlalchemy:"
    assert (done.returncode, done.stderr) == (2, f"llmserve: {line} {installed.pip_install('jobs')}\n")


def test_an_answer_is_served_with_the_demo_predictors_forecast(installed_in_an_image: Installed, fake_engine: str):
    installed = installed_in_an_image
    place = "import predictor; print(predictor.DEMO)"
    demo = installed.run("python", "-c", place).stdout.strip()
    program = [str(installed.bin / "llmserve")]
    with closing(Server("--engine", fake_engine, "--predictor", demo, environment=CLEAN, program=program)) as server:
        answer, headers = server.chat("Count from 1 to 20.", max_tokens=5)
        assert answer["usage"]["completion_tokens"] == 5
        assert float(headers["x-llmserve-predicted-tokens"]) > 0
        assert server.stop(signal.SIGTERM) == 0


# ---- other projects' `bins` and `predictor` ----


def test_another_project_that_overwrites_a_package_is_named_before_any_work(installed: Installed, tmp_path: Path):
    python = installed.bin / "python"
    pip(python, "install", "--no-deps", "--no-index", str(other_wheel(tmp_path, "predictor/__init__.py")))
    try:
        done = installed.run("llmserve", "simulate", "--requests", "100")
        assert (done.returncode, done.stdout, done.stderr) == (
            2,
            "",
            "llmserve: other-project has overwritten llmserve's predictor/__init__.py: give llmserve an environment of "
            "its own, and install it there\n",
        )
        pip(python, "uninstall", "--yes", "other-project")
        done = installed.run("llmserve", "simulate", "--requests", "100")
        assert done.returncode == 2
        assert done.stderr == "llmserve: llmserve's predictor/__init__.py is missing: install llmserve again\n"
    finally:
        pip(python, "install", "--no-deps", "--force-reinstall", str(installed.wheel))
    assert installed.run("llmserve", "simulate", "--requests", "100").returncode == 0


def test_another_project_that_python_finds_first_is_named_before_any_work(installed: Installed, tmp_path: Path):
    (tmp_path / "bins").mkdir()
    (tmp_path / "bins" / "__init__.py").touch()
    command = [str(installed.bin / "python"), "-m", "llmserve", "simulate", "--requests", "100"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, **CLEAN}, cwd=tmp_path
    )
    told = f"the package bins is another project's here ({tmp_path / 'bins'}): start llmserve in another folder"
    assert (done.returncode, done.stderr) == (2, f"llmserve: {told}, or in an environment of its own\n")


def other_wheel(folder: Path, module: str) -> Path:
    """A wheel of another project, with one empty module."""
    path = folder / "other_project-1.0-py3-none-any.whl"
    about = "other_project-1.0.dist-info"
    files = {
        module: "",
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: other-project\nVersion: 1.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{about}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{about}/RECORD"))
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return path
