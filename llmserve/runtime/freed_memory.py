"""Memory that was freed, given back to the system."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


def give_back() -> None:
    """Let the C library give back what it keeps for later. Without effect where it is not glibc. May take milliseconds.

    glibc keeps freed blocks of up to 32 MiB among those in use: after a burst of large bodies, most of the burst.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
