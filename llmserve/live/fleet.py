"""The engines of a live cluster: which are up, which models they serve, which are being drained or restarted.

Engines may serve different models. A listed model stays known, whether its engines are up or down, until an
engine comes up again without the model.

The fleet probes the engines and takes the orders of their operator. engine_state.py decides what follows for an engine;
its scheduler hears of the engine through one entrance:

    watched from now on       -> EngineExpected        it may be up, or come up
    successful probe          -> EngineReady           again when its slots, memory or models change
    lists no served model     -> EngineClosed          until it lists one
    drained by its operator   -> EngineClosed          its requests go on; EngineReady when resumed or restarted
    refuses connections       -> EngineClosed          it may finish its requests; EngineLost after the last of them
    probes stay unanswered    -> EngineLost            its requests are abandoned, and may run on other engines

With each probe the fleet looks for single requests that an engine has lost while it goes on with others (watchdog.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType

import msgspec

from bins.profile import Profile, StepTimes
from llmserve.calls.in_flight import InFlightCall
from llmserve.engines.engine import Endpoints, Engine, EngineError, Health
from llmserve.engines.slots import SlotsLearner
from llmserve.errors import EngineStartError
from llmserve.live.engine_state import EngineEvent, Notice, Order, after
from llmserve.live.handle import EngineHandle
from llmserve.live.homes import Homes
from llmserve.live.known_models import KnownModels, Listed
from llmserve.live.route_queues import RouteQueue, RouteQueues
from llmserve.live.watchdog import lost_error
from llmserve.request import EngineInfo
from llmserve.scheduling.messages import EngineClosed, EngineExpected, EngineLost, EngineReady, Event
from llmserve.settings.tree import LiveConfig

log = logging.getLogger("llmserve")

SUSPECT_PROBE_S = 0.25  # between probes of an engine that has begun to fail, or that may have more slots than are used
NAMES_SHOWN = 20  # names of an engine's models in a line of the log


class Fleet:
    """The engines of a live cluster, which are watched.

    is_served   whether the server serves a model that an engine lists
    profiles    by model ("": every other model): how long batches take; EngineReady carries the step times
    planned     models that the server's group, or the gateway, is for
    homes       of a gateway with a plan, by which engines list models
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        config: LiveConfig | None = None,
        *,
        is_served: Callable[[str], bool] = lambda model: True,
        profiles: Mapping[str, Profile] = MappingProxyType({}),
        planned: Collection[str] = (),
        homes: Homes | None = None,
    ) -> None:
        self.handles = {engine.info.name: EngineHandle(engine) for engine in engines}
        self._known_models = KnownModels()
        self._route_queues = RouteQueues()
        self._config = config or LiveConfig()
        self._profiles = profiles
        self._is_served = is_served
        self._planned, self._homes = planned, homes
        self._notify: Callable[[Event], None] = _nobody

    def start(self, notify: Callable[[Event], None]) -> None:
        """Begin to watch the engines. An engine gets requests from its first successful probe on.

        notify : takes what the scheduler hears of engines. Before EngineLost the engine's calls must be abandoned
        """
        self._notify = notify
        for handle in self.handles.values():
            self._begin_watch(handle)

    async def close(self) -> None:
        alive = [task for handle in self.handles.values() for task in handle.tasks]
        for task in alive:
            task.cancel()
        await asyncio.gather(*alive, return_exceptions=True)
        for handle in self.handles.values():
            await handle.engine.close()

    # ---- models and engines -------------------------------------------------------------------------------------

    @property
    def engines(self) -> Iterator[Engine]:
        return (handle.engine for handle in self.handles.values())

    @property
    def ready(self) -> dict[str, bool]:
        """Whether each engine takes new requests, by name."""
        return {name: handle.ready for name, handle in sorted(self.handles.items())}

    @property
    def models(self) -> Listed:
        """Known models, by id."""
        return self._known_models.by_id

    @property
    def queues(self) -> Iterator[str]:
        """Names of all queues of the scheduler that may be used: of known models, and of their route queues."""
        return chain(self.models, self._route_queues.names)

    @property
    def route_queues(self) -> int:
        """Number of route queues."""
        return len(self._route_queues.names)

    def serving(self, model: str) -> list[EngineHandle]:
        """The engines that serve the model, or did when they were last up."""
        return [handle for handle in self.handles.values() if model in handle.models]

    def is_up(self, model: str) -> bool:
        """Whether an engine of the model takes new requests."""
        return any(handle.ready for handle in self.serving(model))

    def may_come(self, model: str) -> bool:
        """Whether the model is planned, or an engine whose models are not known yet may serve it."""
        unseen = any(not handle.state.seen for handle in self.handles.values())
        return model in self._planned or (self._is_served(model) and unseen)

    def engines_of(self, model: str) -> int:
        """Number of engines that serve the model, or did when they were last up."""
        return self._known_models.engines_of(model)

    def infos_of(self, model: str) -> Iterator[EngineInfo]:
        """The engines that serve the model, or did when they were last up."""
        return (handle.info for handle in self.serving(model))

    def slots_of(self, model: str) -> int:
        """Slots of these engines."""
        return sum([info.slots for info in self.infos_of(model)])

    @property
    def running(self) -> Iterator[InFlightCall]:
        """The calls that engines run."""
        return (in_flight for handle in self.handles.values() for in_flight in handle.running.values())

    def running_on(self, queue: str) -> Iterator[InFlightCall]:
        """The calls on the engines that serve a queue. queue : a model, or a route queue"""
        handles = [handle for handle in self.handles.values() if queue in handle.info.models]
        return (in_flight for handle in handles for in_flight in handle.running.values())

    def open_route_queue(self, route_queue: RouteQueue) -> None:
        """Let the engines that can serve the route queue's calls list it."""
        if self._route_queues.add(route_queue):
            self._list_again()

    def queue_of(self, stream: str, model: str) -> str:
        """The queue of the scheduler for answers of a model: its own, unless the plan gives the stream to a group."""
        if self._homes is None or not (group := self._homes.apart(stream, model)):
            return model
        route_queue = RouteQueue(model, group=group)
        self.open_route_queue(route_queue)
        return route_queue.name

    def model_of(self, queue: str) -> str:
        """The model of a queue of the scheduler, if the queue is the model's own or that of a stream's group."""
        route_queue = self._route_queues.named(queue)
        return route_queue.model if route_queue is not None and route_queue.group else queue

    def follow(self, homes: Homes) -> None:
        """Follow another plan from now on, as a gateway."""
        self._homes, self._planned = homes, homes.models
        self._list_again()

    def lacks(self, handle: EngineHandle, path: str) -> None:
        """Note that an engine without a list of endpoints has refused this endpoint."""
        handle.endpoints.refuse(path)
        self._list_again()

    def _list_again(self) -> None:
        """Tell the scheduler of engines that list other queues than before."""
        for handle in self.handles.values():
            names = self._names(handle) if handle.up else handle.info.models
            if names != handle.info.models:
                handle.info = msgspec.structs.replace(handle.info, models=names, weights=self._weights(handle))
                if handle.ready:
                    self._notify(EngineReady(handle.info))

    def _names(self, handle: EngineHandle) -> tuple[str, ...]:
        """What an engine lists for the scheduler: its models and its route queues, as the plan has it."""
        route_queues, homes = self._route_queues.on(handle.name, handle.models, handle.endpoints), self._homes
        if homes is None:
            return (*handle.models, *(route_queue.name for route_queue in route_queues))
        models = [model for model in handle.models if self._lists(handle, model, homes.of(model))]
        names = (
            *models,
            *(
                route_queue.name
                for route_queue in route_queues
                if self._lists(handle, route_queue.model, route_queue.group)
            ),
        )
        return names or (f"@{handle.name}",)  # () would be every model

    def _lists(self, handle: EngineHandle, model: str, group: str) -> bool:
        """Whether an engine lists a queue of this group; "": of none."""
        if group in ("", handle.group):
            return True
        return not any(one.group == group and one.ready and model in one.models for one in self.handles.values())

    # ---- orders of operators ----------------------------------------------------------------------------------
    # An order must be one that the engine's state does not refuse; see engine_state.refusal.

    def drain(self, handle: EngineHandle) -> None:
        """Send no new requests to the engine until `resume`, or until it was down and is up again."""
        self._drain(handle, EngineEvent.DRAIN)

    def resume(self, handle: EngineHandle) -> None:
        """End a drain."""
        self._step(handle, EngineEvent.RESUME)

    def restart(self, handle: EngineHandle) -> None:
        """Drain the engine, restart its process when it is empty, resume. The engine must have `restart`."""
        if handle.state.order is not Order.RESTART:
            self._drain(handle, EngineEvent.RESTART)
            handle.work = asyncio.create_task(self._restart(handle))

    def add(self, engine: Engine) -> None:
        """Watch one more engine. An engine that was about to be removed stays as it was."""
        handle = self.handles.get(engine.info.name)
        if handle is None:
            handle = self.handles[engine.info.name] = EngineHandle(engine)
            self._begin_watch(handle)
            return
        if handle.state.order is Order.REMOVE:
            _cancel(handle.work)
        self._step(handle, EngineEvent.KEEP)

    def remove(self, handle: EngineHandle) -> None:
        """Drain the engine, and forget it when it is empty."""
        if handle.state.order is not Order.REMOVE:
            _cancel(handle.work)
            self._drain(handle, EngineEvent.REMOVE)
            handle.work = asyncio.create_task(self._remove(handle))

    def _drain(self, handle: EngineHandle, order: EngineEvent) -> None:
        self._step(handle, order)
        log.info("engine %s is drained: %d requests still run on it", handle.name, len(handle.running))

    async def _restart(self, handle: EngineHandle) -> None:
        assert handle.engine.restart is not None, "only an engine that llmserve has started is restarted"
        try:
            while handle.running:
                await handle.empty.wait()
            log.info("engine %s is empty and restarts", handle.name)
            self._step(handle, EngineEvent.EMPTY)
            await handle.engine.restart()
            log.info("engine %s has been restarted", handle.name)
        except EngineStartError as error:
            log.error("engine %s was not restarted: %s", handle.name, error)
        finally:
            self._step(handle, EngineEvent.RESTARTED)
            handle.nudge.set()

    async def _remove(self, handle: EngineHandle) -> None:
        while handle.running:
            await handle.empty.wait()
        _cancel(handle.watcher)
        _cancel(handle.probe)
        self._step(handle, EngineEvent.EMPTY)
        self._known_models.change(handle.models, {})
        del self.handles[handle.name]
        self._route_queues.keep(self.models, self.handles)
        log.info("engine %s is removed", handle.name)
        await handle.engine.close()

    # ---- probes -----------------------------------------------------------------------------------------------

    def _begin_watch(self, handle: EngineHandle) -> None:
        self._notify(EngineExpected(handle.info))
        handle.engine.on_hangup = handle.nudge.set
        handle.watcher = asyncio.create_task(self._watch(handle))

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
        probed = await asyncio.shield(self._begin_probe(handle))
        self._look(handle, probed=probed)
        if probed:
            soon = not handle.probed.slots_found and handle.is_full
            return min(SUSPECT_PROBE_S, config.probe_every_s) if soon else config.probe_every_s
        if not handle.state.alive:
            return min(2 * pause_s, config.probe_every_s)
        if handle.probes_failed >= config.probes_failed_max and not self._may_be_busy(handle):
            self._step(handle, EngineEvent.SILENT)
        elif not (handle.up or handle.running):
            self._step(handle, EngineEvent.EMPTY)
        return min(SUSPECT_PROBE_S, config.probe_every_s)

    def _look(self, handle: EngineHandle, *, probed: bool) -> None:
        """Give up the calls that the engine has lost. probed : whether it has answered the last probe"""
        now_s, running = asyncio.get_running_loop().time(), handle.running.values()
        told = handle.probed.told if probed else None
        lost = handle.watchdog.look(now_s, running, handle.models, probed=probed, told=told)
        for answering, reason in lost.items():
            error = lost_error(handle.name, reason)
            log.warning("%s", error)
            answering.lose(error)

    def _may_be_busy(self, handle: EngineHandle) -> bool:
        """Whether an engine that answers no probe may be at work on answers that show nothing before their end."""
        return handle.hangs and handle.watchdog.may_be_busy(asyncio.get_running_loop().time())

    def _begin_probe(self, handle: EngineHandle) -> asyncio.Task[bool]:
        """Return the probe that runs, or begin one: an engine has one probe at a time."""
        if handle.probe is None or handle.probe.done():
            handle.probe = asyncio.create_task(self._probe_once(handle))
        return handle.probe

    async def _probe_once(self, handle: EngineHandle) -> bool:
        try:
            health = await handle.engine.probe()
        except Exception as error:  # after any error the watch must go on
            unreachable = isinstance(error, EngineError) and error.unreachable
            if str(error) != handle.trouble and not (unreachable and handle.state.alive):  # else `_refused` says it
                log.warning("%s", error)
            handle.trouble, handle.hangs = str(error), isinstance(error, EngineError) and error.late
            if unreachable:
                self._refused(handle)
            elif not (isinstance(error, EngineError) and error.local):
                handle.probes_failed += 1
            return False
        return self._answered(handle, health)

    def _answered(self, handle: EngineHandle, health: Health) -> bool:
        """Bring the handle up to date after a successful probe. False: the engine's restart is not over."""
        models = {model.id: model for model in health.models if self._is_served(model.id)}
        event = EngineEvent.ANSWERED if models else EngineEvent.BARE
        came_up = not handle.up
        if came_up and not after(handle.state, event).up:
            return False
        program = handle.probed.program
        handle.answer(health)
        if came_up or models != handle.models:
            self._known_models.change(handle.models, models)
            others = models.keys() != handle.models.keys()
            handle.models = models
            self._route_queues.keep(self.models, self.handles)
            if came_up or others:
                _log_models(handle, health, came_up=came_up)
        if came_up or health.paths != handle.endpoints.told:
            handle.endpoints = Endpoints(health.paths)
        before, handle.info = handle.info, self._info(handle, health, came_up=came_up)
        if handle.models and (came_up or health.program != program):
            _log_program(handle, health)
        was_ready = handle.ready
        self._step(handle, event)
        if was_ready and handle.ready and handle.info != before:
            self._notify(EngineReady(handle.info))
            self._follow_homes()
        return True

    def _info(self, handle: EngineHandle, health: Health, *, came_up: bool) -> EngineInfo:
        """The description of an engine that is up, for the scheduler."""
        learner = handle.engine.slots
        slots = health.slots or (handle.engine.info if came_up else handle.info).slots
        return msgspec.structs.replace(
            handle.engine.info,
            slots=slots,
            look_ahead=handle.engine.info.look_ahead if learner is None else learner.look_ahead,
            tokens_max=health.tokens_max if self._config.memory_bound else None,
            models=self._names(handle),
            speeds=self._speeds(handle, slots),
            models_at_once=handle.models_at_once,
            loaded=health.told.loaded if handle.models_at_once else None,
            weights=self._weights(handle),
            prefix_cache=health.told.prefix_cache is not False,
        )

    def _weights(self, handle: EngineHandle) -> dict[str, str]:
        """The model of each route queue, for an engine that loads models on demand."""
        if not handle.models_at_once:
            return {}
        route_queues = self._route_queues.on(handle.name, handle.models, handle.endpoints)
        return {route_queue.name: route_queue.model for route_queue in route_queues}

    def _speeds(self, handle: EngineHandle, slots: int) -> dict[str, StepTimes]:
        return {
            model: profile.step_times(slots)
            for model, profile in self._profiles.items()
            if model == "" or model in handle.models
        }

    # ---- slots --------------------------------------------------------------------------------------------------

    def sent(self, handle: EngineHandle, in_flight: InFlightCall, now_s: float, *, holds_up: bool) -> None:
        """A call goes to the engine. holds_up : requests wait there until the call's answer begins"""
        handle.add(in_flight)
        if (learner := handle.engine.slots) is not None:
            request = in_flight.request
            learner.sent(request.id, now_s, request.sequences, loads=holds_up)

    def adopted(self, handle: EngineHandle, in_flight: InFlightCall, now_s: float) -> None:
        """A call runs on the engine that an earlier process has sent."""
        handle.add(in_flight)
        if (learner := handle.engine.slots) is not None:
            request = in_flight.request
            learner.adopted(request.id, now_s, in_flight.measured.first_at_s, request.sequences)

    def began(self, handle: EngineHandle, in_flight: InFlightCall, now_s: float) -> None:
        """The stream of a call begins."""
        if (learner := handle.engine.slots) is not None:
            learner.began(in_flight.request.id, now_s)
            self._follow_slots(handle, learner)

    def left(self, handle: EngineHandle, in_flight: InFlightCall, now_s: float, tokens: float) -> None:
        """A call has left the engine. tokens : of its whole answer; 0: unknown, or none"""
        handle.remove(in_flight)
        if (learner := handle.engine.slots) is not None:
            learner.ended(in_flight.request.id, now_s, tokens)
            self._follow_slots(handle, learner)

    def _follow_slots(self, handle: EngineHandle, learner: SlotsLearner) -> None:
        """Tell the scheduler of another number of slots, or another look-ahead."""
        info = handle.info
        if (learner.slots, learner.look_ahead) != (info.slots, info.look_ahead) and handle.up:
            speeds = info.speeds if learner.slots == info.slots else self._speeds(handle, learner.slots)
            handle.info = msgspec.structs.replace(
                info, slots=learner.slots, look_ahead=learner.look_ahead, speeds=speeds
            )
            if handle.ready:
                self._notify(EngineReady(handle.info))

    # ---- failures of requests -----------------------------------------------------------------------------------

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
        """An engine that refuses connections has died, or still finishes its requests."""
        if handle.up:
            log.warning("engine %s takes no connections; %d requests run on it", handle.name, len(handle.running))
            self._step(handle, EngineEvent.REFUSED)
            handle.nudge.set()

    # ---- events for the scheduler -----------------------------------------------------------------------------

    def _step(self, handle: EngineHandle, event: EngineEvent) -> None:
        """Let the engine's state follow, and tell the scheduler."""
        for notice in handle.step(event):
            if notice is Notice.OPENED:
                self._notify(EngineReady(handle.info))
                self._follow_homes()
            elif notice is Notice.CLOSED:
                self._notify(EngineClosed(handle.name, handle.state.expected))
                self._follow_homes()
            else:
                self._lose(handle, event)

    def _follow_homes(self) -> None:
        """After an engine has come or gone: others serve the requests of its group no longer, or meanwhile."""
        if self._homes is not None:
            self._list_again()

    def _lose(self, handle: EngineHandle, event: EngineEvent) -> None:
        handle.probes_failed = 0
        if not handle.state.planned and event is not EngineEvent.EMPTY:  # then `_refused` has said it
            log.warning("engine %s is lost with %d running requests", handle.name, len(handle.running))
        if handle.engine.slots is not None:
            handle.engine.slots.restarted()
        state = handle.state
        self._notify(EngineLost(handle.name, handle.answered, planned=state.planned, expected=state.expected))


def _nobody(event: Event) -> None:
    """Takes what is told before the start."""


def _cancel(task: asyncio.Task[None] | asyncio.Task[bool] | None) -> None:
    if task is not None:
        task.cancel()


def _log_models(handle: EngineHandle, health: Health, *, came_up: bool) -> None:
    names = _shortened(list(handle.models))
    if not handle.models:
        listed = _shortened([model.id for model in health.models]) or "no model at all"
        log.error("engine %s lists no model to be served, but %s: it gets no requests", handle.name, listed)
    elif not came_up:
        log.info("engine %s serves other models now: %s", handle.name, names)


def _log_program(handle: EngineHandle, health: Health) -> None:
    """What was found behind an engine's URL, in one line."""
    models, slots = _count(len(handle.models), "model"), _count(handle.info.slots, "slot")
    learning = "" if health.slots_found else " (learning)"
    names = _shortened(list(handle.models))
    log.info("engine %s: %s, %s, %s%s: %s", handle.name, health.program, models, slots, learning, names)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _shortened(names: list[str]) -> str:
    more = [f"and {len(names) - NAMES_SHOWN} more"] if len(names) > NAMES_SHOWN else []
    return ", ".join([*names[:NAMES_SHOWN], *more])
