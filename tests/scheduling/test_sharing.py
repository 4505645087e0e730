"""An engine that holds few models at once: requests are grouped by the loaded model, within what ages allow."""

import pytest
from scheduling.checked_step import step

from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import (
    Action,
    AnswerBegan,
    EngineLost,
    EngineReady,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    StartBatch,
)
from llmserve.scheduling.scheduler import Scheduler
from llmserve.scheduling.sharing import PATIENCE
from llmserve.settings.policies import SchedulingConfig

LOAD_S = 5.0


def ollama(
    name: str = "gpu0", *, slots: int = 1, at_once: int = 1, loads_s: float = LOAD_S, **more: object
) -> EngineInfo:
    """An engine of three models. loads_s : known from before"""
    known = dict.fromkeys("abc", loads_s) if loads_s else {}
    info: dict[str, object] = {"models": ("a", "b", "c"), "models_at_once": at_once, "loads_s": known, **more}
    return EngineInfo(name, slots, False, **info)  # type: ignore[arg-type]


def new_scheduler(*engines: EngineInfo, order: str = "fffs") -> Scheduler:
    scheduler = SchedulingConfig(order=order).resolved(barrier=False).scheduler()
    for engine in engines:
        step(scheduler, EngineReady(engine))
    return scheduler


def arrive(
    scheduler: Scheduler, model: str, *ids: int, now_s: float = 0.0, deadline_s: float | None = None
) -> list[int]:
    """Ids of the requests that start."""
    requests = [Request(request_id, 100.0, deadline_s, model=model) for request_id in ids]
    return [id_ for request in requests for id_ in started(step(scheduler, RequestArrived(request), now_s))]


def end(scheduler: Scheduler, request_id: int, now_s: float, engine: str = "gpu0") -> list[int]:
    """Ids of the requests that start."""
    return started(step(scheduler, RequestEnded(engine, request_id, "completed", 100.0), now_s))


def started(actions: list[Action]) -> list[int]:
    return [request.id for action in actions if isinstance(action, StartBatch) for request in action.batch.requests]


def test_requests_of_the_loaded_model_pass_others_that_have_waited_a_little_longer() -> None:
    scheduler = new_scheduler(ollama())
    assert arrive(scheduler, "a", 0) == [0]
    assert arrive(scheduler, "b", 1, now_s=1.0) == []
    assert arrive(scheduler, "a", 2, 3, now_s=2.0) == []
    assert end(scheduler, 0, 3.0) == [2]
    assert end(scheduler, 2, 4.0) == [3]
    assert end(scheduler, 3, 5.0) == [1]


def test_no_request_is_passed_by_one_that_arrived_later_by_more_than_the_patience() -> None:
    scheduler = new_scheduler(ollama())
    arrive(scheduler, "a", 0)
    arrive(scheduler, "b", 1, now_s=1.0)
    arrive(scheduler, "a", 2, now_s=1.0 + PATIENCE * LOAD_S)
    arrive(scheduler, "a", 3, now_s=1.1 + PATIENCE * LOAD_S)
    assert end(scheduler, 0, 50.0) == [2]
    assert end(scheduler, 2, 51.0) == [1]
    assert end(scheduler, 1, 52.0) == [3]


def test_a_model_of_too_old_requests_waits_until_the_other_has_left_the_engine() -> None:
    scheduler = new_scheduler(ollama(slots=2))
    arrive(scheduler, "a", 0, 1)
    arrive(scheduler, "b", 2, now_s=1.0)
    arrive(scheduler, "a", 3, now_s=2.0 + PATIENCE * LOAD_S)
    assert end(scheduler, 0, 50.0) == [], "one slot is free, and the other one still runs a"
    assert end(scheduler, 1, 51.0) == [2]
    assert end(scheduler, 2, 52.0) == [3]


def test_before_a_load_was_seen_the_oldest_request_decides() -> None:
    scheduler = new_scheduler(ollama(loads_s=0.0))
    arrive(scheduler, "a", 0)
    arrive(scheduler, "b", 1, now_s=0.5)
    arrive(scheduler, "a", 2, now_s=1.0)
    assert end(scheduler, 0, 2.0) == [1], "the first request took no longer than its tokens"


def test_a_burst_of_two_models_takes_two_loads() -> None:
    scheduler = new_scheduler(ollama(slots=2))
    for request_id in range(20):
        arrive(scheduler, "ab"[request_id % 2], request_id)
    order = []
    while running := list(scheduler.engines["gpu0"].running):
        order.append(running[0])
        end(scheduler, running[0], float(len(order)))
    assert ["ab"[request_id % 2] for request_id in order] == ["a"] * 10 + ["b"] * 10


def test_the_time_of_a_load_is_learnt_from_the_first_token_after_a_change_of_the_model() -> None:
    scheduler = new_scheduler(ollama(loads_s=0.0))
    loaded = scheduler.engines["gpu0"].loaded
    assert loaded is not None
    now_s = 0.0
    for request_id, (model, first_s) in enumerate([("a", 6.0), ("a", 1.0), ("b", 9.0), ("b", 1.0), ("a", 6.0)]):
        assert arrive(scheduler, model, request_id, now_s=now_s) == [request_id]
        step(scheduler, AnswerBegan(request_id), now_s + first_s)
        now_s += first_s + 10.0
        end(scheduler, request_id, now_s)
    assert loaded.loads_s == {"a": 5.0, "b": 8.0}
    assert scheduler.models["a"].service.seconds_per_token == pytest.approx(0.11, rel=0.05), (
        "a load is no time of an answer"
    )


def test_without_streams_a_load_is_what_the_tokens_of_the_answer_do_not_explain() -> None:
    scheduler = new_scheduler(ollama(loads_s=0.0))
    loaded = scheduler.engines["gpu0"].loaded
    assert loaded is not None
    now_s = 0.0
    for request_id, (model, load_s) in enumerate(zip("aaabbaaabb" * 3, [5.0, 0, 0, 5.0, 0] * 6, strict=True)):
        arrive(scheduler, model, request_id, now_s=now_s)
        now_s += load_s + 4.0
        end(scheduler, request_id, now_s)
    assert loaded.load_s("a") == pytest.approx(5.0, abs=1.0)
    assert scheduler.models["b"].service.seconds_per_token == pytest.approx(0.04, rel=0.25)


def test_a_load_that_nobody_waited_for_to_the_end_teaches_nothing() -> None:
    scheduler = new_scheduler(ollama(loads_s=0.0))
    loaded = scheduler.engines["gpu0"].loaded
    assert loaded is not None
    arrive(scheduler, "a", 0)
    step(scheduler, RequestCancelled(0), 1.0)
    step(scheduler, RequestEnded("gpu0", 0, "cancelled"), 1.0)
    arrive(scheduler, "a", 1, now_s=100.0)
    step(scheduler, AnswerBegan(1), 101.0)
    assert loaded.loads_s == {}


def test_two_models_that_fit_share_the_slots_and_a_third_takes_the_place_of_the_one_that_waits_least() -> None:
    scheduler = new_scheduler(ollama(slots=3, at_once=2))
    assert arrive(scheduler, "a", 0) + arrive(scheduler, "b", 1) == [0, 1]
    assert arrive(scheduler, "c", 2, now_s=1.0) == []
    assert arrive(scheduler, "a", 3, now_s=2.0) == [3]
    assert end(scheduler, 1, 3.0) == [2], "b has no requests, and leaves the memory"
    assert arrive(scheduler, "b", 4, now_s=4.0) == []


@pytest.mark.parametrize(("deadline_s", "first"), [(18.0, 1), (100.0, 2)])
def test_a_deadline_that_comes_close_counts_as_age(deadline_s: float, first: int) -> None:
    scheduler = new_scheduler(ollama())
    arrive(scheduler, "a", 0)
    arrive(scheduler, "b", 1, now_s=1.0, deadline_s=deadline_s)
    arrive(scheduler, "a", 2, now_s=2.0)
    assert end(scheduler, 0, 3.0) == [first]


def test_an_engine_that_has_the_model_is_better_than_one_that_would_load_it() -> None:
    scheduler = new_scheduler(ollama("e0"), ollama("e1", slots=4))
    arrive(scheduler, "a", 0)
    assert scheduler.requests[0].run is not None
    assert scheduler.requests[0].run.engine == "e1"
    arrive(scheduler, "b", 1)
    assert scheduler.requests[1].run is not None
    assert scheduler.requests[1].run.engine == "e0"
    arrive(scheduler, "a", 2)
    assert scheduler.requests[2].run is not None
    assert scheduler.requests[2].run.engine == "e1"


def test_an_idle_engine_says_which_models_it_has() -> None:
    scheduler = new_scheduler(ollama(loaded=("b",)))
    assert scheduler.engines["gpu0"].has_loaded("b")
    arrive(scheduler, "a", 0)
    step(scheduler, EngineReady(ollama(loaded=("c",))), 1.0)
    assert scheduler.engines["gpu0"].has_loaded("a"), "what it says while it runs requests may be out of date"
    end(scheduler, 0, 2.0)
    step(scheduler, EngineReady(ollama(loaded=())), 300.0)
    assert not scheduler.engines["gpu0"].has_loaded("a"), "it has dropped a model that nobody asked for"


def test_a_lost_engine_has_lost_its_models() -> None:
    scheduler = new_scheduler(ollama())
    arrive(scheduler, "a", 0)
    step(scheduler, EngineLost("gpu0", expected=True), 1.0)
    assert not scheduler.engines["gpu0"].has_loaded("a")


def test_names_of_one_model_need_one_load() -> None:
    names = ("a", "b", "c", "a /v1/embeddings")
    scheduler = new_scheduler(ollama(slots=2, models=names, weights={"a /v1/embeddings": "a"}))
    assert arrive(scheduler, "a", 0) + arrive(scheduler, "a /v1/embeddings", 1) == [0, 1]


def test_batch_items_of_the_loaded_model_go_first_and_give_way_to_requests() -> None:
    scheduler = new_scheduler(ollama())

    def item(request_id: int, model: str, deadline_s: float) -> list[int]:
        request = Request(request_id, 100.0, deadline_s, model=model, background=True)
        return started(step(scheduler, RequestArrived(request)))

    assert item(0, "a", 9_000.0) == [0]
    assert item(1, "b", 8_000.0) == []
    assert item(2, "a", 9_000.0) == []
    assert end(scheduler, 0, 4.0) == [2]
    arrive(scheduler, "b", 3, now_s=5.0)
    step(scheduler, RequestEnded("gpu0", 2, "cancelled"), 5.0)
    assert list(scheduler.engines["gpu0"].running) == [3]
