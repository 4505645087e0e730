"""How often a policy decides in each state, and its averages, exact in all states and not at the nodes of a grid only.

The equations of relative values hold at the nodes; in between, interpolated values leave residuals. An average changes
by the sum of the residuals over all visits. The visits are those of the nodes, moved on by one decision; then, as long
as that changes the averages, the nodes' equations balance the visits and they move on again. That is aggregation and
disaggregation (Koury, McAllister, Stewart 1984), with an interpolation in the place of the aggregates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bins.average_cost import Policy
from bins.service import Array
from bins.state_grid import StateGrid

Mixture = Sequence[tuple[Policy, float]]  # policies of all states, and the shares of the decisions that follow them

STEPS_MAX = 12
MATTERING = 2  # the first objectives: response time and power
SPARSE = 16  # up to so many numbers are convolved one by one
TINY = 1e-12


class Model(Protocol):
    """A queue as seen at its decisions (`QueueModel` of bins/smdp_model.py)."""

    grid: StateGrid

    def costs(self, mixture: Mixture) -> tuple[Array, Array]: ...

    def next_after(self, size: int) -> Array: ...


class Nodes(Protocol):
    """The equations of one policy at the nodes of the grid (`Equations` of bins/smdp_model.py)."""

    @property
    def visits(self) -> Array: ...

    def balance(self, surplus: Array) -> Array: ...


def exact_averages(
    model: Model, mixture: Mixture, equations: Nodes, e: Array, averages: Array, error_max: float
) -> tuple[Array, Array]:
    """Averages (objectives,), and how far they may still be from those of all states.

    equations, e, averages : of the nodes.  error_max : relative, of response time and power, at which the steps end.
    """
    grid, flow = model.grid, Flow(model, mixture)
    values = grid.everywhere(e - e[:, :1])  # about 0 where most visits are, against rounding
    cost, time = model.costs(mixture)
    cost -= averages[:, None] * time + values
    visits = flow.moved(_of_nodes(model, equations.visits))
    exact, before = averages, np.zeros(averages.size)
    for _ in range(STEPS_MAX):
        moved = flow.moved(visits)
        exact, last = averages + (cost @ visits + values @ moved) / (time @ visits), exact
        change = np.abs(exact - last)
        rest = change * np.minimum(1.0, change / (before + TINY * np.abs(averages)))  # if they go on to shrink so
        if (rest <= error_max * np.abs(averages))[:MATTERING].all():
            break
        before = change
        visits = moved + flow.moved(_of_nodes(model, equations.balance(grid.onto_nodes(moved - visits))))
    return exact, rest


def _of_nodes(model: Model, visits: Array) -> Array:
    """(states,) visits of the nodes only."""
    result = np.zeros(model.grid.states)
    result[model.grid.nodes] = visits
    return result


class Flow:
    """Moves visits on by one decision under a mixture of policies."""

    def __init__(self, model: Model, mixture: Mixture) -> None:
        self._parts = []
        for policy, share in mixture:
            order = np.argsort(policy, kind="stable")
            for states in np.split(order, np.flatnonzero(np.diff(policy[order])) + 1):
                size = int(policy[states[0]])
                self._parts.append(_Part(states, share, int(states[0]) - size, model.next_after(size)))

    def moved(self, visits: Array) -> Array:
        """(states,) visits one decision later. What goes beyond the last state goes to it, for e is the same there."""
        result = np.zeros(visits.size)
        for part in self._parts:
            arriving = part.moved(visits)[: result.size - part.first]
            result[part.first : part.first + arriving.size] += arriving
        result[-1] += visits.sum() - result.sum()
        return result


@dataclass(frozen=True)
class _Part:
    """The states of one action, ascending.  first : the first next state.  p : of the further next states."""

    states: NDArray[np.intp]
    share: float
    first: int
    p: Array

    def moved(self, visits: Array) -> Array:
        """Visits of the next states from `first` on."""
        leaving = np.zeros(self._span)
        leaving[self.states - self.states[0]] = self.share * visits[self.states]
        present = np.flatnonzero(leaving)
        if present.size > SPARSE:
            arriving = np.fft.irfft(np.fft.rfft(leaving, self._padded) * self._transformed, self._padded)
            return arriving[: self._span + self.p.size - 1]
        arriving = np.zeros(self._span + self.p.size - 1)
        for place in present.tolist():
            arriving[place : place + self.p.size] += leaving[place] * self.p
        return arriving

    @property
    def _span(self) -> int:
        return int(self.states[-1] - self.states[0]) + 1

    @cached_property
    def _padded(self) -> int:
        """A length of 5 to 8 times a power of 2, for which Fourier transforms are fast."""
        count = self._span + self.p.size - 1
        step = max(1, (1 << (count - 1).bit_length()) // 8)
        return -(-count // step) * step

    @cached_property
    def _transformed(self) -> NDArray[np.complex128]:
        return np.fft.rfft(self.p, self._padded)
