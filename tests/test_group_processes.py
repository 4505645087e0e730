"""Which engines each group's process is given."""

from llmserve.group_processes import assigned
from llmserve.scheduling.layout import PlannedGroup
from llmserve.scheduling.messages import ServingGroup

MODELS = {"w0": {"m"}, "w1": {"n"}, "w2": {"n"}}


def test_workers_that_no_group_has_are_the_fallback_groups() -> None:
    planned = (PlannedGroup("a", 1, ("m",), (), ("w0",)),)
    assert assigned(planned, MODELS, ("w0", "w1", "w2")) == (
        ServingGroup("a", ("w0",), ("m",)),
        ServingGroup("fallback", ("w1", "w2"), ()),
    )


def test_a_fallback_group_that_the_plan_names_has_those_that_are_left_too() -> None:
    planned = (PlannedGroup("a", 1, ("m",), (), ("w0",)), PlannedGroup("fallback", 1, ("n",), (), ("w1",)))
    assert assigned(planned, MODELS, ("w0", "w1", "w2")) == (
        ServingGroup("a", ("w0",), ("m",)),
        ServingGroup("fallback", ("w1", "w2"), ("n",)),
    )
