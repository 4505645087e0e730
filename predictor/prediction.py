"""What a trained predictor says of one prompt."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

FEATURE = "<f2"
"""NumPy's name of the type of a feature."""
MARK_BYTES = 16
FEATURE_LIMIT = 100.0
"""Features are within plus and minus this, some hundred times what is usual: so much can one prompt teach at most."""


class Prediction(NamedTuple):
    """lengths : equally likely output tokens, ascending, at least one; the middle one is the median.
    features : MARK_BYTES that name the predictor, then what its encoder knows of the prompt, as numbers of the type
    FEATURE; b"" from an export without features.
    """

    lengths: Sequence[float]
    features: bytes = b""


def mark_of(training_lengths: Sequence[int], forecasts: Sequence[Sequence[float]]) -> bytes:
    """MARK_BYTES that name a predictor: a hash of what comes with it, which another training changes."""
    content = repr((list(training_lengths), [tuple(lengths) for lengths in forecasts]))
    return blake2b(content.encode(), digest_size=MARK_BYTES).digest()
