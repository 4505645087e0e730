"""What the scheduler hears of engines, by probes and by operators' orders, through the fleet's one entrance."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from calls import a_call
from front import until

from llmserve.calls.in_flight import InFlightCall
from llmserve.engines.dialects import OLLAMA, Program, Told
from llmserve.engines.engine import EngineError, Health, ServedModel
from llmserve.live.fleet import Fleet
from llmserve.live.handle import EngineHandle
from llmserve.live.route_queues import RouteQueue
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import EngineClosed, EngineExpected, EngineLost, EngineReady, Event
from llmserve.settings.tree import LiveConfig
from predictor.prompt import Prompt

NOBODY: Any = None  # the client of calls that are never answered
REFUSED = EngineError("nobody listens", unreachable=True)
SILENT = EngineError("no answer")


def lists(*models: str) -> Health:
    return Health(tuple([ServedModel(model) for model in models]))


class Engine:
    """An engine whose probes are answered as a test says: by a Health, or by an error."""

    restart = slots = None

    def __init__(self, answer: Health | EngineError) -> None:
        self.info = EngineInfo("e", 2, barrier=False)
        self.answer = answer
        self.probes = 0
        self.closed = False

    async def probe(self) -> Health:
        self.probes += 1
        if isinstance(self.answer, EngineError):
            raise self.answer
        return self.answer

    async def close(self) -> None:
        self.closed = True


class Watched:
    """A fleet of one engine. heard : by the scheduler, after the first"""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.heard: list[Event] = []
        config = LiveConfig(probe_every_s=0.01, probes_failed_max=2)
        self.fleet = Fleet([engine], config)  # type: ignore[list-item]

    @property
    def handle(self) -> EngineHandle:
        return self.fleet.handles["e"]

    def run(self, request_id: int, *, answered: bool = False) -> InFlightCall:
        call = InFlightCall(a_call("/v1/completions", b"{}", Prompt("", "m")), request_id, NOBODY)
        call.request = Request(request_id)
        call.delivery.answered = answered
        self.handle.add(call)
        return call

    async def probed(self, answer: Health | EngineError) -> None:
        """Let the engine answer so to at least two probes."""
        self.engine.answer, before = answer, self.engine.probes
        self.handle.nudge.set()
        await until(lambda: self.engine.probes >= before + 3)


@asynccontextmanager
async def watched(answer: Health | EngineError) -> AsyncIterator[Watched]:
    one = Watched(Engine(answer))
    one.fleet.start(one.heard.append)
    assert one.heard == [EngineExpected(one.engine.info)]
    one.heard.clear()
    await until(lambda: one.engine.probes >= 2)
    try:
        yield one
    finally:
        await one.fleet.close()


async def test_an_engine_is_ready_from_its_first_answer_on_and_again_when_its_models_change() -> None:
    async with watched(lists("m")) as one:
        await one.probed(lists("m"))
        await one.probed(lists("m", "n"))
    assert [(type(event), event.engine.models) for event in one.heard if isinstance(event, EngineReady)] == [
        (EngineReady, ("m",)),
        (EngineReady, ("m", "n")),
    ]
    assert len(one.heard) == 2


async def test_an_engine_that_lists_no_model_any_more_is_closed_and_not_expected() -> None:
    async with watched(lists("m")) as one:
        await one.probed(lists())
        assert (one.handle.word, one.heard[1:]) == ("without a model", [EngineClosed("e", expected=False)])


async def test_an_engine_that_refuses_connections_is_lost_after_its_last_request() -> None:
    async with watched(lists("m")) as one:
        call = one.run(1)
        await one.probed(REFUSED)
        assert (one.handle.word, one.heard[1:]) == ("down", [EngineClosed("e", expected=True)])
        one.handle.remove(call)
        await one.probed(REFUSED)
        assert one.heard[2:] == [EngineLost("e", (), planned=False, expected=True)]


async def test_a_silent_engine_is_closed_and_then_lost_with_the_requests_that_had_answered() -> None:
    async with watched(lists("m")) as one:
        one.run(2, answered=True)
        one.run(1, answered=True)
        one.run(3)
        await one.probed(SILENT)
        await until(lambda: len(one.heard) == 3)
        assert one.heard[1:] == [
            EngineClosed("e", expected=True),
            EngineLost("e", (1, 2), planned=False, expected=True),
        ]


async def test_an_engine_that_was_never_up_is_neither_closed_nor_lost() -> None:
    async with watched(REFUSED) as one:
        await one.probed(SILENT)
        assert not one.heard


async def test_a_drained_engine_is_not_expected_and_ready_again_when_it_is_resumed() -> None:
    async with watched(lists("m")) as one:
        one.fleet.drain(one.handle)
        await one.probed(lists("m"))
        assert one.heard[1:] == [EngineClosed("e", expected=False)]
        one.fleet.resume(one.handle)
        assert one.heard[2:] == [EngineReady(one.handle.info)]


async def test_a_removed_engine_is_forgotten_when_its_last_request_has_ended() -> None:
    async with watched(lists("m")) as one:
        call = one.run(1)
        one.fleet.remove(one.handle)
        await one.probed(lists("m"))
        assert (one.heard[1:], list(one.fleet.models)) == ([EngineClosed("e", expected=False)], ["m"])
        one.handle.remove(call)
        await until(lambda: one.engine.closed)
        assert one.heard[2:] == [EngineLost("e", (), planned=True, expected=False)]
        assert not one.fleet.handles
        assert not one.fleet.models


async def test_an_engine_that_loads_models_on_demand_says_which_it_has_and_shows_how_many_it_can_have() -> None:
    def has(*loaded: str) -> Health:
        return replace(lists("a", "b"), told=Told(loaded=loaded), program=Program(OLLAMA))

    async with watched(has("a")) as one:
        await one.probed(has("b"))
        await one.probed(has("b", "a"))
        await one.probed(has("a"))
    infos = [event.engine for event in one.heard if isinstance(event, EngineReady)]
    assert [(info.models_at_once, info.loaded) for info in infos] == [
        (1, ("a",)),
        (1, ("b",)),
        (2, ("b", "a")),
        (2, ("a",)),
    ]


async def test_an_engine_that_tells_how_many_models_it_can_have_is_believed() -> None:
    told = replace(lists("a", "b"), told=Told(loaded=("a",), models_at_once=4), program=Program(OLLAMA))
    async with watched(told) as one:
        assert one.handle.info.models_at_once == 4
        await one.probed(replace(told, told=Told(loaded=("a",), models_at_once=0)))
        assert one.handle.info.models_at_once == 0, "the engine has room for all"


async def test_a_route_queue_of_an_engine_that_loads_models_names_its_model() -> None:
    async with watched(replace(lists("a"), program=Program(OLLAMA))) as one:
        one.fleet.open_route_queue(RouteQueue("a", path="/v1/embeddings"))
        assert one.handle.info.weights == {"a /v1/embeddings": "a"}
    async with watched(lists("a")) as one:
        one.fleet.open_route_queue(RouteQueue("a", path="/v1/embeddings"))
        assert (one.handle.info.weights, one.handle.info.models_at_once) == ({}, 0)
