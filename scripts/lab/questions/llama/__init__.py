"""llmserve in front of the real llama.cpp: docs/results/llama.md."""
