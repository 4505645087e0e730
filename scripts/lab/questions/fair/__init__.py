"""How fair shares are, beside floods and over time: docs/results/fair.md."""
