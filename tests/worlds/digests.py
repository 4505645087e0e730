"""Digests of the scheduler's actions in thousands of worlds: proof that a code change changed no decision.

A digest covers all actions of a world's run and their times. `digests.txt` has a line for each world, `SEED DIGEST`;
a digest ends with ! if the run broke a law.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
from worlds.drawing import draw
from worlds.run import run

from llmserve.cluster.journal import Step

FILE = Path(__file__).with_name("digests.txt")
WORLDS = 4_000
DIGITS = 12  # hexadecimal, of SHA-256


def digest(seed: int) -> str:
    """The digest of a world's actions and their times."""
    steps: list[Step] = []
    broken = ""
    try:
        run(draw(seed), steps)
    except Exception:  # every error of the scheduler is a finding
        broken = "!"
    acted = [(step.now_s, step.actions) for step in steps if step.actions]
    return hashlib.sha256(msgspec.json.encode(acted)).hexdigest()[:DIGITS] + broken


def recorded() -> dict[int, str]:
    """The digests of the file, by seed."""
    lines = [line.split() for line in FILE.read_text().splitlines()]
    return {int(seed): digest_ for seed, digest_ in lines}


def write(digests: dict[int, str]) -> None:
    FILE.write_text("".join([f"{seed} {digests[seed]}\n" for seed in sorted(digests)]))
