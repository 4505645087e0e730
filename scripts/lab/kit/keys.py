"""An API key whose limits are counted and never reached: what keys cost, measured."""

from __future__ import annotations

KEY = "key-of-the-comparison"
KEY_FILE = f"""
[keys.one]
key = "{KEY}"
requests_per_minute = 100_000_000
tokens_per_minute = 10_000_000_000
tokens_waiting = 100_000_000
concurrent = 100_000
"""
