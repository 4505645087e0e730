#!/usr/bin/env python
"""Measure the seconds and joules of an engine's batches by size: `llmserve profile`."""

import sys
from collections.abc import Sequence

from llmserve.__main__ import run_script
from llmserve.commands import profile


def main(argv: Sequence[str] | None = None) -> int:
    return run_script("profile_engine", profile, argv)


if __name__ == "__main__":
    sys.exit(main())
