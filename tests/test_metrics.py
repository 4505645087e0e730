"""What /metrics counts of a journal."""

from llmserve.cluster.journal import Header, Journal
from llmserve.cluster.live import LiveCluster
from llmserve.metrics import Metrics
from llmserve.request import Batch, Request
from llmserve.scheduling.messages import StartBatch, TimerFired
from llmserve.scheduling.policies import SchedulingConfig


def started(*batches: tuple[int, int]) -> str:
    """The metrics after these batches (id, request) have started, in this order."""
    header = Header(SchedulingConfig().resolved(barrier=True))
    cluster = LiveCluster(header.scheduler(), [], Journal(header), clock=lambda: 0.0)
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
