"""A step of a scheduler whose laws are checked after it."""

from worlds.invariants import check

from llmserve.scheduling.messages import Action, Event
from llmserve.scheduling.scheduler import Scheduler


def step(scheduler: Scheduler, event: Event, now_s: float = 0.0) -> list[Action]:
    actions = scheduler.handle(event, now_s)
    check(scheduler)
    return actions
