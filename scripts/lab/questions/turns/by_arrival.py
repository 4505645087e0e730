"""Run llmserve so that it admits whole programs by memory in order of arrival: `arrival` of turns/run.py, as a server.

    python scripts/lab turns.by_arrival serve --engine URL

All else is `llmserve`, in the same process.
"""

from __future__ import annotations

from typing import Any

from llmserve import __main__ as llmserve
from llmserve.settings import policies
from questions.turns.run import policy_of


def by_arrival(**learnt: Any) -> Any:
    """In the place of Programs: what is learnt decides nothing."""
    return policy_of("arrival")


def main() -> int:
    policies.Programs = by_arrival  # type: ignore[assignment, misc]
    return llmserve.main()
