"""Expected times of batches, worked out by hand."""

import pytest

from bins.profile import StepTimes
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.choice.batch_times import BatchTimes, Timetable
from llmserve.scheduling.circuit import Circuit
from llmserve.scheduling.engines import PACE_MEMORY, PACE_MOST, PROVEN_S, EngineState, Worker
from llmserve.scheduling.queues.model_queues import ModelQueues
from llmserve.scheduling.queues.waiting import QueuedRequest
from llmserve.settings.policies import SchedulingConfig

SPEED = StepTimes(0.5, (1.0, 1.5, 2.0, 2.5))


def engine(*, slots: int = 4, barrier: bool = True, **speeds: StepTimes) -> EngineState:
    """speeds : by model; `every` is the speed of all other models."""
    speed_of = {"" if model == "every" else model: speed for model, speed in speeds.items()}
    return EngineState(EngineInfo("gpu0", slots, barrier, speeds=speed_of), Circuit(0, 1.0), Worker("gpu0"))


def queues(*lengths: float, bins: int = 1, edges: tuple[float, ...] | None = None, batch_size: int = 4) -> ModelQueues:
    """Queues whose past answers had these lengths."""
    config = SchedulingConfig(order="flex", bins=bins, edges=edges, batch_size=batch_size).resolved(barrier=True)
    return config.queues("m", lengths)


def times_of(times: Timetable, engine: EngineState, queues: ModelQueues, bin_index: int = 0) -> BatchTimes:
    return times.of(engine, queues.model, bin_index, queues.binning.tokens(bin_index))


def test_a_batch_takes_its_prefill_and_the_steps_of_its_longest_answer() -> None:
    times = times_of(Timetable(4), engine(every=SPEED), queues(10.0))
    assert times.expected == (10.5, 15.5, 20.5, 25.5)
    assert times.least == times.expected


def test_the_longest_of_several_answers_is_longer_than_one() -> None:
    """Half of the answers have 1 token, half 9: the longest of b has 9 - 8 / 2^b on average."""
    times = times_of(Timetable(4), engine(every=StepTimes(0.0, (1.0, 1.0, 1.0, 1.0))), queues(*[1.0, 9.0] * 32))
    assert times.expected == pytest.approx([5.0, 7.0, 8.0, 8.5], abs=0.1)
    assert times.least == (1.0, 1.0, 1.0, 1.0)


def test_where_slots_refill_each_answer_takes_its_own_steps_which_all_slots_share() -> None:
    times = times_of(Timetable(2), engine(barrier=False, every=SPEED), queues(10.0, batch_size=2))
    assert times.expected == (25.5, 25.5)
    of_eight = times_of(Timetable(8), engine(barrier=False, every=SPEED), queues(10.0, batch_size=8))
    assert of_eight.expected == (25.5,) * 8


def test_where_slots_refill_the_least_time_is_that_of_a_batch_alone_on_the_engine() -> None:
    """Otherwise an idle engine of many slots would refuse requests that are in time only because it is idle."""
    times = times_of(Timetable(2), engine(barrier=False, every=SPEED), queues(10.0, batch_size=2))
    assert times.least == (10.5, 15.5)


def test_a_speed_declared_for_few_sequences_holds_for_more() -> None:
    times = times_of(Timetable(6), engine(slots=6, every=SPEED), queues(10.0, batch_size=6))
    assert times.expected == (10.5, 15.5, 20.5, 25.5, 25.5, 25.5)


def test_a_larger_batch_takes_no_less_than_a_smaller_one_whatever_was_measured() -> None:
    times = times_of(Timetable(3), engine(every=StepTimes(0.0, (1.0, 0.9, 2.0))), queues(10.0, batch_size=3))
    assert times.expected == (10.0, 10.0, 20.0)


def test_each_model_has_its_own_speed_or_the_common_one() -> None:
    gpu = engine(m=StepTimes(0.0, (3.0,)), every=SPEED)
    assert times_of(Timetable(1), gpu, queues(10.0, batch_size=1)).expected == (30.0,)
    assert times_of(Timetable(1), engine(other=SPEED), queues(10.0, batch_size=1)).expected == (0.0,)


def test_a_model_without_a_declared_speed_takes_no_time() -> None:
    unknown = times_of(Timetable(2), engine(), queues(10.0, batch_size=2))
    assert (unknown.expected, unknown.least) == ((0.0, 0.0), (0.0, 0.0))
    before_the_first_answer = times_of(Timetable(1), engine(every=SPEED), queues(batch_size=1))
    assert before_the_first_answer.expected == (0.5,)


def test_bins_have_their_own_lengths() -> None:
    model_queues = queues(*[10.0] * 8, *[100.0] * 8, bins=2, edges=(50.0,))
    times = [times_of(Timetable(4), engine(every=SPEED), model_queues, index).expected[0] for index in (0, 1)]
    assert times == [10.5, 100.5]


def paced(pace: float) -> EngineState:
    """An engine that takes `pace` seconds for each second that its declared speed promises."""
    gpu = engine(every=SPEED)
    gpu.record_batch("m", 1, 10.0, pace * 10.5, 0.0)
    return gpu


def test_times_follow_the_pace_in_steps_of_two_percent() -> None:
    times = Timetable(4)
    assert times_of(times, paced(2.0), queues(10.0)).expected[0] == pytest.approx(21.0)
    assert times_of(times, paced(1.009), queues(10.0)).expected[0] == pytest.approx(10.5)
    assert times_of(times, paced(1e-9), queues(10.0)).expected[0] > 0


def test_times_follow_changed_lengths_and_speeds() -> None:
    model_queues, gpu, times = queues(10.0), engine(every=SPEED), Timetable(4)
    first_times = times_of(times, gpu, model_queues)
    assert times_of(times, gpu, model_queues) is first_times
    gpu.update(EngineInfo("gpu0", 4, True, speeds={"": StepTimes(0.0, SPEED.step_s)}))
    assert times_of(times, gpu, model_queues).expected[0] == 10.0
    for request_id in range(1_100):
        model_queues.record_answer(QueuedRequest(Request(request_id), 0, 0.0), 20.0, 1.0)
    assert times_of(times, gpu, model_queues).expected[0] == 20.0


def test_the_first_answers_are_known_at_once() -> None:
    """Otherwise an engine would seem to take no time until 64 answers are known."""
    model_queues, gpu, times = queues(), engine(every=SPEED), Timetable(4)
    assert times_of(times, gpu, model_queues).expected[0] == 0.5
    model_queues.record_answer(QueuedRequest(Request(0), 0, 0.0), 20.0, 1.0)
    assert times_of(times, gpu, model_queues).expected[0] == 20.5


def test_while_predictions_are_not_trusted_the_one_bin_has_all_lengths() -> None:
    model_queues = queues(*[10.0] * 64, *[100.0] * 64, bins=2, edges=(50.0,))
    assert model_queues.binning.tokens(0).longest[0] == 10.0
    answers = 0
    while model_queues.binning.trust.trusted:
        score, tokens = (10.0, 100.0) if answers % 2 else (100.0, 10.0)  # reversed predictions
        model_queues.record_answer(QueuedRequest(Request(answers, score), 0, 0.0, score), tokens, 1.0)
        model_queues.binning.tokens(0)
        answers += 1
    assert model_queues.binning.tokens(0).longest[0] == pytest.approx(55.0, abs=1.0)


# ---- late ----


def late_at_s(*engines: EngineState, tokens: float, now_s: float = 0.0) -> float:
    """When a request that is due at 100 s is late, if the shortest answers have `tokens` tokens."""
    queued = QueuedRequest(Request(0, deadline_s=100.0, model="m"), 0, 0.0)
    return Timetable(4).late_at_s(queued, engines, tokens, now_s)


def test_a_request_alone_takes_its_prefill_and_a_step_for_each_token() -> None:
    assert late_at_s(paced(1.0), tokens=0.0) == pytest.approx(99.5, abs=1e-5)
    assert late_at_s(paced(1.0), tokens=10.0) == pytest.approx(89.5, abs=1e-5)
    assert late_at_s(paced(3.0), tokens=10.0) == pytest.approx(68.5, abs=1e-5)
    assert late_at_s(paced(3.0), paced(1.0), tokens=10.0) == pytest.approx(89.5, abs=1e-5)


def test_a_request_takes_no_time_on_an_engine_without_recent_answers() -> None:
    assert late_at_s(engine(every=SPEED), tokens=10.0) == 100.0
    assert late_at_s(paced(1.0), engine(every=SPEED), tokens=10.0) == 100.0
    assert late_at_s(engine(), tokens=10.0) == 100.0
    assert late_at_s(paced(1.0), tokens=10.0, now_s=PROVEN_S) == 100.0


# ---- pace ----


def test_the_first_answers_count_alike_and_later_ones_a_thirty_second() -> None:
    gpu = engine(every=SPEED)
    assert gpu.pace("m") == 1.0
    assert gpu.record_batch("m", 2, 10.0, 31.0, 0.0)  # declared: 15.5
    assert gpu.pace("m") == 2.0
    gpu.record_batch("m", 2, 10.0, 15.5, 1.0)
    assert gpu.pace("m") == 1.5
    for _ in range(PACE_MEMORY - 2):
        gpu.record_batch("m", 2, 10.0, 1.5 * 15.5, 2.0)
    assert gpu.pace("m") == pytest.approx(1.5)
    gpu.record_batch("m", 2, 10.0, 4.7 * 15.5, 3.0)
    assert gpu.pace("m") == pytest.approx(1.5 + 3.2 / PACE_MEMORY)
    for _ in range(500):
        gpu.record_batch("m", 2, 10.0, 31.0, 4.0)
    assert gpu.pace("m") == pytest.approx(2.0, rel=1e-5)


def test_answers_as_fast_as_declared_leave_the_pace_unchanged() -> None:
    gpu = engine(every=SPEED)
    gpu.record_batch("m", 2, 10.0, 15.5 * (1 + 1e-9), 0.0)
    assert gpu.pace("m") == 1.0
    assert gpu.proven_until_s("m") == PROVEN_S


def test_answers_that_show_no_speed_leave_the_pace_unchanged() -> None:
    gpu = engine(other=SPEED)
    assert not gpu.record_batch("m", 2, 10.0, 99.0, 0.0)
    assert not gpu.record_batch("other", 2, 0.0, 99.0, 0.0)
    assert gpu.pace("m") == gpu.pace("other") == 1.0
    assert gpu.proven_until_s("other") < 0


def test_each_model_has_its_own_pace() -> None:
    gpu = engine(m=SPEED, n=SPEED)
    gpu.record_batch("m", 1, 10.0, 21.0, 0.0)
    assert (gpu.pace("m"), gpu.pace("n")) == (2.0, 1.0)


def test_an_endless_answer_changes_the_pace_little() -> None:
    assert paced(1e6).pace("m") == PACE_MOST
