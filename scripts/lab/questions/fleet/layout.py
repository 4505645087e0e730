"""Where everything of a fleet is, and what dies when.

A pool is a set of models and the groups that serve all of them. A group's engines, one for each GPU, are on
neighbouring nodes, and its scheduler is on the node of its first engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

GPUS_A_NODE, NODES_A_RACK = 8, 8

Span = tuple[float, float]
"""(from, to) in seconds, to > from: something is down."""


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """index : of the group.  engines : global numbers of its GPUs, ascending.  pool : index of its pool"""

    index: int
    pool: int
    engines: range

    @property
    def home(self) -> int:
        """The node on which its scheduler runs."""
        return self.engines[0] // GPUS_A_NODE


@dataclass(frozen=True, slots=True)
class Death:
    """Nodes that die together, a node or a rack, and for how long."""

    nodes: range
    down: Span


@dataclass(frozen=True, slots=True)
class Deaths:
    """What dies. restart_s : seconds until the scheduler of a lost group runs again, on its node or on another"""

    all: tuple[Death, ...] = ()
    restart_s: float = 10.0

    def of_engine(self, engine: int) -> list[Span]:
        return [death.down for death in self.all if engine // GPUS_A_NODE in death.nodes]

    def of_group(self, place: GroupPlace) -> list[Span]:
        begins_s = [death.down[0] for death in self.all if place.home in death.nodes]
        return [(at_s, at_s + self.restart_s) for at_s in begins_s]


def places(gpus: int, groups: int, pools: int) -> list[GroupPlace]:
    """Groups of as equal sizes as possible; neighbouring groups are of different pools, so a rack hits many pools.

    Needs gpus >= groups >= pools >= 1.
    """
    bounds = np.linspace(0, gpus, groups + 1).round().astype(int).tolist()
    return [GroupPlace(k, k % pools, range(bounds[k], bounds[k + 1])) for k in range(groups)]


def drawn_deaths(
    gpus: int, span_s: float, *, nodes: int, racks: int, down_s: float, restart_s: float, rng: np.random.Generator
) -> Deaths:
    """So many single nodes and whole racks, none of which dies twice, at times spread over the span."""
    nodes_count = -(-gpus // GPUS_A_NODE)
    racks_count = -(-nodes_count // NODES_A_RACK)
    dying_racks = rng.choice(racks_count, min(racks, racks_count), replace=False)
    lost = [range(rack * NODES_A_RACK, (rack + 1) * NODES_A_RACK) for rack in dying_racks.tolist()]
    others = np.setdiff1d(np.arange(nodes_count), np.concatenate([np.array(part) for part in (*lost, range(0))]))
    lost += [range(node, node + 1) for node in rng.choice(others, min(nodes, others.size), replace=False).tolist()]
    begins_s = rng.uniform(0.1, 0.9, len(lost)) * span_s
    deaths = [Death(part, (at_s, at_s + down_s)) for part, at_s in zip(lost, begins_s.tolist(), strict=True)]
    return Deaths(tuple(sorted(deaths, key=lambda death: death.down)), restart_s)
