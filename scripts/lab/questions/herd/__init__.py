"""How good the plans of groups are, and how long they take: docs/results/herd.md."""
