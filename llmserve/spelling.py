"""Suggestions for unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Collection


def nearest(word: str, candidates: Collection[str]) -> str:
    """Return the end of an error message about an unknown word: "; did you mean x?", or a list of the known words."""
    names = list(candidates)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.0)
    return f"; did you mean {near[0]}?" if near else f"; known are {', '.join(names)}"
