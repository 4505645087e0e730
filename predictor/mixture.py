"""The forecasts of two sources on one scale: the text learner's, and a trained predictor's."""

from typing import Self

from numpy import array as numbers

from predictor.state import State, array

KEPT = 0.995
"""Weight of an answer relative to the next one: about the latest 200 count."""
_RIDGE = 1.0  # as much as four answers half a unit from the mean


class Mixture:
    """A ridge regression of lengths on both forecasts. It begins as the text learner's forecast alone.

    text, predicted, actual : differences from their means over the model's answers, on one scale. So one mixture serves
    all models.
    """

    def __init__(self) -> None:
        self._products = (0.0, 0.0, 0.0)  # sums of text text, text predicted, predicted predicted
        self._errors = (0.0, 0.0)  # sums of both inputs times (actual - text)
        self._weights = 1.0, 0.0

    def mixed(self, text: float, predicted: float) -> float:
        return self._weights[0] * text + self._weights[1] * predicted

    def learn(self, text: float, predicted: float, actual: float) -> None:
        both, error = self._products, actual - text
        self._products = (
            KEPT * both[0] + text * text,
            KEPT * both[1] + text * predicted,
            KEPT * both[2] + predicted * predicted,
        )
        self._errors = KEPT * self._errors[0] + text * error, KEPT * self._errors[1] + predicted * error
        self._solve()

    def _solve(self) -> None:
        """Cramer's rule. The ridge keeps the determinant above zero."""
        a, b, c = self._products[0] + _RIDGE, self._products[1], self._products[2] + _RIDGE
        first, second = self._errors
        determinant = a * c - b * b
        self._weights = 1 + (c * first - b * second) / determinant, (a * second - b * first) / determinant

    def state(self) -> State:
        return {"numbers": numbers([*self._products, *self._errors])}

    @classmethod
    def of(cls, state: State) -> Self:
        """Raises ValueError for another kind of state."""
        mixture = cls()
        *products, first, second = array(state, "numbers", (5,)).tolist()
        mixture._products, mixture._errors = (products[0], products[1], products[2]), (first, second)
        if products[0] < 0 or products[2] < 0 or products[1] ** 2 > 1.001 * products[0] * products[2] + 1e-9:
            raise ValueError("the state of a mixture is no sum of products")
        mixture._solve()
        return mixture
