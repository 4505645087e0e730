"""How well lengths are predicted, and how quickly learnt: docs/results/prediction.md."""
