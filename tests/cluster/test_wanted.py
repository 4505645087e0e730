"""How many engines the requests need."""

from __future__ import annotations

from front import StartFront, until

from llmserve.cluster.wanted import FALL_S, RISE_S, Steady
from llmserve.engines.fake import FakeEngine


def test_the_signal_rises_after_some_seconds_and_falls_after_minutes() -> None:
    steady = Steady()
    at_s = {0.0: 1}
    for now_s in range(1, 400):
        at_s[float(now_s)] = 4 if 10 <= now_s < 60 else 1
    seen = {now_s: steady.update(number, now_s) for now_s, number in at_s.items()}
    assert seen[10.0 + RISE_S - 2.0] == 1
    assert seen[10.0 + RISE_S] == 4
    assert seen[59.0 + FALL_S - 1.0] == 4
    assert seen[60.0 + FALL_S + 1.0] == 1


def test_a_peak_of_a_moment_changes_nothing() -> None:
    steady = Steady()
    assert [steady.update(9 if now_s == 7 else 2, float(now_s)) for now_s in range(20)][6:] == [2] * 14


async def test_a_backlog_wants_more_engines_than_there_are(start_front: StartFront) -> None:
    async with FakeEngine(slots=1, step_s=0.001) as fake:
        front = await start_front(fake, slots=1)
        async with front.post(max_tokens=20) as response:
            assert response.status == 200
        needed = front.cluster.engines_wanted()
        assert needed == {"fake": 0}
        import asyncio

        async def ask() -> None:
            async with front.post(max_tokens=5_000) as response:
                await response.read()

        asking = [asyncio.ensure_future(ask()) for _ in range(12)]
        await until(lambda: len(front.cluster.scheduler.requests) == 12)
        models, now_s = front.cluster.scheduler.models, front.cluster.now_s()
        from llmserve.cluster.wanted import engines_needed

        assert engines_needed(models["fake"], now_s) > 1
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        async with front.session.get(front.url + "/metrics") as metrics:
            assert 'llmserve_engines_wanted{model="fake"}' in await metrics.text()
