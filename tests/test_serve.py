"""`llmserve serve` as a person starts it: a process of its own, with the embedded engine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tiny_llama import save_tiny_llama


class Server:
    """A `llmserve serve` child and all that it says."""

    def __init__(self, *flags: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "llmserve", "serve", "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.said: list[str] = []
        self.url = self._await_ready()
        self.children = psutil.Process(self.process.pid).children(recursive=True)

    def _await_ready(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line)
            if line.startswith("llmserve is ready: "):
                return line.split()[3].removesuffix("/v1")
        raise AssertionError("the server ended before it was ready:\n" + "".join(self.said))

    def chat(self, content: str, **fields: Any) -> tuple[dict[str, Any], Any]:
        body = {"model": "llmserve-demo", "messages": [{"role": "user", "content": content}], **fields}
        request = urllib.request.Request(f"{self.url}/v1/chat/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response), response.headers

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=40)


@pytest.fixture
def start_server() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*flags: str) -> Server:
        servers.append(Server(*flags))
        return servers[-1]

    yield start
    for server in servers:
        server.process.kill()
        server.process.wait()
        assert server.process.stdout is not None
        server.process.stdout.close()


def gone(processes: list[psutil.Process], within_s: float = 10.0) -> bool:
    return not psutil.wait_procs(processes, timeout=within_s)[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_person_chats_and_a_signal_ends_it_with_status_0_and_no_process_left(
    start_server: Callable[..., Server], number: signal.Signals
) -> None:
    server = start_server()
    answer, headers = server.chat("Count from 3 to 9.")
    assert answer["choices"][0]["message"]["content"] == "3, 4, 5, 6, 7, 8, 9"
    assert answer["usage"]["completion_tokens"] == 13
    for name in ("bin", "predicted-tokens", "batch", "queue-ms", "engine"):
        assert headers[f"x-llmserve-{name}"], name
    assert len(server.children) == 2, "the engine and the predictor"
    assert server.stop(number) == 0
    assert gone(server.children)


def test_any_model_folder_is_served_instead(start_server: Callable[..., Server], tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "tiny")
    server = start_server("--model", str(tmp_path / "tiny"))
    answer, headers = server.chat("hello", model="tiny", max_tokens=5)
    assert answer["model"] == "tiny"
    assert 0 < answer["usage"]["completion_tokens"] <= 5
    assert "x-llmserve-predicted-tokens" not in headers, "the demo predictor knows the demo model only"


def test_the_predictor_orders_answers_by_their_length(start_server: Callable[..., Server]) -> None:
    server = start_server()
    short = server.chat("Spell the word cat.", max_tokens=1)[1]
    long_ = server.chat("Count from 1 to 180.", max_tokens=1000)[1]
    assert int(short["x-llmserve-bin"]) < int(long_["x-llmserve-bin"])
    assert int(long_["x-llmserve-predicted-tokens"]) > 100


def test_a_stop_finishes_the_answer_that_is_being_written(start_server: Callable[..., Server]) -> None:
    server = start_server("--predictor", "none")
    body = {"model": "llmserve-demo", "stream": True, "messages": [{"role": "user", "content": "Count from 1 to 150."}]}
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        response.readline()
        server.process.send_signal(signal.SIGTERM)
        assert response.read().endswith(b"data: [DONE]\n\n")
    assert server.process.wait(timeout=30) == 0


def test_when_the_front_end_is_killed_its_processes_end_too(start_server: Callable[..., Server]) -> None:
    server = start_server()
    server.process.kill()
    assert gone(server.children)


def test_an_engine_that_dies_is_started_again(start_server: Callable[..., Server]) -> None:
    server = start_server("--predictor", "none")
    (engine,) = server.children
    engine.kill()
    deadline_s = time.monotonic() + 60
    while True:
        try:
            answer, _ = server.chat("Count from 3 to 9.")
            break
        except urllib.error.HTTPError as error:
            if error.code != 503 or time.monotonic() > deadline_s:
                raise
            time.sleep(0.2)
    assert answer["choices"][0]["message"]["content"] == "3, 4, 5, 6, 7, 8, 9"
    assert server.stop() == 0


def failed_start(*flags: str, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "llmserve", "serve", *flags],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    return done.returncode, done.stderr


def test_a_model_folder_that_is_not_there_is_said_with_the_engines_own_words() -> None:
    status, said = failed_start("--port", "0", "--model", "/nowhere/model", HF_HUB_OFFLINE="1")
    assert status == 1
    assert "/nowhere/model" in said
    assert "Traceback" not in said


def test_a_port_in_use_is_said_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, said = failed_start("--port", str(taken.getsockname()[1]))
    assert status == 1
    assert "Address already in use" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--engine", "localhost:8001"], "is not a URL"),
        (["--engine", "http://a", "--engine", "http://a"], "stands twice"),
        (["--predictor", "/nowhere"], "/nowhere"),
        (["--bins", "3", "--edges", "9,5", "--engine", "http://127.0.0.1:9"], "strictly increasing"),
        (["--host", "0.0.0.0"], "--api-key-file"),
        (["--api-key-file", "/nowhere"], "cannot read the API keys"),
        (["--batch-sise", "4"], "did you mean --batch-size?"),
    ],
)
def test_a_wrong_configuration_is_status_2_and_one_line(flags: list[str], message: str) -> None:
    port = [] if "--port" in flags else ["--port", "0"]
    status, said = failed_start(*port, *flags)
    assert (status, said.count("\n")) == (2, 1), said
    assert message in said


def test_importing_llmserve_loads_neither_torch_nor_transformers() -> None:
    script = (
        "import sys, llmserve.__main__, llmserve.serve, llmserve.api.app, llmserve.cluster.live\n"
        "import predictor.process, predictor.forecaster\n"
        "print([name for name in ('torch', 'transformers', 'onnxruntime', 'vllm', 'ray') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_import_rules_hold() -> None:
    """Who may import whom (README's map). Rooms are named by their first folder or module.

    What a predictor may know of a request is a noun that all of llmserve speaks; the predictor itself is serve's alone.
    """
    import ast

    root = Path(__file__).parents[1]
    allowed = {
        "bins": set(),
        "predictor": {"bins", "predictor.prompt"},
        "predictor.prompt": set(),
        "llmserve.request": {"predictor.prompt"},
        "llmserve.scheduling": {"bins", "llmserve.request"},
        "llmserve.engines": {"llmserve.request", "llmserve.errors"},
        "llmserve.cluster": {
            *("llmserve.scheduling", "llmserve.engines", "llmserve.request", "llmserve.errors", "predictor.prompt"),
        },
        "llmserve.simulation": {"bins", "llmserve.request", "llmserve.errors", "llmserve.scheduling"},
        "llmserve.api": {
            *("llmserve.cluster", "llmserve.request", "llmserve.errors", "llmserve.metrics", "predictor.prompt"),
        },
        "llmserve.metrics": {"llmserve.cluster", "llmserve.request", "llmserve.scheduling"},
    }

    def room(module: str) -> str:
        two = module.startswith("llmserve.") or module == "predictor.prompt"
        return ".".join(module.split(".")[: 2 if two else 1])

    for owner, may in allowed.items():
        place = root / owner.replace(".", "/")
        for file in [place.with_suffix(".py")] if not place.is_dir() else sorted(place.rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                names = (
                    [alias.name for alias in node.names]
                    if isinstance(node, ast.Import)
                    else [node.module or ""]
                    if isinstance(node, ast.ImportFrom)
                    else []
                )
                for name in names:
                    ours = room(name) if name.split(".")[0] in ("llmserve", "bins", "predictor") else owner
                    assert ours in may | {owner}, f"{file.relative_to(root)} imports {name}"
