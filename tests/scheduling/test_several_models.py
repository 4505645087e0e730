"""Several models share the engines: each has its own queues, and no model starves another."""

from scheduling.checked_step import step

from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import (
    Action,
    BatchEnded,
    EngineClosed,
    EngineReady,
    FailRequest,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    StartBatch,
    TimerFired,
)
from llmserve.scheduling.scheduler import Scheduler
from llmserve.settings.policies import SchedulingConfig

Starts = list[tuple[str, list[int]]]


def new_scheduler(*engines: EngineInfo, **config: object) -> Scheduler:
    """By default, batches of 2 of one bin, formed when an engine is free."""
    values = {"bins": 1, "batch_size": 2, "release": "greedy", "order": "fffs", **config}
    scheduler = SchedulingConfig(**values).resolved(barrier=True).scheduler()  # type: ignore[arg-type]
    for engine in engines:
        step(scheduler, EngineReady(engine))
    return scheduler


def barrier(name: str = "gpu0", *models: str, slots: int = 2, worker: str = "") -> EngineInfo:
    return EngineInfo(name, slots, True, models=models, worker=worker)


def refill(name: str, *models: str, slots: int = 2, tokens_max: int | None = None) -> EngineInfo:
    return EngineInfo(name, slots, False, tokens_max=tokens_max, models=models)


def arrive(scheduler: Scheduler, model: str, *ids: int, now_s: float = 0.0, prompt_tokens: float = 0.0) -> list[Action]:
    requests = [Request(request_id, 4.0, prompt_tokens=prompt_tokens, model=model) for request_id in ids]
    return [action for request in requests for action in step(scheduler, RequestArrived(request), now_s)]


def ends(scheduler: Scheduler, engine: str, *ids: int, now_s: float) -> list[Action]:
    batch_id = scheduler.engines[engine].running[ids[0]].batch_id
    return step(scheduler, BatchEnded(engine, batch_id, dict.fromkeys(ids, 1.0)), now_s)


def starts(actions: list[Action]) -> Starts:
    return [
        (action.engine, [request.id for request in action.batch.requests])
        for action in actions
        if isinstance(action, StartBatch)
    ]


def failed(actions: list[Action]) -> list[tuple[int, str]]:
    return [(action.request_id, action.reason) for action in actions if isinstance(action, FailRequest)]


# ---- models of engines ----


def test_a_batch_is_of_one_model() -> None:
    scheduler = new_scheduler(barrier())
    arrive(scheduler, "a", 0)
    assert arrive(scheduler, "b", 1) + arrive(scheduler, "a", 2) + arrive(scheduler, "b", 3) == []
    (start,) = ends(scheduler, "gpu0", 0, now_s=1.0)
    assert isinstance(start, StartBatch)
    assert (start.batch.model, [request.id for request in start.batch.requests]) == ("b", [1, 3])
    assert starts(ends(scheduler, "gpu0", 1, 3, now_s=2.0)) == [("gpu0", [2])]


def test_an_engine_is_given_only_models_that_it_serves() -> None:
    scheduler = new_scheduler(barrier("gpu0", "a"), barrier("gpu1", "b"), barrier("gpu2"))
    assert starts(arrive(scheduler, "b", 0)) == [("gpu1", [0])]
    assert starts(arrive(scheduler, "b", 1)) == [("gpu2", [1])]
    assert arrive(scheduler, "b", 2) == []
    assert starts(arrive(scheduler, "a", 3)) == [("gpu0", [3])]
    assert starts(ends(scheduler, "gpu0", 3, now_s=1.0)) == []
    assert starts(ends(scheduler, "gpu2", 1, now_s=1.0)) == [("gpu2", [2])]


def test_requests_of_a_model_without_open_engines_are_refused_and_others_go_on() -> None:
    scheduler = new_scheduler(barrier("gpu0", "a"))
    assert failed(arrive(scheduler, "b", 0)) == [(0, "no_engine")]
    assert starts(arrive(scheduler, "a", 1)) == [("gpu0", [1])]


def test_an_unserved_model_gets_no_queues_however_often_it_is_requested() -> None:
    scheduler = new_scheduler(barrier("gpu0", "a"))
    for number in range(9):
        assert failed(arrive(scheduler, f"unknown-{number}", number)) == [(number, "no_engine")]
    assert list(scheduler.models) == ["a"]


def test_requests_wait_at_most_engine_wait_s_for_a_lost_engine_and_others_go_on() -> None:
    scheduler = new_scheduler(barrier("gpu0", "a"), barrier("gpu1", "b"), engine_wait_s=5.0)
    arrive(scheduler, "a", 0, 1)
    arrive(scheduler, "b", 2, 3)
    step(scheduler, EngineClosed("gpu1"), 1.0)
    assert scheduler.wake_at_s == 6.0
    assert failed(step(scheduler, TimerFired(), 6.0)) == [(3, "no_engine")]
    assert starts(ends(scheduler, "gpu0", 0, now_s=7.0)) == [("gpu0", [1])]
    assert failed(arrive(scheduler, "b", 4, now_s=7.0)) == [(4, "no_engine")]


def test_an_engine_that_comes_back_serves_the_requests_that_waited_for_it() -> None:
    scheduler = new_scheduler(barrier("gpu0", "a"), barrier("gpu1", "b"))
    arrive(scheduler, "b", 0, 1)
    step(scheduler, EngineClosed("gpu1"), 1.0)
    assert starts(step(scheduler, EngineReady(barrier("gpu2", "b")), 2.0)) == [("gpu2", [1])]


def test_an_engine_that_declares_more_models_serves_them() -> None:
    scheduler = new_scheduler(barrier("gpu0", "a"), barrier("gpu1", "b"))
    arrive(scheduler, "b", 0, 1)
    assert starts(step(scheduler, EngineReady(barrier("gpu0", "a", "b")), 1.0)) == [("gpu0", [1])]


# ---- turns ----


def test_batches_of_all_models_go_in_the_order_in_which_they_formed() -> None:
    scheduler = new_scheduler(barrier(), release="full")
    arrive(scheduler, "a", 0, 1)
    arrive(scheduler, "b", 2, 3)
    arrive(scheduler, "a", 4, 5)
    assert starts(ends(scheduler, "gpu0", 0, 1, now_s=1.0)) == [("gpu0", [2, 3])]
    assert starts(ends(scheduler, "gpu0", 2, 3, now_s=2.0)) == [("gpu0", [4, 5])]


def test_a_model_that_seldom_fills_a_batch_is_not_starved_by_one_that_always_does() -> None:
    """2 of b has waited since before the batch of 3 and 4 formed: it starts directly after that batch at the latest."""
    scheduler = new_scheduler(barrier())
    arrive(scheduler, "a", 0, 1)
    arrive(scheduler, "b", 2)
    order: list[list[int]] = []
    running, fresh = [0], 3
    for second in range(1, 5):
        arrive(scheduler, "a", fresh, fresh + 1, now_s=float(second))
        fresh += 2
        ((_, running),) = starts(ends(scheduler, "gpu0", *running, now_s=float(second)))
        order.append(running)
    assert [2] in order[:2]


def test_a_request_that_waits_for_a_full_batch_waits_on_however_old_it_is() -> None:
    scheduler = new_scheduler(barrier(), release="full")
    arrive(scheduler, "b", 9)
    arrive(scheduler, "a", 0, 1, 2, 3)
    assert starts(ends(scheduler, "gpu0", 0, 1, now_s=1.0)) == [("gpu0", [2, 3])]
    assert ends(scheduler, "gpu0", 2, 3, now_s=2.0) == []
    assert starts(arrive(scheduler, "b", 4, now_s=3.0)) == [("gpu0", [9, 4])]


def test_the_queue_limit_counts_all_models_together() -> None:
    scheduler = new_scheduler(barrier(), queue_requests_max=2)
    arrive(scheduler, "a", 0, 1)
    arrive(scheduler, "b", 2)
    assert failed(arrive(scheduler, "b", 3)) == [(3, "queue_full")]


# ---- memory ----


def test_only_on_its_own_engines_nothing_overtakes_a_request_that_waits_for_memory() -> None:
    """1 of a does not fit beside 0 on the only engine of a. 2 of b would fit there, but may not overtake 1: it runs on
    the engine that serves b alone. 3 waits, because that engine is full.
    """
    scheduler = new_scheduler(refill("both", tokens_max=400), refill("only b", "b", slots=1), batch_size=1)
    assert starts(arrive(scheduler, "a", 0, prompt_tokens=120.0)) == [("both", [0])]
    assert arrive(scheduler, "a", 1, prompt_tokens=300.0) == []
    assert starts(arrive(scheduler, "b", 2)) == [("only b", [2])]
    assert arrive(scheduler, "b", 3) == []
    actions = step(scheduler, RequestEnded("both", 0, "completed", 4.0), 1.0)
    assert starts(actions) == [("both", [1]), ("both", [3])]


# ---- one GPU, two engines ----


def test_engines_of_one_gpu_run_one_batch_at_a_time() -> None:
    scheduler = new_scheduler(barrier("a", "a", worker="gpu0"), barrier("b", "b", worker="gpu0"), barrier("c", "b"))
    assert starts(arrive(scheduler, "a", 0)) == [("a", [0])]
    assert starts(arrive(scheduler, "b", 1)) == [("c", [1])]
    assert arrive(scheduler, "b", 2, now_s=0.1) + arrive(scheduler, "a", 3, now_s=0.2) == []
    assert starts(ends(scheduler, "a", 0, now_s=1.0)) == [("b", [2])]
    assert starts(ends(scheduler, "b", 2, now_s=2.0)) == [("a", [3])]


def test_a_gpu_whose_busy_engine_is_lost_is_free_for_the_other() -> None:
    scheduler = new_scheduler(barrier("a", "a", worker="gpu0"), barrier("b", "b", worker="gpu0"))
    arrive(scheduler, "a", 0)
    assert arrive(scheduler, "b", 1) == []
    step(scheduler, RequestCancelled(0))
    assert starts(step(scheduler, RequestEnded("a", 0, "cancelled"), 1.0)) == [("b", [1])]


# ---- queues of each model ----


def test_each_model_has_its_own_bins_and_edges() -> None:
    scheduler = new_scheduler(barrier(slots=1), bins=2, edges_refit_every=1, edges_window=16, batch_size=1)
    for number in range(16):
        arrive_with(scheduler, number, "short", 1.0 + number)
        arrive_with(scheduler, 100 + number, "long", 1_000.0 + number)
    edges = {model: scheduler.queues(model).binning.edges.edges for model in ("short", "long")}
    assert edges["short"][0] < 20.0 < 1_000.0 <= edges["long"][0]


def arrive_with(scheduler: Scheduler, request_id: int, model: str, tokens: float) -> None:
    step(scheduler, RequestArrived(Request(request_id, tokens, model=model)))


def test_answers_of_one_model_do_not_change_another_models_lengths() -> None:
    scheduler = new_scheduler(barrier())
    arrive(scheduler, "a", 0)
    step(scheduler, BatchEnded("gpu0", scheduler.engines["gpu0"].running[0].batch_id, {0: 500.0}), 1.0)
    assert scheduler.queues("a").service.tokens_mean == 500.0
    assert scheduler.queues("b").service.tokens_mean == 256.0
