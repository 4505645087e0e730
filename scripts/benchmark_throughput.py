"""Measure the gain of bins on a real engine that runs batches to completion: `llmserve bench`."""

import sys

from llmserve.__main__ import run_script
from llmserve.commands import bench


def main() -> int:
    return run_script("benchmark_throughput", bench)


if __name__ == "__main__":
    sys.exit(main())
