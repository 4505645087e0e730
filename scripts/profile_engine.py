#!/usr/bin/env python
"""What an engine costs, in seconds and joules of a batch by its size: `llmserve profile`."""

import sys
from collections.abc import Sequence

from llmserve import profile
from llmserve.__main__ import run_script
from llmserve.engines.measuring import ANSWER_S_MAX, Client, Plan, first_model, measure, observe
from llmserve.profile import power, profile_of, whole

__all__ = ["ANSWER_S_MAX", "Client", "Plan", "first_model", "measure", "observe", "power", "profile_of", "whole"]
# Other scripts take these from here.


def main(argv: Sequence[str] | None = None) -> int:
    return run_script("profile_engine", profile, argv)


if __name__ == "__main__":
    sys.exit(main())
