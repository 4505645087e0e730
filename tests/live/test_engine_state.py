"""The table of an engine's states: what follows from each event, and what the scheduler hears of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from llmserve.live.engine_state import (
    HEALTH,
    ORDERS,
    EngineState,
    Happening,
    Health,
    Heard,
    Order,
    after,
    heard,
    refusal,
)

STATES = [EngineState(health, order) for health, order in product(Health, Order)]
OBSERVED = list(HEALTH[Health.NEW])
ORDERED = [happening for happening in Happening if happening not in OBSERVED]
DESIGN = Path(__file__).parents[2] / "docs" / "design.md"

NEW, UP = EngineState(), EngineState(Health.UP)


def told(*happenings: Happening, state: EngineState = NEW) -> tuple[EngineState, list[Heard]]:
    """The state after these events, and what the scheduler has heard."""
    all_heard: list[Heard] = []
    for happening in happenings:
        before, state = state, after(state, happening)
        all_heard += heard(before, happening, state)
    return state, all_heard


def reachable() -> Iterator[tuple[EngineState, Heard | None]]:
    """All states that an engine can have, with what its scheduler has heard last."""
    new: list[tuple[EngineState, Heard | None]] = [(EngineState(), None)]
    seen = set(new)
    while new:
        state, last = new.pop()
        yield state, last
        for happening in Happening:
            if refusal(state, happening) is None or happening in OBSERVED:
                later = after(state, happening)
                pair = later, (heard(state, happening, later) or (last,))[-1]
                if pair not in seen:
                    seen.add(pair)
                    new.append(pair)


def test_every_order_of_an_operator_is_decided_or_refused_with_a_reason() -> None:
    for state, happening in product(STATES, ORDERED):
        if (why := refusal(state, happening)) is None:
            assert after(state, happening).health is state.health, "no order changes what the probes say"
        else:
            assert why.startswith("is ")
            with pytest.raises(AssertionError):
                after(state, happening)


def test_every_observation_is_decided_in_every_state_and_gives_no_order() -> None:
    for state, happening in product(STATES, OBSERVED):
        assert after(state, happening).order in (state.order, Order.SERVE)


def test_what_the_scheduler_has_heard_last_is_what_the_state_says() -> None:
    for state, last in reachable():
        if state.takes:
            assert last is Heard.OPENED, state
        elif state.closed and state.order is not Order.REMOVE:
            assert last is Heard.CLOSED, state
        elif state.health is Health.DOWN:
            assert last is Heard.LOST, state


def test_no_state_is_a_trap() -> None:
    """From every state some events lead back to an engine that takes requests."""
    takes = {state for state in STATES if state.takes}
    while True:
        more = {
            state
            for state in STATES
            if state not in takes
            and any(
                after(state, happening) in takes
                for happening in Happening
                if happening in OBSERVED or refusal(state, happening) is None
            )
        }
        if not more:
            break
        takes |= more
    assert takes == set(STATES)


# ---- how an engine dies ----


def test_an_engine_whose_probes_stay_unanswered_is_closed_and_lost() -> None:
    assert told(Happening.SILENT, state=UP) == (EngineState(Health.DOWN), [Heard.CLOSED, Heard.LOST])


def test_an_engine_that_refuses_connections_is_lost_when_its_last_request_has_ended() -> None:
    refusing, closed = told(Happening.REFUSED, Happening.REFUSED, state=UP)
    assert (refusing.word(running=True), closed) == ("down", [Heard.CLOSED])
    assert told(Happening.EMPTY, state=refusing) == (EngineState(Health.DOWN), [Heard.LOST])
    assert told(Happening.ANSWERED, state=refusing) == (UP, [Heard.OPENED]), "it was only its listener"


def test_an_engine_is_lost_once() -> None:
    lost = EngineState(Health.DOWN)
    assert told(Happening.SILENT, Happening.EMPTY, Happening.REFUSED, state=lost) == (lost, [])


def test_an_engine_that_was_never_up_is_not_lost() -> None:
    assert told(Happening.REFUSED, Happening.SILENT, Happening.EMPTY) == (NEW, [])


# ---- orders ----


def test_a_drained_engine_is_closed_once_and_opens_when_it_is_resumed() -> None:
    drained, said = told(Happening.DRAIN, Happening.DRAIN, Happening.ANSWERED, state=UP)
    assert ([drained.word(running=one) for one in (True, False)], said) == (["draining", "drained"], [Heard.CLOSED])
    assert told(Happening.RESUME, state=drained) == (UP, [Heard.OPENED])
    assert not drained.expected


def test_a_drain_ends_when_the_engine_was_down() -> None:
    state, said = told(Happening.DRAIN, Happening.SILENT, Happening.ANSWERED, state=UP)
    assert (state, said) == (UP, [Heard.CLOSED, Heard.LOST, Heard.OPENED])


def test_an_engine_that_is_down_is_not_drained_for_it_would_be_used_when_it_is_back() -> None:
    for health in (Health.NEW, Health.REFUSING, Health.DOWN):
        assert "is down" in (refusal(EngineState(health), Happening.DRAIN) or "")


def test_a_restart_takes_the_empty_engine_down_and_no_probe_brings_it_up_before_the_restart_is_over() -> None:
    restarting, said = told(Happening.RESTART, Happening.RESTART, Happening.EMPTY, Happening.ANSWERED, state=UP)
    assert (restarting.word(running=False), restarting.up) == ("restarting", False)
    assert (restarting.planned, restarting.expected, said) == (True, True, [Heard.CLOSED, Heard.LOST])
    assert told(Happening.RESTARTED, Happening.ANSWERED, state=restarting) == (UP, [Heard.OPENED])


def test_an_engine_that_is_removed_is_kept_when_the_settings_name_it_again() -> None:
    leaving, said = told(Happening.REMOVE, state=UP)
    assert (leaving.expected, said) == (False, [Heard.CLOSED])
    assert told(Happening.KEEP, state=leaving) == (UP, [Heard.OPENED])
    assert told(Happening.EMPTY, state=leaving)[1] == [Heard.LOST]


@pytest.mark.parametrize("order", [Happening.DRAIN, Happening.RESUME, Happening.RESTART])
def test_an_engine_that_is_being_removed_takes_no_other_order(order: Happening) -> None:
    assert refusal(EngineState(Health.UP, Order.REMOVE), order) == "is being removed"


def test_an_engine_without_a_served_model_is_closed_and_not_expected_to_take_requests() -> None:
    bare, said = told(Happening.BARE, Happening.BARE)
    assert (bare.word(running=False), bare.up, bare.expected, said) == ("without a model", True, False, [Heard.CLOSED])
    assert told(Happening.ANSWERED, state=bare) == (UP, [Heard.OPENED])


# ---- the page ----


def table(rows: Mapping[Any, Mapping[Happening, Enum]], columns: list[Happening]) -> str:
    """A table of the page: a row for each state, a column for each event; "-": the event is refused."""
    head = ["", *[column.name for column in columns]]
    lines = [head, ["---"] * len(head)]
    for state, follows in rows.items():
        lines.append([state.name, *[follows[one].name if one in follows else "-" for one in columns]])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def test_the_design_page_has_the_tables() -> None:
    page = DESIGN.read_text()
    assert table(HEALTH, OBSERVED) in page, table(HEALTH, OBSERVED)
    assert table(ORDERS, ORDERED) in page, table(ORDERS, ORDERED)
