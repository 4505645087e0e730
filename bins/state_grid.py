"""Numbers of waiting requests at which a function is computed, and its interpolation everywhere else.

Relative values have kinks up to about a full batch, for there each policy decides differently in each state. Far beyond
they are smooth, the smoother the farther. So all states up to a full batch and somewhat beyond are nodes; then panels
follow whose width grows in proportion to the distance from a full batch, each with a polynomial through DEGREE + 1
nodes, near the Chebyshev points of the panel.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from bins.service import Array

DEGREE = 8
TERMS = DEGREE + 1
WIDTH_MIN = 3 * DEGREE  # of a panel: a narrower one would hardly have fewer nodes than states


class StateGrid:
    """nodes : (nodes,) ascending states, from 0 on.  dense : number of states up to which every state is a node.
    states : number of states, up to the last node.  start : (states,) first node of the TERMS nodes of each state.
    weights : (states, TERMS) of these nodes in the state's interpolated value; at a dense state it is the only one.
    """

    def __init__(self, states: int, full_batch: int = 0, growth: float = 0.0) -> None:
        """growth: width of a panel over its distance from a full batch; 0: every state is a node.

        With panels, a few states may be added to the number of states, so that the last panel is full.
        """
        self.dense = states if not growth else min(states, full_batch + 1 + int(WIDTH_MIN / growth))
        nodes, start, weights = (
            [np.arange(self.dense)],
            [np.arange(self.dense)],
            [np.eye(1, TERMS).repeat(self.dense, 0)],
        )
        before = self.dense - 1
        self.panels: list[tuple[int, int, int]] = []  # (first state after the first node, end, first node)
        while before < states - 1:
            width = int(growth * (before - full_batch))
            points = before + np.round(width * (1 - np.cos(np.pi * np.arange(TERMS) / DEGREE)) / 2).astype(np.intp)
            first = self.dense - 1 + DEGREE * len(self.panels)
            self.panels.append((before + 1, before + 1 + width, first))
            nodes.append(points[1:])
            start.append(np.full(width, first))
            weights.append(_lagrange(points, np.arange(before + 1, before + 1 + width)))
            before += width
        self.nodes: NDArray[np.intp] = np.concatenate(nodes)
        self.start: NDArray[np.intp] = np.concatenate(start)
        self.weights: Array = np.concatenate(weights)
        self.states = before + 1

    @cached_property
    def between(self) -> NDArray[np.intp]:
        """States that are no nodes."""
        return np.setdiff1d(np.arange(self.states), self.nodes, assume_unique=True)

    def everywhere(self, values: Array) -> Array:
        """(..., states) from (..., nodes), interpolated."""
        result = np.empty((*values.shape[:-1], self.states))
        result[..., : self.dense] = values[..., : self.dense]
        for begin, end, first in self.panels:
            result[..., begin:end] = values[..., first : first + TERMS] @ self.weights[begin:end].T
        return result

    def onto_nodes(self, weights: Array) -> Array:
        """(..., nodes) weights that give any interpolated function the same sum as weights (..., states or fewer)."""
        result = np.zeros((*weights.shape[:-1], self.nodes.size))
        count = min(self.dense, weights.shape[-1])
        result[..., :count] = weights[..., :count]
        for begin, end, first in self.panels:
            part = weights[..., begin:end]
            result[..., first : first + TERMS] += part @ self.weights[begin : begin + part.shape[-1]]
        return result

    def at(self, values: Array, rows: NDArray[np.intp], states: NDArray[np.intp]) -> Array:
        """Interpolated values[row] at each state.  values : (rows, nodes)."""
        result = np.empty(states.shape)
        is_node = states < self.dense
        result[is_node] = values[rows[is_node], states[is_node]]
        other = ~is_node
        if other.any():
            of_panels = sliding_window_view(values, TERMS, axis=1)  # (rows, first nodes, TERMS)
            terms = of_panels[rows[other], self.start[states[other]]]
            result[other] = np.einsum("st,st->s", terms, self.weights[states[other]])
        return result


def _lagrange(points: NDArray[np.intp], states: NDArray[np.intp]) -> Array:
    """(states, points) values of the Lagrange polynomials of the points."""
    scale = (points[-1] - points[0]) / 4  # of the products, so that they neither overflow nor vanish
    gaps = (points[:, None] - points) / scale
    np.fill_diagonal(gaps, 1.0)
    distance = (states[:, None] - points) / scale
    hit = distance == 0
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = 1.0 / (gaps.prod(axis=1) * distance)
        weights: Array = terms / terms.sum(axis=1, keepdims=True)
    weights[hit.any(axis=1)] = hit[hit.any(axis=1)]
    return weights
