"""The papers' numbers, measured again: what scripts/reproduce.py runs."""
