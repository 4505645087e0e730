"""A GPU that serves several models, by hand."""

import pytest
from papers.shepherd.worker import SimulatedWorker

from bins.profile import StepTimes
from llmserve.request import Batch, EngineInfo, Request
from llmserve.scheduling.messages import BatchEnded

SPEEDS = {"a": StepTimes(1.0, (0.1, 0.2, 0.3)), "": StepTimes(0.0, (1.0, 1.0, 1.0))}
LENGTHS = [10.0, 20.0, 30.0]


def worker(speeds: dict[str, StepTimes] | None = None) -> SimulatedWorker:
    return SimulatedWorker(EngineInfo("gpu0", 3, True, speeds=SPEEDS if speeds is None else speeds), LENGTHS)


def batch(*ids: int, model: str = "a", batch_id: int = 7) -> Batch:
    return Batch(batch_id, 0, tuple(Request(id_, model=model) for id_ in ids), 0.0, len(ids), model)


def test_a_batch_takes_its_prefill_and_as_many_steps_as_its_longest_answer_has_tokens() -> None:
    made = worker()
    assert made.next_end_s is None
    made.start(batch(0, 2), now_s=5.0)
    assert made.next_end_s == 5.0 + 1.0 + 30.0 * 0.2
    assert made.end(12.0) == BatchEnded("gpu0", 7, {0: 10.0, 2: 30.0})
    assert made.next_end_s is None
    assert (made.busy_s, made.wasted_s) == (7.0, 0.0)


def test_a_model_without_a_speed_of_its_own_has_that_of_all_others() -> None:
    made = worker()
    made.start(batch(1, model="b"), now_s=0.0)
    assert made.next_end_s == 20.0


def test_batches_follow_each_other_and_never_overlap() -> None:
    made = worker()
    made.start(batch(0), now_s=0.0)
    with pytest.raises(AssertionError, match="gpu0 was sent two batches"):
        made.start(batch(1), now_s=1.0)
    made.end(2.0)
    made.start(batch(1, batch_id=8), now_s=2.0)
    assert made.end(5.0) == BatchEnded("gpu0", 8, {1: 20.0})
    assert made.busy_s == 5.0


def test_a_batch_that_is_stopped_frees_the_gpu_at_once_and_was_for_nothing() -> None:
    made = worker()
    made.start(batch(0, 1), now_s=0.0)
    made.abort(0, 2.0)
    made.abort(1, 2.0)
    assert made.next_end_s is None
    assert (made.busy_s, made.wasted_s) == (2.0, 2.0)
    made.start(batch(2), now_s=2.0)
    made.end(6.0)
    assert (made.busy_s, made.wasted_s) == (6.0, 2.0)


def test_a_batch_that_loses_one_goes_on_as_long_and_its_share_was_for_nothing() -> None:
    made = worker()
    made.start(batch(0, 2), now_s=0.0)
    made.abort(2, 2.0)
    assert made.next_end_s == 7.0
    assert made.end(7.0) == BatchEnded("gpu0", 7, {0: 10.0})
    assert (made.busy_s, made.wasted_s) == (7.0, 1.0)


def test_a_request_that_is_not_there_cannot_be_stopped() -> None:
    made = worker()
    made.abort(0, 1.0)
    made.start(batch(0), now_s=1.0)
    made.abort(1, 1.5)
    made.end(3.0)
    assert (made.busy_s, made.wasted_s) == (2.0, 0.0)


def test_only_what_runs_a_batch_at_a_time_is_such_a_gpu() -> None:
    with pytest.raises(AssertionError, match="one batch at a time"):
        SimulatedWorker(EngineInfo("gpu0", 3, False, speeds=SPEEDS), LENGTHS)
