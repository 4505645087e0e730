#!/usr/bin/env python
"""Evaluate a trained length predictor: `llmserve evaluate`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from llmserve.__main__ import run_script
from llmserve.commands import evaluate


def main() -> int:
    return run_script("evaluate_predictor", evaluate)


if __name__ == "__main__":
    sys.exit(main())
