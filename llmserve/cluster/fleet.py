"""The engines of a live cluster: who is up, who serves what, who is being drained or restarted.

Engines may serve different models. One that some engine has listed is known, be its engines up or down, until an engine
that is up again no longer lists it.

A handle is what is kept of one engine. Its life, as the scheduler is told it:

    good probe                -> EngineReady           (again when its slots, memory or models turn out to be others)
    lists no model of ours    -> EngineClosed          until it does
    drained by its operator   -> EngineClosed          what it runs goes on; EngineReady when resumed or restarted
    refuses connections       -> EngineClosed          it may be finishing what it has; EngineLost when that is over
    probes stay unanswered    -> EngineLost            what it runs is given up, and may run elsewhere
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from bins.profile import Profile
from llmserve.cluster.in_flight import InFlightCall
from llmserve.cluster.known_models import KnownModels, Listed
from llmserve.engines.engine import Engine, EngineError, Health
from llmserve.errors import EngineStartError
from llmserve.request import EngineInfo
from llmserve.scheduling.messages import EngineClosed, EngineReady, Event
from llmserve.settings import LiveConfig

log = logging.getLogger("llmserve")

LOOK_EVERY_S = 0.25  # at an engine that has begun to fail, or whose slots are all in use and may not be all
NAMES_SHOWN = 20  # of an engine's models, in a line of the log


class EngineHandle:
    """What is kept of one engine.

    up       it answered its last probe, or only missed a few
    drained  its operator wants no new requests on it
    models   of ours that it listed when it was last up, by id
    running  calls that it serves, by request id
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.info = engine.info
        self.up = False
        self.drained = False
        self.models: Listed = {}
        self.running: dict[int, InFlightCall] = {}
        self.empty = asyncio.Event()
        self.empty.set()
        self.trouble = ""  # what its last failed probe said
        self.closed = False  # the scheduler has been told that it is closed, and neither ready nor lost since
        self.probes_failed = 0
        self.slots_found = True  # those of `info` are all there are
        self.watcher: asyncio.Task[None] | None = None
        self.probe: asyncio.Task[bool] | None = None
        self.restart: asyncio.Task[None] | None = None
        self.nudge = asyncio.Event()  # it is worth a look now

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def is_full(self) -> bool:
        return len(self.running) >= self.info.slots

    @property
    def ready(self) -> bool:
        """It takes new requests."""
        return self.up and not self.drained and bool(self.models)

    @property
    def state(self) -> str:
        """One word for people."""
        if self.restart is not None:
            return "restarting"
        if not self.up:
            return "down"
        if self.drained:
            return "draining" if self.running else "drained"
        return "ready" if self.models else "without a model"

    def add(self, in_flight: InFlightCall) -> None:
        self.running[in_flight.request.id] = in_flight
        self.empty.clear()
        if not self.slots_found and len(self.running) == self.info.slots:
            self.nudge.set()  # there may be more

    def remove(self, in_flight: InFlightCall) -> None:
        del self.running[in_flight.request.id]
        if not self.running:
            self.empty.set()


class Fleet:
    """Watches the engines and tells the scheduler what becomes of them.

    tell        takes an event for the scheduler
    lose        ends what a handle runs, and tells the scheduler that the engine is lost
    wanted      whether a model that an engine lists is to be served
    profiles    what batches take, by model ("": of every other model): the scheduler is told it with each engine
    """

    def __init__(
        self,
        engines: list[Engine],
        config: LiveConfig,
        *,
        tell: Callable[[Event], None],
        lose: Callable[[EngineHandle], None],
        wanted: Callable[[str], bool] = lambda model: True,
        profiles: Mapping[str, Profile] = MappingProxyType({}),
    ) -> None:
        self.handles = {engine.info.name: EngineHandle(engine) for engine in engines}
        self._known = KnownModels()
        self._config = config
        self._profiles = profiles
        self._tell = tell
        self._tell_lost = lose
        self._wanted = wanted

    @property
    def models(self) -> Listed:
        """That are known, by id."""
        return self._known.by_id

    def engines_of(self, model: str) -> int:
        """Engines that serve the model, or did when they were last up."""
        return self._known.engines_of(model)

    def start(self) -> None:
        """Begin to watch; each engine is used from its first good probe on."""
        for handle in self.handles.values():
            handle.watcher = asyncio.create_task(self._watch(handle))

    async def close(self) -> None:
        tasks: list[asyncio.Task[Any] | None] = []
        for handle in self.handles.values():
            tasks += [handle.watcher, handle.probe, handle.restart]
        alive = [task for task in tasks if task is not None and not task.done()]
        for task in alive:
            task.cancel()
        await asyncio.gather(*alive, return_exceptions=True)
        for handle in self.handles.values():
            await handle.engine.close()

    # ---- what operators ask for -------------------------------------------------------------------------------

    def drain(self, handle: EngineHandle) -> None:
        """No new requests for it; those it runs go on. Until `resume`, or until it has been away and is back."""
        handle.drained = True
        if handle.up:
            self._close(handle)
        log.info("engine %s is drained: %d requests still run on it", handle.name, len(handle.running))

    def resume(self, handle: EngineHandle) -> None:
        """It takes requests again."""
        handle.drained = False
        if handle.ready:
            self._open(handle)

    def begin_restart(self, handle: EngineHandle) -> None:
        """Drain it, restart its process when it is empty, use it again. Only of an engine that has `restart`."""
        if handle.restart is None:
            self.drain(handle)
            handle.restart = asyncio.create_task(self._restart(handle))

    async def _restart(self, handle: EngineHandle) -> None:
        assert handle.engine.restart is not None
        try:
            while handle.running:
                await handle.empty.wait()
            log.info("engine %s is empty and restarts", handle.name)
            self._lose(handle)
            await handle.engine.restart()
            log.info("engine %s has been restarted", handle.name)
        except EngineStartError as error:
            log.error("engine %s was not restarted: %s", handle.name, error)
        finally:
            handle.restart = None
            self.resume(handle)
            handle.nudge.set()

    # ---- probes -----------------------------------------------------------------------------------------------

    async def _watch(self, handle: EngineHandle) -> None:
        pause_s = 0.05
        while True:
            try:
                pause_s = await self._look(handle, pause_s)
            except Exception:  # whatever it is, the watch must go on
                log.exception("looking at engine %s failed", handle.name)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(handle.nudge.wait(), pause_s)
            handle.nudge.clear()

    async def _look(self, handle: EngineHandle, pause_s: float) -> float:
        """Probe it once; returns how long to wait before the next time, pause_s being how long it was."""
        config = self._config
        if await self._probe(handle):
            soon = not handle.slots_found and handle.is_full
            return min(LOOK_EVERY_S, config.probe_every_s) if soon else config.probe_every_s
        if handle.up or handle.closed:
            is_silent = handle.probes_failed >= config.probes_failed_max
            if is_silent or not (handle.up or handle.running):
                self._lose(handle)
            return min(LOOK_EVERY_S, config.probe_every_s)
        return min(2 * pause_s, config.probe_every_s)

    async def _probe(self, handle: EngineHandle) -> bool:
        return await asyncio.shield(self._begin_probe(handle))

    def _begin_probe(self, handle: EngineHandle) -> asyncio.Task[bool]:
        """One probe at a time, shared by all who ask meanwhile."""
        if handle.probe is None or handle.probe.done():
            handle.probe = asyncio.create_task(self._probe_once(handle))
        return handle.probe

    async def _probe_once(self, handle: EngineHandle) -> bool:
        try:
            health = await handle.engine.probe()
        except Exception as error:  # whatever it is, the watcher must live on
            if handle.up or str(error) != handle.trouble:
                log.warning("%s", error)
            handle.trouble = str(error)
            if isinstance(error, EngineError) and error.unreachable:
                self._refused(handle)
            else:
                handle.probes_failed += 1
            return False
        if handle.restart is not None and not handle.up:
            return False  # not before its restart is over
        self._found(handle, health)
        return True

    def _found(self, handle: EngineHandle, health: Health) -> None:
        handle.probes_failed, handle.trouble = 0, ""
        handle.slots_found = health.slots_found
        came_up, handle.up = not handle.up, True
        models = {model.id: model for model in health.models if self._wanted(model.id)}
        if came_up or models != handle.models:
            self._known.change(handle.models, models)
            handle.models = models
            _say_models(handle, health, came_up=came_up)
        if came_up:
            handle.drained = False  # whoever drained it has done with it what was to be done
        info = self._info(handle, health, came_up=came_up)
        if came_up or info != handle.info:
            handle.info = info
            if handle.ready:
                self._open(handle)
            elif not handle.models:
                self._close(handle)

    def _info(self, handle: EngineHandle, health: Health, *, came_up: bool) -> EngineInfo:
        """What the scheduler is to know of an engine that is up."""
        slots = health.slots or (handle.engine.info if came_up else handle.info).slots
        return msgspec.structs.replace(
            handle.engine.info,
            slots=slots,
            tokens_max=health.tokens_max if self._config.memory_bound else None,
            models=tuple(handle.models),
            speeds={
                model: profile.step_times(slots)
                for model, profile in self._profiles.items()
                if model == "" or model in handle.models
            },
        )

    async def suspect(self, handle: EngineHandle, model: str, *, unreachable: bool) -> None:
        """A request of this model failed by its engine's fault: is the whole engine gone?"""
        if unreachable:
            self._refused(handle)
        elif handle.up:
            probing = self._begin_probe(handle)
            others = [other for other in self.handles.values() if other is not handle and other.ready]
            if not any(model in other.models for other in others):
                await asyncio.shield(probing)  # else it runs elsewhere, without waiting for what is found here

    def _refused(self, handle: EngineHandle) -> None:
        """Nobody listens there. It may have died, and all that it ran breaks off; or be finishing what it has."""
        if handle.up:
            handle.up = False
            log.warning("engine %s takes no connections; %d requests run on it", handle.name, len(handle.running))
            self._close(handle)
            handle.nudge.set()

    # ---- what the scheduler is told ---------------------------------------------------------------------------

    def _open(self, handle: EngineHandle) -> None:
        handle.closed = False
        self._tell(EngineReady(handle.info))

    def _close(self, handle: EngineHandle) -> None:
        if not handle.closed:
            handle.closed = True
            self._tell(EngineClosed(handle.name))

    def _lose(self, handle: EngineHandle) -> None:
        self._close(handle)  # so that nothing is sent there while what it ran is settled
        handle.up = handle.closed = False
        handle.probes_failed = 0
        if handle.restart is None:
            log.warning("engine %s is lost with %d running requests", handle.name, len(handle.running))
        self._tell_lost(handle)


def _say_models(handle: EngineHandle, health: Health, *, came_up: bool) -> None:
    names = _some(list(handle.models))
    if not handle.models:
        listed = _some([model.id for model in health.models]) or "none at all"
        log.error("engine %s lists no model to be served, but %s: it gets no requests", handle.name, listed)
    elif came_up:
        log.info("engine %s is ready: %s", handle.name, names)
    else:
        log.info("engine %s serves other models now: %s", handle.name, names)


def _some(names: list[str]) -> str:
    more = [f"and {len(names) - NAMES_SHOWN} more"] if len(names) > NAMES_SHOWN else []
    return ", ".join([*names[:NAMES_SHOWN], *more])
