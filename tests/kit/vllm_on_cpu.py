"""How the tests start the real vLLM on a CPU."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from real_engine import running

MODEL = Path(__file__).parents[2] / "llmserve/demo/model"
ARGS = ("--max-model-len", "1024", "--enforce-eager", "--dtype", "float32")
# Where a grammar allows white space anywhere, the demo model writes nothing else: neither for JSON nor for tools.
STRUCTURED = ("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}')
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # Otherwise the first request for log-probabilities compiles a function, which takes up to a minute.
    "TORCH_COMPILE_DISABLE": "1",
    # The engine core runs the model itself, in one thread. A separate worker process would import vLLM again, the two
    # would poll each other all the time, and threads of so small a model would mostly wait for each other.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


def running_vllm(python: str, log: Path, *args: str) -> AbstractContextManager[str]:
    """A vLLM server with the demo model and these arguments. Yields its base URL.

    python : an interpreter that has vLLM.  log : the file for the server's output
    """

    def command(port: int) -> list[str]:
        words = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL), "--port", str(port)]
        return [*words, "--host", "127.0.0.1", *ARGS, *STRUCTURED, *args]

    settings = {
        **SETTINGS,
        "VLLM_ENABLE_RESPONSES_API_STORE": "1",
        "VLLM_ENFORCE_STRICT_TOOL_CALLING": "0",  # for arguments of tools, too, STRUCTURED holds
    }
    return running(command, log, settings)
