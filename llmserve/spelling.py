"""What a person may have meant by a name that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Collection


def nearest(word: str, known: Collection[str]) -> str:
    """How a sentence about an unknown word ends: "; did you mean x?", or which words are known where none is near."""
    names = list(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.0)
    return f"; did you mean {near[0]}?" if near else f"; known are {', '.join(names)}"
