"""A cluster of several Ray nodes on one machine, its load, and what is killed: docs/results/machines.md."""
