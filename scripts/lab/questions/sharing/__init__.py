"""Models in turn on one engine: what loads cost, and what grouping saves (docs/results/shared-models.md)."""
