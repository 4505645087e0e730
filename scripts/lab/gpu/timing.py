"""Seconds of work on a device: by the device's own events on a GPU, by the clock on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

COPY_BYTES, COPY_BYTES_REHEARSED = 4 << 30, 64 << 20
COPIES = 9


def device_s(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds from the work's first kernel to its last. The work must be done before, once, to warm up."""
    if device.type == "cpu":
        began_s = time.perf_counter()
        work()
        return time.perf_counter() - began_s
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def median_s(work: Callable[[int], Any], device: torch.device, repeats: int) -> tuple[float, float]:
    """The median, and the spread from the first to the third quartile as a share of the median, >= 0.

    work : called with the number of the repetition, for other inputs each time
    """
    seconds = sorted(device_s(lambda: work(number), device) for number in range(repeats))  # noqa: B023
    median = statistics.median(seconds)
    first, _, third = statistics.quantiles(seconds, n=4) if repeats > 1 else (median, median, median)
    return median, (third - first) / median


def copy_bytes_per_s(device: torch.device) -> float:
    """Bandwidth of the memory by a copy within it; the bytes read and the bytes written both count."""
    size = COPY_BYTES_REHEARSED if device.type == "cpu" else COPY_BYTES
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    seconds, _ = median_s(lambda _: target.copy_(source), device, COPIES)
    return 2 * size / seconds
