"""Assignment of workers to groups."""

from __future__ import annotations

from collections.abc import Collection
from itertools import product

import hypothesis.strategies as st
from hypothesis import given, settings

from llmserve.planning import HerdGroup
from llmserve.planning.assignment import assign

ANY: tuple[str, ...] = ()


def workers_of(
    planned: list[HerdGroup], workers: dict[str, Collection[str]], previous: dict[str, str] | None = None
) -> dict[str, tuple[str, ...]]:
    groups = assign(planned, workers, previous or {})
    return {group.name: tuple(sorted(worker for worker in groups if groups[worker] == group.name)) for group in planned}


def test_each_group_gets_as_many_workers_as_planned_in_order_of_name() -> None:
    planned = [HerdGroup("left", 2, ("m",)), HerdGroup("right", 1, ("n",))]
    assert workers_of(planned, dict.fromkeys("dcba", ANY)) == {"left": ("a", "b"), "right": ("c",)}


def test_a_group_that_names_its_workers_gets_these_whether_known_or_not() -> None:
    planned = [HerdGroup("left", 2, ("m",)), HerdGroup("right", 5, ("n",), workers=("a", "x"))]
    assert workers_of(planned, {"a": ANY, "b": ANY}) == {"left": ("b",), "right": ("a", "x")}


def test_a_worker_is_assigned_only_to_a_group_whose_models_it_serves() -> None:
    planned = [HerdGroup("left", 1, ("m",)), HerdGroup("right", 1, ("n",))]
    assert workers_of(planned, {"a": ("n",), "b": ("m",), "c": ("k",)}) == {"left": ("b",), "right": ("a",)}


def test_a_worker_of_all_models_is_preferred_to_a_worker_of_some() -> None:
    planned = [HerdGroup("left", 1, ("m", "n"))]
    assert workers_of(planned, {"a": ("m",), "b": ("m", "n")}) == {"left": ("b",)}
    assert workers_of(planned, {"a": ("m",), "b": ("k",)}) == {"left": ("a",)}


def test_a_group_leaves_the_only_worker_of_another_group_to_that_group() -> None:
    planned = [HerdGroup("left", 1, ("m",)), HerdGroup("right", 1, ("n",))]
    assert workers_of(planned, {"a": ("m", "n"), "b": ("m",)}) == {"left": ("b",), "right": ("a",)}


def test_workers_stay_where_they_were() -> None:
    planned = [HerdGroup("left", 1, ("m",)), HerdGroup("right", 1, ("n",))]
    workers = dict.fromkeys("abc", ANY)
    assert workers_of(planned, workers, {"a": "right", "c": "left"}) == {"left": ("c",), "right": ("a",)}
    assert workers_of(planned, workers, {"a": "right"}) == {"left": ("b",), "right": ("a",)}


def test_streams_that_a_group_serves_without_their_model_count_among_its_models() -> None:
    planned = [HerdGroup("left", 1, (), streams=(("chat", "m"),))]
    assert workers_of(planned, {"a": ("n",), "b": ("m",)}) == {"left": ("b",)}


@settings(max_examples=200, deadline=None)
@given(
    served=st.lists(st.sets(st.sampled_from("mnk"), min_size=1), max_size=5),
    requested=st.lists(st.tuples(st.sampled_from("mnk"), st.integers(1, 3)), min_size=1, max_size=3),
    previous=st.lists(st.integers(0, 3), min_size=5, max_size=5),
)
def test_as_many_workers_are_assigned_as_by_brute_force(
    served: list[set[str]], requested: list[tuple[str, int]], previous: list[int]
) -> None:
    planned = [HerdGroup(f"g{index}", gpus, (model,)) for index, (model, gpus) in enumerate(requested)]
    models_of = {f"w{index}": models for index, models in enumerate(served)}
    groups = assign(planned, models_of, {f"w{index}": f"g{group}" for index, group in enumerate(previous)})
    for group in planned:
        workers = [worker for worker in groups if groups[worker] == group.name]
        assert len(workers) <= group.gpus
        assert all(group.models[0] in models_of[worker] for worker in workers)
    most_workers = max(
        sum(place is not None for place in places)
        for places in product([None, *range(len(planned))], repeat=len(served))
        if all(
            place is None or planned[place].models[0] in models for place, models in zip(places, served, strict=True)
        )
        and all(places.count(index) <= group.gpus for index, group in enumerate(planned))
    )
    assert len(groups) == most_workers
