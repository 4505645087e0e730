"""What a relay tells of one call, to a scheduler process and to the next."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from llmserve.calls.in_flight import Receipt
from llmserve.forecasts.reading import PromptReaders
from llmserve.gateway.draft import Draft
from llmserve.gateway.endpoints import ENDPOINTS
from llmserve.request import Terms, Wire
from llmserve.scheduling.messages import RequestEnded
from llmserve.wire.answer_forms import COMPLETION
from llmserve.workers import messages
from llmserve.workers.relayed_call import RelayedCall
from predictor.prompt import Prompt

PATH = "/v1/completions"


class Relay:
    """A relay with one call, whose line notes what is told. Its clock stands still unless it is moved."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.line: Any = SimpleNamespace(is_open=True, tell=self.told.append)
        self.at_s = 0.0
        self.forgotten: list[RelayedCall] = []
        self.exchange: Any = SimpleNamespace(
            followed=False, ended=False, started=True, write=lambda data: False, end=self._end, headers={}
        )
        draft = Draft(
            ENDPOINTS[PATH], wire=Wire(PATH, b"{}", True, form=COMPLETION), prompt=Prompt("hi", "m"), model="m"
        )
        self.call = RelayedCall(self, 1, draft, self.exchange, PromptReaders({}), None)
        self.call.arrive()

    def _end(self) -> None:
        self.exchange.ended = True

    def now_s(self) -> float:
        return self.at_s

    def forget(self, call: RelayedCall) -> None:
        self.forgotten.append(call)

    def start(self, *, holds: bool = False) -> None:
        """Start the call on an engine."""
        answering = SimpleNamespace(heard_s=0.0, close=lambda: None, in_flight=self.call.in_flight)
        self.call.in_flight.forward = lambda *_: answering  # type: ignore[assignment]
        receipt = Receipt(7, 0, 3, "e", 0.0, None)
        self.call.start(messages.Start(1, 1, receipt, 1, None, "m", Terms(), (), "", holds), None)  # type: ignore[arg-type]

    def finish(self) -> None:
        """The client has got the whole answer."""
        in_flight = self.call.in_flight
        in_flight.delivery.complete = self.exchange.ended = True
        self.call.ended(in_flight.answering, RequestEnded("e", 7, "completed", 4.0))  # type: ignore[arg-type]

    def again(self) -> list[Any]:
        """What the next scheduler process is told."""
        self.line.is_open = True
        self.told.clear()
        self.call.tell_again()
        return [type(message) for message in self.told]


@pytest.fixture
def relay() -> Relay:
    return Relay()


def test_what_waits_arrives_again_with_its_age(relay: Relay) -> None:
    relay.at_s = 3.0
    assert relay.again() == [messages.Arrived]
    assert relay.told[0].waited_s == 3.0


def test_what_came_while_no_process_was_there_is_new_to_the_next() -> None:
    relay = Relay()
    relay.line.is_open = False
    relay.call.arrive()
    assert relay.again() == [messages.Arrived]
    assert relay.told[0].waited_s is None


def test_what_runs_goes_on(relay: Relay) -> None:
    relay.start()
    relay.at_s = 2.0
    assert relay.again() == [messages.GoesOn]
    assert (relay.told[0].ran_s, relay.told[0].is_over) == (2.0, False)


def test_an_end_that_nobody_was_told_is_told_to_the_next(relay: Relay) -> None:
    relay.start()
    relay.line.is_open = False
    relay.finish()
    assert relay.again() == [messages.GoesOn, messages.Ended, messages.Over]
    assert not relay.told[0].is_over
    assert relay.again() == [messages.Over], "and once only"


def test_an_end_is_told_again_until_its_use_is_written(relay: Relay) -> None:
    relay.start(holds=True)
    relay.finish()
    assert not relay.forgotten
    assert relay.again() == [messages.GoesOn, messages.Ended, messages.Over]
    assert relay.told[0].is_over
    relay.call.settled()
    assert relay.forgotten == [relay.call]


def test_a_client_that_has_left_is_told_of_behind_its_call(relay: Relay) -> None:
    relay.start()
    relay.call.in_flight.delivery.gone = True
    assert relay.again() == [messages.GoesOn, messages.Cancelled]


def test_a_preempted_call_waits_again(relay: Relay) -> None:
    relay.start()
    relay.line.is_open, relay.call.in_flight.stopping = False, True
    relay.call.in_flight.answering = None
    relay.call._end(RequestEnded("e", 7, "cancelled"))
    assert relay.again() == [messages.Arrived]


def test_a_client_whose_stream_was_lost_is_told_so_if_nobody_else_has(relay: Relay) -> None:
    relay.start()
    relay.call.in_flight.delivery.answered = True
    relay.call.drop(messages.Drop(1, 1))
    assert relay.again() == [messages.Over]
    assert relay.exchange.ended
    assert relay.call.in_flight.delivery.error == "engine_failed"


def test_an_answer_that_has_begun_does_not_begin_again(relay: Relay) -> None:
    relay.call.in_flight.delivery.answered = True
    relay.start()
    assert relay.exchange.ended, "its client is told that it has failed"
    assert isinstance(relay.told[-1], messages.Ended)
    assert relay.told[-1].ended.outcome == "cancelled"


def test_times_move_to_the_next_clock(relay: Relay) -> None:
    relay.at_s = 10.0
    relay.start()
    relay.call.in_flight.measured.first_at_s = 10.5
    relay.call.shift(-10.0)
    assert (relay.call.in_flight.arrived_at_s, relay.call.in_flight.measured.first_at_s) == (-10.0, 0.5)
