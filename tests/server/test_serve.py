"""`llmserve serve` in its own process, as a user starts it, with the embedded engine."""

from __future__ import annotations

import ast
import asyncio
import json
import logging
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from front import StartFront, until
from server_process import Server, all_ended, failed_start
from tiny_llama import save_tiny_llama

from llmserve.__main__ import main
from llmserve.commands import serve
from llmserve.commands.serve import _print_address, _wait_for_engine
from llmserve.engines.timed.server import FakeEngine
from llmserve.settings.dispatch import DispatchConfig
from llmserve.settings.tree import ApiConfig


@pytest.fixture
def start_server() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*flags: str) -> Server:
        servers.append(Server(*flags))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.mark.slow
def test_a_user_chats_and_ctrl_c_ends_all_processes_with_status_0(start_server: Callable[..., Server]) -> None:
    """The predictor distinguishes short answers from long ones, too."""
    server = start_server()
    answer, headers = server.chat("Count from 3 to 9.")
    assert answer["choices"][0]["message"]["content"] == "3, 4, 5, 6, 7, 8, 9"
    assert answer["usage"]["completion_tokens"] == 13
    for name in ("bin", "predicted-tokens", "batch", "queue-ms", "engine"):
        assert headers[f"x-llmserve-{name}"], name
    short = server.chat("Spell the word cat.", max_tokens=1)[1]
    long_ = server.chat("Count from 1 to 180.", max_tokens=1000)[1]
    assert float(short["x-llmserve-predicted-tokens"]) < float(long_["x-llmserve-predicted-tokens"])
    assert int(long_["x-llmserve-predicted-tokens"]) > 100
    assert len(server.children) == 3, "the engine, its supervisor, and the predictor"
    assert server.stop(signal.SIGINT) == 0
    assert all_ended(server.children)


@pytest.mark.slow
def test_any_model_folder_is_served_instead_and_when_the_front_end_is_killed_its_processes_end_too(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    save_tiny_llama(tmp_path / "tiny")
    server = start_server("--model", str(tmp_path / "tiny"))
    answer, headers = server.chat("hello", model="tiny", max_tokens=5)
    assert answer["model"] == "tiny"
    assert 0 < answer["usage"]["completion_tokens"] <= 5
    assert "x-llmserve-predicted-tokens" not in headers, "the demo predictor knows only the demo model"
    server.process.kill()
    assert all_ended(server.children)


@pytest.mark.slow
def test_an_engine_that_dies_is_restarted_and_a_stop_finishes_the_running_answer(
    start_server: Callable[..., Server],
) -> None:
    """And then ends all processes, also the predictor."""
    server = start_server()
    (engine,) = [child for child in server.children if not child.children() and "llmserve.demo" in child.cmdline()]
    engine.kill()
    answer = server.chat_when_up("Count from 3 to 9.", within_s=60)
    assert answer["choices"][0]["message"]["content"] == "3, 4, 5, 6, 7, 8, 9"
    processes = psutil.Process(server.process.pid).children(recursive=True)
    assert len(processes) == 3, "the new engine, its supervisor, and the predictor"

    body = {"model": "llmserve-demo", "stream": True, "messages": [{"role": "user", "content": "Count from 1 to 150."}]}
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        response.readline()
        server.process.send_signal(signal.SIGTERM)
        assert response.read().endswith(b"data: [DONE]\n\n")
    assert server.process.wait(timeout=30) == 0
    assert all_ended(processes)


# A stand-in for an interpreter that has vLLM. The name of the model decides the server's behaviour.
STAND_IN = """#!{python}
import os, sys, time
if sys.argv[1] == "-c":
    sys.exit(0)  # asked whether it has vLLM
value = lambda flag: sys.argv[sys.argv.index(flag) + 1]
if value("--model") == "one-of-two-fails" and not os.path.exists("{folder}/first"):
    os.mkdir("{folder}/first")
    sys.exit("torch.OutOfMemoryError: CUDA out of memory")
print("loading", flush=True)
if value("--model") != "good":
    time.sleep(600)
words = ["--port", value("--port"), "--model", value("--served-model-name")]
words += ["--slots", value("--max-num-seqs")] if "--max-num-seqs" in sys.argv else []
words += ["--api-key", os.environ["VLLM_API_KEY"]]
os.execv(sys.executable, [sys.executable, "-m", "llmserve.engines.timed", *words])
"""


@pytest.fixture
def vllm_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two replicas of a stand-in for vLLM; their output is kept in tmp_path/llmserve/PORT."""
    (tmp_path / "python").write_text(STAND_IN.format(python=sys.executable, folder=tmp_path))
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return ["--engine", "vllm", "--engine-python", str(tmp_path / "python"), "--replicas", "2"]


@pytest.mark.slow
def test_replicas_are_started_beside_a_running_server(
    start_server: Callable[..., Server], vllm_flags: list[str], tmp_path: Path
) -> None:
    other = start_server(*vllm_flags, "--model", "good", "--engine-log-folder", str(tmp_path / "other"))
    server = start_server(*vllm_flags, "--model", "good", "--slots", "2", "--engine", other.url)
    with urllib.request.urlopen(f"{server.url}/ready") as response:
        engines = json.load(response)["engines"]
    assert sorted(engines) == [other.url.removeprefix("http://"), "vllm-0", "vllm-1"]
    answer, headers = server.chat("hello", model="good", max_tokens=3)
    assert answer["usage"]["completion_tokens"] == 3
    assert headers["x-llmserve-engine"] in engines
    for child in server.children:
        for connection in child.net_connections():
            if connection.status == psutil.CONN_LISTEN:
                with pytest.raises(urllib.error.HTTPError, match="401"):
                    urllib.request.urlopen(f"http://127.0.0.1:{connection.laddr.port}/v1/models")
    assert [file.name for file in sorted((tmp_path / "llmserve" / "0").iterdir())] == ["vllm-0.log", "vllm-1.log"]
    assert server.stop() == 0
    assert all_ended(server.children)


def test_when_one_replica_cannot_start_the_others_end_too(vllm_flags: list[str], tmp_path: Path) -> None:
    status, error = failed_start("--port", "0", *vllm_flags, "--model", "one-of-two-fails")
    assert status == 1
    assert "ended with status 1\n    torch.OutOfMemoryError: CUDA out of memory" in error
    assert f"(the full log is {tmp_path}/llmserve/0/vllm-" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_engines_start_ends_them_and_is_status_0(
    vllm_flags: list[str], tmp_path: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "llmserve", "serve", "--port", "0", *vllm_flags, "--model", "slow"]
    logs = [tmp_path / "llmserve" / "0" / f"vllm-{index}.log" for index in range(2)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        until_s = time.monotonic() + 60
        while not all(log.exists() and log.read_text() for log in logs) and time.monotonic() < until_s:
            time.sleep(0.02)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        error = process.communicate(timeout=40)[1]
    assert len(children) == 4, "two supervisors and two engines"
    assert process.returncode == 0
    assert "Traceback" not in error
    assert all_ended(children)


def test_the_error_of_a_missing_model_folder_quotes_the_engine() -> None:
    status, error = failed_start("--port", "0", "--model", "/nowhere/model", HF_HUB_OFFLINE="1")
    assert status == 1
    assert "/nowhere/model" in error
    assert "Traceback" not in error


@pytest.fixture
def refusal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[int, str]]]:
    """`refusal(*flags)`: exit status and output of a `llmserve serve` in this process that cannot start. It has a free
    port, unless the flags name another, and looks for no engine on this machine.

    The output includes the log: pytest's log handlers are replaced by those of a real process.
    """
    monkeypatch.setattr(serve, "looks_around", lambda *_: False)
    loggers = [logging.getLogger(name) for name in ("", "asyncio")]
    settings_before = [(logger.level, logger.handlers) for logger in loggers]

    def refused(*flags: str) -> tuple[int, str]:
        logging.getLogger().handlers = []
        return main(["serve", "--port", "0", *flags]), capsys.readouterr().err

    yield refused
    for logger, (level, handlers) in zip(loggers, settings_before, strict=True):
        logger.setLevel(level)
        logger.handlers = handlers


def test_a_port_in_use_is_an_error_before_anything_is_loaded(refusal: Callable[..., tuple[int, str]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        status, error = refusal("--port", str(listener.getsockname()[1]))
    assert status == 1
    assert "Address already in use" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("flags", [["--batch-sise", "4"], ["--predictor", "/nowhere", "--engine", "embedded"]])
def test_a_wrongly_configured_process_ends_with_status_2_and_one_line(flags: list[str]) -> None:
    status, error = failed_start("--port", "0", *flags)
    assert (status, error.count("\n")) == (2, 1), error
    assert ("/nowhere" if "/nowhere" in flags else "did you mean --batch-size?") in error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--engine", "localhost:8001"], "is not a URL"),
        (["--engine", "http://a", "--engine", "http://a"], "is given twice"),
        (["--engine", "http://a:80", "--engine", "http://a/v1"], "is given twice"),
        (["--engine", "vllm"], "engine vllm needs --model"),
        (["--engine", "vllm", "--model", "/nowhere/model"], "there is no model folder /nowhere/model"),
        (["--engine", "vllm", "--model", "m", "--", "--port", "1"], "--port is not allowed among vLLM's arguments"),
        (["--engine", "vllm", "--model", "m", "--engine-python", "/nowhere"], "/nowhere cannot be run"),
        (
            ["--engine", "vllm", "--model", "m", "--engine-python", "true", "--engine-log-folder", "/dev/null/logs"],
            "logs",
        ),
        (["--replicas", "2"], "only for vLLM"),
        (["--", "--max-model-len", "1024"], "only for vLLM"),
        (["--admin-key-file", "/nowhere"], "cannot read the API keys"),
        (["--predictor", "none", "--predictor", "model:m=/nowhere"], "/nowhere"),
        (["--predictor", "model:m"], "predictor: 'model:m' is not `model:ID=VALUE`"),
        (["--profile", "p4-googlenet", "--profile", "h100-llama-3.1-8b"], "is a second value for the same"),
        (["--engine", "gpu0=embedded"], "only a URL can have a worker"),
        (["--engine", "gpu0=http://a", "--engine", "gpu1=http://a"], "is given twice"),
        (["--slo-ms", "streem:a=5"], "stream:NAME=MS"),
        (["--bins", "3", "--edges", "9,5", "--engine", "http://127.0.0.1:9"], "strictly increasing"),
        (["--host", "0.0.0.0"], "--api-key-file"),
        (["--api-key-file", "/nowhere"], "cannot read the API keys"),
    ],
)
def test_a_wrong_configuration_is_status_2_and_one_line(
    refusal: Callable[..., tuple[int, str]], flags: list[str], message: str
) -> None:
    status, error = refusal(*flags)
    assert (status, error.count("\n")) == (2, 1), error
    assert message in error


async def test_settings_for_models_that_no_engine_serves_are_reported(
    start_front: StartFront, caplog: pytest.LogCaptureFixture
) -> None:
    """The profile's model is missing, the deadline's model is served."""
    settings = {
        "dispatch": DispatchConfig(profile=("model:chta=p4-googlenet",)),
        "limits": ApiConfig(slo_ms=("model:chat=500", "stream:night=5000")),
    }
    async with FakeEngine(model="chat") as fake:
        await start_front(fake, **settings)
        await until(lambda: "no engine serves" in caplog.text)
    messages = [record.message for record in caplog.records if "no engine serves" in record.message]
    assert messages == ["profile: no engine serves a model chta; did you mean chat?"]


async def test_a_server_without_an_engine_says_again_and_again_where_it_listens_and_what_it_waits_for(
    start_front: StartFront, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeEngine() as fake:
        front = await start_front(fake)
    await until(lambda: not any(front.cluster.engines_ready.values()))
    waiting = asyncio.create_task(_wait_for_engine(front.cluster, front.url, 0.0, 0.01))
    (name,) = front.cluster.engines_ready
    said = f"listening on {front.url}; waiting for an engine: {name}"
    await until(lambda: caplog.messages.count(said) >= 2)
    waiting.cancel()


async def test_the_banner_names_the_page(start_front: StartFront, capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeEngine() as fake:
        front = await start_front(fake)
        _print_address(front.cluster, front.url, with_key=False)
        lines = capsys.readouterr().out.splitlines()
        assert lines[:2] == [f"llmserve is ready: {front.url}/v1  (models: fake)", f"page: {front.url}/"]
        async with front.session.get(lines[1].removeprefix("page: ")) as page:
            assert page.content_type == "text/html"


async def test_an_order_by_batch_times_reports_a_missing_profile(
    start_front: StartFront, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeEngine(barrier=True) as fake:
        for profile in ((), ("p4-googlenet",)):
            caplog.clear()
            await start_front(
                fake, barrier=True, scheduling={"order": "flex"}, dispatch=DispatchConfig(profile=profile)
            )
            assert ("order flex without --profile" in caplog.text) == (not profile)


def loaded(imported: Sequence[str], looked_for: Sequence[str]) -> list[str]:
    """The modules among `looked_for` that a fresh interpreter loads when it imports `imported`."""
    script = f"import sys, {', '.join(imported)}\nprint([name for name in {looked_for} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded: list[str] = ast.literal_eval(done.stdout)
    return loaded


def test_importing_llmserve_loads_neither_torch_nor_transformers() -> None:
    modules = ["llmserve.__main__", "llmserve.commands.serve", "llmserve.web.app", "llmserve.live.driver"]
    modules += ["predictor.process", "predictor.forecaster"]
    assert loaded(modules, ["torch", "transformers", "onnxruntime", "vllm", "ray"]) == []


def test_the_server_and_the_commands_are_clients_without_aiohttp() -> None:
    modules = ["llmserve.server.serving", "llmserve.engines.kinds", "llmserve.live.driver"]
    modules += [f"llmserve.commands.{command}" for command in ("bench", "batch", "doctor", "profile", "queue")]
    assert loaded(modules, ["aiohttp"]) == []


def test_other_commands_load_no_server() -> None:
    server = [
        "llmserve.web.app",
        "llmserve.http",
        "llmserve.live.driver",
        "llmserve.live.fleet",
        "llmserve.settings.tree",
        "aiohttp",
    ]
    assert loaded([f"llmserve.commands.{command}" for command in ("solve", "plan", "simulate")], server) == []
    assert loaded(["llmserve.commands.serve"], server) == ["llmserve.settings.tree"], "a loaded module must be found"
