"""Where the value of a field lies in a body, so that it can be exchanged without writing the body again."""

from __future__ import annotations

import numpy as np
from msgspec import Raw


def place_of(view: Raw, data: bytes) -> slice:
    """view : of a field that is not empty, as decoded from `data`"""
    start = _address(view) - _address(data)
    return slice(start, start + len(memoryview(view)))


def _address(view: bytes | Raw) -> int:
    """Where the bytes lie in memory."""
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address
