"""Streams of engines that put several tokens into an event, such as vLLM with `--stream-interval`."""

from __future__ import annotations

import asyncio

from engines.lying import LyingEngine, chunked
from front import StartFront, until

EVENTS = "content-type: text/event-stream\r\n"
FIVE = b'data: {"choices":[{"index":0,"delta":{"content":"a b c d e"}}]}\n\n'
END = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
COUNTS = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":105}}\n\n'
DONE = b"data: [DONE]\n\n"


async def test_a_stream_in_progress_is_counted_by_what_an_event_of_the_engine_holds(start_front: StartFront) -> None:
    """Before: by its events, a fifth."""
    async with LyingEngine(chunked(*[FIVE] * 20, END, COUNTS, DONE, headers=EVENTS)) as engine:
        front = await start_front(engine)
        async with front.post(stream=True) as response:
            await response.read()
        (handle,) = front.cluster.fleet.handles.values()
        assert handle.tokens_an_event == 5.0

        async def unfinished(writer: asyncio.StreamWriter) -> None:
            writer.write(chunked(*[FIVE] * 20, end=False, headers=EVENTS))
            await writer.drain()
            await asyncio.Event().wait()

        engine.answer = unfinished
        async with front.post(stream=True):
            (in_flight,) = handle.running.values()
            await until(lambda: in_flight.measured.streamed_tokens == 100)
