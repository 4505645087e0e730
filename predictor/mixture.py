"""What a forecast is made of, each part with the weight that it has earned."""

from operator import mul
from typing import Self

import numpy as np

from predictor.state import State, array

KEPT = 0.998
"""Weight of an answer relative to the next one: about the latest 500 count."""
Parts = tuple[float, float, float]
"""Of the words, of a trained predictor, of the level of the model; each a difference from the level of all models."""
PRIOR: Parts = (1.0, 0.0, 1.0)
"""The weights before the first answer: the words and the level of the model as they are, and no prediction."""
_RIDGE = 1.0  # as much as four answers half a unit from the mean


class Mixture:
    """A ridge regression of lengths on the parts of their forecasts, towards PRIOR. One mixture serves all models.

    Learns from the parts as they were served. With many answers in flight, the words and the level of a model know
    less when they forecast an answer than when the answer has come; their weights then fall by themselves. These two
    weights are at most 1: parts that lag behind a change of all lengths would earn more, and overshoot afterwards.
    """

    def __init__(self) -> None:
        self._products = [0.0] * 6  # sums of the products of the parts 1 and 1, 1 and 2, 1 and 3, 2 and 2, ...
        self._errors = [0.0] * 3  # sums of the parts times (actual - the forecast by PRIOR)
        self._weights = PRIOR

    def mixed(self, parts: Parts) -> float:
        words, predicted, level = self._weights
        return words * parts[0] + predicted * parts[1] + level * parts[2]

    def learn(self, parts: Parts, actual: float) -> None:
        """actual : relative to the level of all models at the time of the forecast."""
        error = actual - sum(map(mul, PRIOR, parts), 0.0)
        x, y, z = parts
        self._products = [
            KEPT * kept + new
            for kept, new in zip(self._products, (x * x, x * y, x * z, y * y, y * z, z * z), strict=True)
        ]
        self._errors = [KEPT * kept + part * error for kept, part in zip(self._errors, parts, strict=True)]
        self._solve()

    def _solve(self) -> None:
        """By the adjugate matrix, which takes a twentieth of the time of a call of numpy. The ridge keeps the
        determinant above zero.
        """
        xx, xy, xz, yy, yz, zz = self._products
        a, d, f = xx + _RIDGE, yy + _RIDGE, zz + _RIDGE
        first, second, third = d * f - yz * yz, xz * yz - xy * f, xy * yz - xz * d
        fourth, fifth, sixth = a * f - xz * xz, xy * xz - a * yz, a * d - xy * xy
        determinant = a * first + xy * second + xz * third
        x, y, z = self._errors
        words = PRIOR[0] + (first * x + second * y + third * z) / determinant
        predicted = PRIOR[1] + (second * x + fourth * y + fifth * z) / determinant
        level = PRIOR[2] + (third * x + fifth * y + sixth * z) / determinant
        self._weights = min(words, 1.0), predicted, min(level, 1.0)

    def state(self) -> State:
        return {"products": np.array(self._products), "errors": np.array(self._errors)}

    @classmethod
    def of(cls, state: State) -> Self:
        """Raises ValueError for another kind of state."""
        mixture = cls()
        products, errors = array(state, "products", (6,)), array(state, "errors", (3,))
        matrix = np.zeros((3, 3))
        matrix[np.triu_indices(3)] = products
        least = np.linalg.eigvalsh(matrix, UPLO="U").min() if np.isfinite(products).all() else -np.inf
        if least < -1e-6 * (1 + np.abs(products).max()) or not np.isfinite(errors).all():
            raise ValueError("the state of a mixture is no sum of products")
        mixture._products, mixture._errors = products.tolist(), errors.tolist()
        mixture._solve()
        return mixture
