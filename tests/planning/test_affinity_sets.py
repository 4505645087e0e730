"""Models with similar batch times: the paper's A between any two models of a set."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from instances import ROUNDING

from llmserve.planning import Instance, Model, Stream, affinity_sets, plan


def test_models_of_different_affinity_sets_are_never_in_one_group() -> None:
    models = (Model("slow", 1.0, 40.98, 5.67), Model("fast", 1.0, 0.22, 3.74), Model("fast too", 1.0, 0.25, 4.0))
    streams = tuple(Stream("s", model.name, gpus_needed=0.1) for model in models)
    problem = Instance(streams, models, 4, 16.0, 4, 2, affinity_max=20.0)
    assert {group.models for group in plan(problem).groups} == {("slow",), ("fast", "fast too")}
    assert affinity_sets(models, None).tolist() == [0, 0, 0]


def affinity(first: Model, second: Model) -> float:
    """A(m_i, m_j), as Section 5.2 prints it."""
    spare = second.alpha_ms + second.beta_ms - first.beta_ms
    bound = (first.alpha_ms + first.beta_ms) / second.alpha_ms
    return bound if spare <= 0 else min(bound, max(first.alpha_ms / spare, first.alpha_ms / second.alpha_ms))


@pytest.mark.parametrize("affinity_max", [1.0, 2.0, 5.0, 50.0])
def test_any_two_models_of_an_affinity_set_diverge_by_at_most_the_limit(affinity_max: float) -> None:
    rng = np.random.default_rng(5)
    models = [Model(f"m{k}", 1.0, *rng.uniform((0.2, 3.7), (4.4, 74.0)).tolist()) for k in range(40)]
    sets = affinity_sets(models, affinity_max)
    for (a, first), (b, second) in product(enumerate(models), repeat=2):
        assert sets[a] != sets[b] or affinity(first, second) <= affinity_max * (1 + ROUNDING)
    assert set(sets.tolist()) == set(range(sets.max() + 1))
    assert sets.max() < 39 or affinity_max == 1.0
