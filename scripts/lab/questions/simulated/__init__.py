"""The simulated engine with a KV cache beside the real vLLM: docs/results/simulated.md."""
