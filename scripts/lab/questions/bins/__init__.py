"""What bins and windows gain on engines that run batches to their end: docs/results/bins.md."""
