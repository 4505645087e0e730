"""How many engines a model wants, and the models of a live cluster."""

from __future__ import annotations

import asyncio
import random

import pytest
from front import StartFront, until

from llmserve.engines.timed.server import FakeEngine
from llmserve.estimates.engines_wanted import BUSY, REPLY_S, Load, Wanted, engines_wanted, load_of


def load(arriving: float = 0.0, *waiting: tuple[float | None, float], start_s: float = 10.0) -> Load:
    return Load(arriving, waiting, start_s)


def test_no_load_wants_no_engine() -> None:
    assert engines_wanted(load()) == 0


def test_arrivals_want_engines_that_are_not_quite_busy() -> None:
    assert engines_wanted(load(BUSY)) == 1
    assert engines_wanted(load(BUSY + 0.01)) == 2
    assert engines_wanted(load(8.0)) == 10


def test_a_backlog_wants_engines_that_finish_it_by_its_deadlines() -> None:
    assert engines_wanted(load(0.0, (20.0, 40.0))) == 2
    assert engines_wanted(load(0.0, (20.0, 40.0), (40.0, 40.0))) == 2, "80 engine-seconds in 40 s"
    assert engines_wanted(load(0.0, (20.0, 40.0), (40.0, 80.0))) == 3, "120 engine-seconds in 40 s"
    assert engines_wanted(load(0.0, (None, 3 * REPLY_S))) == 3
    assert engines_wanted(load(BUSY, (20.0, 40.0))) == 3


def test_work_that_is_due_before_an_engine_could_start_counts_when_it_has_started() -> None:
    assert engines_wanted(load(0.0, (1.0, 20.0), start_s=10.0)) == 2
    assert engines_wanted(load(0.0, (-5.0, 20.0), start_s=10.0)) == 2


def test_fewer_engines_than_wanted_miss_a_deadline() -> None:
    """Fluid engines that work on the earliest deadline: enough with the number, too few with one less."""
    rng = random.Random(0)
    for _ in range(200):
        waiting = [(rng.uniform(10.0, 100.0), rng.uniform(1.0, 50.0)) for _ in range(rng.randint(1, 12))]
        wanted = engines_wanted(load(0.0, *waiting))
        assert in_time(waiting, wanted)
        assert not in_time(waiting, wanted - 1)


def in_time(waiting: list[tuple[float, float]], engines: int) -> bool:
    done = 0.0
    for left_s, work in sorted(waiting):
        done += work
        if done > engines * left_s + 1e-6:
            return False
    return True


@pytest.mark.parametrize("down_after_s", [0.0, 100.0])
def test_the_number_rises_at_once_and_falls_later(down_after_s: float) -> None:
    wanted = Wanted(down_after_s=down_after_s)
    assert wanted.at(0.0, load(4 * BUSY)) == 4
    assert wanted.at(10.0, load(8 * BUSY)) == 8
    assert wanted.at(20.0, load(2 * BUSY)) == (8 if down_after_s else 2)
    assert wanted.at(60.0, load(5 * BUSY)) == (8 if down_after_s else 5)
    assert wanted.at(111.0, load(2 * BUSY)) == (5 if down_after_s else 2)
    assert wanted.at(200.0, load(2 * BUSY)) == 2


def test_the_number_keeps_its_limits() -> None:
    wanted = Wanted(least=1, most=3)
    assert wanted.at(0.0, load()) == 1
    assert wanted.at(1.0, load(100.0)) == 3


async def test_a_backlog_wants_more_engines_than_there_are(start_front: StartFront) -> None:
    async with FakeEngine(slots=1, step_s=0.001) as fake:
        front = await start_front(fake, slots=1)
        assert front.cluster.estimator.engines_wanted() == {"fake": 1}  # nothing is known of its answers yet
        async with front.post(max_tokens=2_000) as response:
            assert response.status == 200
        assert front.cluster.estimator.engines_wanted() == {"fake": 0}

        async def ask() -> None:
            async with front.post(max_tokens=5_000, headers={"x-llmserve-predicted-tokens": "50000"}) as response:
                await response.read()

        asking = [asyncio.ensure_future(ask()) for _ in range(12)]
        await until(lambda: len(front.cluster.scheduler.requests) == 12)
        queues = front.cluster.scheduler.models["fake"]
        assert engines_wanted(load_of(queues, front.cluster.now_s())) > 1
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        async with front.session.get(front.url + "/metrics") as metrics:
            assert 'llmserve_engines_wanted{model="fake"}' in await metrics.text()
