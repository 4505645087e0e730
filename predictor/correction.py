"""What a trained predictor's forecasts lack, learnt while serving from what its encoder knows of the prompts.

    h    the features of a prompt (export.py); their mean square is about 1
    r    what the prediction lacked
    c h  the correction: a ridge regression of r on h, over all answers with weights that fade

A predictor that meets other traffic than its training's ranks it poorly, but its encoder still tells prompts apart. So
the learner trains one more linear layer on the encoder, for this traffic. A ridge this large suits features of which
each tells a little.

The regression is sums of products of features. It adds BLOCK answers at a time, and takes STEPS steps of conjugate
gradients (Hestenes and Stiefel 1952) from the last weights, which are near the best ones already.

Pure: no clock, no I/O, no randomness. Not thread-safe.
"""

from typing import Self

import numpy as np
from numpy.typing import NDArray

from predictor.state import State, array, part

Vector = NDArray[np.float64]

RIDGE = 1000.0
KEPT = 0.9995
"""Weight of an answer relative to the next one: about the latest 2,000 count."""
BLOCK = 16
STEPS = 8


class Correction:
    """See the module's docstring.

    encoder : names the predictor whose features these are.  size : number of features, at least 1.
    """

    def __init__(self, encoder: bytes, size: int) -> None:
        self.encoder, self.size = encoder, size
        self.weights = np.zeros(size)  # c
        self._products = np.zeros((size, size))  # sum of h h
        self._targets = np.zeros(size)  # sum of r h
        self._block: list[tuple[Vector, float]] = []  # h and r, times the root of the answer's weight

    def of(self, features: Vector) -> float:
        """c h"""
        return float(self.weights.dot(features))

    def learn(self, features: Vector, lacked: float, weight: float) -> None:
        """weight : of the answer, from 0 to 1."""
        root = weight**0.5
        self._block.append((root * features, root * lacked))
        if len(self._block) < BLOCK:
            return
        rows, targets = map(np.array, zip(*self._block, strict=True))
        self._block.clear()
        for sums, new in ((self._products, rows.T @ rows), (self._targets, targets @ rows)):
            sums *= KEPT**BLOCK
            sums += new
        self._improve()

    def _improve(self) -> None:
        rest = self._targets - self._applied(self.weights)
        direction, square = rest, float(rest @ rest)
        for _ in range(STEPS):
            if square < np.finfo(float).tiny:
                return
            applied = self._applied(direction)
            step = square / float(direction @ applied)
            self.weights += step * direction
            rest = rest - step * applied
            before, square = square, float(rest @ rest)
            direction = rest + square / before * direction

    def _applied(self, vector: Vector) -> Vector:
        product: Vector = self._products @ vector + RIDGE * vector
        return product

    def state(self) -> State:
        """All but the last few answers, which are in no block yet."""
        sums = {"weights": self.weights, "products": self._products, "targets": self._targets}
        return {"encoder": self.encoder.hex(), **{name: numbers.astype(np.float32) for name, numbers in sums.items()}}

    @classmethod
    def restored(cls, state: State) -> Self:
        """Raises ValueError for another kind of state."""
        size = len(array(state, "weights", (None,)))
        correction = cls(bytes.fromhex(part(state, "encoder")), size)
        shapes = {"weights": (size,), "products": (size, size), "targets": (size,)}
        sums = {name: array(state, name, shape).astype(float) for name, shape in shapes.items()}
        if not all(np.isfinite(numbers).all() for numbers in sums.values()):
            raise ValueError("the state of a correction has numbers that are not finite")
        correction.weights, correction._products, correction._targets = sums.values()
        return correction
