"""The supervisor: a process below it ends with the supervisor's holder, and no process is left."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest

from llmserve.engines.process import SUPERVISOR

# Starts a worker in its own process group, prints the worker's process id, and obeys its argument.
LEADER = """
import signal, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
print(worker.pid, flush=True)
exec(sys.argv[2])
"""
SLEEP = "import time; time.sleep(600)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); {SLEEP}"

# Holds two supervisors, as a front-end with two engines does, prints all process ids, and waits to be killed.
HOLDER = """
import asyncio, sys
LEADER, SLEEP, SUPERVISOR = sys.argv[1], sys.argv[2], sys.argv[3:]
async def main():
    for _ in range(2):
        process = await asyncio.create_subprocess_exec(
            *SUPERVISOR, sys.executable, "-c", LEADER, SLEEP, SLEEP,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True)
        print(process.pid, int(await process.stdout.readline()), flush=True)
        globals()[f"kept{process.pid}"] = process
    await asyncio.sleep(600)
EVENT_LOOP
"""
EVENT_LOOPS = {"asyncio": "asyncio.run(main())", "uvloop": "import uvloop; uvloop.run(main())"}

Supervised = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def supervised() -> Iterator[Supervised]:
    """`supervised(word, ...)` runs a command below a supervisor that the test holds."""
    processes: list[subprocess.Popen[str]] = []

    def start(*command: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen([*SUPERVISOR, *command], stdin=pipe, stdout=pipe, stderr=pipe, text=True))
        return processes[-1]

    yield start
    for process in processes:
        with process:  # closes its pipes, which ends the supervisor
            pass


def all_ended(*pids: int) -> bool:
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    processes = [process for process in processes if process.status() != psutil.STATUS_ZOMBIE]
    return not psutil.wait_procs(processes, timeout=20)[1]


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("pass", 0),
        ("raise SystemExit(7)", 7),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 128 + 9),
    ],
)
def test_the_supervisor_ends_as_its_command_does(supervised: Supervised, script: str, status: int) -> None:
    assert supervised(sys.executable, "-c", script).wait(timeout=20) == status


def test_a_command_that_cannot_be_run_is_one_line_and_status_127(supervised: Supervised) -> None:
    process = supervised("/nowhere/python")
    assert process.wait(timeout=20) == 127
    assert process.stderr is not None
    assert process.stderr.read() == "cannot run /nowhere/python: No such file or directory\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_command_once(supervised: Supervised, number: signal.Signals) -> None:
    script = (
        "import signal, time; seen = []\n"
        f"signal.signal({int(number)}, lambda *_: seen.append(1))\n"
        "print('ready', flush=True)\n"
        "while not seen: time.sleep(0.01)\n"
        "time.sleep(0.2); raise SystemExit(40 + len(seen))"
    )
    process = supervised(sys.executable, "-c", script)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.wait(timeout=20) == 41


@pytest.mark.parametrize("ending", ["pass", "import os; os.kill(os.getpid(), signal.SIGKILL)"])
def test_the_rest_of_a_commands_group_ends_with_it(supervised: Supervised, ending: str) -> None:
    process = supervised(sys.executable, "-c", LEADER, SLEEP, ending)
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    assert process.wait(timeout=20) in (0, 128 + 9)
    assert all_ended(worker)


def test_a_command_and_a_worker_that_ignore_their_signals_are_killed_when_the_supervisor_loses_its_holder(
    supervised: Supervised,
) -> None:
    process = supervised(sys.executable, "-c", LEADER, DEAF, DEAF)
    assert process.stdin is not None
    assert process.stdout is not None
    lines = sorted([process.stdout.readline().strip() for _ in range(3)])  # its worker's id, and both are deaf by now
    assert lines[1:] == ["deaf", "deaf"]
    worker = int(lines[0])
    (leader,) = psutil.Process(process.pid).children()
    process.stdin.close()
    assert process.wait(timeout=30) == 128 + 9
    assert all_ended(leader.pid, worker)


@pytest.mark.parametrize("loop", EVENT_LOOPS)
def test_when_the_holder_of_two_supervisors_is_killed_all_processes_end(loop: str) -> None:
    """Neither supervisor may keep the other's pipe open."""
    script = HOLDER.replace("EVENT_LOOP", EVENT_LOOPS[loop])
    command = [sys.executable, "-c", script, LEADER, SLEEP, *SUPERVISOR]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        pids = [int(word) for _ in range(2) for word in holder.stdout.readline().split()]
        holder.kill()
    assert len(set(pids)) == 4
    assert all_ended(*pids)
