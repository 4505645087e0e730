"""An OpenAI-compatible front-end that predicts answer lengths and batches requests by predicted length."""

__version__ = "0.1.0"
