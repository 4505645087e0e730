"""What bins gain on a real engine that runs batches to completion: `llmserve bench`."""

import sys

from llmserve import bench
from llmserve.__main__ import run_script
from llmserve.bench import (
    BASELINE,
    MODEL,
    Arrangement,
    Run,
    batch_cost,
    embedded_engine,
    front_end,
    is_ready,
    rows,
    run,
)

__all__ = ["BASELINE", "MODEL", "Arrangement", "Run"]  # other scripts take these and the next from here
__all__ += ["batch_cost", "embedded_engine", "front_end", "is_ready", "rows", "run"]


def main() -> int:
    return run_script("benchmark_throughput", bench)


if __name__ == "__main__":
    sys.exit(main())
