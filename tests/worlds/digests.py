"""Digests of the scheduler's actions in thousands of worlds: proof that a code change changed no decision.

A digest covers all actions of a world's run and their times, to DIGITS_OF_NUMBERS: the last digits of a solved plan
depend on the machine's instructions. `digests.txt` has a line for each world, `SEED DIGEST`; a digest ends with ! if
the run broke a law.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import msgspec
from worlds.drawing import draw
from worlds.run import run

from llmserve.live.journal import Step

FILE = Path(__file__).with_name("digests.txt")
WORLDS = 4_000
DIGITS = 12  # hexadecimal, of SHA-256
DIGITS_OF_NUMBERS = 9  # significant


def digest(seed: int) -> str:
    """The digest of a world's actions and their times."""
    steps: list[Step] = []
    broken = ""
    try:
        run(draw(seed), steps)
    except Exception:  # every error of the scheduler is a finding
        broken = "!"
    return digest_of(steps) + broken


def digest_of(steps: Iterable[Step]) -> str:
    """The digest of the steps that have actions."""
    acted = msgspec.to_builtins([(step.now_s, step.actions) for step in steps if step.actions])
    return hashlib.sha256(msgspec.json.encode(_rounded(acted))).hexdigest()[:DIGITS]


def _rounded(value: object) -> object:
    """The value with all its floating-point numbers, at any depth, rounded to DIGITS_OF_NUMBERS."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS_OF_NUMBERS}g}")
    if isinstance(value, list | tuple):
        return [_rounded(member) for member in value]
    if isinstance(value, dict):
        return {key: _rounded(member) for key, member in value.items()}
    return value


def recorded() -> dict[int, str]:
    """The digests of the file, by seed."""
    lines = [line.split() for line in FILE.read_text().splitlines()]
    return {int(seed): digest_ for seed, digest_ in lines}


def write(digests: dict[int, str]) -> None:
    FILE.write_text("".join([f"{seed} {digests[seed]}\n" for seed in sorted(digests)]))
