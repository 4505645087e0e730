"""The relay's side: clients' requests are read here, the scheduler process decides, and engines' answers pass here.

While there is no scheduler process, requests wait and answers go on. The next one is told of both.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from llmserve.calls.client_request import ClientExchange
from llmserve.errors import ConfigError, Unavailable
from llmserve.forecasts.reading import PromptReaders
from llmserve.gateway.completions import BeginTrace
from llmserve.gateway.draft import Draft
from llmserve.gateway.intake import Intake
from llmserve.gateway.parse import limits_of
from llmserve.gateway.part import tls_of
from llmserve.gateway.stages import Admission, Stage, authenticated, reading
from llmserve.http.server import Server
from llmserve.settings.tree import Config
from llmserve.tenants.authentication import Keys
from llmserve.workers import messages
from llmserve.workers.balance import Sharing
from llmserve.workers.line import SchedulerLine
from llmserve.workers.relay_engines import RelayEngines
from llmserve.workers.relayed_call import RelayedCall, never_ran

log = logging.getLogger("llmserve")

PROGRESS_S = 0.5


class Relay(Intake):
    """Takes clients' requests to the scheduler process, and its calls to engines.

    path        of the scheduler process's socket.  keys : of clients, which the scheduler process tells
    on_welcome  called when a scheduler process is there

    admission   the stages of requests, to which parts add theirs
    on_lost      called when the scheduler process is gone; None: the next one is awaited
    begin_trace  begins the traces of requests; None: there are none
    server   of this relay's clients, once it listens.  sharing : of its connections with other relays; None: none
    refused : requests by code, until the next report
    """

    def __init__(self, config: Config, path: str, keys: Keys, on_welcome: Callable[[], None]) -> None:
        super().__init__(Admission(head=[self._while_serving, authenticated(keys)], body=[self._read]))
        self.admission = self._admission
        self.admission.by_address = config.limits.fair_by == "address"
        self.begin_trace: BeginTrace | None = None
        self.on_lost: Callable[[], None] | None = None
        self.server: Server | None = None
        self.sharing: Sharing | None = None
        self.refused: Counter[str] = Counter()
        self.line = SchedulerLine(path, secrets.token_hex(8), self._hear, self._lost)
        self._config, self._keys = config, keys
        self._on_welcome = on_welcome
        self._engines = RelayEngines(config)
        self._calls: dict[int, RelayedCall] = {}  # by number
        self._last_number = 0
        self._zero_s: float | None = None
        self._reading: Stage | None = None
        self._readers = PromptReaders({})
        self._retry_after_s: float | None = None  # of new requests, while the server shuts down
        self._closed = False
        self._hears: dict[type, Callable[[Any], None]] = {
            messages.Welcome: self._welcome,
            messages.UseKeys: self._use_keys,
            messages.RenewCertificates: lambda told: self._renew_certificates(),
            messages.UseEngine: self._engines.use,
            messages.Drain: self._drain,
            messages.Start: self._start,
        }
        self._of_call: dict[type, Callable[[RelayedCall, Any], None]] = {
            messages.Settled: lambda call, told: call.settled(),
            messages.Stop: RelayedCall.stop,
            messages.GiveUp: RelayedCall.give_up,
            messages.Drop: RelayedCall.drop,
            messages.Refuse: RelayedCall.refuse,
            messages.Fail: RelayedCall.fail,
            messages.TellRefused: RelayedCall.tell_refused,
            messages.Place: RelayedCall.show_place,
        }

    def close(self) -> None:
        self._closed = True
        self.line.close()

    # ---- requests ----

    def _while_serving(self, draft: Draft) -> None:
        if self._retry_after_s is not None:
            raise Unavailable("the server is shutting down", code="draining", retry_after_s=self._retry_after_s)

    def _read(self, draft: Draft) -> None:
        assert self._reading is not None, "the relay listens only after a Welcome"
        self._reading(draft)

    def _take(self, draft: Draft, exchange: ClientExchange) -> None:
        """Pass a request on to the scheduler process."""
        self._last_number = number = self._last_number + 1
        call = self._calls[number] = RelayedCall(self, number, draft, exchange, self._readers, self.begin_trace)
        call.arrive()

    def count_refused(self, code: str) -> None:
        self.refused[code] += 1

    # ---- for a call ----

    def now_s(self) -> float:
        assert self._zero_s is not None, "the relay listens only after a Welcome"
        return time.monotonic() - self._zero_s

    def forget(self, call: RelayedCall) -> None:
        self._calls.pop(call.number, None)

    # ---- the scheduler process ----

    def _hear(self, message: Any) -> None:
        kind = type(message)
        if (hear := self._of_call.get(kind)) is None:
            self._hears[kind](message)
        elif (call := self._calls.get(message.number)) is not None:  # else it is over here, which is on its way
            hear(call, message)

    def _lost(self) -> None:
        if self.on_lost is not None:
            self.on_lost()
            return
        log.warning("the scheduler process is gone: %d requests wait for the next one or go on", len(self._calls))

    def _welcome(self, told: messages.Welcome) -> None:
        before_s, self._zero_s = self._zero_s, told.zero_s
        limits = self._config.limits
        self._reading = reading(limits_of(limits), told.secret, limits.session_from)
        self._readers = PromptReaders(told.readers)
        self._retry_after_s = None
        calls = list(self._calls.values())
        if before_s is not None:
            for call in calls:
                call.shift(before_s - told.zero_s)
        for call in sorted(calls, key=lambda call: not call.runs):  # what runs holds slots
            call.tell_again()
        self.line.tell(messages.Told())
        self._on_welcome()

    def _use_keys(self, told: messages.UseKeys) -> None:
        self._keys.use(told.names)
        if self._keys.tokens is not None:
            self._keys.tokens.allow(frozenset(told.tenants) if told.tenants is not None else None)

    def _renew_certificates(self) -> None:
        try:
            self._engines.renew_certificate()
            tls = tls_of(self._config)
        except ConfigError as error:  # changed since the scheduler process has read it
            log.error("a certificate stays as it was: %s", error)
            return
        if tls is not None and self.server is not None:
            self.server.use(tls)

    def _start(self, told: messages.Start) -> None:
        call = self._calls.get(told.number)
        if call is None:  # the client has left
            self.line.tell(never_ran(told))
        else:
            call.start(told, self._engines.handle(told.receipt.engine))

    def _drain(self, told: messages.Drain) -> None:
        self._retry_after_s = told.retry_after_s

    def progress(self) -> None:
        """Tell what is seen of answers, of engines and of connections; again in PROGRESS_S."""
        if self._closed:
            return
        asyncio.get_running_loop().call_later(PROGRESS_S, self.progress)
        server, refused = self.server, dict(self.refused)
        if server is not None and self.sharing is not None:
            self.sharing.note(server)
        if server is None or not self.line.is_open:
            return
        self.refused.clear()
        running = tuple([call.seen() for call in self._calls.values() if call.runs])
        connections = len(server.connections), server.buffered_bytes, dict(server.cut)
        self.line.tell(messages.Progress(running, self._engines.heard(), refused, *connections, time.process_time()))
