"""What the front-end and the scheduler cost: docs/results/performance.md."""
