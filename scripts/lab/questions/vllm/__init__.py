"""llmserve in front of real vLLM servers: docs/results/vllm.md."""
