"""Shares of deadlines met, live and simulated: docs/results/deadlines.md."""
