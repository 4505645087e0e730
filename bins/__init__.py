"""Bin edges, and the theory and control of batching in bins. Depends on numpy only."""
