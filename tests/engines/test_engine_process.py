"""Engine processes: no process is left behind, whatever the child does."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop
from front import until

from llmserve.engines import process as engine_process
from llmserve.engines.process import EngineProcess, free_port, free_ports
from llmserve.errors import EngineStartError

SERVER = """
import http.server, os, subprocess, sys
WORKER = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
if "worker" in sys.argv:
    subprocess.Popen([sys.executable, "-c", WORKER])
print("I am", os.environ.get("ROLE", "nobody"), os.getpid(), flush=True)
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
try:
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
except KeyboardInterrupt:
    pass
"""

Start = Callable[..., EngineProcess]


def python(script: str, *words: str) -> Callable[[int], Sequence[str]]:
    return lambda port: [sys.executable, "-u", "-c", script, str(port), *words]


def engine(script: str, *words: str, **options: Any) -> EngineProcess:
    return EngineProcess("vllm-0", python(script, *words), **{"start_s": 30, **options})


def server_of(process: EngineProcess) -> psutil.Process:
    """The command itself, which runs below the supervisor."""
    (child,) = psutil.Process(process.pid).children()
    return child


@pytest.fixture
async def started() -> AsyncIterator[Callable[..., Any]]:
    """`await started(engine)` starts an engine; the test's end stops it."""
    async with AsyncExitStack() as stack:

        async def start(process: EngineProcess) -> EngineProcess:
            stack.push_async_callback(process.stop)
            await process.start()
            return process

        yield start


def test_a_worker_that_ignores_its_signal_is_ended_with_its_leader_without_delay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under uvloop, as in the server: there the end of a process also waits for the end of its output."""
    monkeypatch.setattr(engine_process, "STOP_S", 1.0)

    async def run() -> list[psutil.Process]:
        process = engine(SERVER, "worker")
        await process.start()
        supervisor = psutil.Process(process.pid)
        family = [supervisor, *supervisor.children(recursive=True)]
        await process.stop()
        return family

    family = uvloop.run(run())
    assert len(family) == 3
    assert not psutil.wait_procs(family, timeout=20)[1]


async def test_an_engine_that_ends_at_once_is_quoted_in_the_error() -> None:
    with pytest.raises(EngineStartError, match=r"ended with status 3\n    no model here"):
        await engine("print('no model here', flush=True); raise SystemExit(3)").start()


async def test_the_error_names_the_signal_that_killed_an_engine() -> None:
    with pytest.raises(EngineStartError, match="was ended by SIGKILL"):
        await engine("import os; os.kill(os.getpid(), 9)").start()


async def test_an_early_cause_in_the_log_is_quoted_too() -> None:
    script = (
        "print('(Worker pid=7) ERROR 11-20 [executor.py:9] RuntimeError: Cannot find any model weights')\n"
        "for number in range(100): print('  File line', number)\n"
        "raise SystemExit(1)"
    )
    with pytest.raises(EngineStartError) as failure:
        await engine(script).start()
    lines = str(failure.value).splitlines()
    assert "RuntimeError: Cannot find any model weights" in lines[1]
    assert lines[-1] == "      File line 99"
    assert len(lines) < 20


async def test_an_engine_that_never_becomes_healthy_is_ended_in_time() -> None:
    process = engine("import time; print('loading', flush=True); time.sleep(600)", start_s=1)
    with pytest.raises(EngineStartError, match=r"was not ready within 1 s\n    loading"):
        await process.start()
    assert process.pid is not None
    assert not psutil.pid_exists(process.pid)


async def test_a_missing_program_is_an_error() -> None:
    with pytest.raises(EngineStartError, match="cannot run /nowhere/python"):
        await EngineProcess("an engine", lambda port: ["/nowhere/python"], start_s=5).start()


async def test_an_engine_gets_its_own_variables_and_its_output_is_kept(
    started: Callable[..., Any], tmp_path: Path
) -> None:
    file = tmp_path / "logs" / "vllm-0.log"
    for role in ("first", "second"):
        process = await started(engine(SERVER, environment={"ROLE": role}, log_file=file))
        await until(lambda role=role: file.read_text().startswith(f"I am {role} "))  # type: ignore[misc]
        await process.stop()
    assert (tmp_path / "logs" / "vllm-0.log.1").read_text().startswith("I am first ")


async def test_a_failure_names_the_log(tmp_path: Path) -> None:
    file = tmp_path / "vllm-0.log"
    with pytest.raises(EngineStartError, match=f"{file}"):
        await engine("raise SystemExit('no')", log_file=file).start()
    assert file.read_text() == "no\n"


async def test_a_log_that_grows_too_large_starts_again(
    started: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "LOG_BYTES_MAX", 1000)
    file = tmp_path / "vllm-0.log"
    talk = "import time\nfor n in range(50): print(n, 'x' * 100, flush=True); time.sleep(0.01)\n"
    await started(engine(talk + SERVER, log_file=file))
    await until(lambda: "I am" in file.read_text())
    assert file.stat().st_size < 3000
    assert (tmp_path / "vllm-0.log.1").stat().st_size < 3000


async def test_a_slow_start_logs_the_last_output_from_time_to_time(
    started: Callable[..., Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "PROGRESS_EVERY_S", 0.2)
    caplog.set_level(logging.INFO, "llmserve")
    slow = "import sys, time; sys.stdout.write('weights: 10%\\rweights: 20%\\r'); sys.stdout.flush(); time.sleep(1)\n"
    await started(engine(slow + SERVER))
    assert "vllm-0 is starting (0 s): weights: 20%" in [record.getMessage() for record in caplog.records]


async def test_a_start_that_tries_again_logs_why(
    started: Callable[..., Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines are those of huggingface_hub without a network."""
    monkeypatch.setattr(engine_process, "PROGRESS_EVERY_S", 0.2)
    caplog.set_level(logging.INFO, "llmserve")
    why, again = "'[Errno -3] no name resolution' thrown while requesting HEAD URL", "Retrying in 8s [Retry 4/5]."
    slow = f"import time; print({why!r}, {again!r}, sep='\\n', flush=True); time.sleep(1)\n"
    await started(engine(slow + SERVER))
    assert f"vllm-0 is starting (0 s): {why}; {again}" in [record.getMessage() for record in caplog.records]


async def test_a_port_taken_by_another_process_is_replaced(started: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        process = await started(engine(SERVER, port=port))
        assert process.port != port
        assert process.url.endswith(f":{process.port}")


async def test_a_healthy_foreign_server_on_the_port_is_recognised(started: Callable[..., Any]) -> None:
    stranger = await started(engine(SERVER))
    process = await started(engine(SERVER, port=stranger.port))
    assert process.port != stranger.port


async def test_a_port_that_is_always_taken_is_an_error_in_the_end() -> None:
    tried: list[int] = []

    def command(port: int) -> list[str]:
        tried.append(port)
        return [sys.executable, "-c", "raise SystemExit('OSError: [Errno 98] Address already in use')"]

    with pytest.raises(EngineStartError, match="Address already in use"):
        await EngineProcess("vllm-0", command, start_s=30).start()
    assert len(tried) == engine_process.START_TRIES


async def test_a_killed_engine_comes_back_on_its_port_and_that_is_logged(
    started: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    process = await started(engine(SERVER))
    port, first = process.port, server_of(process)
    first.kill()
    await until(lambda: "vllm-0 is up again" in caplog.text)
    assert process.port == port
    assert server_of(process).pid != first.pid
    assert "vllm-0 was ended by SIGKILL; restarting in 0.5 s\n    I am nobody" in caplog.text


async def test_an_engine_that_hangs_is_killed_and_comes_back(started: Callable[..., Any]) -> None:
    process = await started(engine(SERVER, hung_s=0.9))
    hung = server_of(process)
    hung.suspend()
    async with asyncio.timeout(30):
        while not process.restarts or not process.healthy:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert not hung.is_running() or hung.status() == psutil.STATUS_ZOMBIE
    assert process.last_end == "was killed, for it had not answered /health for 0.9 s"
    await asyncio.sleep(2.0)
    assert process.restarts == 1, "an engine that answers is left alone"


async def test_an_engine_whose_supervisor_is_killed_leaves_no_process_and_comes_back(
    started: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    process = await started(engine(SERVER))
    first = server_of(process)
    os.kill(process.pid, signal.SIGKILL)
    await until(lambda: "vllm-0 is up again" in caplog.text)
    assert not psutil.wait_procs([first], timeout=20)[1]


async def test_a_restart_returns_when_it_is_healthy_and_is_no_crash(
    started: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    process = await started(engine(SERVER))
    port, first = process.port, server_of(process)
    await process.restart()
    assert not first.is_running()
    assert server_of(process).pid != first.pid
    assert process.port == port
    assert caplog.text == ""
    server_of(process).kill()  # the process is still watched
    await until(lambda: "vllm-0 is up again" in caplog.text)


async def test_a_restart_that_fails_is_an_error_and_is_tried_again(
    started: Callable[..., Any], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    flag = tmp_path / "fail"
    process = await started(engine(f"import os\nif os.path.exists({str(flag)!r}): raise SystemExit(5)\n{SERVER}"))
    flag.touch()
    with pytest.raises(EngineStartError, match="status 5"):
        await process.restart()
    flag.unlink()
    await until(lambda: "vllm-0 is up again" in caplog.text)


async def test_a_stop_during_a_restart_leaves_nothing_running(started: Callable[..., Any], tmp_path: Path) -> None:
    flag = tmp_path / "slow"
    process = await started(
        engine(f"import os, time\nif os.path.exists({str(flag)!r}): time.sleep(600)\n{SERVER}", start_s=60)
    )
    flag.touch()
    supervisor = process.pid
    restarting = asyncio.ensure_future(process.restart())
    await until(lambda: process.pid != supervisor)
    second = psutil.Process(process.pid)
    await process.stop()
    with pytest.raises(EngineStartError, match="is being stopped"):
        await restarting
    assert not second.is_running()


def test_free_ports_are_different_and_can_be_listened_on() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    for port in [*ports, free_port()]:
        socket.create_server(("127.0.0.1", port)).close()


# ---- the key ----


async def test_a_process_gets_a_random_key_in_its_environment_only(started: Callable[..., Any]) -> None:
    first, second = [engine(SERVER, key_variable="ROLE") for _ in range(2)]
    await started(first)
    assert first.api_key is not None
    assert len(first.api_key) > 40
    assert first.api_key != second.api_key
    assert server_of(first).environ()["ROLE"] == first.api_key
    commands = [server_of(first).cmdline(), psutil.Process(first.pid).cmdline()]
    assert not any(first.api_key in word for words in commands for word in words)
    assert engine(SERVER).api_key is None
