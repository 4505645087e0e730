"""Tasks that serve everybody go on after an exception, and say so."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from llmserve.runtime.lasting import failing, lasting


async def test_a_task_that_fails_goes_on_and_its_cause_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    runs = 0

    async def run() -> None:
        nonlocal runs
        runs += 1
        if runs < 3:
            raise RecursionError("too deep")

    await lasting("the test", run, again_s=0.001)
    assert runs == 3
    assert caplog.text.count("the test failed, and goes on") == 2
    assert "RecursionError: too deep" in caplog.text


async def test_a_task_that_failed_is_named_with_its_cause_until_it_ends() -> None:
    failed = asyncio.Event()

    async def run() -> None:
        if not failed.is_set():
            failed.set()
            raise ValueError("no number")
        await asyncio.Event().wait()

    task = lasting("the feed of a test", run, again_s=0.001)
    await failed.wait()
    await asyncio.sleep(0)
    assert failing() == {"the feed of a test": "ValueError: no number"}
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert failing() == {}


async def test_a_cancelled_task_is_not_begun_again() -> None:
    runs = 0

    async def run() -> None:
        nonlocal runs
        runs += 1
        await asyncio.Event().wait()

    task = lasting("the test", run)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert runs == 1
