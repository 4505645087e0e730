"""The engines of a live cluster: who is up, who serves what, who is being drained or restarted.

Engines may serve different models. One that some engine has listed is known, be its engines up or down, until an engine
that is up again no longer lists it.

A desk is what is kept of one engine. Its life, as the scheduler is told it:

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
from llmserve.cluster.exchange import Exchange
from llmserve.cluster.known_models import KnownModels, Listed
from llmserve.engines.engine import Engine, EngineError, Health
from llmserve.errors import EngineStartError
from llmserve.request import EngineInfo
from llmserve.scheduling.messages import EngineClosed, EngineReady, Event
from llmserve.settings import LiveConfig

log = logging.getLogger("llmserve")

LOOK_EVERY_S = 0.25  # at an engine that has begun to fail
NAMES_SHOWN = 20  # of an engine's models, in a line of the log


class Desk:
    """What is kept of one engine.

    up       it answered its last probe, or only missed a few
    drained  its operator wants no new requests on it
    models   of ours that it listed when it was last up, by id
    running  exchanges that it serves, by request id
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.info = engine.info
        self.up = False
        self.drained = False
        self.models: Listed = {}
        self.running: dict[int, Exchange] = {}
        self.empty = asyncio.Event()
        self.empty.set()
        self.trouble = ""  # what its last failed probe said
        self.closed = False  # the scheduler has been told that it is closed, and neither ready nor lost since
        self.probes_failed = 0
        self.watcher: asyncio.Task[None] | None = None
        self.probe: asyncio.Task[bool] | None = None
        self.restart: asyncio.Task[None] | None = None
        self.nudge = asyncio.Event()  # it is worth a look now

    @property
    def name(self) -> str:
        return self.info.name

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

    def add(self, exchange: Exchange) -> None:
        self.running[exchange.request.id] = exchange
        self.empty.clear()

    def remove(self, exchange: Exchange) -> None:
        del self.running[exchange.request.id]
        if not self.running:
            self.empty.set()


class Fleet:
    """Watches the engines and tells the scheduler what becomes of them.

    tell        takes an event for the scheduler
    lose        ends what a desk runs, and tells the scheduler that the engine is lost
    wanted      whether a model that an engine lists is to be served
    profiles    what batches take, by model ("": of every other model): the scheduler is told it with each engine
    """

    def __init__(
        self,
        engines: list[Engine],
        config: LiveConfig,
        *,
        tell: Callable[[Event], None],
        lose: Callable[[Desk], None],
        wanted: Callable[[str], bool] = lambda model: True,
        profiles: Mapping[str, Profile] = MappingProxyType({}),
    ) -> None:
        self.desks = {engine.info.name: Desk(engine) for engine in engines}
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
        for desk in self.desks.values():
            desk.watcher = asyncio.create_task(self._watch(desk))

    async def close(self) -> None:
        tasks: list[asyncio.Task[Any] | None] = []
        for desk in self.desks.values():
            tasks += [desk.watcher, desk.probe, desk.restart]
        alive = [task for task in tasks if task is not None and not task.done()]
        for task in alive:
            task.cancel()
        await asyncio.gather(*alive, return_exceptions=True)
        for desk in self.desks.values():
            await desk.engine.close()

    # ---- what operators ask for -------------------------------------------------------------------------------

    def drain(self, desk: Desk) -> None:
        """No new requests for it; those it runs go on. Until `resume`, or until it has been away and is back."""
        desk.drained = True
        if desk.up:
            self._close(desk)
        log.info("engine %s is drained: %d requests still run on it", desk.name, len(desk.running))

    def resume(self, desk: Desk) -> None:
        """It takes requests again."""
        desk.drained = False
        if desk.ready:
            self._open(desk)

    def begin_restart(self, desk: Desk) -> None:
        """Drain it, restart its process when it is empty, use it again. Only of an engine that has `restart`."""
        if desk.restart is None:
            self.drain(desk)
            desk.restart = asyncio.create_task(self._restart(desk))

    async def _restart(self, desk: Desk) -> None:
        assert desk.engine.restart is not None
        try:
            while desk.running:
                await desk.empty.wait()
            log.info("engine %s is empty and restarts", desk.name)
            self._lose(desk)
            await desk.engine.restart()
            log.info("engine %s has been restarted", desk.name)
        except EngineStartError as error:
            log.error("engine %s was not restarted: %s", desk.name, error)
        finally:
            desk.restart = None
            self.resume(desk)
            desk.nudge.set()

    # ---- probes -----------------------------------------------------------------------------------------------

    async def _watch(self, desk: Desk) -> None:
        pause_s = 0.05
        while True:
            try:
                pause_s = await self._look(desk, pause_s)
            except Exception:  # whatever it is, the watch must go on
                log.exception("looking at engine %s failed", desk.name)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(desk.nudge.wait(), pause_s)
            desk.nudge.clear()

    async def _look(self, desk: Desk, pause_s: float) -> float:
        """Probe it once; returns how long to wait before the next time, pause_s being how long it was."""
        config = self._config
        if await self._probe(desk):
            return config.probe_every_s
        if desk.up or desk.closed:
            is_silent = desk.probes_failed >= config.probes_failed_max
            if is_silent or not (desk.up or desk.running):
                self._lose(desk)
            return min(LOOK_EVERY_S, config.probe_every_s)
        return min(2 * pause_s, config.probe_every_s)

    async def _probe(self, desk: Desk) -> bool:
        return await asyncio.shield(self._begin_probe(desk))

    def _begin_probe(self, desk: Desk) -> asyncio.Task[bool]:
        """One probe at a time, shared by all who ask meanwhile."""
        if desk.probe is None or desk.probe.done():
            desk.probe = asyncio.create_task(self._probe_once(desk))
        return desk.probe

    async def _probe_once(self, desk: Desk) -> bool:
        try:
            health = await desk.engine.probe()
        except Exception as error:  # whatever it is, the watcher must live on
            if desk.up or str(error) != desk.trouble:
                log.warning("%s", error)
            desk.trouble = str(error)
            if isinstance(error, EngineError) and error.unreachable:
                self._refused(desk)
            else:
                desk.probes_failed += 1
            return False
        if desk.restart is not None and not desk.up:
            return False  # not before its restart is over
        self._found(desk, health)
        return True

    def _found(self, desk: Desk, health: Health) -> None:
        desk.probes_failed, desk.trouble = 0, ""
        came_up, desk.up = not desk.up, True
        models = {model.id: model for model in health.models if self._wanted(model.id)}
        if came_up or models != desk.models:
            self._known.change(desk.models, models)
            desk.models = models
            _say_models(desk, health, came_up=came_up)
        if came_up:
            desk.drained = False  # whoever drained it has done with it what was to be done
        info = self._info(desk, health, came_up=came_up)
        if came_up or info != desk.info:
            desk.info = info
            if desk.ready:
                self._open(desk)
            elif not desk.models:
                self._close(desk)

    def _info(self, desk: Desk, health: Health, *, came_up: bool) -> EngineInfo:
        """What the scheduler is to know of an engine that is up."""
        slots = health.slots or (desk.engine.info if came_up else desk.info).slots
        return msgspec.structs.replace(
            desk.engine.info,
            slots=slots,
            tokens_max=health.tokens_max if self._config.memory_bound else None,
            models=tuple(desk.models),
            speeds={
                model: profile.step_times(slots)
                for model, profile in self._profiles.items()
                if model == "" or model in desk.models
            },
        )

    async def suspect(self, desk: Desk, model: str, *, unreachable: bool) -> None:
        """A request of this model failed by its engine's fault: is the whole engine gone?"""
        if unreachable:
            self._refused(desk)
        elif desk.up:
            probing = self._begin_probe(desk)
            others = [other for other in self.desks.values() if other is not desk and other.ready]
            if not any(model in other.models for other in others):
                await asyncio.shield(probing)  # else it runs elsewhere, without waiting for what is found here

    def _refused(self, desk: Desk) -> None:
        """Nobody listens there. It may have died, and all that it ran breaks off; or be finishing what it has."""
        if desk.up:
            desk.up = False
            log.warning("engine %s takes no connections; %d requests run on it", desk.name, len(desk.running))
            self._close(desk)
            desk.nudge.set()

    # ---- what the scheduler is told ---------------------------------------------------------------------------

    def _open(self, desk: Desk) -> None:
        desk.closed = False
        self._tell(EngineReady(desk.info))

    def _close(self, desk: Desk) -> None:
        if not desk.closed:
            desk.closed = True
            self._tell(EngineClosed(desk.name))

    def _lose(self, desk: Desk) -> None:
        self._close(desk)  # so that nothing is sent there while what it ran is settled
        desk.up = desk.closed = False
        desk.probes_failed = 0
        if desk.restart is None:
            log.warning("engine %s is lost with %d running requests", desk.name, len(desk.running))
        self._tell_lost(desk)


def _say_models(desk: Desk, health: Health, *, came_up: bool) -> None:
    names = _some(list(desk.models))
    if not desk.models:
        listed = _some([model.id for model in health.models]) or "none at all"
        log.error("engine %s lists no model to be served, but %s: it gets no requests", desk.name, listed)
    elif came_up:
        log.info("engine %s is ready: %s", desk.name, names)
    else:
        log.info("engine %s serves other models now: %s", desk.name, names)


def _some(names: list[str]) -> str:
    more = [f"and {len(names) - NAMES_SHOWN} more"] if len(names) > NAMES_SHOWN else []
    return ", ".join([*names[:NAMES_SHOWN], *more])
