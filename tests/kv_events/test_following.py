"""What an engine tells arrives in order, whole, and once."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import zmq.asyncio
from front import until
from publisher import CLEARED, Publisher, removed, stored

from llmserve.kv_events.following import Following
from llmserve.scheduling.messages import CacheChanged

TOKENS = list(range(32))


@dataclass
class Heard:
    """What the scheduler and the metrics got. dropped : blocks of prompts, in order"""

    changes: list[CacheChanged] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def dropped(self) -> list[int]:
        return [block for change in self.changes for block in change.removed]

    def count(self, what: str, number: int) -> None:
        self.counts[what] += number


@asynccontextmanager
async def following(publisher: Publisher, replay: bool = True) -> AsyncIterator[tuple[Following, Heard]]:
    """A follower, which has begun to listen."""
    heard, context = Heard(), zmq.asyncio.Context()
    follower = Following("e", publisher.endpoint, publisher.replay if replay else "", heard.changes.append, heard.count)
    task = asyncio.create_task(follower.follow(context))
    await publisher.followed()
    try:
        yield follower, heard
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        context.destroy(linger=0)


async def test_what_an_engine_drops_reaches_the_scheduler(tmp_path: Path) -> None:
    async with Publisher(tmp_path).running() as publisher, following(publisher) as (follower, heard):
        await publisher.tell(stored([11, 12], TOKENS[:16]))
        await publisher.tell(stored([13, 14], TOKENS[16:], parent=12))
        await until(lambda: len(follower.chains) == 4)
        follower.chains.tie([1, 2], 0.5, TOKENS)
        await publisher.tell(removed(14, 13))
        await publisher.tell(stored([15, 16], TOKENS[16:], parent=12), CLEARED)
        await until(lambda: heard.counts["cleared"] == 1)
    changes = [CacheChanged("e", removed=(2,)), CacheChanged("e", stored=(2,)), CacheChanged("e", cleared=True)]
    assert heard.changes == changes
    assert publisher.asked == []


async def test_missed_messages_are_asked_for_again(tmp_path: Path) -> None:
    async with Publisher(tmp_path).running() as publisher:
        await publisher.tell(stored([11, 12], TOKENS[:16]), lost=True)
        async with following(publisher) as (follower, heard):
            await publisher.tell(stored([13, 14], TOKENS[16:], parent=12))
            await until(lambda: len(follower.chains) == 4)
            follower.chains.tie([1, 2], 0.5, TOKENS)
            await publisher.tell(removed(14), lost=True)
            await publisher.tell(removed(13))
            await publisher.tell(removed(12))
            await until(lambda: len(follower.chains) == 1)
    assert (publisher.asked, heard.dropped) == ([0, 2], [2, 1])
    assert (heard.counts["messages"], heard.counts["missed"]) == (5, 0)


async def test_what_the_engine_has_not_kept_is_counted_as_missed(tmp_path: Path) -> None:
    async with Publisher(tmp_path).running() as publisher, following(publisher, replay=False) as (follower, heard):
        await publisher.tell(stored([11], TOKENS[:8]))
        await publisher.tell(stored([12], TOKENS[8:16], parent=11), lost=True)
        await publisher.tell(stored([13], TOKENS[16:24], parent=12))
        await publisher.tell(removed(11))
        await until(lambda: heard.counts["messages"] == 3)
        assert len(follower.chains) == 0
    assert heard.counts["missed"] == 1


async def test_an_engine_that_has_restarted_has_an_empty_cache(tmp_path: Path) -> None:
    async with Publisher(tmp_path).running() as publisher, following(publisher) as (follower, heard):
        for _ in range(3):
            await publisher.tell(stored([11, 12], TOKENS[:16]))
        publisher.restart()
        await publisher.tell(stored([21], TOKENS[:8]))
        await until(lambda: heard.counts["messages"] == 4)
        assert len(follower.chains) == 1
    assert heard.changes == [CacheChanged("e", cleared=True)]


async def test_a_message_that_cannot_be_read_is_left_out_and_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Publisher(tmp_path).running() as publisher, following(publisher) as (follower, heard):
        assert publisher._socket is not None
        for number in range(2):
            await publisher._socket.send_multipart([b"", number.to_bytes(8), b"\xc1"])
        publisher._number = 2
        await publisher.tell(stored([11], TOKENS[:8]))
        await until(lambda: len(follower.chains) == 1)
    assert heard.counts["messages"] == 3
    assert caplog.text.count("a message of its KV events is left out") == 1
