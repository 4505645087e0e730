"""`llmserve serve --engine vllm`: the real vLLM is started, watched, restarted, and never left behind."""

from __future__ import annotations

import shutil
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from server_process import Server, all_ended, failed_start
from vllm_on_cpu import ARGS, MODEL, SETTINGS

pytestmark = pytest.mark.vllm

START_S = 240.0


@pytest.fixture
def flags(vllm_python: str, tmp_path: Path) -> list[str]:
    """Flags that serve the demo model with vLLM, without the model and vLLM's arguments."""
    return ["--engine", "vllm", "--engine-python", vllm_python, "--engine-log-folder", str(tmp_path / "logs")]


def vllm_of(server: Server) -> list[psutil.Process]:
    """vLLM's processes; the first is its API server."""
    (supervisor,) = psutil.Process(server.process.pid).children()
    return supervisor.children(recursive=True)


def test_vllm_answers_comes_back_when_killed_and_ends_with_a_killed_front_end(flags: list[str], tmp_path: Path) -> None:
    server = Server(*flags, "--model", str(MODEL), "--slots", "4", "--", *ARGS, environment=SETTINGS)
    try:
        answer, headers = server.chat("Count from 3 to 9.", model="model")
        assert answer["choices"][0]["message"]["content"] == "3, 4, 5, 6, 7, 8, 9"
        assert headers["x-llmserve-engine"] == "vllm-0"
        assert headers["x-llmserve-cached-tokens"] == "0", "llmserve has vLLM tell what was in its cache"
        assert (tmp_path / "logs" / "vllm-0.log").stat().st_size > 0

        (port,) = {each.laddr.port for each in vllm_of(server)[0].net_connections() if each.status == "LISTEN"}
        with pytest.raises(urllib.error.HTTPError, match="401"):  # other users of this machine have no key
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=20)

        first = vllm_of(server)
        assert len(first) > 1, "at least an API server and an engine core"
        first[0].kill()
        answer = server.chat_when_up("Count from 3 to 9.", within_s=START_S, model="model")
        assert answer["choices"][0]["message"]["content"] == "3, 4, 5, 6, 7, 8, 9"
        assert all_ended(first), "its engine core must end with it"

        second = vllm_of(server)
        assert len(second) == len(first)
        server.process.kill()
        assert all_ended([*second, *server.children], within_s=20)
    finally:
        server.close()


def test_a_model_without_weights_ends_the_start_with_vllms_message(flags: list[str], tmp_path: Path) -> None:
    model = shutil.copytree(MODEL, tmp_path / "hollow", ignore=shutil.ignore_patterns("*.safetensors"))
    status, error = failed_start(
        *flags, "--port", "0", "--model", str(model), "--", *ARGS, within_s=START_S, **SETTINGS
    )
    assert status == 1
    assert "vllm-0 ended with status 1" in error
    assert "Cannot find any model weights" in error, "an early line of vLLM's output"
    assert str(tmp_path / "logs" / "vllm-0.log") in error
    assert "llmserve/commands/serve.py" not in error, "no traceback of llmserve"


def test_an_argument_that_vllm_does_not_know_ends_the_start(flags: list[str]) -> None:
    """For all replicas, as test_serve.py shows with stand-ins."""
    model = ["--model", str(MODEL)]
    status, error = failed_start(*flags, "--port", "0", *model, "--", "--no-such-thing", within_s=START_S, **SETTINGS)
    assert status == 1
    assert "unrecognized arguments: --no-such-thing" in error
