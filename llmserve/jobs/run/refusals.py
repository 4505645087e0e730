"""Tells refusals that another try may escape from those that are final."""

from __future__ import annotations

from collections import Counter

from llmserve.errors import RequestError

BUSY = (429, 503)  # statuses of engines that may take the line later
PASSING = (401, 429, 502, 503)  # of refusals by the front-end, likewise
LOST_MAX = 10  # engines that a line may lose: it may be what kills them
REASONS = {"insufficient_quota": "budget", "invalid_api_key": "key_missing"}  # by the code of a refusal


def is_final(error: RequestError, lost: Counter[int], number: int) -> bool:
    """Whether another try would fail, too. The scheduler has already retried a line that failed on engines.

    lost : number of engines that each line has lost; updated here
    """
    if error.code == "engine_lost":
        lost[number] += 1
        return lost[number] >= LOST_MAX
    return error.status not in PASSING or error.code == "engine_failed"


def reason_of(error: RequestError) -> str:
    """Why a line waits, in a word."""
    return REASONS.get(error.code or "", error.code or "busy")
