"""What a trained predictor says of one prompt."""

from collections.abc import Sequence
from typing import NamedTuple

FEATURE = "<f2"
"""NumPy's name of the type of a feature."""


class Prediction(NamedTuple):
    """lengths : equally likely output tokens, ascending, at least one; the middle one is the median.
    features : what the encoder knows of the prompt, numbers of the type FEATURE; b"" from an export without features.
    """

    lengths: Sequence[float]
    features: bytes = b""
