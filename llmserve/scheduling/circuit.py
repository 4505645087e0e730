"""A circuit breaker: an engine that fails all requests gets none for a while, then one at a time on trial.

closed     fewer than `faults_max` faults in a row
open       `faults_max` requests in a row failed by the engine's fault: nothing is sent until the pause is over
half open  the pause is over: one request (of a barrier engine: one batch) is on trial; its success closes the circuit,
           its failure opens the circuit for longer

Only the engine's own faults count (5xx, silence, broken connections), never a client's error (4xx). Only a request's
first try counts. Requests sent before the circuit opened neither lengthen the pause nor end it.

A request may also make every engine fail. One fault does not show which is to blame, so three rules judge faults:

* Faults of one sender do not open a circuit while the engine serves other senders. A circuit opens at the faults of as
  many senders as the engine has lately served, `faults_max` at most.
* A request that fails on a second engine, too, is at fault itself. The fault is taken back from the first engine, and
  the sender is suspect until one of the sender's requests is answered. A request that a second engine answers proves
  the first fault, so that `faults_max` proofs open the circuit, from any senders.
* A suspect is not put on trial until one more pause has passed in which no other request came. Suspects are requests
  that have failed, and all requests of suspect senders; the senders whose faults opened the circuit are suspect, too. A
  suspect's failure on trial does not lengthen the pause, and a suspect sender's faults do not count.

With one engine and no keys, a stream of distinct failing prompts cannot be told from a dead engine.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Protocol

from llmserve.request import Request

PAUSE_GROWTH = 2.0
PAUSES_MAX = 32.0  # longest pause, in units of the first
FAULTS_KEPT = 64  # faults in a row that are remembered, where faults_max is not larger
SERVED_S = 60.0  # seconds for which a sender counts as lately served
SUSPECTS_MAX = 1024  # senders


class Suspects:
    """The last SUSPECTS_MAX senders whose requests were at fault, and have not been answered since."""

    def __init__(self) -> None:
        self._senders: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, sender: int) -> bool:
        return sender in self._senders

    def __len__(self) -> int:
        return len(self._senders)

    def add(self, sender: int) -> None:
        """Suspect a sender. sender : as in Request; 0: unknown, and not suspected"""
        if sender:
            self._senders[sender] = None
            self._senders.move_to_end(sender)
            if len(self._senders) > SUSPECTS_MAX:
                self._senders.popitem(last=False)

    def clear(self, sender: int) -> None:
        """Record that a request of this sender was answered."""
        if self._senders:
            self._senders.pop(sender, None)


class Tried(Protocol):
    """A request that an engine failed or answered. failed_on, suspect : as in QueuedRequest"""

    request: Request
    failed_on: str
    suspect: bool


class Suspicious(Protocol):
    """A batch. suspect : whether one of the requests may have been the cause of a fault"""

    @property
    def suspect(self) -> bool: ...


class Circuit:
    """The circuit breaker of one engine.

    faults_max : faults in a row that open the circuit; 0: never.  pause_s : the first pause; each next is doubled
    """

    __slots__ = (
        *("_faults", "_faults_max", "_first_pause_s", "_pause_s", "_proofs", "_served"),
        *("open_until_s", "trial"),
    )

    def __init__(self, faults_max: int, pause_s: float) -> None:
        self._faults_max = faults_max or math.inf
        self._first_pause_s = self._pause_s = pause_s
        self._faults: OrderedDict[int, int] = OrderedDict()  # request id -> sender, of the faults in a row
        self._proofs = 0  # requests among them that another engine has answered
        self._served: OrderedDict[int, float] = OrderedDict()  # sender -> time of its last answer, the latest last
        self.open_until_s: float | None = None  # None while closed; the past while half open
        self.trial: int | None = None  # the request on trial while half open

    @property
    def first_pause_s(self) -> float:
        return self._first_pause_s

    @property
    def closed(self) -> bool:
        return self.open_until_s is None

    @property
    def suspects_from_s(self) -> float:
        """When a suspect may be put on trial; -inf while closed."""
        return -math.inf if self.open_until_s is None else self.open_until_s + self._pause_s

    @property
    def accused(self) -> Collection[int]:
        """Senders of the faults in a row."""
        return self._faults.values()

    def takes(self, now_s: float) -> bool:
        """Whether a request may be sent now."""
        return self.open_until_s is None or (now_s >= self.open_until_s and self.trial is None)

    def refuses(self, batch: Suspicious, now_s: float) -> bool:
        """Whether a suspect batch would be on trial here too early."""
        return now_s < self.suspects_from_s and batch.suspect

    def started(self, request_id: int) -> None:
        if self.open_until_s is not None and self.trial is None:
            self.trial = request_id

    def fault(self, request: Request, now_s: float, *, suspect: bool = False) -> None:
        """Record that a request failed by the engine's fault. suspect : the request may be at fault"""
        if not suspect:
            self._faults[request.id] = request.sender
            if len(self._faults) > max(FAULTS_KEPT, 0 if self._faults_max == math.inf else self._faults_max):
                self._faults.popitem(last=False)
        if self.open_until_s is None:
            if self._is_failing(now_s):
                self.open_until_s = now_s + self._pause_s
        elif request.id == self.trial:
            if not suspect:
                self._pause_s = min(PAUSE_GROWTH * self._pause_s, PAUSES_MAX * self._first_pause_s)
            self.open_until_s, self.trial = now_s + self._pause_s, None

    def _is_failing(self, now_s: float) -> bool:
        if self._proofs >= self._faults_max:
            return True
        if len(self._faults) < self._faults_max:
            return False
        senders = {sender for sender in self._faults.values() if sender}
        unknown = sum([not sender for sender in self._faults.values()])  # each may be of another sender
        served = {sender for sender, at_s in self._served.items() if now_s < at_s + SERVED_S}
        return len(senders) + unknown >= min(self._faults_max, len(senders | served))

    def take_back(self, request_id: int, now_s: float) -> None:
        """Record that the request was at fault. Closes the circuit if the other faults would not have opened it, unless
        another request is on trial.
        """
        if self._faults.pop(request_id, None) is None or self.open_until_s is None or self.trial is not None:
            return
        if not self._is_failing(now_s):
            self._close()

    def prove(self, request_id: int, now_s: float) -> None:
        """Record that another engine has answered a request that failed here. May open the circuit."""
        if request_id in self._faults:
            self._proofs += 1
            if self.open_until_s is None and self._is_failing(now_s):
                self.open_until_s = now_s + self._pause_s

    def success(self, requests: Collection[Request], now_s: float) -> None:
        """Record that the engine has answered these requests. Closes the circuit unless another is on trial."""
        if self._faults_max == math.inf:
            return
        for request in requests:
            if request.sender:
                self._served[request.sender] = now_s
                self._served.move_to_end(request.sender)
                if len(self._served) > self._faults_max:
                    self._served.popitem(last=False)
        if self.open_until_s is not None and self.trial not in [request.id for request in requests]:
            return
        self._close()
        if self._faults:
            self._faults.clear()
            self._proofs = 0

    def _close(self) -> None:
        self._pause_s = self._first_pause_s
        self.open_until_s = self.trial = None

    def end_trial(self, request_id: int) -> None:
        """End the trial of a request that left the engine without a result (cancelled): another may be tried."""
        if request_id == self.trial:
            self.trial = None


class Faults:
    """The judge of faults and answers of all engines. circuit_of : the circuit of an engine that was ever ready"""

    def __init__(self, circuit_of: Callable[[str], Circuit]) -> None:
        self._circuit_of = circuit_of
        self.suspects = Suspects()

    def failed(self, engine: str, tried: Tried, now_s: float) -> list[str]:
        """Judge a fault of an engine. Returns the names of the engines whose circuit has changed."""
        request, first = tried.request, tried.failed_on or engine
        before_s = [(name, self._circuit_of(name).open_until_s) for name in dict.fromkeys((first, engine))]
        if first != engine:
            self.suspects.add(request.sender)
            self._circuit_of(first).take_back(request.id, now_s)
        suspect = tried.suspect or request.sender in self.suspects
        tried.failed_on, tried.suspect = first, True
        circuit = self._circuit_of(engine)
        was_closed = circuit.closed
        circuit.fault(request, now_s, suspect=suspect)
        if was_closed and not circuit.closed:
            for sender in circuit.accused:
                self.suspects.add(sender)
        return self._changed(before_s)

    def answered(self, engine: str, answered: Collection[Tried], now_s: float) -> list[str]:
        """Record that an engine has answered requests. Returns the names of the engines whose circuit has changed."""
        circuit = self._circuit_of(engine)
        before_s = [] if circuit.closed else [(engine, circuit.open_until_s)]  # an answer opens no circuit
        for tried in answered:
            self.suspects.clear(tried.request.sender)
            if tried.failed_on not in ("", engine):
                before_s.append((tried.failed_on, self._circuit_of(tried.failed_on).open_until_s))
                self._circuit_of(tried.failed_on).prove(tried.request.id, now_s)
        circuit.success([tried.request for tried in answered], now_s)
        return self._changed(before_s) if before_s else []

    def _changed(self, before_s: list[tuple[str, float | None]]) -> list[str]:
        names = [name for name, at_s in before_s if self._circuit_of(name).open_until_s != at_s]
        return list(dict.fromkeys(names))
