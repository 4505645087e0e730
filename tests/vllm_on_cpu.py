"""How the tests start the real vLLM on a CPU."""

from pathlib import Path

MODEL = Path(__file__).parents[1] / "llmserve/engines/embedded/model"
ARGS = ("--max-model-len", "1024", "--enforce-eager", "--dtype", "float32")
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
