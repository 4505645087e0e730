"""BatchMonitor's rule as printed: what it counts, what it prefers, and what a scheduler does by it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from papers.batchmonitor.printed_rate import PrintedRate, PrintedScheduling, WindowCount
from worlds.invariants import check

from bins.dispatch import DispatchPlan, DispatchTable
from llmserve.commands.simulate import Scenario, simulate
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import (
    Action,
    BatchEnded,
    DispatchSolved,
    EngineReady,
    Event,
    RequestArrived,
    StartBatch,
    TimerFired,
)
from llmserve.scheduling.queues.waiting import BinQueue, QueuedRequest
from llmserve.scheduling.scheduler import Scheduler

ALPHA_S, BETA_S = 0.0103, 0.0317  # 32 in 0.36 s: 88 a second
SIZES = 4  # largest batch of a scheduler


def plan(*services_s: tuple[float, ...]) -> DispatchPlan:
    """As many bins as services: seconds of batches of 1, 2, ..."""
    tables = [DispatchTable((0,) * (len(each) + 1), (), (), each, each, 1e9) for each in services_s]
    return DispatchPlan(tuple(range(len(tables))), tuple(tables))


def step(made: Scheduler, event: Event, now_s: float) -> list[Action]:
    actions = made.handle(event, now_s)
    check(made)
    return actions


def following(a_plan: DispatchPlan, bins: int = 1) -> Scheduler:
    edges = tuple(float(10 * index) for index in range(1, bins))
    config = PrintedScheduling(batch_size=SIZES, bins=bins, edges=edges, order="fffs", bins_by="median")
    made = config.resolved(barrier=True).scheduler()
    step(made, EngineReady(EngineInfo("gpu0", 8, barrier=True)), 0.0)
    step(made, DispatchSolved(a_plan), 0.0)
    return made


def arrive(made: Scheduler, *requests: Request, now_s: float = 0.0) -> list[Action]:
    return [action for request in requests for action in step(made, RequestArrived(request), now_s)]


def started(actions: list[Action]) -> list[list[int]]:
    return [[request.id for request in action.batch.requests] for action in actions if isinstance(action, StartBatch)]


def waiting(made: Scheduler) -> list[list[int]]:
    return [[queued.request.id for queued in queue] for queue in made.queues("").bins]


# ---- what is counted ----


def test_arrivals_of_the_last_whole_window_are_counted() -> None:
    count = WindowCount(1.0)
    for now_s in (0.0, 0.3, 0.999):
        count.observe(now_s)
    assert count.last_per_s(0.9999) == 0.0, "no window is over yet"
    assert count.last_per_s(1.0) == 3.0
    count.observe(1.2)
    assert count.last_per_s(1.9) == 3.0
    assert count.last_per_s(2.0) == 1.0


def test_an_empty_window_counts_nothing() -> None:
    count = WindowCount(0.5)
    count.observe(0.1)
    assert count.last_per_s(0.6) == 2.0
    assert count.last_per_s(1.1) == 0.0
    count.observe(7.1)
    assert count.last_per_s(7.2) == 0.0
    assert count.last_per_s(7.5) == 2.0


def test_no_arrival_is_lost_between_windows() -> None:
    times_s = np.cumsum(np.random.default_rng(1).exponential(1.0 / 20.0, 2_000))
    count = WindowCount(1.0)
    told: dict[int, float] = {}
    for now_s in times_s.tolist():
        told[int(now_s)] = count.last_per_s(now_s)
        count.observe(now_s)
    exact = np.bincount(times_s.astype(int))
    assert all(told[second] == exact[second - 1] for second in told if second > 0)


def test_a_window_tells_when_it_ends_and_the_rate_of_the_last_arrivals_is_known_besides() -> None:
    count = WindowCount(0.5)
    count.observe(3.2)
    assert count.ends_at_s == 3.5
    assert count.per_s(3.2) is None
    count.observe(3.4)
    assert count.per_s(3.4) == pytest.approx(5.0)


# ---- the rule ----


def at_rate(per_s: int, batch_max: int = 32) -> PrintedRate:
    """Even arrivals since half of an arrival after the time 0, up to 1.0 s."""
    count = WindowCount()
    for index in range(per_s):
        count.observe((index + 0.5) / per_s)
    release = PrintedRate(batch_max, count)
    release.plan = plan(tuple([ALPHA_S * size + BETA_S for size in range(1, batch_max + 1)]))
    return release


def queue_of(count: int) -> BinQueue:
    queue = BinQueue(0)
    for id_ in range(count):
        queue.append(QueuedRequest(Request(id_), 0, 0.0))
    return queue


def test_the_rule_is_its_closed_form() -> None:
    """clamp(floor(R beta / (1 - alpha R)) + 1, 2, max), and max when alpha R >= 1."""
    for per_s in range(130):
        slack = 1.0 - ALPHA_S * per_s
        size = math.floor(per_s * BETA_S / slack) + 1 if slack > 0 else 32
        assert at_rate(per_s).preferred(queue_of(1), 1.0) == min(max(size, 2), 32), per_s


def test_the_rule_goes_by_the_last_whole_second() -> None:
    release, queue = at_rate(60), queue_of(1)
    assert release.preferred(queue, 0.999) == 2, "no second is over"
    assert release.preferred(queue, 1.999) == 5
    assert release.preferred(queue, 2.0) == 2, "nothing came in the second before"


def test_several_engines_share_the_rate() -> None:
    release = at_rate(60)
    assert release.plan is not None
    assert release.preferred(queue_of(1), 1.0) == 5
    release.plan = replace(release.plan, engines=3)
    assert release.preferred(queue_of(1), 1.0) == at_rate(20).preferred(queue_of(1), 1.0) == 2


# ---- through the scheduler ----


def test_a_lone_request_waits_for_ever() -> None:
    made = following(plan((1.0, 2.0, 3.0, 4.0)))
    assert arrive(made, Request(1, None)) == []
    assert made.wake_at_s is None
    assert step(made, TimerFired(), 1e6) == []
    assert started(arrive(made, Request(2, None), now_s=1e6)) == [[1, 2]]


def test_batches_of_its_size_form_while_the_engine_is_busy() -> None:
    made = following(plan((0.1,) * SIZES))
    assert started(arrive(made, *[Request(id_) for id_ in range(1, 6)])) == [[1, 2]]
    assert [list(formed.requests) for formed in made.queues("").formed.batches()] == [[3, 4]]
    assert waiting(made) == [[5]]


def test_without_a_plan_an_engine_that_is_free_takes_what_there_is() -> None:
    made = PrintedScheduling(batch_size=SIZES, bins=1).resolved(barrier=True).scheduler()
    step(made, EngineReady(EngineInfo("gpu0", 8, barrier=True)), 0.0)
    assert started(arrive(made, Request(1))) == [[1]]


@pytest.mark.parametrize("another_comes", [True, False])
def test_who_waits_for_a_size_that_is_too_large_now_goes_when_the_second_is_over(another_comes: bool) -> None:
    """Ten came in the first second, so four are wanted; none came in the next, so that two will do."""
    made = following(plan(*[(1.0,) * SIZES] * 2), bins=2)
    for index in range(10):
        arrive(made, Request(index, 5.0), now_s=0.1 * index)
    for _ in range(3):  # of the five batches of two that formed meanwhile
        running = made.engines["gpu0"].running
        (batch_id,) = {run.batch_id for run in running.values()}
        step(made, BatchEnded("gpu0", batch_id, dict.fromkeys(running, 5.0)), 1.0)
    arrive(made, Request(20, 15.0), Request(21, 15.0), now_s=1.5)
    assert waiting(made)[1] == [20, 21]
    assert made.wake_at_s == 2.0
    assert step(made, TimerFired(), 2.0) == [], "two came in the last second, and are not enough for it"
    assert made.wake_at_s == 3.0
    if another_comes:  # to another bin
        arrive(made, Request(22, 5.0), now_s=3.0)
    else:
        step(made, TimerFired(), 3.0)
    assert [20, 21] in [list(formed.requests) for formed in made.queues("").formed.batches()]


def test_a_simulation_goes_by_it_and_leaves_the_last_behind() -> None:
    scenario = Scenario(
        requests=1, profile="p4-googlenet", barrier=True, load=0.3, lengths="constant:1", last_batch="drop"
    )
    assert simulate(scenario, PrintedScheduling(batch_size=8, bins=1)).completed == 0
