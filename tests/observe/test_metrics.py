"""The counters in /metrics, for given journals."""

from llmserve.engines.engine import ServedModel
from llmserve.live.cluster import LiveCluster
from llmserve.live.fleet import Fleet
from llmserve.live.journal import Header, Journal, Step
from llmserve.observe.counters import Families
from llmserve.observe.metrics import Metrics
from llmserve.observe.request_counts import BATCHES_STORED, RequestCounts
from llmserve.observe.stream_counts import OTHER_STREAMS, STREAMS_MAX
from llmserve.observe.table import TABLE
from llmserve.request import Batch, EngineInfo, Request
from llmserve.scheduling.messages import (
    Action,
    EngineLost,
    EngineReady,
    Event,
    FailRequest,
    ForecastsRevised,
    PreemptBatch,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    RevisedForecast,
    StartBatch,
    TimerFired,
)
from llmserve.scheduling.queues.waiting import QueuedRequest
from llmserve.settings.policies import SchedulingConfig


def started(*batches: tuple[int, int]) -> str:
    """The metrics after these batches (id, request) have started in this order."""
    header = Header(SchedulingConfig().resolved(barrier=True))
    cluster = LiveCluster(header.scheduler(), Fleet([]), Journal(header), clock=lambda: 0.0)
    metrics = Metrics(cluster, 8)
    for batch_id, request_id in batches:
        batch = Batch(batch_id, 0, (Request(request_id),), 0.0, 2)
        cluster.journal.append(0.0, TimerFired(), [StartBatch("a", batch)])
    return metrics.render().decode()


def test_batches_that_overtake_others_are_counted_too() -> None:
    text = started((3, 5), (1, 1), (2, 3))
    assert "llmserve_batches_total 3.0" in text
    assert "llmserve_batch_fill_count 3.0" in text


def test_a_batch_that_starts_in_parts_or_again_is_counted_once() -> None:
    assert "llmserve_batches_total 2.0" in started((1, 1), (2, 3), (1, 2), (2, 3))


def test_a_batch_that_a_lost_engine_gives_back_is_counted_once() -> None:
    scraped = Scraped()
    for request_id in (1, 2, 3):
        scraped.step(0.0, arrived(request_id))
    scraped.step(1.0, TimerFired(), start(1, 2, 3))
    scraped.step(2.0, EngineLost("a"))
    scraped.step(3.0, RequestCancelled(3))
    scraped.step(4.0, TimerFired(), start(1, 2))
    assert scraped.has("llmserve_batches_total 1.0")


def test_only_batches_that_start_in_parts_are_remembered_and_of_these_the_last() -> None:
    scraped = Scraped()
    for id_ in range(BATCHES_STORED):
        scraped.step(0.0, arrived(id_), start(id_, batch=id_))
        scraped.step(1.0, ended(id_))
    requests = scraped.metrics._requests
    assert not requests._batches._in_parts
    assert not requests._open
    for id_ in range(2 * BATCHES_STORED):
        scraped.step(0.0, TimerFired(), StartBatch("a", Batch(id_, 0, (Request(id_),), 0.0, 2)))
    assert len(requests._batches._in_parts) == BATCHES_STORED
    assert scraped.has(f"llmserve_batches_total {3.0 * BATCHES_STORED}")


def test_a_prediction_is_judged_by_the_forecast_with_which_its_request_started() -> None:
    scraped = Scraped()
    early, late = Request(1, 100.0), Request(1, 10.0)
    scraped.step(0.0, RequestArrived(early))
    scraped.step(1.0, ForecastsRevised((RevisedForecast(1, 10.0), RevisedForecast(2, 7.0))))
    scraped.step(2.0, TimerFired(), StartBatch("a", Batch(1, 0, (late,), 0.0, 1)))
    scraped.step(3.0, RequestEnded("a", 1, "completed", 10.0))
    text = scraped.metrics.render().decode()
    assert "llmserve_revised_forecasts_total 2.0" in text
    assert "llmserve_predicted_over_actual_tokens_sum 1.0" in text


# ---- by model and stream ----


class Scraped:
    """Metrics of a journal that the test writes."""

    def __init__(self) -> None:
        header = Header(SchedulingConfig().resolved(barrier=True))
        cluster = LiveCluster(header.scheduler(), Fleet([]), Journal(header), clock=lambda: 0.0)
        self.metrics = Metrics(cluster, 8)
        self._journal = cluster.journal
        self._fleet = cluster.fleet

    def step(self, now_s: float, event: Event, *actions: Action) -> None:
        self._journal.append(now_s, event, actions)

    def lists(self, *models: str) -> None:
        """The single engine lists these models from now on."""
        listed = {model: ServedModel(model) for model in models}
        self._fleet._known_models.change(dict(self._fleet.models), listed)
        self.step(9.0, EngineReady(EngineInfo("a", 8, False, models=models)))

    def has(self, *lines: str) -> bool:
        text = self.metrics.render().decode().splitlines()
        missing = [line for line in lines if line not in text]
        assert not missing, missing
        return True


def arrived(request_id: int, deadline_s: float | None = None, stream: str = "chat") -> RequestArrived:
    return RequestArrived(Request(request_id, deadline_s=deadline_s, model="m", stream=stream))


def start(*ids: int, batch: int = 1) -> StartBatch:
    return StartBatch("a", Batch(batch, 0, tuple([Request(id_, model="m") for id_ in ids]), 0.0, len(ids), "m"))


def ended(request_id: int, outcome: str = "completed", tokens: float = 5.0) -> RequestEnded:
    return RequestEnded("a", request_id, outcome, tokens)  # type: ignore[arg-type]


def test_a_deadline_is_met_by_a_whole_answer_in_time_and_missed_by_a_later_one_or_none() -> None:
    scraped = Scraped()
    for request_id in range(1, 7):
        scraped.step(0.0, arrived(request_id, deadline_s=2.0))
    scraped.step(0.0, arrived(7))
    scraped.step(2.0, ended(1))
    scraped.step(2.1, ended(2))
    scraped.step(2.1, TimerFired(), FailRequest(3, "deadline_exceeded"))
    scraped.step(2.1, ended(4, "failed"))
    scraped.step(2.1, RequestCancelled(5))
    scraped.step(2.1, arrived(8, deadline_s=3.0), FailRequest(8, "queue_full"))
    scraped.step(9.0, ended(7))
    assert scraped.has(
        'llmserve_deadlines_total{model="m",outcome="met",stream="chat"} 1.0',
        'llmserve_deadlines_total{model="m",outcome="missed",stream="chat"} 4.0',
        'llmserve_stream_requests_total{model="m",outcome="completed",stream="chat"} 3.0',
        'llmserve_stream_requests_total{model="m",outcome="rejected",stream="chat"} 1.0',
        'llmserve_stream_output_tokens_total{model="m",stream="chat"} 15.0',
        'llmserve_requests_total{outcome="completed"} 3.0',
    )


def test_a_preempted_request_counts_as_ended_only_at_its_last_end() -> None:
    scraped = Scraped()
    for request_id in (1, 2, 3):
        scraped.step(0.0, arrived(request_id))
    scraped.step(1.0, TimerFired(), start(1, 2, 3))
    scraped.step(3.5, TimerFired(), PreemptBatch("a", 1, (1, 2, 3)))
    scraped.step(3.5, ended(1, "cancelled"))
    scraped.step(3.5, ended(2, "cancelled"), FailRequest(2, "deadline_exceeded"))
    scraped.step(3.5, ended(3))  # ended at the same time
    scraped.step(4.0, TimerFired(), start(1, batch=2))
    scraped.step(5.0, ended(1))
    assert scraped.has(
        'llmserve_requests_total{outcome="completed"} 2.0',
        'llmserve_requests_total{outcome="failed"} 1.0',
        'llmserve_preempted_requests_total{model="m",stream="chat"} 3.0',
        'llmserve_preempted_batches_total{model="m"} 1.0',
        'llmserve_preempted_seconds_total{model="m"} 2.5',
        'llmserve_stream_requests_total{model="m",outcome="cancelled",stream="chat"} 0.0',
    )


def test_a_client_with_many_stream_names_does_not_fill_the_memory() -> None:
    scraped = Scraped()
    for request_id in range(STREAMS_MAX + 50):
        scraped.step(0.0, arrived(request_id, stream=f"s{request_id}"))
        scraped.step(0.0, ended(request_id))
    assert scraped.has(
        f'llmserve_stream_requests_total{{model="m",outcome="completed",stream="s{STREAMS_MAX - 1}"}} 1.0',
        f'llmserve_stream_requests_total{{model="m",outcome="completed",stream="{OTHER_STREAMS}"}} 50.0',
    )
    assert f's{STREAMS_MAX}"' not in scraped.metrics.render().decode()


def test_counters_of_a_model_are_dropped_when_no_engine_lists_it_and_start_again() -> None:
    scraped = Scraped()
    scraped.lists("m", "n")
    for request_id in (1, 2):
        scraped.step(0.0, arrived(request_id))
    scraped.step(0.0, TimerFired(), start(1, 2))
    scraped.step(1.0, TimerFired(), PreemptBatch("a", 1, (1,)))
    scraped.step(1.0, ended(2))
    scraped.lists("m")
    assert 'model="m"' in scraped.metrics.render().decode()
    scraped.lists("n")
    assert 'model="m"' not in scraped.metrics.render().decode()
    scraped.step(9.0, ended(1))  # request 1 ran on
    assert scraped.has(
        'llmserve_stream_requests_total{model="m",outcome="completed",stream="chat"} 1.0',
        'llmserve_requests_total{outcome="completed"} 2.0',
    )


def test_expected_hits_are_counted_where_the_engine_tells_its_own() -> None:
    families = Families(TABLE)
    queued = QueuedRequest(Request(1, model="m"), 0, 0.0, cached_tokens=64.0)
    counts = RequestCounts(families, 8, {1: queued})
    start = StartBatch("a", Batch(1, 0, (queued.request,), 0.0, 1))
    for told in (32.0, None):
        arrived, ended = RequestArrived(queued.request), RequestEnded("a", 1, "completed", 5.0, cached_tokens=told)
        counts.arrive(arrived, Step(0.0, arrived, (start,)))
        counts.start(start, Step(0.0, arrived, (start,)))
        counts.end_run(ended, Step(1.0, ended, ()))
    assert 'llmserve_forecast_cached_tokens_total{engine="a",model="m"} 64.0' in families.text()
