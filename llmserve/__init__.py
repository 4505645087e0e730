"""An OpenAI-compatible front-end that predicts answer lengths and batches by them."""

__version__ = "0.1.0"
