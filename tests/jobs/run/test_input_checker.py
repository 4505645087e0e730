"""Checks of files take turns by key."""

from __future__ import annotations

import asyncio
import contextlib

from llmserve.jobs.run.input_checker import Turns


async def test_keys_take_turns_however_many_files_each_has() -> None:
    turns, order = Turns(), list[str]()

    async def check(key: str) -> None:
        async with turns.turn(key):
            order.append(key)
            await asyncio.sleep(0)

    await asyncio.gather(*[check("red") for _ in range(4)], check("blue"), check("green"), check("blue"))
    assert order == ["red", "red", "blue", "green", "red", "blue", "red"]


async def test_a_check_that_is_cancelled_gives_its_turn_away() -> None:
    turns, order = Turns(), list[str]()
    begun, go = asyncio.Event(), asyncio.Event()

    async def check(name: str) -> None:
        async with turns.turn("red"):
            begun.set()
            order.append(name)
            await go.wait()

    tasks = {name: asyncio.create_task(check(name)) for name in ("first", "waits", "last")}
    await begun.wait()
    tasks["waits"].cancel()
    go.set()
    await asyncio.sleep(0)
    tasks["first"].cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert order == ["first", "last"]


async def test_a_turn_that_was_granted_and_cancelled_at_once_goes_to_the_next() -> None:
    turns, done = Turns(), list[str]()

    async def check(name: str) -> None:
        async with turns.turn(name):
            done.append(name)

    async with turns.turn("red"):
        granted = asyncio.create_task(check("blue"))
        last = asyncio.create_task(check("green"))
        await asyncio.sleep(0)
    granted.cancel()  # between the grant and its task's next step
    await asyncio.gather(granted, last, return_exceptions=True)
    assert done == ["green"]
