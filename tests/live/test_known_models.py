"""Known models when engines change their lists, and the cost of such a change."""

import random
import sys
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType
from typing import Any

from llmserve.engines.engine import Health, ServedModel
from llmserve.engines.openai import OpenAIEngine
from llmserve.live.cluster import LiveCluster
from llmserve.live.fleet import Fleet
from llmserve.live.journal import Header, Journal
from llmserve.live.known_models import KnownModels, Listed
from llmserve.observe.metrics import Metrics
from llmserve.request import EngineInfo
from llmserve.settings.policies import SchedulingConfig


def listed(**contexts_tokens: int | None) -> Listed:
    return {id_: ServedModel(id_, tokens) for id_, tokens in contexts_tokens.items()}


def test_a_model_is_known_while_an_engine_lists_it() -> None:
    known_models = KnownModels()
    known_models.change({}, listed(a=None, b=None))
    known_models.change({}, listed(b=None))
    known_models.change(listed(a=None, b=None), listed(c=None))
    assert list(known_models.by_id) == ["b", "c"]
    assert [known_models.engines_of(model) for model in "abc"] == [0, 1, 1]


def test_the_smallest_context_is_reported_while_an_engine_has_it() -> None:
    known_models = KnownModels()
    for tokens in (None, 8192, 4096):
        known_models.change({}, listed(m=tokens))
    assert known_models.by_id["m"].context_tokens == 4096
    known_models.change(listed(m=4096), listed(m=2048))
    assert known_models.by_id["m"].context_tokens == 2048
    known_models.change(listed(m=2048), {})
    assert known_models.by_id["m"].context_tokens == 8192
    known_models.change(listed(m=8192), {})
    assert known_models.by_id["m"].context_tokens is None


def from_scratch(lists: Iterable[Listed]) -> dict[str, tuple[int | None, int]]:
    """The smallest context and the number of engines of each model."""
    everywhere = [model for listing in lists for model in listing.values()]
    return {
        id_: (
            min(
                [model.context_tokens for model in everywhere if model.id == id_ and model.context_tokens], default=None
            ),
            sum(model.id == id_ for model in everywhere),
        )
        for id_ in {model.id for model in everywhere}
    }


def test_after_any_changes_the_known_models_are_those_of_the_lists() -> None:
    rng = random.Random(1)
    known_models, lists = KnownModels(), [listed() for _ in range(5)]
    for _ in range(500):
        engine = rng.randrange(5)
        new_list = listed(**{id_: rng.choice([None, 1024, 2048]) for id_ in "abcdef" if rng.random() < 0.4})
        known_models.change(lists[engine], new_list)
        lists[engine] = new_list
        assert {
            id_: (model.context_tokens, known_models.engines_of(id_)) for id_, model in known_models.by_id.items()
        } == (from_scratch(lists))


# ---- how long a change takes ----


class Name(str):
    """A str whose hashes and comparisons run Python code, so that they are counted."""

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other)  # type: ignore[arg-type]

    def __hash__(self) -> int:
        return str.__hash__(self)


def operations(work: Callable[[], object]) -> int:
    """The number of executed bytecodes, which does not depend on the machine's load."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        count += event == "opcode"
        frame.f_trace_opcodes = True
        return trace

    previous_trace = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(previous_trace)
    return count


class Lists(OpenAIEngine):
    """An engine whose list of models is set by the test."""

    def __init__(self, name: str) -> None:
        self.info, self.slots = EngineInfo(name, 8, False), None


def lists(kind: str, count: int) -> Health:
    return Health(tuple([ServedModel(Name(f"{kind}-{number}"), 4096) for number in range(count)]))


def probe_operations(fleet: Fleet, count: int) -> int:
    """Operations of a probe that finds `count` new models on the first engine."""
    for handle in fleet.handles.values():
        fleet._answered(handle, lists("old", count))
    first, *_ = fleet.handles.values()
    return operations(partial(fleet._answered, first, lists("new", count)))


def watched(engines: int) -> Fleet:
    """A fleet whose events are dropped."""
    return Fleet([Lists(f"gpu{number}") for number in range(engines)])


def test_four_times_as_many_new_models_take_four_times_as_long() -> None:
    assert probe_operations(watched(1), 1_000) < 5 * probe_operations(watched(1), 250)


def test_the_time_for_one_engines_models_does_not_depend_on_other_engines() -> None:
    assert probe_operations(watched(20), 100) < 1.5 * probe_operations(watched(2), 100)


def test_the_whole_server_takes_four_times_as_long_for_four_times_as_many_new_models() -> None:
    def operations_for(count: int) -> int:
        header = Header(SchedulingConfig().resolved(barrier=False))
        cluster = LiveCluster(header.scheduler(), Fleet([Lists("gpu0")]), Journal(header))
        cluster.fleet._notify = cluster.driver.step
        Metrics(cluster, 8)
        return probe_operations(cluster.fleet, count)

    assert operations_for(1_000) < 5 * operations_for(250)
