"""Instances without a plan: why, and by how much."""

from __future__ import annotations

import pytest
from instances import instance

from llmserve.planning import Instance, Model, NoPlan, plan


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (instance([3.0, 2.5]), "the load needs 5.5 GPUs, 1.5 more than the 4 there are"),
        (instance([2.5], group_gpus_max=2), "the load of one model needs 2.5 GPUs, 0.5 more than the 2 of a group"),
        (instance([1.0] * 5, gpus=8, group_gpus_max=2), "needs 5 GPUs, and 2 groups of at most 2 have 4"),
        (instance([0.1] * 3, [12.0] * 3), "the models take 36 GB, the memory of 3 GPUs of 16 GB, so at least 3 groups"),
        (instance([0.1] * 3, [15.0] * 3, gpus=2, groups=3), "there are only 2 GPUs"),
        (instance([0.1] * 3, [9.0] * 3), "no grouping of whole models keeps all limits; 3 groups would be enough"),
        (instance([1.1] * 3, gpus=4, group_gpus_max=2, groups=3), "6 GPUs would be enough"),
    ],
)
def test_without_a_plan_the_error_says_why_and_by_how_much(problem: Instance, message: str) -> None:
    with pytest.raises(NoPlan) as caught:
        plan(problem)
    assert message in str(caught.value)


def test_too_many_affinity_sets_are_an_error() -> None:
    models = tuple(Model(f"m{k}", 1.0, 4.0**k, 1.0) for k in range(3))
    with pytest.raises(NoPlan, match="the models fall into 3 affinity sets, each set needs its own groups"):
        plan(Instance((), models, 4, 16.0, 4, 2, affinity_max=1.5))
