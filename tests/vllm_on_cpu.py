"""How the tests start the real vLLM on a CPU, quickly and without starving what it is tested with."""

from pathlib import Path

MODEL = Path(__file__).parents[1] / "llmserve/engines/embedded/model"
# One process with one thread: engine core and worker, which wait for each other by spinning, would leave small machines
# no time for anything else (scripts/benchmark_vllm.py).
ARGS = ("--max-model-len", "1024", "--enforce-eager", "--dtype", "float32", "--distributed-executor-backend", "uni")
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # Else the first request for log-probabilities compiles a function, which takes up to a minute.
    "TORCH_COMPILE_DISABLE": "1",
}
