"""What `llmserve doctor` finds: in plain words what is wrong or slow, and the remedy."""

from __future__ import annotations

from typing import Literal

import msgspec

Level = Literal["wrong", "slow", "note"]
LEVELS: tuple[Level, ...] = ("wrong", "slow", "note")


class Finding(msgspec.Struct, frozen=True):
    """One finding.

    level   wrong: requests fail, or soon will; slow: they could be served faster; note: good to know
    code    the kind of the finding, for programs
    what    a sentence
    remedy  what to do about it, a sentence
    """

    level: Level
    code: str
    what: str
    remedy: str
