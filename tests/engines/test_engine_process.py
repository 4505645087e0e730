"""Engine processes: nothing is left behind, whatever the child does."""

from __future__ import annotations

import sys

import psutil
import pytest
import uvloop

from llmserve.engines.engine_process import EngineProcess
from llmserve.errors import EngineStartError

SERVER = """
import http.server, subprocess, sys
DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
worker = subprocess.Popen([sys.executable, "-c", DEAF])
print("worker", worker.pid, flush=True)
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""


def engine(script: str) -> EngineProcess:
    return EngineProcess("an engine", lambda port: [sys.executable, "-c", script, str(port)], start_s=30)


def test_a_worker_that_ignores_its_signal_goes_with_its_leader_and_holds_nothing_up() -> None:
    """Under uvloop, which the server uses: there the end of a process also waits for its output."""

    async def run() -> list[psutil.Process]:
        process = engine(SERVER)
        await process.start()
        assert process.pid is not None
        leader = psutil.Process(process.pid)
        family = [leader, *leader.children()]
        await process.stop()
        return family

    family = uvloop.run(run())
    assert len(family) == 2
    assert not psutil.wait_procs(family, timeout=20)[1]


async def test_an_engine_that_ends_at_once_is_quoted() -> None:
    with pytest.raises(EngineStartError, match=r"status 3\n    no model here"):
        await engine("print('no model here', flush=True); raise SystemExit(3)").start()


async def test_a_program_that_is_not_there_is_an_error() -> None:
    with pytest.raises((EngineStartError, OSError)):
        await EngineProcess("an engine", lambda port: ["/nowhere/python"], start_s=5).start()
