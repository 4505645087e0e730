"""A ridge regression that learns while serving: the weights of features, from the latest answers.

    x_i, z_i   the features of answer i, and its target
    w          the weights: the sum of a_i x_i over the answers
    a_i        for the best w it is (z_i - w x_i) / ridge

A visit of an answer gives its a_i the best value, given the others (dual coordinate ascent: Shalev-Shwartz and Zhang
2013). So a few hundred answers teach as much as in a regression over all of them, and there is no learning rate. Three
kinds of answers are bounded:

    capped     a_i >= 0: the full length is longer, so the answer can only raise forecasts
    absurd     |a_i| is at most that of an error of ERROR_MAX (Huber's loss)
    nonsense   the answers of a sender of nonsense have a small weight, and so a small a_i (senders.py)

An answer is visited when it comes. Then BLOCK answers in turn make a block, whose answers are visited together again
and again: all of its a_i get their best values at once. For that each answer has a feature of its own, whose value is
the root of the ridge and whose weight is root a_i, kept behind the other weights. So a visit reads the weights of a
block once, takes two products with a small matrix, and writes the weights once. That takes about a quarter of the time
of as many visits of single answers.

Answers that leave the window keep their part of w. Pure: no clock, no I/O, no randomness. Not thread-safe.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from predictor.answer_block import BLOCK, FACTS, Block, Example, best_dual
from predictor.levels import Level
from predictor.senders import Sender
from predictor.state import Saving, State, array
from predictor.text_features import BITS, Features

RIDGES = 2.0, 2.5, 3.0, 3.5, 4.0
"""With the first RIDGE_ANSWERS answers, with the next as many, and so on."""
RIDGE_ANSWERS = 200
BLOCKS_MAX = 250
"""Blocks that are visited again: the window is the latest BLOCK BLOCKS_MAX answers."""
CELLS_MAX = 1_500_000
"""Numbers in the matrices of all blocks: 6 MB. The window is shorter where prompts have many features."""
VISITS, VISITS_LATER = 4, 3
"""Blocks that are visited with an answer: fewer when the window is half full."""
BLOCKS_FEW = 8
"""With fewer blocks the answers that are in none are visited again too."""
WEIGHTS = (1 << BITS) + BLOCK * BLOCKS_MAX
SAVED_AT_ONCE = 8
"""Blocks of a slice of a state."""

_STEP = 7919  # a prime: the visits go through the blocks in an order unlike that of the answers


class Ridge:
    """See the module's docstring.

    weights : (WEIGHTS,) w, and the weights of the answers' own features.
    """

    def __init__(self) -> None:
        self.weights = np.zeros(WEIGHTS, dtype=np.float32)
        self._blocks: deque[Block] = deque()
        self._open: list[tuple[Example, Features]] = []  # the latest answers, in no block yet
        self._learnt = 0.0  # weights of all answers
        self._visited = self._made = 0  # blocks
        self._cells = 0  # in the matrices of all blocks

    def product(self, features: Features) -> float:
        """w x"""
        return float(self.weights.take(features.indices).dot(features.values))

    def learn(self, example: Example, features: Features, product: float) -> None:
        """Visit an answer, and earlier answers. product : w x, for these features."""
        ridge = RIDGES[min(int(self._learnt / RIDGE_ANSWERS), len(RIDGES) - 1)]
        self._learnt += example.sender.weight
        self._visit_one(example, features, product, ridge)
        blocks = self._blocks
        visits = VISITS if len(blocks) < BLOCKS_MAX // 2 else VISITS_LATER
        for _ in range(min(visits, len(blocks))):
            self._visited += 1
            blocks[self._visited * _STEP % len(blocks)].visit(self.weights, ridge)
        if len(blocks) < BLOCKS_FEW:
            for earlier, own in self._open:
                self._visit_one(earlier, own, self.product(own), ridge)
        self._open.append((example, features))
        if len(self._open) == BLOCK:
            self._close(ridge)

    def _visit_one(self, example: Example, features: Features, product: float, ridge: float) -> None:
        values, dual = features.values, example.dual
        square, error = float(values.dot(values)), example.target_now - product
        example.dual = best_dual(dual, error, square, ridge / example.sender.weight, example.capped)
        if example.dual != dual:
            np.add.at(self.weights, features.indices, np.float32(example.dual - dual) * values)

    def _close(self, ridge: float) -> None:
        """Make a block of the latest answers."""
        examples, features = zip(*self._open, strict=True)
        self._open.clear()
        first_own = (1 << BITS) + BLOCK * (self._made % BLOCKS_MAX)
        block = Block.of(examples, features, first_own, ridge)
        self.weights[first_own : first_own + BLOCK] = block.roots * [example.dual for example in examples]
        self._put(block)

    def _put(self, block: Block) -> None:
        self._made += 1
        self._blocks.append(block)
        self._cells += block.matrix.size
        while len(self._blocks) > BLOCKS_MAX or self._cells > CELLS_MAX:
            self._cells -= self._blocks.popleft().matrix.size

    def saving(self, place_of: Mapping[int, int]) -> Saving:
        """Make the state in slices. place_of : of senders and levels, by their id."""
        weights, blocks, waiting = self.weights.copy(), list(self._blocks), list(self._open)
        ridges = np.array([block.ridges for block in blocks]).reshape(-1, BLOCK)
        duals = np.array([example.dual for example, _ in waiting])
        counts = np.array([self._learnt, self._visited, self._made], dtype=np.float64)
        yield
        facts, sizes, indices, places, values = [_facts([example for example, _ in waiting], place_of)], [], [], [], []
        for start in range(0, len(blocks), SAVED_AT_ONCE):
            for block in blocks[start : start + SAVED_AT_ONCE]:
                own, cells = block.indices[:-BLOCK], block.matrix[:, :-BLOCK].reshape(-1)
                filled = np.flatnonzero(cells)
                sizes.append((len(own), len(filled), block.indices[-BLOCK]))
                indices.append(own.astype(np.int32))
                places.append(filled.astype(np.int32))
                values.append(cells[filled])
                facts.append(_facts(block.examples, place_of))
            yield
        return {
            "weights": weights,
            "counts": counts,
            "ridges": ridges,
            "sizes": np.array(sizes, dtype=np.int64).reshape(-1, 3),
            "indices": _joined(indices, np.int32),
            "places": _joined(places, np.int32),
            "values": _joined(values, np.float32),
            "examples": np.concatenate(facts),
            "open_duals": duals,
            "open_sizes": np.array([len(features.indices) for _, features in waiting], dtype=np.int64),
            "open_indices": _joined([features.indices for _, features in waiting], np.int32),
            "open_values": _joined([features.values for _, features in waiting], np.float32),
        }

    def restore(self, state: State, senders: Sequence[Sender], levels: Sequence[Level | None]) -> None:
        """senders, levels : by their places; the last of both stands for the place -1. Raises ValueError for a state
        that does not fit.
        """
        self.weights = array(state, "weights", (WEIGHTS,)).astype(np.float32)
        self._learnt, *counts = array(state, "counts", (3,)).tolist()
        self._visited, self._made = map(int, counts)
        duals = array(state, "open_duals", (None,))
        ridges = array(state, "ridges", (None, BLOCK))
        facts = array(state, "examples", (len(duals) + ridges.size, FACTS))
        for name, column, entries in (("senders", 2, senders), ("models", 3, levels)):
            if len(facts) and not -1 <= facts[:, column].min() <= facts[:, column].max() < len(entries) - 1:
                raise ValueError(f"the state of the text learner names {name} that it does not have")
        if (
            not all(np.isfinite(numbers).all() for numbers in (self.weights, facts, duals, ridges))
            or ridges.min(initial=1) <= 0
        ):
            raise ValueError("the state of the text learner has numbers that are not finite, or no ridges")
        examples = [
            Example(target, bool(capped), senders[int(sender)], levels[int(level)])
            for target, capped, sender, level in facts.tolist()
        ]
        for example, dual in zip(examples, duals.tolist(), strict=False):
            example.dual = dual
        waiting, in_blocks = examples[: len(duals)], examples[len(duals) :]
        self._open = list(zip(waiting, _open_features(state, len(duals)), strict=True))
        for place, (indices, matrix) in enumerate(_matrices(state, len(ridges))):
            own = in_blocks[place * BLOCK : (place + 1) * BLOCK]
            self._put(Block(own, indices, matrix, ridges[place].tolist()))
        self._made -= len(ridges)
        for example in in_blocks + waiting:
            if example.level:
                example.level.young.append(example)


def _facts(examples: Sequence[Example], place_of: Mapping[int, int]) -> NDArray[np.float64]:
    return np.array([example.facts(place_of) for example in examples], dtype=np.float64).reshape(-1, FACTS)


def _joined(arrays: Sequence[NDArray[Any]], kind: type) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype=kind), *arrays]).astype(kind)


def _parts(state: State, name: str, sizes: NDArray[np.int64], kind: str, most: int | None = None) -> list[NDArray[Any]]:
    """An array of the state in parts of these sizes. most : its numbers are from 0 to below `most`, or finite."""
    ends = np.cumsum(sizes)
    numbers = array(state, name, (int(ends[-1]) if len(ends) else 0,), kind)
    fits = np.isfinite(numbers).all() if most is None else 0 <= numbers.min(initial=0) <= numbers.max(initial=0) < most
    if sizes.min(initial=0) < 0 or not fits:
        raise ValueError(f"the state of the text learner has {name} that do not exist")
    return np.split(numbers, ends[:-1])


def _open_features(state: State, answers: int) -> list[Features]:
    sizes = array(state, "open_sizes", (answers,), "i")
    indices, values = _parts(state, "open_indices", sizes, "i", 1 << BITS), _parts(state, "open_values", sizes, "f")
    return [Features(own.astype(np.int64), of, 0) for own, of in zip(indices, values, strict=True)][:answers]


def _matrices(state: State, blocks: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """The indices and the matrix of each block."""
    sizes = array(state, "sizes", (blocks, 3), "i")
    own = sizes[:, 2]
    if not (1 << BITS) <= own.min(initial=1 << BITS) <= own.max(initial=1 << BITS) <= WEIGHTS - BLOCK:
        raise ValueError("the state of the text learner names features that do not exist")
    every = zip(
        sizes.tolist(),
        _parts(state, "indices", sizes[:, 0], "i", 1 << BITS),
        _parts(state, "places", sizes[:, 1], "i", 1 << 31),
        _parts(state, "values", sizes[:, 1], "f"),
        strict=False,
    )
    for (count, _, first_own), indices, places, values in every:
        cells = np.zeros(BLOCK * count, dtype=np.float32)
        if places.max(initial=0) >= cells.size:
            raise ValueError("the state of the text learner has values of features that it does not name")
        cells[places] = values
        matrix = np.hstack([cells.reshape(BLOCK, count), np.zeros((BLOCK, BLOCK), dtype=np.float32)])
        yield np.concatenate((indices.astype(np.int64), np.arange(first_own, first_own + BLOCK))), matrix
