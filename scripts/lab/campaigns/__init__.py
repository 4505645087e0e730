"""Campaigns against a running server: kills of processes, hostile bytes, a foreign proxy."""
