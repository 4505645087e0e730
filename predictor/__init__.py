"""Text -> predicted output tokens.

Importing this package, or `predictor.process`, loads neither torch nor transformers.
"""

from pathlib import Path

DEMO = Path(__file__).parent / "demo"
"""The predictor that ships with the package; docs/results/demo-predictor.md has its training and its accuracy."""
