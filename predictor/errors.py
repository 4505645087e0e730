"""The exceptions of this package.

PredictorError
├── DatasetError      the sources give no usable training rows
├── BadPredictor      a folder does not hold a loadable predictor
├── PredictionFailed  the predictor process lives, but could not answer for these prompts
└── PredictorDied     the predictor process is dead; it restarts unless it was closed
"""


class PredictorError(Exception):
    """The root of this package's exceptions."""


class DatasetError(PredictorError):
    """The sources give no usable training rows."""


class BadPredictor(PredictorError):
    """A folder does not hold a loadable predictor."""


class PredictionFailed(PredictorError):
    """The predictor process lives, but could not answer for these prompts."""


class PredictorDied(PredictorError):
    """The predictor process is dead; it restarts unless it was closed."""
