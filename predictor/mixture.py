"""Forecasts from two others: a trained predictor's, and that of the text learner."""

from typing import Self

import numpy as np

from predictor.state import State, array

KEPT = 0.997
"""Weight of an answer relative to the next one: about the latest 300 count."""
_RIDGE = np.diag([0.1, 0.3, 0.3])


class Mixture:
    """A ridge regression on both forecasts, by what an answer showed. It begins as the prediction alone.

    All arguments are on one scale of lengths; `actual` is the length that an answer showed.
    """

    def __init__(self) -> None:
        self._products = _RIDGE.copy()  # of the inputs with each other
        self._errors = np.zeros(3)  # products of the inputs with the errors of the predictions
        self._weights = [0.0, 0.0, 0.0]
        self._centre: tuple[float, float] | None = None

    def mixed(self, text: float, predicted: float) -> float:
        if self._centre is None:
            return predicted
        level, own, other = self._weights
        return predicted + level + own * (text - self._centre[0]) + other * (predicted - self._centre[1])

    def learn(self, text: float, predicted: float, actual: float) -> None:
        self._centre = self._centre or (text, predicted)
        inputs = np.array([1.0, text - self._centre[0], predicted - self._centre[1]])
        self._products *= KEPT
        self._products += np.outer(inputs, inputs) + (1 - KEPT) * _RIDGE
        self._errors *= KEPT
        self._errors += (actual - predicted) * inputs
        self._weights = np.linalg.solve(self._products, self._errors).tolist()

    def state(self) -> State:
        """Of a mixture that has learnt."""
        return {"products": self._products.copy(), "errors": self._errors.copy(), "centre": np.array(self._centre)}

    @classmethod
    def of(cls, state: State) -> Self:
        """Raises ValueError for another kind of state."""
        mixture = cls()
        mixture._products = array(state, "products", (3, 3)).copy()
        mixture._errors = array(state, "errors", (3,)).copy()
        text, predicted = array(state, "centre", (2,)).tolist()
        mixture._centre = text, predicted
        try:
            mixture._weights = np.linalg.solve(mixture._products, mixture._errors).tolist()
        except np.linalg.LinAlgError as error:
            raise ValueError(f"the state of a mixture cannot be solved: {error}") from error
        return mixture
