"""The longest steps of the scheduler while many requests wait, by order, release and kind of event.

    python scripts/lab performance.stalls --output docs/results/stalls.json

A step holds up the event loop, so none may walk all that wait. Each setup is played several times with the same events,
so a step does the same work each time: of its processor times the shortest counts, for others have something else in
them. The longest step of each kind is shown in milliseconds, and how many functions it called.
"""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, TypeVar

import msgspec
from kit.arguments import add_results, parser_of
from kit.progress import log
from kit.results import machine, write_json
from kit.tables import show

from llmserve.request import EngineInfo
from llmserve.scheduling.messages import (
    REVISIONS_MAX,
    Action,
    EngineClosed,
    EngineLost,
    EngineReady,
    Event,
    ForecastsRevised,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    RevisedForecast,
    ServedElsewhere,
    Tuned,
)
from questions.performance.scheduler import Case, Load

SHARES = (1, 1_000)
ENGINES = 12
GAP_S = 0.002  # between two events
STEPS = 800  # arrivals and ends
UNLIKE = 600  # answers that are long where they were forecast as short: forecasts are no longer trusted
BARRIER = math.inf  # `slo_s` of requests without deadlines, on engines that run batches to their end

Steps = Iterator[tuple[str, Event]]
Number = TypeVar("Number", int, float)


def setups(queued: int) -> list[Case]:
    """Every order, and every way to form batches."""
    slots: list[dict[str, Any]] = [{"order": order} for order in ("boost", "shortest", "fffs", "edf")]
    bins = {"bins": 8, "batch_size": 8}
    batches: list[tuple[dict[str, Any], float]] = [
        *[({"order": order, "release": "window"}, BARRIER) for order in ("boost", "fffs")],
        *[({"order": "boost", "release": release, **bins}, BARRIER) for release in ("greedy", "full", "timeout")],
        *[({"order": order, **bins}, 3_600.0) for order in ("flex", "clockwork")],
    ]
    cases = [*[(settings, None) for settings in slots], *batches]
    return [
        Case(f"{_name(settings)}, {shares:,} shares", settings, ENGINES, queued, slo_s=slo_s, shares=shares)
        for settings, slo_s in cases
        for shares in SHARES
    ]


def _name(settings: dict[str, Any]) -> str:
    return ", ".join([settings["order"], *[f"release {name}" for name in [settings.get("release")] if name]])


def events(load: Load, case: Case) -> Steps:
    """Events of each kind, with its name, while about the case's number of requests wait."""
    for _, event in load.events(STEPS, 0.0):
        yield "arrivals and ends", event
    yield from _revised(load)
    for request_id in _waiting(load)[-50:]:
        yield "cancellations", RequestCancelled(request_id)
    served = {f"share {number}": 100.0 + number for number in range(min(256, case.shares))}
    yield "service elsewhere", ServedElsewhere("m0", served)
    yield from _engines_come_and_go(load, case.engine(0), case.engine(1))
    if case.slo_s in (None, math.inf):
        for settings in ({"order": "shortest", "patience": 4.0}, {"order": case.settings["order"]}):
            yield "another order", Tuned(settings)
            yield from _refilled(load, 20, "another order")
    for _ in range(UNLIKE):
        engine, request = load.running.pop(0)
        yield "answers unlike forecasts", RequestEnded(engine, request.id, "completed", 1e4 / request.quantiles[0])
        yield "answers unlike forecasts", RequestArrived(load.request(float(load.rng.lognormal(5.2, 0.8)), GAP_S))


def _waiting(load: Load) -> list[int]:
    return [queued.request.id for queued in load.scheduler.requests.values() if queued.run is None]


def _revised(load: Load) -> Steps:
    waiting = _waiting(load)
    for start in range(0, len(waiting), REVISIONS_MAX):
        revisions = []
        for request_id in waiting[start : start + REVISIONS_MAX]:
            quantiles = load.scheduler.requests[request_id].request.quantiles
            factor = float(load.rng.lognormal(0.0, 0.5))
            longer = tuple([factor * tokens for tokens in quantiles])
            revisions.append(RevisedForecast(request_id, longer[len(longer) // 2], longer))
        yield "later forecasts", ForecastsRevised(tuple(revisions))


def _engines_come_and_go(load: Load, first: EngineInfo, second: EngineInfo) -> Steps:
    name = "engines come and go"
    yield name, EngineReady(msgspec.structs.replace(first, slots=first.slots + 1))
    yield name, EngineReady(first)
    yield name, EngineClosed(second.name)
    yield name, EngineReady(second)
    load.running = [(engine, request) for engine, request in load.running if engine != first.name]
    yield name, EngineLost(first.name)
    yield name, EngineReady(first)


def _refilled(load: Load, count: int, name: str) -> Steps:
    """Arrivals and ends, so that the scheduler looks at the queue."""
    for tokens in load.rng.lognormal(5.2, 0.8, count).tolist():
        yield name, RequestArrived(load.request(tokens, GAP_S))
        engine, request = load.running.pop(0)
        yield name, RequestEnded(engine, request.id, "completed", tokens)


def played(case: Case, handle: Callable[[Load, Event, float], list[Action]]) -> list[str]:
    """Let `handle` make each step of a case. Returns the kind of each."""
    load, kinds = Load(case, 1), []
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for number, (kind, event) in enumerate(events(load, case)):
            kinds.append(kind)
            load.apply(handle(load, event, number * GAP_S))
    finally:
        gc.enable()
        gc.unfreeze()
    return kinds


def calls(case: Case) -> dict[str, int]:
    """How many functions the step called that called most, by kind of event."""
    counts: list[int] = []

    def count(frame: FrameType, what: str, argument: object) -> None:
        counts[-1] += what in ("call", "c_call")

    def handle(load: Load, event: Event, now_s: float) -> list[Action]:
        counts.append(0)
        sys.setprofile(count)
        try:
            return load.scheduler.handle(event, now_s)
        finally:
            sys.setprofile(None)

    return _most(played(case, handle), counts)


def times_ms(case: Case, rounds: int) -> dict[str, float]:
    """Milliseconds of the longest step, by kind of event."""
    times: list[list[int]] = []

    def handle(load: Load, event: Event, now_s: float) -> list[Action]:
        began_ns = time.thread_time_ns()
        actions = load.scheduler.handle(event, now_s)
        times[-1].append(time.thread_time_ns() - began_ns)
        return actions

    kinds: list[str] = []
    for _ in range(rounds):
        times.append([])
        kinds = played(case, handle)
    return _most(kinds, [min(step) / 1e6 for step in zip(*times, strict=True)])


def _most(kinds: Sequence[str], values: Sequence[Number]) -> dict[str, Number]:
    most: dict[str, Number] = {}
    for kind, value in zip(kinds, values, strict=True):
        most[kind] = max(value, most.get(kind, value))
    return most


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--queued", type=int, default=10_000, help="waiting requests")
    parser.add_argument("--rounds", type=int, default=3, help="of the same steps; the shortest time of each counts")
    parser.add_argument("--only", default="", help="setups whose name begins so")
    add_results(parser)
    args = parser.parse_args()
    records = []
    for case in setups(args.queued):
        if not case.name.startswith(args.only):
            continue
        longest, called = times_ms(case, args.rounds), calls(case)
        records += [{"setup": case.name, "kind": kind, "ms": longest[kind], "calls": called[kind]} for kind in longest]
        log(f"{case.name}: {max(longest.values()):.1f} ms")
    lines = [[row["setup"], row["kind"], f"{row['ms']:.2f}", f"{row['calls']:,}"] for row in records]
    show(f"Longest steps with {args.queued:,} waiting", ["setup", "kind", "ms", "calls"], lines)
    write_json(args.output, {**machine(), "queued": args.queued, "rounds": args.rounds, "steps": records}, indent=2)
