"""A few answers that a ridge regression visits together, as a small matrix (ridge.py has the letters).

Pure: no clock, no I/O, no randomness.
"""

from collections.abc import Mapping, Sequence
from operator import mul

import numpy as np
from numpy.typing import NDArray

from predictor.levels import Level
from predictor.senders import Sender
from predictor.text_features import Features

BLOCK = 8
"""Answers of a block."""
ERROR_MAX = 1.5
"""A greater error teaches as much as one of ERROR_MAX."""
FACTS = 4
"""Numbers that describe an answer in a state."""


class Example:
    """An answer to learn from.

    target   z while the level of its model is not settled (`level`); then z - level
    dual     a_i, until the answer is in a block
    """

    __slots__ = ("capped", "dual", "level", "sender", "target")

    def __init__(self, target: float, capped: bool, sender: Sender, level: Level | None, dual: float = 0.0) -> None:
        self.target, self.capped, self.sender, self.level, self.dual = target, capped, sender, level, dual

    def settle(self) -> None:
        if self.level:
            self.target -= self.level.value
            self.level = None

    @property
    def target_now(self) -> float:
        return self.target - self.level.value if self.level else self.target

    def facts(self, place_of: Mapping[int, int]) -> tuple[float, ...]:
        """(FACTS,) numbers that describe the answer in a state. place_of : of senders and levels, by their id."""
        level = place_of.get(id(self.level), -1)
        target = self.target if level >= 0 else self.target_now  # -1 also for a model that is forgotten
        return target, self.capped, place_of.get(id(self.sender), -1), level


class Block:
    """Answers that are visited together.

    indices    (n + answers,) ascending: of the weights of their features, then of their own features
    matrix     (answers, n + answers) the values of these features
    ridges     (answers,) each over the weight of the answer's sender
    targets    (answers,)
    unsettled  (place, answer) whose targets still change
    """

    __slots__ = (
        *("examples", "indices", "matrix", "ridges", "targets", "unsettled"),
        *("_inverse", "_least", "_most", "_products", "_ridges_of_senders", "_senders"),
    )

    def __init__(
        self, examples: Sequence[Example], indices: NDArray[np.int64], matrix: NDArray[np.float32], ridges: list[float]
    ) -> None:
        """matrix : its columns of the answers' own features are filled in."""
        self.examples, self.indices, self.matrix = examples, indices, matrix
        self.targets = np.array([example.target_now for example in examples], dtype=np.float32)
        self.unsettled = [(place, example) for place, example in enumerate(examples) if example.level]
        of_sender = {
            id(example.sender): (example.sender, ridge) for example, ridge in zip(examples, ridges, strict=True)
        }
        self._senders = [sender for sender, _ in of_sender.values()]
        self._ridges_of_senders = [ridge for _, ridge in of_sender.values()]
        self._weigh(ridges)

    @classmethod
    def of(cls, examples: Sequence[Example], features: Sequence[Features], first_own: int, ridge: float) -> "Block":
        """first_own : index of the first of the features of their own."""
        indices, place = np.unique(np.concatenate([own.indices for own in features]), return_inverse=True)
        answers = len(examples)
        place += (len(indices) + answers) * np.arange(answers).repeat([len(own.indices) for own in features])
        matrix = np.zeros((answers, len(indices) + answers), dtype=np.float32)
        np.add.at(matrix.reshape(-1), place, np.concatenate([own.values for own in features]))
        indices = np.concatenate((indices, np.arange(first_own, first_own + answers)))
        return cls(examples, indices, matrix, [ridge / example.sender.weight for example in examples])

    @property
    def roots(self) -> NDArray[np.float32]:
        """(answers,) values of the features of their own."""
        return self.matrix[:, -len(self.examples) :].diagonal()

    def visit(self, weights: NDArray[np.float32], ridge: float) -> None:
        """Give all a_i their best values. weights : of all features, which are changed."""
        ridges = [ridge / sender.weight for sender in self._senders]
        if ridges != self._ridges_of_senders:
            self._ridges_of_senders = ridges
            self._reweigh(weights, [ridge / example.sender.weight for example in self.examples])
        if self.unsettled:
            self._follow_levels()
        own = weights.take(self.indices)
        errors = self.targets - self.matrix.dot(own)
        own += self._inverse.dot(errors).dot(self.matrix)
        duals = own[-len(self.examples) :].tolist()
        if max(duals) > self._most or min(duals) < self._least:
            own = weights.take(self.indices)
            own += self._bounded_changes(own, errors).dot(self.matrix)
        weights[self.indices] = own

    def _bounded_changes(self, own: NDArray[np.float32], errors: NDArray[np.float32]) -> NDArray[np.float32]:
        """(answers,) the changes of a_i where some are bounded: of one after the other."""
        changes: list[float] = []
        duals = (own[-len(errors) :] / self.roots).tolist()
        for example, dual, error, ridge, products in zip(
            self.examples, duals, errors.tolist(), self.ridges, self._products.tolist(), strict=True
        ):
            error += ridge * dual - sum(map(mul, changes, products))
            best = best_dual(dual, error, products[len(changes)] - ridge, ridge, example.capped)
            changes.append(best - dual)
        return np.array(changes, dtype=np.float32)

    def _follow_levels(self) -> None:
        for place, example in self.unsettled:
            self.targets[place] = example.target_now
        self.unsettled = [(place, example) for place, example in self.unsettled if example.level]

    def _reweigh(self, weights: NDArray[np.float32], ridges: list[float]) -> None:
        """Change the ridges, and keep a_i."""
        own, before = self.indices[-len(ridges) :], self.roots.copy()
        self._weigh(ridges)
        weights[own] *= self.roots / before

    def _weigh(self, ridges: list[float]) -> None:
        self.ridges, roots = ridges, np.sqrt(ridges)
        np.fill_diagonal(self.matrix[:, -len(ridges) :], roots)
        self._products = self.matrix.dot(self.matrix.T)
        self._inverse = np.linalg.inv(self._products)
        # Of root a_i: as strict as the strictest of the answers' own.
        self._most = ERROR_MAX / float(roots.max())
        self._least = 0.0 if any(example.capped for example in self.examples) else -self._most


def best_dual(dual: float, error: float, square: float, ridge: float, capped: float) -> float:
    """The best a_i, for error = z_i - w x_i and square = x_i x_i."""
    best, most = dual + (error - ridge * dual) / (square + ridge), ERROR_MAX / ridge
    if best > most:
        return most
    least = 0.0 if capped else -most
    return best if best > least else least
