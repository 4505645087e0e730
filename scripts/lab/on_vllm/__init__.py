"""Parts of benchmark_vllm.py: llmserve in front of real vLLM servers."""
