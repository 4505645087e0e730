"""Prompts of five templates that differ in the length of their answers. Standard library only."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Template:
    """text : with {n}, a number between least and most.  tokens_each : of the answer, for each of the n things"""

    text: str
    least: int
    most: int
    tokens_each: float


TEMPLATES = (
    Template("Count from 1 to {n}.", 20, 40, 2.0),
    Template("Count down from {n} to 1.", 60, 120, 2.0),
    Template("Name {n} animals.", 2, 5, 4.0),
    Template("Write the word red {n} times.", 30, 60, 3.0),
    Template("Tell me the alphabet, and then the numbers up to {n}.", 3, 12, 2.0),
)


def drawn(count: int, rng: random.Random) -> list[str]:
    """So many prompts, of a template each, in random order."""
    chosen = [rng.choice(TEMPLATES) for _ in range(count)]
    return [template.text.format(n=rng.randint(template.least, template.most)) for template in chosen]


def tokens_of(prompt: str) -> int:
    """Tokens of an engine's answer. Raises ValueError for a prompt of no template."""
    for template in TEMPLATES:
        found = re.search(re.escape(template.text).replace(r"\{n\}", r"(\d+)"), prompt)
        if found:
            return max(1, round(template.tokens_each * int(found[1])))
    raise ValueError(f"{prompt!r} is of no template")
