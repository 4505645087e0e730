"""When a batch should wait: docs/results/dispatch.md."""
