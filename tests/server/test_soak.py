"""What thousands of requests leave behind in a server: nothing that grows with their number."""

import asyncio
import gc
import sys

from front import Front, StartFront

from llmserve.engines.timed.server import FakeEngine
from llmserve.settings.tree import PredictorConfig

SETTLED = 1000  # the journal and the windows of lengths in memory are full then
MORE = 1500
ROUNDS = 3  # something else in the process of the tests may grow in one of them, an object for each request in all


async def ask(front: Front, count: int) -> None:
    """Whole answers, streams, and bodies that are no JSON, from eight clients at once."""
    numbers = iter(range(count))

    async def keep_asking() -> None:
        for number in numbers:
            async with front.post(max_tokens=1 + number % 8, stream=number % 4 == 0) as response:
                await response.read()
                assert response.status == 200
            if number % 20 == 0:
                async with front.session.post(f"{front.url}/v1/chat/completions", data=b"\xff") as response:
                    assert response.status == 400

    await asyncio.gather(*[keep_asking() for _ in range(8)])


def memory_blocks() -> int:
    gc.collect()
    return sys.getallocatedblocks()


async def test_no_object_stays_for_each_request(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0.0) as engine:
        front = await start_front(engine, prediction=PredictorConfig(memory_keys=0))  # templates have their own tests
        await ask(front, SETTLED)
        grown: list[int] = []
        for _ in range(ROUNDS):
            settled = memory_blocks()
            await ask(front, MORE)
            grown.append(memory_blocks() - settled)
            if grown[-1] < MORE / 2:
                return
    raise AssertionError(f"{MORE} requests leave {grown} blocks behind")
