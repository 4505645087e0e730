"""Text -> predicted output tokens.

Importing this package, or `predictor.process`, loads neither torch nor transformers: they live in the leaves.
"""

from pathlib import Path

DEMO = Path(__file__).parent / "demo"
"""The predictor that ships with the package; docs/results/demo-predictor.md says how it was made and how good it is."""
