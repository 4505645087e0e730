"""The laws of items of batch jobs, checked from outside."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from llmserve.request import EngineInfo, Request


def assert_item_may_start(
    started: Request, waited: Request, engine: EngineInfo, online: Sequence[Request], now_s: float
) -> None:
    """An item starts as it waited, in its window, and takes no slot that an online request waits for.

    waited : the item as the account knows it.  online : requests that wait and could run in the engine's group
    """
    assert started == waited, f"item {started.id} was changed before its start"
    assert started.background, f"online request {started.id} starts among items"
    assert started.deadline_s is None or started.deadline_s > now_s, f"item {started.id} starts after its window"
    passed = [request.id for request in online if engine.serves(request.model)]
    assert not passed, f"item {started.id} takes a slot of {engine.name} for which requests {passed} wait"


def assert_items_may_wait(
    items: Sequence[Request], idle: Collection[EngineInfo], now_s: float, wake_at_s: float | None
) -> None:
    """No item waits past its window, or beside an idle engine of a server that has had no online request.

    idle : engines that run nothing and take work; none once there was an online request
    """
    ends_s = [item.deadline_s for item in items if item.deadline_s is not None]
    if ends_s:
        assert min(ends_s) > now_s, "an item waits past its window"
        assert wake_at_s is not None, "the end of a window will not be noticed"
        assert wake_at_s <= min(ends_s), "the end of a window will be noticed late"
    for engine in idle:
        waiting = [item.id for item in items if engine.serves(item.model)]
        assert not waiting, f"items {waiting} wait although {engine.name} is idle"
