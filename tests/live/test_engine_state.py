"""The table of an engine's states: what follows from each event, and what the scheduler hears of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from llmserve.live.engine_state import (
    CONDITIONS,
    ORDERS,
    Condition,
    EngineEvent,
    EngineState,
    Notice,
    Order,
    after,
    notices,
    refusal,
)

STATES = [EngineState(condition, order) for condition, order in product(Condition, Order)]
OBSERVED = list(CONDITIONS[Condition.NEW])
ORDERED = [event for event in EngineEvent if event not in OBSERVED]
DESIGN = Path(__file__).parents[2] / "docs" / "design.md"

NEW, UP = EngineState(), EngineState(Condition.UP)


def told(*events: EngineEvent, state: EngineState = NEW) -> tuple[EngineState, list[Notice]]:
    """The state after these events, and what the scheduler has heard."""
    all_notices: list[Notice] = []
    for event in events:
        before, state = state, after(state, event)
        all_notices += notices(before, event, state)
    return state, all_notices


def reachable() -> Iterator[tuple[EngineState, Notice | None]]:
    """All states that an engine can have, with what its scheduler has heard last."""
    new: list[tuple[EngineState, Notice | None]] = [(EngineState(), None)]
    seen = set(new)
    while new:
        state, last = new.pop()
        yield state, last
        for event in EngineEvent:
            if refusal(state, event) is None or event in OBSERVED:
                later = after(state, event)
                pair = later, (notices(state, event, later) or (last,))[-1]
                if pair not in seen:
                    seen.add(pair)
                    new.append(pair)


def test_every_order_of_an_operator_is_decided_or_refused_with_a_reason() -> None:
    for state, event in product(STATES, ORDERED):
        if (why := refusal(state, event)) is None:
            assert after(state, event).condition is state.condition, "no order changes what the probes say"
        else:
            assert why.startswith("is ")
            with pytest.raises(AssertionError):
                after(state, event)


def test_every_observation_is_decided_in_every_state_and_gives_no_order() -> None:
    for state, event in product(STATES, OBSERVED):
        assert after(state, event).order in (state.order, Order.SERVE)


def test_what_the_scheduler_has_heard_last_is_what_the_state_says() -> None:
    for state, last in reachable():
        if state.takes:
            assert last is Notice.OPENED, state
        elif state.closed and state.order is not Order.REMOVE:
            assert last is Notice.CLOSED, state
        elif state.condition is Condition.DOWN:
            assert last is Notice.LOST, state


def test_no_state_is_a_trap() -> None:
    """From every state some events lead back to an engine that takes requests."""
    takes = {state for state in STATES if state.takes}
    while True:
        more = {
            state
            for state in STATES
            if state not in takes
            and any(
                after(state, event) in takes
                for event in EngineEvent
                if event in OBSERVED or refusal(state, event) is None
            )
        }
        if not more:
            break
        takes |= more
    assert takes == set(STATES)


# ---- how an engine dies ----


def test_an_engine_whose_probes_stay_unanswered_is_closed_and_lost() -> None:
    assert told(EngineEvent.SILENT, state=UP) == (EngineState(Condition.DOWN), [Notice.CLOSED, Notice.LOST])


def test_an_engine_that_refuses_connections_is_lost_when_its_last_request_has_ended() -> None:
    refusing, closed = told(EngineEvent.REFUSED, EngineEvent.REFUSED, state=UP)
    assert (refusing.word(running=True), closed) == ("down", [Notice.CLOSED])
    assert told(EngineEvent.EMPTY, state=refusing) == (EngineState(Condition.DOWN), [Notice.LOST])
    assert told(EngineEvent.ANSWERED, state=refusing) == (UP, [Notice.OPENED]), "it was only its listener"


def test_an_engine_is_lost_once() -> None:
    lost = EngineState(Condition.DOWN)
    assert told(EngineEvent.SILENT, EngineEvent.EMPTY, EngineEvent.REFUSED, state=lost) == (lost, [])


def test_an_engine_that_was_never_up_is_not_lost() -> None:
    assert told(EngineEvent.REFUSED, EngineEvent.SILENT, EngineEvent.EMPTY) == (NEW, [])


# ---- orders ----


def test_a_drained_engine_is_closed_once_and_opens_when_it_is_resumed() -> None:
    drained, said = told(EngineEvent.DRAIN, EngineEvent.DRAIN, EngineEvent.ANSWERED, state=UP)
    assert ([drained.word(running=one) for one in (True, False)], said) == (["draining", "drained"], [Notice.CLOSED])
    assert told(EngineEvent.RESUME, state=drained) == (UP, [Notice.OPENED])
    assert not drained.expected


def test_a_drain_ends_when_the_engine_was_down() -> None:
    state, said = told(EngineEvent.DRAIN, EngineEvent.SILENT, EngineEvent.ANSWERED, state=UP)
    assert (state, said) == (UP, [Notice.CLOSED, Notice.LOST, Notice.OPENED])


def test_an_engine_that_is_down_is_not_drained_for_it_would_be_used_when_it_is_back() -> None:
    for condition in (Condition.NEW, Condition.REFUSING, Condition.DOWN):
        assert "is down" in (refusal(EngineState(condition), EngineEvent.DRAIN) or "")


def test_a_restart_takes_the_empty_engine_down_and_no_probe_brings_it_up_before_the_restart_is_over() -> None:
    restarting, said = told(EngineEvent.RESTART, EngineEvent.RESTART, EngineEvent.EMPTY, EngineEvent.ANSWERED, state=UP)
    assert (restarting.word(running=False), restarting.up) == ("restarting", False)
    assert (restarting.planned, restarting.expected, said) == (True, True, [Notice.CLOSED, Notice.LOST])
    assert told(EngineEvent.RESTARTED, EngineEvent.ANSWERED, state=restarting) == (UP, [Notice.OPENED])


def test_an_engine_that_is_removed_is_kept_when_the_settings_name_it_again() -> None:
    leaving, said = told(EngineEvent.REMOVE, state=UP)
    assert (leaving.expected, said) == (False, [Notice.CLOSED])
    assert told(EngineEvent.KEEP, state=leaving) == (UP, [Notice.OPENED])
    assert told(EngineEvent.EMPTY, state=leaving)[1] == [Notice.LOST]


@pytest.mark.parametrize("order", [EngineEvent.DRAIN, EngineEvent.RESUME, EngineEvent.RESTART])
def test_an_engine_that_is_being_removed_takes_no_other_order(order: EngineEvent) -> None:
    assert refusal(EngineState(Condition.UP, Order.REMOVE), order) == "is being removed"


def test_an_engine_without_a_served_model_is_closed_and_not_expected_to_take_requests() -> None:
    bare, said = told(EngineEvent.BARE, EngineEvent.BARE)
    assert (bare.word(running=False), bare.up, bare.expected, said) == ("without a model", True, False, [Notice.CLOSED])
    assert told(EngineEvent.ANSWERED, state=bare) == (UP, [Notice.OPENED])


# ---- the page ----


def table(rows: Mapping[Any, Mapping[EngineEvent, Enum]], columns: list[EngineEvent]) -> str:
    """A table of the page: a row for each state, a column for each event; "-": the event is refused."""
    head = ["", *[column.name for column in columns]]
    lines = [head, ["---"] * len(head)]
    for state, follows in rows.items():
        lines.append([state.name, *[follows[one].name if one in follows else "-" for one in columns]])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def test_the_design_page_has_the_tables() -> None:
    page = DESIGN.read_text()
    assert table(CONDITIONS, OBSERVED) in page, table(CONDITIONS, OBSERVED)
    assert table(ORDERS, ORDERED) in page, table(ORDERS, ORDERED)
