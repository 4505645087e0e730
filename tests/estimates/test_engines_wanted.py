"""How many engines the requests of a live cluster want."""

from __future__ import annotations

import asyncio

from front import StartFront, until

from llmserve.engines.timed.server import FakeEngine
from llmserve.estimates.engines_wanted import load_of
from llmserve.estimates.wanted import engines_wanted


async def test_a_backlog_wants_more_engines_than_there_are(start_front: StartFront) -> None:
    async with FakeEngine(slots=1, step_s=0.001) as fake:
        front = await start_front(fake, slots=1)
        assert front.cluster.engines_wanted() == {"fake": 1}  # nothing is known of its answers yet
        async with front.post(max_tokens=2_000) as response:
            assert response.status == 200
        assert front.cluster.engines_wanted() == {"fake": 0}

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
