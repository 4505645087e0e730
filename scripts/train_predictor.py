#!/usr/bin/env python
"""Train a length predictor: `llmserve train`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from llmserve.__main__ import run_script
from llmserve.commands import train


def main() -> int:
    return run_script("train_predictor", train)


if __name__ == "__main__":
    sys.exit(main())
