"""Hits in the caches of real vLLM servers behind llmserve and behind vllm-router: docs/results/residency.md."""
