"""How the tests start the real vLLM on a CPU."""

from pathlib import Path

MODEL = Path(__file__).parents[1] / "llmserve/engines/embedded/model"
ARGS = ("--max-model-len", "1024", "--enforce-eager", "--dtype", "float32")
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # Else the first request for log-probabilities compiles a function, which takes up to a minute.
    "TORCH_COMPILE_DISABLE": "1",
    # The engine core runs the model itself, in one thread: a worker process of its own imports vLLM once more, the two
    # watch each other without a pause, and the threads of a model so small wait mostly for each other.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
