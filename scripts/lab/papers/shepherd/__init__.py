"""Shepherd (NSDI 2023)."""
