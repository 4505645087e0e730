"""The engines of a live cluster: which are up, which models they serve, which are being drained or restarted.

Engines may serve different models. A model that some engine has listed stays known, whether its engines are up or down,
until an engine that is up again no longer lists the model.

A handle is the state of one engine. The scheduler gets these events about an engine:

    watched from now on       -> EngineExpected        it may be up, or come up
    successful probe          -> EngineReady           again when its slots, memory or models change
    lists no served model     -> EngineClosed          until it lists one
    drained by its operator   -> EngineClosed          its requests go on; EngineReady when resumed or restarted
    refuses connections       -> EngineClosed          it may finish its requests; EngineLost after the last of them
    probes stay unanswered    -> EngineLost            its requests are abandoned, and may run on other engines

An engine that is down is expected back: processes are restarted, by llmserve or by whoever started them. Only an engine
that its operator has drained, and is not restarting, or that lists no served model, is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

import msgspec

from bins.profile import Profile
from llmserve.calls.in_flight import InFlightCall
from llmserve.engines.engine import Endpoints, Engine, EngineError, Health
from llmserve.errors import EngineStartError
from llmserve.live.known_models import KnownModels, Listed
from llmserve.live.lanes import Lane, Lanes
from llmserve.request import EngineInfo
from llmserve.scheduling.messages import EngineClosed, EngineExpected, EngineReady, Event
from llmserve.settings.tree import LiveConfig

log = logging.getLogger("llmserve")

SUSPECT_PROBE_S = 0.25  # between probes of an engine that has begun to fail, or that may have more slots than are used
NAMES_SHOWN = 20  # names of an engine's models in a line of the log


class EngineHandle:
    """The state of one engine.

    up       the engine answered its last probe, or missed only a few
    seen     the engine was ever up
    drained  the operator wants no new requests on the engine
    models   served models that the engine listed when it was last up, by id
    endpoints  that it had when it was last up
    running  calls that the engine serves, by request id
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.info = engine.info
        self.up = self.seen = False
        self.drained = False
        self.models: Listed = {}
        self.endpoints = Endpoints()
        self.running: dict[int, InFlightCall] = {}
        self.empty = asyncio.Event()
        self.empty.set()
        self.trouble = ""  # message of the last failed probe
        self.closed = False  # the last event about the engine was EngineClosed
        self.probes_failed = 0
        self.slots_found = True  # `info` has all slots of the engine
        self.load_known = True  # the engine's metrics can be read
        self.watcher: asyncio.Task[None] | None = None
        self.probe: asyncio.Task[bool] | None = None
        self.restart: asyncio.Task[None] | None = None
        self.removal: asyncio.Task[None] | None = None
        self.nudge = asyncio.Event()  # asks for a probe now

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def is_full(self) -> bool:
        return len(self.running) >= self.info.slots

    @property
    def ready(self) -> bool:
        """Whether the engine takes new requests."""
        return self.up and not self.drained and bool(self.models)

    @property
    def goes_as_planned(self) -> bool:
        """Whether its operator takes the engine down."""
        return self.restart is not None or self.removal is not None

    @property
    def state(self) -> str:
        """The state in words, for operators."""
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
            self.nudge.set()  # the engine may have more slots

    def remove(self, in_flight: InFlightCall) -> None:
        del self.running[in_flight.request.id]
        if not self.running:
            self.empty.set()


class Fleet:
    """Watches the engines and notifies the scheduler of their changes.

    notify      takes an event for the scheduler
    on_lost     abandons the calls of a handle, and notifies the scheduler that the engine is lost
    is_served   whether the server serves a model that an engine lists
    profiles    by model ("": every other model): how long batches take; EngineReady carries the step times
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        config: LiveConfig,
        *,
        notify: Callable[[Event], None],
        on_lost: Callable[[EngineHandle], None],
        is_served: Callable[[str], bool] = lambda model: True,
        profiles: Mapping[str, Profile] = MappingProxyType({}),
    ) -> None:
        self.handles = {engine.info.name: EngineHandle(engine) for engine in engines}
        self._known_models = KnownModels()
        self._lanes = Lanes()
        self._config = config
        self._profiles = profiles
        self._notify = notify
        self._on_lost = on_lost
        self._is_served = is_served
        self.planned: Collection[str] = ()  # models that the server's group is for

    @property
    def models(self) -> Listed:
        """Known models, by id."""
        return self._known_models.by_id

    @property
    def queues(self) -> Iterator[str]:
        """Names of all queues of the scheduler that may be used: of known models, and of their lanes."""
        return chain(self.models, self._lanes.names)

    @property
    def lanes(self) -> int:
        """Number of lanes."""
        return len(self._lanes.names)

    def serving(self, model: str) -> list[EngineHandle]:
        """The engines that serve the model, or did when they were last up."""
        return [handle for handle in self.handles.values() if model in handle.models]

    def is_up(self, model: str) -> bool:
        """Whether an engine of the model takes new requests."""
        return any(handle.ready for handle in self.serving(model))

    def open_lane(self, lane: Lane) -> None:
        """Let the engines that can serve the lane's calls list it."""
        if self._lanes.add(lane):
            for handle in self.handles.values():
                self._list_lanes(handle)

    def lacks(self, handle: EngineHandle, path: str) -> None:
        """Note that an engine that does not list its endpoints has refused one."""
        handle.endpoints.refuse(path)
        self._list_lanes(handle)

    def _list_lanes(self, handle: EngineHandle) -> None:
        names = self._names(handle)
        if handle.up and names != handle.info.models:
            handle.info = msgspec.structs.replace(handle.info, models=names)
            if handle.ready:
                self._open(handle)

    def _names(self, handle: EngineHandle) -> tuple[str, ...]:
        """What an engine lists for the scheduler: its models, and the lanes that it serves."""
        return (*handle.models, *self._lanes.on(handle.name, handle.models, handle.endpoints))

    def may_come(self, model: str) -> bool:
        """Whether the model is planned, or an engine whose models are not known yet may serve it."""
        return model in self.planned or (self._is_served(model) and any(not one.seen for one in self.handles.values()))

    def engines_of(self, model: str) -> int:
        """Number of engines that serve the model, or did when they were last up."""
        return self._known_models.engines_of(model)

    def infos_of(self, model: str) -> Iterator[EngineInfo]:
        """The engines that serve the model, or did when they were last up."""
        return (handle.info for handle in self.serving(model))

    def start(self) -> None:
        """Begin to watch the engines. An engine gets requests from its first successful probe on."""
        for handle in self.handles.values():
            self._begin_watch(handle)

    def _begin_watch(self, handle: EngineHandle) -> None:
        self._notify(EngineExpected(handle.info))
        handle.watcher = asyncio.create_task(self._watch(handle))

    async def close(self) -> None:
        tasks: list[asyncio.Task[Any] | None] = []
        for handle in self.handles.values():
            tasks += [handle.watcher, handle.probe, handle.restart, handle.removal]
        alive = [task for task in tasks if task is not None and not task.done()]
        for task in alive:
            task.cancel()
        await asyncio.gather(*alive, return_exceptions=True)
        for handle in self.handles.values():
            await handle.engine.close()

    # ---- commands of operators --------------------------------------------------------------------------------

    def drain(self, handle: EngineHandle) -> None:
        """Send no new requests to the engine until `resume`, or until it was down and is up again."""
        handle.drained = True
        if handle.up:
            self._close(handle, expected=handle.restart is not None)
        log.info("engine %s is drained: %d requests still run on it", handle.name, len(handle.running))

    def resume(self, handle: EngineHandle) -> None:
        handle.drained = False
        if handle.ready:
            self._open(handle)

    def begin_restart(self, handle: EngineHandle) -> None:
        """Drain the engine, restart its process when it is empty, resume. The engine must have `restart`."""
        if handle.restart is None:
            handle.restart = asyncio.create_task(self._restart(handle))
            self.drain(handle)

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

    def add(self, engine: Engine) -> None:
        """Watch one more engine. An engine that was about to be removed stays as it was."""
        handle = self.handles.get(engine.info.name)
        if handle is None:
            handle = self.handles[engine.info.name] = EngineHandle(engine)
            self._begin_watch(handle)
        elif handle.removal is not None:
            handle.removal.cancel()
            handle.removal = None
            self.resume(handle)

    def remove(self, handle: EngineHandle) -> None:
        """Drain the engine, and forget it when it is empty."""
        if handle.removal is None:
            self.drain(handle)
            handle.removal = asyncio.create_task(self._remove(handle))

    async def _remove(self, handle: EngineHandle) -> None:
        while handle.running:
            await handle.empty.wait()
        for task in (handle.watcher, handle.probe, handle.restart):
            if task is not None:
                task.cancel()
        self._lose(handle)
        self._known_models.change(handle.models, {})
        del self.handles[handle.name]
        self._lanes.keep(self.models, self.handles)
        log.info("engine %s is removed", handle.name)
        await handle.engine.close()

    # ---- probes -----------------------------------------------------------------------------------------------

    async def _watch(self, handle: EngineHandle) -> None:
        pause_s = 0.05
        while True:
            try:
                pause_s = await self._check(handle, pause_s)
            except Exception:  # after any error the watch must go on
                log.exception("the check of engine %s failed", handle.name)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):  # wait_for of Python 3.11 may lose a cancellation
                    await handle.nudge.wait()
            handle.nudge.clear()

    async def _check(self, handle: EngineHandle, pause_s: float) -> float:
        """Probe the engine once; return the seconds to wait before the next probe. pause_s : the wait before this."""
        config = self._config
        if await self._probe(handle):
            soon = not handle.slots_found and handle.is_full
            return min(SUSPECT_PROBE_S, config.probe_every_s) if soon else config.probe_every_s
        if handle.up or handle.closed:
            is_silent = handle.probes_failed >= config.probes_failed_max
            if is_silent or not (handle.up or handle.running):
                self._lose(handle)
            return min(SUSPECT_PROBE_S, config.probe_every_s)
        return min(2 * pause_s, config.probe_every_s)

    async def _probe(self, handle: EngineHandle) -> bool:
        return await asyncio.shield(self._begin_probe(handle))

    def _begin_probe(self, handle: EngineHandle) -> asyncio.Task[bool]:
        """Return the probe that runs, or begin one: an engine has one probe at a time."""
        if handle.probe is None or handle.probe.done():
            handle.probe = asyncio.create_task(self._probe_once(handle))
        return handle.probe

    async def _probe_once(self, handle: EngineHandle) -> bool:
        try:
            health = await handle.engine.probe()
        except Exception as error:  # after any error the watch must go on
            if handle.up or str(error) != handle.trouble:
                log.warning("%s", error)
            handle.trouble = str(error)
            if isinstance(error, EngineError) and error.unreachable:
                self._refused(handle)
            elif not (isinstance(error, EngineError) and error.local):
                handle.probes_failed += 1
            return False
        if handle.restart is not None and not handle.up:
            return False  # the restart is not over
        self._update(handle, health)
        return True

    def _update(self, handle: EngineHandle, health: Health) -> None:
        """Bring the handle up to date after a successful probe, and notify the scheduler of changes."""
        handle.probes_failed, handle.trouble = 0, ""
        handle.slots_found, handle.load_known = health.slots_found, health.load_known
        came_up, handle.up, handle.seen = not handle.up, True, True
        models = {model.id: model for model in health.models if self._is_served(model.id)}
        if came_up or models != handle.models:
            self._known_models.change(handle.models, models)
            handle.models = models
            self._lanes.keep(self.models, self.handles)
            _log_models(handle, health, came_up=came_up)
        if came_up or health.paths != handle.endpoints.told:
            handle.endpoints = Endpoints(health.paths)
        if came_up:
            handle.drained = handle.removal is not None  # it was down: the operator's work on it is done
        info = self._info(handle, health, came_up=came_up)
        if came_up or info != handle.info:
            handle.info = info
            if handle.ready:
                self._open(handle)
            elif not handle.models:
                self._close(handle, expected=False)

    def _info(self, handle: EngineHandle, health: Health, *, came_up: bool) -> EngineInfo:
        """The description of an engine that is up, for the scheduler."""
        slots = health.slots or (handle.engine.info if came_up else handle.info).slots
        return msgspec.structs.replace(
            handle.engine.info,
            slots=slots,
            tokens_max=health.tokens_max if self._config.memory_bound else None,
            models=self._names(handle),
            speeds={
                model: profile.step_times(slots)
                for model, profile in self._profiles.items()
                if model == "" or model in handle.models
            },
        )

    async def suspect(self, handle: EngineHandle, model: str, *, unreachable: bool) -> None:
        """Find out whether an engine is down after it failed a request of this model."""
        if unreachable:
            self._refused(handle)
        elif handle.up:
            probing = self._begin_probe(handle)
            other_engines = [other for other in self.handles.values() if other is not handle and other.ready]
            if not any(model in other.models for other in other_engines):
                await asyncio.shield(probing)  # else the request runs on another engine, and need not wait

    def _refused(self, handle: EngineHandle) -> None:
        """Close an engine that refuses connections. It has died, or still finishes its requests."""
        if handle.up:
            handle.up = False
            log.warning("engine %s takes no connections; %d requests run on it", handle.name, len(handle.running))
            self._close(handle, expected=is_expected(handle))
            handle.nudge.set()

    # ---- events for the scheduler -----------------------------------------------------------------------------

    def _open(self, handle: EngineHandle) -> None:
        handle.closed = False
        self._notify(EngineReady(handle.info))

    def _close(self, handle: EngineHandle, *, expected: bool) -> None:
        if not handle.closed:
            handle.closed = True
            self._notify(EngineClosed(handle.name, expected))

    def _lose(self, handle: EngineHandle) -> None:
        # First, so that no request starts there while its calls are abandoned.
        self._close(handle, expected=is_expected(handle))
        handle.up = handle.closed = False
        handle.probes_failed = 0
        if not handle.goes_as_planned:
            log.warning("engine %s is lost with %d running requests", handle.name, len(handle.running))
        self._on_lost(handle)


def is_expected(handle: EngineHandle) -> bool:
    """Whether an engine that is down, or goes down, will probably take requests again."""
    return not handle.drained or handle.restart is not None


def _log_models(handle: EngineHandle, health: Health, *, came_up: bool) -> None:
    names = _shortened(list(handle.models))
    if not handle.models:
        listed = _shortened([model.id for model in health.models]) or "no model at all"
        log.error("engine %s lists no model to be served, but %s: it gets no requests", handle.name, listed)
    elif came_up:
        log.info("engine %s is ready: %s", handle.name, names)
    else:
        log.info("engine %s serves other models now: %s", handle.name, names)


def _shortened(names: list[str]) -> str:
    more = [f"and {len(names) - NAMES_SHOWN} more"] if len(names) > NAMES_SHOWN else []
    return ", ".join([*names[:NAMES_SHOWN], *more])
