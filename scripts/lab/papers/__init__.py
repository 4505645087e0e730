"""Measure the numbers of papers again, for scripts/reproduce.py."""
