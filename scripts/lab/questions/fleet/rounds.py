"""A fleet in rounds of one second: its gateways, its groups in one process or several, what came of each request."""

from __future__ import annotations

import multiprocessing
import random
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.collector import collector_paused
from questions.fleet.counters import Controller, Served
from questions.fleet.gateway import Board, Gateway, Held, Routed, again_at
from questions.fleet.group import Ended, EngineSpeed, GroupProcess, Report
from questions.fleet.layout import Deaths, GroupPlace
from questions.fleet.traffic import Sent, Traffic

TAIL_S = 300  # longest time after the last arrival
SCORES = 500  # sample of forecasts for the first edges


@dataclass(frozen=True)
class Settings:
    """places : of all groups.  models : of each pool.  exchange : whether groups are told what others served"""

    places: tuple[GroupPlace, ...]
    deaths: Deaths
    traffic: Traffic
    speed: EngineSpeed
    models: int
    exchange: bool = True
    processes: int = 1
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)

    @property
    def pools(self) -> int:
        return len(self.traffic.peak_per_s)

    @property
    def pool_of(self) -> list[int]:
        return [place.pool for place in self.places]


@dataclass(slots=True)
class Results:
    """What came of the requests, in the order of their ends, and how much work it was.

    tokens           that the request got; offered_tokens : that its answer has
    waited_s         until the last start on an engine; NaN: never started
    groups           number of groups that had the request
    sent, routed     requests; decisions of gateways, which are more where a request needs another group
    gateway_s           of this machine, for all gateways; controller_s : for the controller
    controller_rows  numbers that groups sent to the controller and back
    behind           weighted tokens; see Controller
    step_ns          of every step of a scheduler
    """

    ids: list[int] = field(default_factory=list)
    arrived_s: list[float] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    offered_tokens: list[float] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    bursts: list[bool] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)
    sent: int = 0
    rounds: int = 0
    routed: int = 0
    gateway_s: float = 0.0
    controller_s: float = 0.0
    controller_rows: int = 0
    behind: list[float] = field(default_factory=list)
    step_ns: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def add(self, held: Held, ended: Ended) -> None:
        start_s = ended.started_at_s
        self.ids.append(ended.request_id)
        self.arrived_s.append(held.sent.at_s)
        self.ended_s.append(ended.at_s)
        self.waited_s.append(float("nan") if start_s is None else start_s - held.sent.at_s)
        self.tokens.append(ended.tokens)
        self.offered_tokens.append(held.sent.tokens)
        self.groups.append(held.groups)
        self.bursts.append(held.sent.burst)
        self.outcomes.append(ended.outcome)


# ---- the groups of a process ----------------------------------------------------------------------------------------


class Hall(Protocol):
    """Groups that are simulated together."""

    def begin(self, until_s: float, routed: Routed, told: Sequence[Served]) -> None: ...

    def reports(self) -> list[Report]: ...

    def close(self) -> NDArray[np.int64]:
        """The nanoseconds of every step."""
        ...


class OwnHall:
    """Groups of this process. numbers : of the groups"""

    def __init__(self, settings: Settings, numbers: Sequence[int]) -> None:
        self._step_ns: array[int] = array("q")
        models = tuple(f"m{k}" for k in range(settings.models))
        scores = settings.traffic.forecasts(SCORES)
        scheduling = settings.scheduling.resolved(barrier=False)
        self._groups = [
            GroupProcess(
                settings.places[number], settings.deaths, scheduling, settings.speed, models, scores, self._step_ns
            )
            for number in numbers
        ]
        self._reports: list[Report] = []

    def begin(self, until_s: float, routed: Routed, told: Sequence[Served]) -> None:
        self._reports = [
            group.round(until_s, routed.get(group.place.index, ()), told[group.place.index]) for group in self._groups
        ]

    def reports(self) -> list[Report]:
        return self._reports

    def close(self) -> NDArray[np.int64]:
        return np.array(self._step_ns)


class OtherHall:
    """Groups of another process."""

    def __init__(self, settings: Settings, numbers: Sequence[int]) -> None:
        self._numbers = numbers
        self._pipe, other = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("fork").Process(target=_serve, args=(settings, numbers, other))
        self._process.start()

    def begin(self, until_s: float, routed: Routed, told: Sequence[Served]) -> None:
        own = {number: routed[number] for number in self._numbers if number in routed}
        self._pipe.send((until_s, own, {number: told[number] for number in self._numbers}))

    def reports(self) -> list[Report]:
        reports: list[Report] = self._pipe.recv()
        return reports

    def close(self) -> NDArray[np.int64]:
        self._pipe.send(None)
        step_ns: NDArray[np.int64] = self._pipe.recv()
        self._process.join()
        return step_ns

    def stop(self) -> None:
        """After an error as well: the process must not stay."""
        if self._process.is_alive():
            self._process.terminate()


def _serve(settings: Settings, numbers: Sequence[int], pipe: Connection) -> None:
    hall = OwnHall(settings, numbers)
    with collector_paused():
        while (asked := pipe.recv()) is not None:
            hall.begin(*asked)
            pipe.send(hall.reports())
    pipe.send(hall.close())


@contextmanager
def _halls(settings: Settings) -> Iterator[list[Hall]]:
    count = len(settings.places)
    if settings.processes == 1:
        yield [OwnHall(settings, range(count))]
        return
    halls = [OtherHall(settings, range(part, count, settings.processes)) for part in range(settings.processes)]
    try:
        yield [*halls]
    finally:
        for hall in halls:
            hall.stop()


# ---- the rounds -----------------------------------------------------------------------------------------------------


class Fleet:
    """The gateways and the controller, and what came of the requests. Each request must end once, at its gateway."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.results = Results()
        self._gateways = [
            Gateway(random.Random(f"{settings.traffic.seed} {k}")) for k in range(settings.traffic.gateways)
        ]
        self._gateway_of: dict[int, Gateway] = {}
        self._controller = Controller(settings.pool_of, settings.pools)
        self._again: list[int] = []  # requests that need another group, in the order of their ids
        count, slots = len(settings.places), settings.speed.slots
        first = [Report(place.index, slots=slots * len(place.engines)) for place in settings.places]
        self._board = Board.of(first, settings.pool_of, settings.pools)
        self._told: list[Served] = [{} for _ in range(count)]

    @property
    def open(self) -> int:
        """Requests that have not ended."""
        return len(self._gateway_of)

    def run(self, progress: Callable[[float], None] = lambda at_s: None) -> Results:
        with _halls(self.settings) as halls, collector_paused():
            second = 0
            while second < self.settings.traffic.span_s or (
                self.open and second < self.settings.traffic.span_s + TAIL_S
            ):
                self._round(second, halls)
                second += 1
                progress(second)
            self.results.step_ns = np.concatenate([hall.close() for hall in halls])
        assert not self.open, f"{self.open} requests never ended"
        self.results.rounds, self.results.behind = second, self._controller.behind
        self.results.controller_rows = self._controller.rows
        self.results.routed = sum(gateway.routed for gateway in self._gateways)
        return self.results

    def _round(self, second: int, halls: Sequence[Hall]) -> None:
        arrived = []
        if second < self.settings.traffic.span_s:
            arrived = self.settings.traffic.second(second, first_id=self.results.sent)
        self.results.sent += len(arrived)
        began_s = time.perf_counter()
        routed = self._route(float(second), arrived)
        self.results.gateway_s += time.perf_counter() - began_s
        for hall in halls:
            hall.begin(second + 1.0, routed, self._told)
        reports = sorted([report for hall in halls for report in hall.reports()], key=lambda report: report.group)
        for report in reports:
            for ended in report.ended:
                self._end(ended)
        self._again += sorted([request_id for report in reports for request_id in report.again])
        self._board = Board.of(reports, self.settings.pool_of, self.settings.pools)
        if self.settings.exchange:
            began_s = time.perf_counter()
            self._told = self._controller.exchange(reports)
            self.results.controller_s += time.perf_counter() - began_s

    def _end(self, ended: Ended) -> None:
        self.results.add(self._gateway_of.pop(ended.request_id).end(ended.request_id), ended)

    def _route(self, now_s: float, arrived: Sequence[Sent]) -> dict[int, list[Sent]]:
        """The requests of the round by group: first those that need another group, then the new ones."""
        routed: dict[int, list[Sent]] = {}
        for gateway in self._gateways:
            gateway.begin_round()
        again, self._again = self._again, []
        for request_id in again:
            gateway = self._gateway_of[request_id]
            sent = gateway.held[request_id].sent
            late = sent.request.deadline_s is not None and sent.request.deadline_s <= now_s
            if late or gateway.gives_up(request_id):
                self._end(Ended(request_id, now_s, "late" if late else "refused", 0.0, None))
            else:
                self._send(gateway, again_at(sent, now_s), routed)
        for sent in arrived:
            gateway = self._gateway_of[sent.request.id] = self._gateways[sent.gateway]
            gateway.take(sent)
            self._send(gateway, sent, routed)
        return routed

    def _send(self, gateway: Gateway, sent: Sent, routed: dict[int, list[Sent]]) -> None:
        group = gateway.route(sent.request.id, self._board)
        if group is None:
            self._again.append(sent.request.id)
        else:
            routed.setdefault(group, []).append(sent)


def outcomes(results: Results) -> Mapping[str, int]:
    names, counts = np.unique(results.outcomes, return_counts=True)
    return dict(zip(names.tolist(), counts.tolist(), strict=True))
