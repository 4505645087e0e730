"""One engine of a live cluster: state, measurements, and running calls."""

from __future__ import annotations

import asyncio
from typing import Any

from llmserve.calls.in_flight import InFlightCall
from llmserve.engines.engine import Endpoints, Engine, Health
from llmserve.live.engine_state import EngineEvent, EngineState, Notice, after, notices
from llmserve.live.known_models import Listed
from llmserve.live.watchdog import Watchdog

STREAMS_KEPT = 0.9  # weight of the streams before the last one


class EngineHandle:
    """One engine, as the fleet sees the engine.

    info       as the scheduler knows the engine
    models     served models of the engine's last list, by id
    endpoints  of the engine when last up
    probed     the last answer to a probe
    models_at_once  models that it has loaded at once, where it loads them on demand: as it tells, or as it was seen
                    to have; else 0
    running    calls on the engine, by request id
    empty      set while no call runs
    tokens_an_event  of its streams, at least 1: vLLM's `--stream-interval N` puts N into an event
    trouble    message of the last failed probe; "": the last one did not fail
    hangs      whether the engine took that probe's connection, and has sent nothing
    watchdog   finds the calls that the engine has lost
    nudge      asks for a probe now
    work       restarts or removes the engine when it is empty
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.info = engine.info
        self.state = EngineState()
        self.models: Listed = {}
        self.endpoints = Endpoints()
        self.probed = Health(())
        self.models_at_once = 0
        self.tokens_an_event = 1.0
        self._events = self._tokens = 0.0  # of its streams that have ended; the older ones count less
        self.probes_failed = 0
        self.trouble, self.hangs = "", False
        self.watchdog = Watchdog()
        self.running: dict[int, InFlightCall] = {}
        self.empty, self.nudge = asyncio.Event(), asyncio.Event()
        self.empty.set()
        self.watcher: asyncio.Task[None] | None = None
        self.probe: asyncio.Task[bool] | None = None
        self.work: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def group(self) -> str:
        """The group of a gateway's plan whose server the engine is."""
        return self.info.worker or self.info.name

    @property
    def is_full(self) -> bool:
        return len(self.running) >= self.info.slots

    @property
    def ready(self) -> bool:
        """Whether the engine takes new requests."""
        return self.state.takes

    @property
    def up(self) -> bool:
        return self.state.up

    @property
    def word(self) -> str:
        """The state in words, for operators."""
        return self.state.word(running=bool(self.running))

    @property
    def answered(self) -> tuple[int, ...]:
        """Ids of the running requests whose clients have got a part of the answer."""
        return tuple(sorted([id_ for id_, in_flight in self.running.items() if in_flight.delivery.answered]))

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        """Those that are not done."""
        return [task for task in (self.watcher, self.probe, self.work) if task is not None and not task.done()]

    def step(self, event: EngineEvent) -> tuple[Notice, ...]:
        """Take the next state; return what the scheduler must hear."""
        before, self.state = self.state, after(self.state, event)
        return notices(before, event, self.state)

    def answer(self, probed: Health) -> None:
        """Note a probe's answer."""
        told = probed.told
        if not probed.program.dialect.swaps_models:
            self.models_at_once = 0
        elif told.models_at_once is not None:
            self.models_at_once = told.models_at_once
        else:
            before = self.models_at_once if probed.program == self.probed.program else 0
            self.models_at_once = max(before, 1, len(told.loaded or ()))
        self.probed, self.probes_failed = probed, 0
        self.trouble, self.hangs = "", False

    def note_stream(self, events: int, tokens: int) -> None:
        """Learn from the engine's count of a stream that has ended. events : with content"""
        self._events, self._tokens = STREAMS_KEPT * self._events + events, STREAMS_KEPT * self._tokens + tokens
        self.tokens_an_event = max(1.0, self._tokens / max(1.0, self._events))

    def add(self, in_flight: InFlightCall) -> None:
        self.running[in_flight.request.id] = in_flight
        self.empty.clear()
        if not self.probed.slots_found and len(self.running) == self.info.slots:
            self.nudge.set()  # the engine may have more slots

    def remove(self, in_flight: InFlightCall) -> None:
        del self.running[in_flight.request.id]
        if not self.running:
            self.empty.set()
