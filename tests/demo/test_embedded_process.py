"""The embedded engine as a process: how it starts, and that it always ends."""

import contextlib
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

LIMIT_S = 120.0  # importing torch takes long on a busy machine
COMMAND = [sys.executable, "-m", "llmserve.demo"]


@contextlib.contextmanager
def process(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def url_in(line: str) -> str:
    assert "ready at" in line, line
    return line.split()[-1]


def refusal(*arguments: str) -> str:
    """The one line that a process prints when it cannot start and ends with an error."""
    ended = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode not in (0, -signal.SIGTERM)
    (line,) = ended.stderr.splitlines()
    return line


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_process_reports_readiness_and_a_signal_ends_it_with_status_0(tiny_model: Path, number: signal.Signals):
    with process([*COMMAND, "--model", str(tiny_model), "--served-model-name", "mini", "--port", "0"]) as engine:
        url = url_in(engine.stdout.readline())
        with urllib.request.urlopen(url + "/v1/models", timeout=LIMIT_S) as response:
            assert b'"id": "mini"' in response.read()
        engine.send_signal(number)
        assert engine.wait(LIMIT_S) == 0
        assert engine.stderr.read() == ""


def test_a_missing_model_folder_is_one_clear_line(tmp_path: Path):
    assert f"the model folder {tmp_path}/none does not exist" in refusal("--model", f"{tmp_path}/none")


@pytest.mark.slow
def test_a_folder_without_a_model_is_one_clear_line(tmp_path: Path):
    assert f"cannot load the model {tmp_path}" in refusal("--model", str(tmp_path))


def test_a_port_in_use_is_one_clear_line(tiny_model: Path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        line = refusal("--model", str(tiny_model), "--port", str(port))
    assert f"cannot listen on 127.0.0.1:{port}" in line


def test_the_engines_package_and_the_command_line_load_no_torch():
    code = (
        "import sys, llmserve.engines, llmserve.engines.timed.server, llmserve.demo.__main__; "
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT_S)
