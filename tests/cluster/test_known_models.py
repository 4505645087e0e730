"""Which models are known when engines list others than before, and how long it takes to hear of that."""

import random
import time
from collections.abc import Callable, Iterable
from functools import partial

import pytest

from llmserve.cluster.fleet import Fleet, FleetConfig
from llmserve.cluster.journal import Header, Journal
from llmserve.cluster.known_models import KnownModels, Listed
from llmserve.cluster.live import LiveCluster
from llmserve.engines.engine import Health, ServedModel
from llmserve.engines.openai_engine import OpenAIEngine
from llmserve.metrics import Metrics
from llmserve.request import EngineInfo
from llmserve.scheduling.policies import SchedulingConfig


def listed(**contexts_tokens: int | None) -> Listed:
    return {id_: ServedModel(id_, tokens) for id_, tokens in contexts_tokens.items()}


def test_a_model_is_known_while_an_engine_lists_it() -> None:
    known = KnownModels()
    known.change({}, listed(a=None, b=None))
    known.change({}, listed(b=None))
    known.change(listed(a=None, b=None), listed(c=None))
    assert list(known.by_id) == ["b", "c"]
    assert [known.engines_of(model) for model in "abc"] == [0, 1, 1]


def test_of_several_sizes_of_context_the_least_is_told_as_long_as_an_engine_has_it() -> None:
    known = KnownModels()
    for tokens in (None, 8192, 4096):
        known.change({}, listed(m=tokens))
    assert known.by_id["m"].context_tokens == 4096
    known.change(listed(m=4096), listed(m=2048))
    assert known.by_id["m"].context_tokens == 2048
    known.change(listed(m=2048), {})
    assert known.by_id["m"].context_tokens == 8192
    known.change(listed(m=8192), {})
    assert known.by_id["m"].context_tokens is None


def from_scratch(lists: Iterable[Listed]) -> dict[str, tuple[int | None, int]]:
    """Of each model the least context and the number of engines."""
    everywhere = [model for one in lists for model in one.values()]
    return {
        id_: (
            min(
                [model.context_tokens for model in everywhere if model.id == id_ and model.context_tokens], default=None
            ),
            sum(model.id == id_ for model in everywhere),
        )
        for id_ in {model.id for model in everywhere}
    }


def test_after_any_changes_what_is_known_is_what_the_lists_say() -> None:
    rng = random.Random(1)
    known, lists = KnownModels(), [listed() for _ in range(5)]
    for _ in range(500):
        engine = rng.randrange(5)
        after = listed(**{id_: rng.choice([None, 1024, 2048]) for id_ in "abcdef" if rng.random() < 0.4})
        known.change(lists[engine], after)
        lists[engine] = after
        assert {id_: (model.context_tokens, known.engines_of(id_)) for id_, model in known.by_id.items()} == (
            from_scratch(lists)
        )


# ---- how long it takes ----


class Lists(OpenAIEngine):
    """An engine that is told what it lists, and asked for nothing else."""

    restart = None

    def __init__(self, name: str) -> None:
        self.info = EngineInfo(name, 8, False)

    async def close(self) -> None:
        pass


def names(kind: str, count: int) -> Health:
    return Health(tuple([ServedModel(f"{kind}-{number}", 4096) for number in range(count)]))


def cpu_s(work: Callable[[], None]) -> float:
    began_s = time.process_time()
    work()
    return time.process_time() - began_s


def change_s(fleet: Fleet, count: int, tries: int) -> float:
    """Least CPU time of a probe of the first engine that finds so many models, none of which was there before."""
    first, *others = fleet.desks.values()
    for desk in (first, *others):
        fleet._found(desk, names("base", count))
    return min([cpu_s(partial(fleet._found, first, names(f"new-{again}", count))) for again in range(tries)])


def watched(engines: int) -> Fleet:
    """A fleet alone: nobody hears what it tells."""

    def hear(_: object) -> None:
        pass

    return Fleet([Lists(f"gpu{number}") for number in range(engines)], FleetConfig(), tell=hear, lose=hear)


def test_a_list_of_four_times_as_many_new_models_takes_about_four_times_as_long() -> None:
    """Sixteen times, if each model were compared with each other one."""
    assert change_s(watched(1), 4_000, tries=5) < 8 * change_s(watched(1), 1_000, tries=5)


def test_what_one_engine_lists_costs_the_same_however_many_engines_there_are() -> None:
    assert change_s(watched(40), 500, tries=5) < 3 * change_s(watched(2), 500, tries=5)


@pytest.mark.xfail(
    strict=True,
    reason="the scheduler counts the engines of all lanes for each new lane, and keeps lanes of models that are gone",
)
def test_the_whole_server_takes_about_four_times_as_long_for_four_times_as_many_new_models() -> None:
    """With 1,000 and 4,000 names, as above, once it passes."""

    def took_s(count: int) -> float:
        header = Header(SchedulingConfig().resolved(barrier=False))
        cluster = LiveCluster(header.scheduler(), [Lists("gpu0")], Journal(header))
        Metrics(cluster, 8)
        return change_s(cluster.fleet, count, tries=2)

    assert took_s(400) < 8 * took_s(100)
