"""Multi-Bin Batching."""
