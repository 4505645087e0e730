"""How long answers are, whatever the prompt: of all models together, and of one model beside them."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from predictor.state import State, array, part

RATE = 0.03
"""Weight of an answer in the level of its model: the level follows a change within some 100 answers."""
RATE_OF_ALL = 0.005
"""Weight of an answer in the level of all models. The words of the prompts are learnt relative to this level. A level
that followed the latest answers would take what their prompts have in common for its own change, and the words would
not learn it."""
LEAST = 4
"""Answers that a mean has at least, so that the first ones do not count fully."""
YOUNG = 32
"""Answers while the level of all models is not settled: only the answers after it show the level at the time of an
answer."""


class Unsettled(Protocol):
    """An answer that is compared with the level of all models."""

    def settle(self) -> None:
        """Compare with the level as it is now, whatever it will be."""


class Level:
    """A mean that follows the latest answers.

    rate   weight of an answer, once there are 1 / rate answers; the mean of fewer weighs them alike
    young  answers that are not settled
    """

    __slots__ = ("count", "rate", "value", "young")

    def __init__(self, value: float = 0.0, count: float = 0.0, rate: float = RATE) -> None:
        self.value, self.count, self.rate = value, count, rate
        self.young: list[Unsettled] = []

    def follow(self, error: float, weight: float) -> None:
        self.count += weight
        self.value += weight * error * max(self.rate, 1 / (self.count + LEAST))

    def settle_later(self, answer: Unsettled) -> None:
        """Settle the answer after YOUNG further ones."""
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
