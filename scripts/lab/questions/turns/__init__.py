"""Turns of agents before an engine whose memory is short (docs/results/turns.md)."""
