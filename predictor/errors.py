"""What can go wrong in this package.

PredictorError
├── DatasetError      no training rows can be had from what was given
├── BadPredictor      a folder does not hold a predictor that can be loaded
├── PredictionFailed  the predictor process could not answer for these prompts, but lives on
└── PredictorDied     the predictor process is gone; it is being started again, unless it was closed
"""


class PredictorError(Exception):
    """The root of this package's exceptions."""


class DatasetError(PredictorError):
    """No training rows can be had from what was given."""


class BadPredictor(PredictorError):
    """A folder does not hold a predictor that can be loaded."""


class PredictionFailed(PredictorError):
    """The predictor process could not answer for these prompts, but lives on."""


class PredictorDied(PredictorError):
    """The predictor process is gone; it is being started again, unless it was closed."""
