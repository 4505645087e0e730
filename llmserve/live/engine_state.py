"""The state of an engine: a pure table of (state, event) -> state, and what the scheduler hears of each step.

An engine's state has two parts: what the probes say (`Condition`), and what the operator wants (`Order`):

    condition  NEW       never up so far
               UP        answers, and lists a served model
               BARE      answers, but lists no served model
               REFUSING  refuses connections; requests may finish
               DOWN      lost
    order      SERVE     take requests
               DRAIN     no new requests
               RESTART   no new requests; a restart when no request runs any more
               REMOVE    no new requests; forgotten when no request runs any more

An engine dies here: `SILENT` (probes stay unanswered) and `EMPTY` (connections are refused, and the last request has
left) lead to DOWN. The scheduler then hears LOST: the engine's requests are abandoned, and may run on other engines.

An engine that is down is expected back: its process is restarted, by llmserve or by whoever started it. An engine
that was drained or is being removed is not expected, nor is an engine without a served model.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import NamedTuple


class Condition(Enum):
    """What an engine's probes say."""

    NEW = auto()
    UP = auto()
    BARE = auto()
    REFUSING = auto()
    DOWN = auto()


UP = (Condition.UP, Condition.BARE)
"""Of an engine that answered its last probe, or missed only a few."""


class Order(Enum):
    """What an engine's operator wants."""

    SERVE = auto()
    DRAIN = auto()
    RESTART = auto()
    REMOVE = auto()


class EngineEvent(Enum):
    """What a probe, a request or an operator does to an engine."""

    ANSWERED = "a probe was answered, with a served model"
    BARE = "a probe was answered, without a served model"
    REFUSED = "a connection was refused"
    SILENT = "probes_failed_max probes were not answered"
    EMPTY = "no request runs on it (any more)"
    DRAIN = "its operator drains it"
    RESUME = "its operator resumes it"
    RESTART = "its operator restarts it"
    RESTARTED = "its restart is over"
    REMOVE = "the settings name it no more"
    KEEP = "the settings name it"


class Notice(Enum):
    """An event of the scheduler about an engine."""

    OPENED = "EngineReady"
    CLOSED = "EngineClosed"
    LOST = "EngineLost"


CONDITIONS: Mapping[Condition, Mapping[EngineEvent, Condition]] = {
    Condition.NEW: {
        EngineEvent.ANSWERED: Condition.UP,
        EngineEvent.BARE: Condition.BARE,
        EngineEvent.REFUSED: Condition.NEW,
        EngineEvent.SILENT: Condition.NEW,
        EngineEvent.EMPTY: Condition.NEW,
    },
    Condition.UP: {
        EngineEvent.ANSWERED: Condition.UP,
        EngineEvent.BARE: Condition.BARE,
        EngineEvent.REFUSED: Condition.REFUSING,
        EngineEvent.SILENT: Condition.DOWN,
        EngineEvent.EMPTY: Condition.UP,
    },
    Condition.BARE: {
        EngineEvent.ANSWERED: Condition.UP,
        EngineEvent.BARE: Condition.BARE,
        EngineEvent.REFUSED: Condition.REFUSING,
        EngineEvent.SILENT: Condition.DOWN,
        EngineEvent.EMPTY: Condition.BARE,
    },
    Condition.REFUSING: {
        EngineEvent.ANSWERED: Condition.UP,
        EngineEvent.BARE: Condition.BARE,
        EngineEvent.REFUSED: Condition.REFUSING,
        EngineEvent.SILENT: Condition.DOWN,
        EngineEvent.EMPTY: Condition.DOWN,
    },
    Condition.DOWN: {
        EngineEvent.ANSWERED: Condition.UP,
        EngineEvent.BARE: Condition.BARE,
        EngineEvent.REFUSED: Condition.DOWN,
        EngineEvent.SILENT: Condition.DOWN,
        EngineEvent.EMPTY: Condition.DOWN,
    },
}
"""Condition after what a probe or a request observes."""

ORDERS: Mapping[Order, Mapping[EngineEvent, Order]] = {
    Order.SERVE: {
        EngineEvent.DRAIN: Order.DRAIN,
        EngineEvent.RESUME: Order.SERVE,
        EngineEvent.RESTART: Order.RESTART,
        EngineEvent.RESTARTED: Order.SERVE,
        EngineEvent.REMOVE: Order.REMOVE,
        EngineEvent.KEEP: Order.SERVE,
    },
    Order.DRAIN: {
        EngineEvent.DRAIN: Order.DRAIN,
        EngineEvent.RESUME: Order.SERVE,
        EngineEvent.RESTART: Order.RESTART,
        EngineEvent.RESTARTED: Order.DRAIN,
        EngineEvent.REMOVE: Order.REMOVE,
        EngineEvent.KEEP: Order.DRAIN,
    },
    Order.RESTART: {
        EngineEvent.RESTART: Order.RESTART,
        EngineEvent.RESTARTED: Order.SERVE,
        EngineEvent.REMOVE: Order.REMOVE,
        EngineEvent.KEEP: Order.RESTART,
    },
    Order.REMOVE: {
        EngineEvent.RESTARTED: Order.REMOVE,
        EngineEvent.REMOVE: Order.REMOVE,
        EngineEvent.KEEP: Order.SERVE,
    },
}
"""Order after what an operator does. What is missing here is refused; see `refusal`."""


class EngineState(NamedTuple):
    """The state of an engine, and what follows from it."""

    condition: Condition = Condition.NEW
    order: Order = Order.SERVE

    @property
    def up(self) -> bool:
        """Whether the engine answered its last probe, or missed only a few."""
        return self.condition in UP

    @property
    def seen(self) -> bool:
        """Whether the engine was ever up."""
        return self.condition is not Condition.NEW

    @property
    def takes(self) -> bool:
        """Whether the engine takes new requests."""
        return self.condition is Condition.UP and self.order is Order.SERVE

    @property
    def closed(self) -> bool:
        """Whether the engine is there without taking new requests."""
        return self.alive and not self.takes

    @property
    def alive(self) -> bool:
        """Whether requests may run on the engine."""
        return self.up or self.condition is Condition.REFUSING

    @property
    def planned(self) -> bool:
        """Whether the engine's operator takes it down."""
        return self.order in (Order.RESTART, Order.REMOVE)

    @property
    def expected(self) -> bool:
        """Whether an engine that is down, or goes down, will probably take requests again."""
        return self.order in (Order.SERVE, Order.RESTART) and self.condition is not Condition.BARE

    def word(self, *, running: bool) -> str:
        """The state in words, for operators. running : whether a request runs on the engine"""
        if self.order is Order.RESTART:
            return "restarting"
        if not self.up:
            return "down"
        if self.order is not Order.SERVE:
            return "draining" if running else "drained"
        return "ready" if self.takes else "without a model"


def after(state: EngineState, event: EngineEvent) -> EngineState:
    """The state that follows. An operator's order must not be one that the state refuses."""
    condition, order = state
    if event not in CONDITIONS[condition]:
        assert refusal(state, event) is None, f"{event} is refused in {state}"
        return EngineState(condition, ORDERS[order][event])
    later = CONDITIONS[condition][event]
    if event is EngineEvent.EMPTY and state.planned:
        later = Condition.DOWN if state.seen else Condition.NEW  # what its operator has waited for
    elif later in UP and condition not in UP:
        if order is Order.RESTART:
            later = condition  # it answers, but its restart is not over
        elif order is Order.DRAIN:
            order = Order.SERVE  # it was down: its operator's work on it is done
    return EngineState(later, order)


def refusal(state: EngineState, event: EngineEvent) -> str | None:
    """Why an engine's state refuses an operator's order, as the end of "the engine ..."; None: the order is allowed."""
    if event not in ORDERS[state.order]:
        return "is being removed" if state.order is Order.REMOVE else "is being restarted"
    if event is EngineEvent.DRAIN and not state.up:
        return "is down: it gets no requests now, and gets requests again once it is up"
    return None


def notices(before: EngineState, event: EngineEvent, later: EngineState) -> tuple[Notice, ...]:
    """What the scheduler hears of a step, in this order.

    CLOSED comes before LOST, so that no request starts on the engine while the engine's calls are abandoned.
    """
    is_ended = event is EngineEvent.EMPTY and before.planned
    if is_ended or (later.condition is Condition.DOWN and before.condition is not Condition.DOWN):
        return (Notice.LOST,) if before.closed else (Notice.CLOSED, Notice.LOST)
    if later.closed and not before.closed:
        return (Notice.CLOSED,)
    if later.takes and (not before.takes or event is EngineEvent.RESUME):
        return (Notice.OPENED,)
    return ()
