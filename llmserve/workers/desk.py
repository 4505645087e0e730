"""The scheduler process's side of its relays: their requests are admitted and queued like any client's.

After the death of a scheduler process, the next one first hears of what runs, then of what waits (`Desk.restored`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, cast

import msgspec

from llmserve.calls.in_flight import Head, InFlightCall
from llmserve.engines.openai import OpenAIEngine
from llmserve.errors import RequestError, Unauthorized
from llmserve.gateway.draft import Draft
from llmserve.gateway.endpoints import ENDPOINTS
from llmserve.gateway.part import Admissions
from llmserve.gateway.stages import while_serving
from llmserve.live.cluster import LiveCluster
from llmserve.live.handle import EngineHandle
from llmserve.observe.metrics import Metrics
from llmserve.request import Call, Wire
from llmserve.tenants.budgets import Ledger
from llmserve.tenants.keys import GATEWAY
from llmserve.tenants.limits import KeyLimits
from llmserve.workers import messages
from llmserve.workers.link import Link
from llmserve.workers.messages import ToldError
from llmserve.workers.remote_calls import RemoteAnswer, RemoteCall, StreamSeen

log = logging.getLogger("llmserve")

TOLD_S = 2.0  # for which a new scheduler process waits to hear what runs
ENGINE_S = 10.0  # for which it then waits for an engine, before it looks at what waits


class Counts:
    """The connections of a relay, as its last message tells them; see readings.Connections."""

    def __init__(self) -> None:
        self.connections: range = range(0)
        self.buffered_bytes = 0
        self.cut: Counter[str] = Counter()


class RemoteRelay:
    """One relay: its link, and its calls by the relay's numbers.

    name    that no other relay has; "": it has not said Hello yet.  counts : of its connections
    """

    def __init__(self, desk: Desk) -> None:
        self.link = Link(messages.FromRelay, self._opened, self._take, self._lost)
        self.name = ""
        self.counts = Counts()
        self._cpu_s = 0.0  # of the relay's process, as far as the desk's sum has it
        self._desk, self._cluster = desk, desk.cluster
        self._calls: dict[int, RemoteCall] = {}
        self._homeless: dict[int, messages.GoesOn] = {}  # on engines that are not known yet
        self._introduced: dict[str, tuple[int, int, int]] = {}  # engines that the relay knows
        self._asking: set[asyncio.Task[None]] = set()
        self._takes: dict[type, Callable[[Any], None]] = {
            messages.Hello: self._hello,
            messages.Arrived: self._arrived,
            messages.GoesOn: self._goes_on,
            messages.Told: lambda told: desk.told(self),
            messages.Began: self._began,
            messages.Ended: self._ended,
            messages.Cancelled: self._cancelled,
            messages.Over: self._over,
            messages.PromptCounted: self._prompt_counted,
            messages.ResponseKept: self._response_kept,
            messages.Suspected: lambda told: self._answer(self._suspected(told)),
            messages.NotThere: lambda told: self._answer(self._not_there(told)),
            messages.AskPlace: self._ask_place,
            messages.Progress: self._progress,
        }

    def introduce(self, handle: EngineHandle) -> None:
        engine = cast(OpenAIEngine, handle.engine)
        known = id(engine), engine.sign, engine.outages
        if self._introduced.get(handle.name) != known:
            self._introduced[handle.name] = known
            self.link.tell(messages.UseEngine(handle.name, engine.url, engine.api_key, engine.sign, engine.outages))

    def _take(self, message: Any) -> None:
        self._takes[type(message)](message)

    def _opened(self, link: Link) -> None:
        cluster = self._cluster
        self._desk.relays.add(self)
        link.tell(self._desk.keys)
        link.tell(messages.Welcome(cluster.calls.secret, cluster.driver.zero_s, dict(cluster.forecasts.secrets)))
        if self._cluster.draining:
            self.drain()

    def _hello(self, told: messages.Hello) -> None:
        self.name = told.relay

    def drain(self) -> None:
        self.link.tell(messages.Drain(max(1.0, self._cluster.drain_time_s)))

    def _lost(self, link: Link) -> None:
        """The relay has died, or ends: its calls are cancelled, as if all of its clients had left."""
        self._desk.relays.discard(self)
        if self._calls:
            log.warning("a relay is lost with %d requests", len(self._calls))
        calls, self._calls = self._calls, {}
        for remote in calls.values():
            if remote.in_flight is not None:
                self._cluster.calls.cancel(remote.in_flight)
            remote.release()

    # ---- requests ----

    def _arrived(self, told: messages.Arrived) -> None:
        if not self._desk.hold(self, told):
            self.admit(told)

    def admit(self, told: messages.Arrived) -> None:
        """Queue a request, or refuse it: for limits only one that no earlier scheduler process has admitted."""
        remote = self._calls[told.number] = RemoteCall(self, told.number)
        draft, again = draft_of(told), told.waited_s is not None
        try:
            call = self._desk.decide(draft, again=again)
        except Exception as error:
            remote.account = draft.account
            if not isinstance(error, RequestError):
                log.exception("a request of a relay was not admitted")
                error = RequestError("the front-end failed on this request", code="internal_error")
            self.link.tell(messages.Refuse(told.number, ToldError.of(error)))
            return
        remote.account = account = draft.account
        assert account is not None, "a request that was admitted has an account"
        if told.read is not None and told.read.model == call.model and draft.prompt is told.prompt:
            call = msgspec.structs.replace(call, features=told.read.features)
        if told.waited_s is not None and call.terms.slo_s is not None:  # of its time to the deadline
            terms = msgspec.structs.replace(call.terms, slo_s=call.terms.slo_s - told.waited_s)
            call = msgspec.structs.replace(call, terms=terms)
        charge = account.named_charge(call.model, self._held_as(told.number), again=again)
        remote.in_flight = self._cluster.calls.submit(call, remote, charge, forward=remote.forward)

    def _goes_on(self, told: messages.GoesOn) -> None:
        """Take over a call that runs since an earlier scheduler process."""
        number, receipt = told.arrived.number, told.started.receipt
        if told.is_over and not self._desk.has_left(self._held_as(number)):
            self.link.tell(messages.Settled(number))
            return
        handle = self._cluster.fleet.handles.get(receipt.engine)
        remote = self._calls.get(number)
        if remote is None:
            remote = self._calls[number] = RemoteCall(self, number)
            with contextlib.suppress(KeyError):  # the key has been removed meanwhile
                remote.account = self._desk.key_limits.acquire_again(told.arrived.key)
        if handle is None:
            self._homeless[number] = told
            return
        self._homeless.pop(number, None)
        calls, call = self._cluster.calls, self._desk.decided(told)
        held_as, account = self._held_as(number), remote.account
        charge = account.named_charge(call.model, held_as, again=True) if account is not None else None
        in_flight = InFlightCall(call, receipt.request_id, remote, charge, None, remote.forward)
        in_flight.receipt, in_flight.preemptions = receipt, told.preemptions
        in_flight.delivery.answered, in_flight.measured.first_at_s = told.answered, told.first_at_s
        in_flight.arrived_at_s = self._cluster.now_s() - told.waited_s
        remote.in_flight = in_flight
        calls.adopt(in_flight, handle, remote.go_on(calls, handle, in_flight, told.started), told.ran_s)

    def _held_as(self, number: int) -> str:
        """The name of what a call holds of budgets."""
        return f"{self.name}/{number}"

    def _cancelled(self, told: messages.Cancelled) -> None:
        remote = self._calls.get(told.number)
        if remote is not None and remote.in_flight is not None:
            self._cluster.calls.cancel(remote.in_flight)

    def _over(self, told: messages.Over) -> None:
        self._desk.let_go(self, told.number)
        self._homeless.pop(told.number, None)
        remote = self._calls.get(told.number)
        if remote is not None:  # else it was told to the scheduler process before this one
            remote.release()
            self._forget(remote)

    def _forget(self, remote: RemoteCall) -> None:
        if remote.over:
            self._calls.pop(remote.number, None)

    # ---- answers ----

    def _answering(self, number: int, attempt: int) -> RemoteAnswer | None:
        """The answer that the relay speaks of; None: it was given up here meanwhile."""
        remote = self._calls.get(number)
        answering = remote.answering if remote is not None else None
        return answering if answering is not None and answering.attempt == attempt else None

    def _began(self, told: messages.Began) -> None:
        remote = self._calls.get(told.number)
        if remote is not None and remote.in_flight is not None:
            remote.in_flight.delivery.answered = True
        answering = self._answering(told.number, told.attempt)
        if answering is None:
            return
        in_flight = answering.in_flight
        if told.first_token:
            in_flight.measured.first_at_s = told.at_s
            in_flight.measured.usage = StreamSeen(True, 0).reader
        self._cluster.calls.began(in_flight, first_token=told.first_token)
        if told.first_token:
            self._cluster.fleet.began(answering.handle, in_flight, told.at_s)

    def _ended(self, told: messages.Ended) -> None:
        answering = self._answering(told.number, told.attempt)
        if answering is None:
            self._ended_homeless(told)
            return
        in_flight, receipt = answering.in_flight, answering.in_flight.receipt
        delivery, measured = in_flight.delivery, in_flight.measured
        delivery.complete = delivery.complete or told.complete
        delivery.answered, delivery.error = told.answered, told.error or delivery.error
        if told.refused and receipt is not None:
            delivery.refused = Head(told.refused, "", None, receipt, b"")
        in_flight.preemptions = told.preemptions
        measured.counts, measured.cut, measured.names = told.counts, told.cut, told.names
        measured.first_at_s, measured.last_at_s = told.first_at_s, told.last_at_s
        if in_flight.call.wire.stream:
            measured.usage = StreamSeen(told.answered, told.tokens).reader
        self._cluster.calls.ended(answering, told.ended)
        if (remote := self._calls.get(told.number)) is not None:
            self._forget(remote)

    def _ended_homeless(self, told: messages.Ended) -> None:
        """A call has ended on an engine that this process has never known. It runs again if it may."""
        went_on = self._homeless.pop(told.number, None)
        if went_on is not None and told.ended.retryable and not told.complete:
            self._calls.pop(told.number).release()
            self._arrived(msgspec.structs.replace(went_on.arrived, waited_s=went_on.waited_s))

    def _prompt_counted(self, told: messages.PromptCounted) -> None:
        remote = self._calls.get(told.number)
        if remote is not None and remote.in_flight is not None:
            self._cluster.forecasts.learn_prompt(remote.in_flight.call, told.tokens)

    def _response_kept(self, told: messages.ResponseKept) -> None:
        remote = self._calls.get(told.number)
        if remote is not None and remote.in_flight is not None:
            self._cluster.routes.note(told.response_id, told.engine, remote.in_flight.call)

    def _progress(self, told: messages.Progress) -> None:
        for went_on in list(self._homeless.values()):
            self._goes_on(went_on)
        for seen in told.running:
            answering = self._answering(seen.number, seen.attempt)
            if answering is not None:
                answering.heard_s = seen.heard_s
                if seen.began:
                    answering.in_flight.measured.usage = StreamSeen(True, seen.tokens).reader
        for name, heard_s in told.heard.items():
            handle = self._cluster.fleet.handles.get(name)
            if handle is not None:
                cast(OpenAIEngine, handle.engine).heard(heard_s)
        self.counts.connections, self.counts.buffered_bytes = range(told.connections), told.buffered_bytes
        self.counts.cut = Counter(told.cut)
        self._desk.cpu_s += told.cpu_s - self._cpu_s
        self._cpu_s = told.cpu_s
        for code, number in told.refused.items():
            self._desk.metrics.refused(code, number)

    # ---- questions ----

    def _ask_place(self, told: messages.AskPlace) -> None:
        remote = self._calls.get(told.number)
        if remote is not None and (in_flight := remote.in_flight) is not None:
            queued = self._cluster.estimator.position_of(in_flight)
            self.link.tell(messages.Place(told.number, in_flight.request.id, queued))

    def _answer(self, answering: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(answering)
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _suspected(self, told: messages.Suspected) -> None:
        try:
            handle = self._cluster.fleet.handles.get(told.engine)
            if handle is not None:
                await self._cluster.fleet.suspect(handle, told.model, unreachable=told.unreachable)
        finally:
            self.link.tell(messages.Reply(told.question))

    async def _not_there(self, told: messages.NotThere) -> None:
        error: RequestError | None = None
        try:
            handle, remote = self._cluster.fleet.handles.get(told.engine), self._calls.get(told.number)
            if handle is not None and remote is not None and remote.in_flight is not None:
                call = remote.in_flight.call
                error = self._cluster.routes.no_endpoint(handle, call, told.status, told.body)
        finally:
            self.link.tell(messages.Reply(told.question, ToldError.of(error) if error is not None else None))


class Desk:
    """All relays of the scheduler process. count : that there are, once all have started

    relays  those whose link is open
    cpu_s   processor time of all relays that have been there
    """

    def __init__(
        self,
        cluster: LiveCluster,
        admissions: Admissions,
        key_limits: KeyLimits,
        ledger: Ledger | None,
        metrics: Metrics,
        count: int,
    ) -> None:
        self.cluster, self.metrics, self.key_limits = cluster, metrics, key_limits
        self.relays: set[RemoteRelay] = set()
        self.cpu_s = 0.0
        self._admissions = admissions
        self._while_serving = while_serving(cluster)
        self._held: dict[tuple[RemoteRelay, int], messages.Arrived] | None = None  # None: nothing is held back
        self._told: set[RemoteRelay] = set()
        self._all_told = asyncio.Event()
        self._ledger, self._count = ledger, count
        if ledger is not None:
            ledger.on_written = self._written

    # ---- for a relay ----

    @property
    def keys(self) -> messages.UseKeys:
        known = self.key_limits.keys
        tenants = known.tokens.tenants if known.tokens is not None else None
        return messages.UseKeys(dict(known.names), tuple(tenants) if tenants is not None else None)

    def decide(self, draft: Draft, *, again: bool) -> Call:
        """What is asked before the body where one process has the connection, and after it. Raises RequestError.

        again : an earlier scheduler process has admitted the request
        """
        try:
            self.key_limits.account(draft.key)
        except KeyError:  # the key has just been removed, and the relay has not heard of it
            raise Unauthorized("the API key is wrong") from None
        self._while_serving(draft)
        draft.account = self.key_limits.acquire_again(draft.key) if again else self.key_limits.acquire(draft.key)
        admissions = self._admissions
        return (admissions.gateways if draft.key == GATEWAY else admissions.clients).decide(draft)

    def decided(self, told: messages.GoesOn) -> Call:
        """The call as the scheduler process before this one had decided, as a step of a program that is known here."""
        draft, started = draft_of(told.arrived), told.started
        draft.terms, draft.model, draft.route_queue = started.terms, started.model, started.queue
        if self._admissions.identified is not None and draft.key != GATEWAY:
            self._admissions.identified(draft)
        return draft.call()

    # ---- after the death of a scheduler process ----

    async def restored(self) -> None:
        """Wait until the relays have told what runs. What waits is held back until an engine has told its models, for
        it may name none.
        """
        self._held = {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TOLD_S):
                await self._all_told.wait()

    def told(self, relay: RemoteRelay) -> None:
        self._told.add(relay)
        if len(self._told & self.relays) >= self._count and not self._all_told.is_set():
            self._all_told.set()
            if self._ledger is not None:
                self._ledger.give_up_rest()

    def has_left(self, name: str) -> bool:
        """Whether an earlier scheduler process has reserved a part of budgets under this name, and not settled it."""
        return self._ledger is not None and self._ledger.has_left(name)

    def _written(self, names: Sequence[str]) -> None:
        """What calls have used of budgets is written."""
        relays = {relay.name: relay for relay in self.relays}
        for name in names:
            relay, _, number = name.partition("/")
            if relay in relays:
                relays[relay].link.tell(messages.Settled(int(number)))

    async def admit_held(self) -> None:
        """Admit what is held back, as soon as an engine is ready."""
        ends_s = self.cluster.now_s() + ENGINE_S
        while not any(self.cluster.engines_ready.values()) and self.cluster.now_s() < ends_s:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        held, self._held = self._held or {}, None
        for (relay, _), told in sorted(held.items(), key=lambda pair: -(pair[1].waited_s or 0.0)):
            if relay in self.relays:
                relay.admit(told)

    def hold(self, relay: RemoteRelay, told: messages.Arrived) -> bool:
        """Hold back a request that has arrived, if it is too early for it."""
        if self._held is None:
            return False
        self._held[relay, told.number] = told
        return True

    def let_go(self, relay: RemoteRelay, number: int) -> None:
        """A request is over: it is held back no longer."""
        if self._held is not None:
            self._held.pop((relay, number), None)

    # ---- for the metrics ----

    @property
    def count(self) -> int:
        return len(self.relays)

    @property
    def connections(self) -> range:
        return range(sum([len(relay.counts.connections) for relay in self.relays]))

    @property
    def buffered_bytes(self) -> int:
        return sum([relay.counts.buffered_bytes for relay in self.relays])

    @property
    def cut(self) -> Mapping[str, int]:
        return sum([relay.counts.cut for relay in self.relays], Counter[str]())

    # ---- the relays ----

    def tell_all(self, message: Any) -> None:
        for relay in self.relays:
            relay.link.tell(message)

    def renew(self) -> None:
        """Have the relays take the keys that are known now, and read certificates again."""
        self.tell_all(self.keys)
        self.tell_all(messages.RenewCertificates())

    def drain(self) -> None:
        """Have the relays refuse new requests at their heads."""
        for relay in self.relays:
            relay.drain()

    @contextlib.asynccontextmanager
    async def listening(self, path: str) -> AsyncIterator[None]:
        """Take relays inside the block. path : of the socket"""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        server = await asyncio.get_running_loop().create_unix_server(partial(_link_of_new_relay, self), path)
        try:
            yield
        finally:
            server.close()
            for relay in list(self.relays):
                relay.link.flush()
                relay.link.close()


def _link_of_new_relay(desk: Desk) -> Link:
    return RemoteRelay(desk).link


def draft_of(told: messages.Arrived) -> Draft:
    endpoint = ENDPOINTS[told.path]
    return Draft(
        endpoint,
        dict(told.headers),
        address=told.address,
        wire=Wire(told.path, b"", told.stream, None, told.headers, "", endpoint.form),
        prompt=told.prompt,
        bounds=told.bounds,
        opening=told.opening,
        blocks=told.blocks,
        block_share=told.block_share,
        previous=told.previous,
        tier=told.tier,
        priority=told.priority,
        trail=told.trail.trail if told.trail is not None else None,
        model=told.prompt.model,
        key=told.key,
        stream_name=told.stream_name,
        slo_s=told.slo_s,
        deadline_s=told.deadline_s,
        predicted_tokens=told.predicted_tokens,
        receipt=told.receipt,
    )
