"""The level of a model: how long its answers are, whatever the prompt."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from predictor.state import State, array, part

RATE = 0.03
"""Weight of an answer in the level of its model: a level follows a change within some 100 answers."""
LEAST = 4
"""Answers that a mean has at least, so that the first ones do not count fully."""
YOUNG = 32
"""Answers of a model whose level is not settled: only the answers after it show the level at the time of an answer."""


class Unsettled(Protocol):
    """An answer that is compared with the level of its model."""

    def settle(self) -> None:
        """Compare with the level of the model as it is now, whatever it will be."""


class Level:
    """A mean that follows the latest answers of a model. young : those of its answers that are not settled."""

    __slots__ = ("count", "value", "young")

    def __init__(self, value: float, count: float = 0.0) -> None:
        self.value, self.count = value, count
        self.young: list[Unsettled] = []

    def follow(self, error: float, weight: float) -> None:
        self.count += weight
        self.value += weight * error * max(RATE, 1 / (self.count + LEAST))

    def settle_later(self, answer: Unsettled) -> None:
        """Settle the answer after YOUNG further ones of the model."""
        self.young.append(answer)
        if len(self.young) > YOUNG:
            self.young.pop(0).settle()


def levels_state(entries: Sequence[tuple[str, Level]]) -> State:
    values = np.array([(level.value, level.count) for _, level in entries]).reshape(-1, 2)
    return {"models": [model for model, _ in entries], "values": values}


def levels_of(state: State) -> list[tuple[str, Level]]:
    """Raises ValueError for another kind of state."""
    models = part(state, "models")
    values = array(state, "values", (len(models), 2)).tolist()
    return [(str(model), Level(*numbers)) for model, numbers in zip(models, values, strict=True)]
