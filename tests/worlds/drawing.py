"""Random worlds: all that is derived from a seed.

unit_s   seconds that a mean request takes alone: the unit of all other times
kinds    the kinds of trouble that are on. Few kinds in a world test each more deeply; many worlds cover all kinds
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import msgspec
from worlds.faults import Closed, Fault, Lost, Pace, Ready, RequestFault

from bins.dispatch import DispatchPlan, DispatchTable, Observed
from bins.profile import StepTimes
from llmserve.request import NO_BLOCKS, EngineInfo, Request
from llmserve.scheduling.choice.orders import PREEMPTION_FACTOR
from llmserve.scheduling.lengths import Learned
from llmserve.scheduling.messages import (
    REVISIONS_MAX,
    CacheChanged,
    ForecastsRevised,
    RevisedForecast,
    ServedElsewhere,
    Tuned,
)
from llmserve.scheduling.trust import WINDOW_MIN
from llmserve.settings.policies import SchedulingConfig

RELEASES = ("full", "static:1", "static", "timeout", "greedy", "window", "rate-headroom", "deadline", "table")
ORDERS = ("fffs", "fffs", "fffs", "shortest", "edf", "flex", "flex", "clockwork")
BOOST_SHARE = 0.5  # of the worlds that drew "shortest"
ENGINE_FAULTS = ("deaths", "hangs", "paces", "closures", "changes")
KINDS = (
    *ENGINE_FAULTS,
    *("request faults", "stale news", "leaving", "late aborts", "late timers", "slow plans", "early drain"),
)
TIMES_STAND = {
    "deaths",
    "closures",
    "changes",
    "leaving",
    "late aborts",
    "early drain",
}  # kinds of trouble that slow no engine
LENGTHS = ("constant", "lognormal", "heavy", "ties", "tiny")
PREDICTORS = ("oracle", "noisy", "none", "constant", "reversed", "swapped", "garbage")
PROFILE = "h100-llama-3.1-8b"  # profile of the solver where a real solver makes plans
SPEED_SIZES = 12  # largest declared batch; engines have no more slots
T = TypeVar("T", str, tuple[str, str])

UNIT_LEAST_S = 1 / 16  # used where requests take no time
REVISED_EVERY = 3  # in one world in this many, forecasts are revised while requests wait
LEARNT_EVERY = 5  # in one world in this many, the scheduler begins with what was learnt before
EXPECTED_EVERY = 3  # in one world in this many, if engines fail, they are expected back, and some begin late
SHARED_EVERY = 3  # in one world in this many, requests are of several shares
CACHED_EVERY = 11  # in one world in this many, engines tell what they have in their caches
ELSEWHERE_EVERY = 15  # in one world in this many, other schedulers have served its shares, too
TUNED_EVERY = 7  # in one world in this many, the order changes while requests wait, if its keys are fixed
DECLINED_EVERY = 4  # in one world in this many, if requests fail, engines also decline some that others may run
JOBS_EVERY = 8  # in one world in this many, some requests are items of batch jobs
FIXED_ORDERS = (*[name for name in dict.fromkeys(ORDERS) if name not in ("flex", "clockwork")], "boost")


@dataclass(frozen=True, slots=True)
class Odds:
    """Odds of request faults: per start, of each kind, and the share that come at once."""

    request_fault: float
    kinds: tuple[str, ...]
    at_once: float


@dataclass(frozen=True, slots=True)
class EngineLife:
    """step_s : true seconds of a step with one sequence, and of each further sequence. The rest: see FaultyEngine."""

    info: EngineInfo
    step_s: float
    step_s_more: float
    prefill_s: float
    faults: tuple[tuple[float, Fault], ...]
    odds: Odds
    one_by_one: bool
    stale_s: float | None
    late_s: float | None = None
    expected: bool = False

    def batch_s(self, size: int, tokens: float) -> float:
        """Seconds that a batch of `size` takes if its longest answer has `tokens` tokens and no fault is injected."""
        return self.prefill_s + tokens * (self.step_s + self.step_s_more * (size - 1))


@dataclass(frozen=True, slots=True)
class Arrival:
    """first : the arrival precedes all other events of its instant; otherwise it follows.  tokens : true length."""

    at_s: float
    request: Request
    tokens: float
    first: bool


@dataclass(frozen=True, slots=True)
class Leaving:
    """A client leaves `seconds` after its request has arrived, started (at each start) or ended."""

    after: Literal["arrival", "start", "end"]
    seconds: float


@dataclass(frozen=True, slots=True)
class World:
    """A world.

    kinds           kinds of trouble
    drain_at_s      None: arrivals end without a drain
    real_plans      a solver makes the dispatch plans; otherwise they are random
    scores, lengths, learnt  as in a journal's header
    tokens          length of every answer, if the scheduler knows it and each engine's speed; None: it may err
    begins          request -> seconds from its start to its first byte, if the client sees one before the end
    revised         later forecasts and their times; some are of requests that run, have ended or will arrive
    tuned           changes of the order, and their times
    elsewhere       what other schedulers have served its shares, and the times when that is known
    cached          what engines tell of their caches, and when
    timers_late_s   delay of timers; aborts_late_s and plans_late_s are mean delays
    """

    seed: int
    kinds: frozenset[str]
    unit_s: float
    tick_s: float
    config: SchedulingConfig
    scores: tuple[float, ...]
    lengths: tuple[float, ...]
    learnt: dict[str, Learned]
    engines: tuple[EngineLife, ...]
    arrivals: tuple[Arrival, ...]
    leavings: dict[int, Leaving]
    tokens: float | None
    begins: dict[int, float]
    revised: tuple[tuple[float, ForecastsRevised], ...]
    tuned: tuple[tuple[float, Tuned], ...]
    elsewhere: tuple[tuple[float, ServedElsewhere], ...]
    cached: tuple[tuple[float, CacheChanged], ...]
    drain_at_s: float | None
    timers_late_s: float
    aborts_late_s: float
    plans_late_s: float
    real_plans: bool

    @property
    def untroubled(self) -> bool:
        return not self.kinds and not self.tick_s

    @property
    def foreseen(self) -> bool:
        """Whether the scheduler knows throughout how long each batch takes: no event changes its estimates."""
        plain = all(life.info.barrier and not life.one_by_one for life in self.engines)
        return self.tokens is not None and plain and not self.kinds & {"leaving", "changes"}

    @property
    def title(self) -> str:
        """One line that describes the world."""
        config = self.config
        barriers = sum(life.info.barrier for life in self.engines)
        models = len({arrival.request.model for arrival in self.arrivals})
        return (
            f"{len(self.arrivals)} requests of {models} models, {config.bins} bins, batches of {config.batch_size}, "
            f"{config.release}, {config.order}, {barriers} barrier and {len(self.engines) - barriers} refill engines, "
            f"ticks of {self.tick_s:g} s; {', '.join(sorted(self.kinds)) or 'no trouble'}"
        )


def draw(seed: int) -> World:
    rng = random.Random(seed)
    kinds = _kinds(rng)
    order = rng.choice(ORDERS)
    if order == "shortest" and random.Random(f"{seed} boost").random() < BOOST_SHARE:
        order = "boost"
    times_known = _goes_by_times(order) and rng.random() < 0.5  # the scheduler knows how long batches take
    tick_s = 0.0 if times_known or rng.random() < 0.7 else rng.choice([1 / 64, 1 / 8, 1.0])
    models = rng.choice([("",), ("",), ("a",), ("a", "b"), ("a", "b"), ("a", "b", "c")])
    tokens = _lengths(rng, _count(rng), "constant" if times_known else rng.choice(LENGTHS))
    infos, costs = _engines(rng, sum(tokens) / len(tokens), direct=_goes_by_times(order))
    infos = [_speeds(rng, info, costs, models, times_known=times_known) for info in _shared(rng, infos, models)]
    mean_s = sum(tokens) / len(tokens) * costs[0] + costs[2]
    unit_s = max(mean_s, UNIT_LEAST_S)
    slots = sum(info.slots for info in infos)
    arrivals = _arrivals(rng, tokens, models, slots / unit_s, unit_s, tick_s, dated=_goes_by_times(order))
    horizon_s = arrivals[-1].at_s + rng.choice([0.0, 2.0, 20.0]) * unit_s
    config = _config(rng, unit_s, infos, order, times_known=times_known)
    scores, lengths = _sample(rng, tokens, scores_min=1 if times_known else 0)
    if times_known:
        kinds &= TIMES_STAND
    engines = tuple([_life(rng, info, costs, kinds, unit_s, horizon_s, tick_s) for info in infos])
    if seed % EXPECTED_EVERY == EXPECTED_EVERY - 1 and kinds & {"deaths", "hangs", "closures"}:
        engines = _expected(random.Random(f"{seed} expected"), engines, unit_s, tick_s)
    if seed % DECLINED_EVERY == DECLINED_EVERY - 3:
        engines = _declining(engines)
    if seed % SHARED_EVERY == SHARED_EVERY - 2:
        arrivals = _share_out(random.Random(f"{seed} shares"), arrivals)
    if seed % JOBS_EVERY == JOBS_EVERY - 3:
        arrivals = _items(random.Random(f"{seed} jobs"), arrivals, unit_s, tick_s)
        config = msgspec.structs.replace(config, line_stops=random.Random(f"{seed} stops").choice([0.0, 0.0, 0.3, 1.0]))
    return World(
        seed=seed,
        kinds=kinds,
        unit_s=unit_s,
        tick_s=tick_s,
        config=config,
        scores=scores,
        lengths=lengths,
        learnt=_learnt(random.Random(f"{seed} learnt"), tokens, models, unit_s, times_known=times_known)
        if seed % LEARNT_EVERY == LEARNT_EVERY - 1
        else {},
        engines=engines,
        arrivals=arrivals,
        leavings=_leavings(rng, len(arrivals), unit_s) if "leaving" in kinds else {},
        tokens=tokens[0] if times_known else None,
        begins=_begins(rng, len(arrivals), unit_s),
        revised=_revised(random.Random(f"{seed} revised"), arrivals, unit_s, tick_s)
        if seed % REVISED_EVERY == REVISED_EVERY - 1
        else (),
        tuned=_tuned(random.Random(f"{seed} tuned"), horizon_s, tick_s)
        if seed % TUNED_EVERY == TUNED_EVERY - 1 and not _goes_by_times(order)
        else (),
        elsewhere=_elsewhere(random.Random(f"{seed} elsewhere"), arrivals, horizon_s, tick_s)
        if seed % ELSEWHERE_EVERY == ELSEWHERE_EVERY - 5
        else (),
        cached=_cached(random.Random(f"{seed} cached"), infos, horizon_s, tick_s)
        if seed % CACHED_EVERY == CACHED_EVERY - 7
        else (),
        drain_at_s=_drain_at_s(rng, kinds, horizon_s, tick_s),
        timers_late_s=rng.choice([0.01, 1.0]) * unit_s if "late timers" in kinds else 0.0,
        aborts_late_s=rng.choice([0.1, 5.0]) * unit_s if "late aborts" in kinds else 0.0,
        plans_late_s=rng.choice([0.1, 5.0]) * unit_s if "slow plans" in kinds else 0.0,
        real_plans=rng.random() < 0.15,
    )


def _kinds(rng: random.Random) -> frozenset[str]:
    share = rng.choice([0.0, 0.15, 0.15, 0.4, 0.4, 0.9])
    return frozenset([kind for kind in KINDS if rng.random() < share])


def on_clock(at_s: float, tick_s: float) -> float:
    """Round a time up to the next tick."""
    return math.ceil(at_s / tick_s) * tick_s if tick_s else at_s


# ---- requests ---------------------------------------------------------------------------------------------------


def _count(rng: random.Random) -> int:
    low, high = rng.choice([(1, 6), (6, 30), (6, 30), (30, 80), (30, 80), (80, 140)])
    return rng.randint(low, high)


def _lengths(rng: random.Random, count: int, kind: str) -> list[float]:
    """Output tokens, > 0."""
    draws: dict[str, Callable[[], float]] = {
        "constant": lambda: 32.0,
        "lognormal": lambda: max(1.0, rng.lognormvariate(3.0, 0.8)),
        "heavy": lambda: min(2_000.0, 4.0 * rng.paretovariate(1.1)),
        "ties": lambda: rng.choice([1.0, 2.0, 2.0, 64.0]),
        "tiny": lambda: rng.choice([1e-6, 0.5, 1.0]),
    }
    return [draws[kind]() for _ in range(count)]


def _arrivals(
    rng: random.Random,
    tokens: Sequence[float],
    models: Sequence[str],
    capacity_per_s: float,
    unit_s: float,
    tick_s: float,
    *,
    dated: bool,
) -> tuple[Arrival, ...]:
    """dated : more requests have deadlines, and the deadlines are tighter."""
    times_s = [on_clock(at_s, tick_s) for at_s in _times(rng, len(tokens), capacity_per_s)]
    predicted = _predictions(rng, tokens)
    first = rng.choice([0.0, 0.5, 1.0])
    share = rng.choice([0.0, 0.7, 0.9, 1.0] if dated else [0.0, 0.0, 0.3, 1.0])
    patience_s = rng.choice([1.5, 3.0, 3.0, 20.0] if dated else [0.5, 3.0, 20.0, 5_000.0]) * unit_s
    models = [*models, *models[:1] * rng.choice([0, 0, 5])]  # one model may get more requests than the others
    with_quantiles, prompts, prefixes = rng.choice([0.0, 0.5, 1.0]), rng.random() < 0.5, rng.random() < 0.5
    arrivals = []
    for number, (at_s, length, median) in enumerate(zip(times_s, tokens, predicted, strict=True)):
        slo_s = rng.choice([0.0, 0.1, 1.0, 1.0, 1.0]) * patience_s if rng.random() < share else None
        request = Request(
            number,
            median,
            None if slo_s is None else on_clock(at_s + slo_s, tick_s),
            _quantiles(median) if median is not None and rng.random() < with_quantiles else (),
            prompt_tokens=(prompt_tokens := rng.choice([0.0, 10.0, 300.0]) if prompts else 0.0),
            choices=rng.choice([1, 1, 3]) if prompts else 1,
            blocks=(1 + number % 2, 10 + number % 10) if prefixes else (),
            block_tokens=prompt_tokens / 3.0 if prefixes else NO_BLOCKS,
            model=rng.choice(models),
        )
        arrivals.append(Arrival(at_s, request, length, rng.random() < first))
    return tuple(arrivals)


def _times(rng: random.Random, count: int, capacity_per_s: float) -> list[float]:
    """Ascending times, seconds. The load ranges from idle to all at once, single or in bursts, random or even."""
    load = rng.choice([0.05, 0.3, 0.8, 1.2, 4.0, math.inf])
    burst = rng.choice([1, 1, 1, 3, 12])
    even = rng.random() < 0.2
    gap_s = 0.0 if math.isinf(load) else burst / (load * capacity_per_s)
    times_s: list[float] = []
    now_s = 0.0
    while len(times_s) < count:
        times_s += [now_s] * (burst if even else rng.randint(1, 2 * burst - 1))
        now_s += gap_s if even or not gap_s else rng.expovariate(1 / gap_s)
    return times_s[:count]


def _predictions(rng: random.Random, tokens: Sequence[float]) -> list[float | None]:
    """Medians; the predictor may change in between."""
    parts = sorted([0, len(tokens), *[rng.randrange(len(tokens) + 1) for _ in range(rng.choice([0, 0, 1, 2]))]])
    predicted: list[float | None] = []
    for start, stop in itertools.pairwise(parts):
        predicted += _predict(rng, rng.choice(PREDICTORS), tokens[start:stop])
    return predicted


def _predict(rng: random.Random, predictor: str, tokens: Sequence[float]) -> list[float | None]:
    if predictor == "reversed":
        longest, shortest = max(tokens, default=1.0), min(tokens, default=1.0)
        return [longest + shortest - length for length in tokens]
    if predictor == "swapped":
        return rng.sample(tokens, len(tokens))
    draws: dict[str, Callable[[float], float | None]] = {
        "oracle": lambda length: length,
        "noisy": lambda length: length * rng.lognormvariate(0.0, 0.5),
        "none": lambda length: None,
        "constant": lambda length: 100.0,
        "garbage": lambda length: rng.choice([None, 1e-6, 1.0, 2.0**31, 10.0 ** rng.uniform(-3.0, 9.0)]),
    }
    return [draws[predictor](length) for length in tokens]


def _quantiles(median: float) -> tuple[float, ...]:
    return (0.25 * median, 0.75 * median, median, 1.5 * median, 4.0 * median)


def _sample(
    rng: random.Random, tokens: Sequence[float], *, scores_min: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Scores of at least `scores_min` answers for the first edges, and the lengths of these answers."""
    scores = tuple(rng.choices(tokens, k=max(scores_min, rng.choice([0, 0, 1, 20, 20, 600]))))
    return scores, tuple(rng.choices(tokens, k=len(scores))) if rng.random() < 0.5 else ()


def _learnt(
    rng: random.Random, tokens: Sequence[float], models: Sequence[str], unit_s: float, *, times_known: bool
) -> dict[str, Learned]:
    """Of some models, and perhaps of a model that no engine serves any more. times_known : lengths are known, too."""
    mean_tokens = sum(tokens) / len(tokens)
    learnt = {}
    for model in rng.sample([*models, "gone"], rng.randint(1, len(models) + 1)):
        scores, lengths = _sample(rng, tokens, scores_min=0)
        if times_known:
            lengths = tuple(rng.choices(tokens, k=len(scores)))
        seconds_per_token = unit_s / mean_tokens * rng.choice([0.1, 1.0, 10.0])
        service = seconds_per_token, mean_tokens * rng.choice([0.5, 1.0, 3.0]), rng.choice([0.5, 1.0, 60.0])
        learnt[model] = Learned(scores, lengths, service if rng.random() < 0.8 else None)
    return learnt


def _leavings(rng: random.Random, count: int, unit_s: float) -> dict[int, Leaving]:
    share = rng.choice([0.1, 0.5])
    moments: tuple[Literal["arrival", "start", "end"], ...] = ("arrival", "arrival", "start", "start", "end")
    return {
        number: Leaving(rng.choice(moments), rng.choice([0.0, rng.expovariate(1.0)]) * unit_s)
        for number in range(count)
        if rng.random() < share
    }


def _begins(rng: random.Random, count: int, unit_s: float) -> dict[int, float]:
    share = rng.choice([0.0, 0.0, 0.2, 0.8])
    return {number: rng.choice([0.0, rng.random()]) * unit_s for number in range(count) if rng.random() < share}


def _tuned(rng: random.Random, horizon_s: float, tick_s: float) -> tuple[tuple[float, Tuned], ...]:
    tuned = []
    for _ in range(rng.choice([1, 1, 3, 10])):
        settings = {"order": rng.choice(FIXED_ORDERS), "patience": rng.choice([0.0, 3.0, 120.0])}
        tuned.append((on_clock(rng.random() * horizon_s, tick_s), Tuned(settings)))
    return tuple(tuned)


def _revised(
    rng: random.Random, arrivals: Sequence[Arrival], unit_s: float, tick_s: float
) -> tuple[tuple[float, ForecastsRevised], ...]:
    """Each is about requests that arrived near a time before it; some are too late, and some come twice."""
    patience_s, share = rng.choice([0.1, 1.0, 10.0]) * unit_s, rng.choice([0.0, 0.5, 1.0])
    revised = []
    for _ in range(rng.choice([1, 5, 30])):
        middle = rng.randrange(len(arrivals))
        at_s = on_clock(arrivals[middle].at_s + rng.choice([0.0, rng.expovariate(1.0)]) * patience_s, tick_s)
        around = range(max(0, middle - rng.choice([0, 3, 20])), middle + rng.choice([1, 3, 20]))
        ids = rng.choices(around, k=rng.randint(1, REVISIONS_MAX))
        actual = [arrivals[min(request_id, len(arrivals) - 1)].tokens for request_id in ids]
        lengths = _predict(rng, rng.choice(PREDICTORS), actual)
        forecasts = [
            RevisedForecast(request_id, length, _quantiles(length) if rng.random() < share else ())
            for request_id, length in zip(ids, lengths, strict=True)
            if length is not None
        ]
        revised.append((at_s, ForecastsRevised(tuple(forecasts))))
    return tuple(revised)


# ---- groups -----------------------------------------------------------------------------------------------------


def _elsewhere(
    rng: random.Random, arrivals: Sequence[Arrival], horizon_s: float, tick_s: float
) -> tuple[tuple[float, ServedElsewhere], ...]:
    """Service of shares that ask here, and of one that never does."""
    served = []
    shares = [*sorted({arrival.request.share for arrival in arrivals}), "nobody here"]
    models = sorted({arrival.request.model for arrival in arrivals})
    for _ in range(rng.choice([1, 3, 10])):
        tokens = {share: rng.choice([0.0, 10.0, 1e4]) * rng.random() for share in shares if rng.random() < 0.5}
        served.append((on_clock(rng.random() * horizon_s, tick_s), ServedElsewhere(rng.choice(models), tokens)))
    return tuple(served)


def _cached(
    rng: random.Random, infos: Sequence[EngineInfo], horizon_s: float, tick_s: float
) -> tuple[tuple[float, CacheChanged], ...]:
    """Blocks of prompts that arrive, and others; also of an engine that is not there."""
    told = []
    for _ in range(rng.choice([1, 10, 30])):
        stored, removed = ([block for block in range(1, 20) if rng.random() < share] for share in (0.3, 0.1))
        engine = rng.choice([*[info.name for info in infos], "nowhere"])
        changed = CacheChanged(engine, tuple(stored), tuple(removed), rng.random() < 0.1)
        told.append((on_clock(rng.random() * horizon_s, tick_s), changed))
    return tuple(told)


def _share_out(rng: random.Random, arrivals: Sequence[Arrival]) -> tuple[Arrival, ...]:
    """Return the arrivals as requests of several shares, some of which ask more, or weigh more, than others."""
    names = [f"share {number}" for number in range(rng.randint(2, 6))]
    weights = {name: rng.choice([0.25, 1.0, 1.0, 4.0]) for name in names}
    askers = rng.choices(names, [rng.choice([1.0, 1.0, 20.0]) for _ in names], k=len(arrivals))
    return tuple(
        [
            replace(arrival, request=msgspec.structs.replace(arrival.request, share=name, weight=weights[name]))
            for arrival, name in zip(arrivals, askers, strict=True)
        ]
    )


def _items(rng: random.Random, arrivals: Sequence[Arrival], unit_s: float, tick_s: float) -> tuple[Arrival, ...]:
    """Return the arrivals, some of them as items of batch jobs with windows from hopeless to endless."""
    share = rng.choice([0.2, 0.5, 0.9, 1.0])
    windows_s = [rng.choice([0.5, 3.0, 30.0, 1_000.0, 100_000.0]) * unit_s for _ in range(rng.randint(1, 4))]
    drawn = []
    for arrival in arrivals:
        window_s = rng.choice([*windows_s, None])
        request = msgspec.structs.replace(
            arrival.request,
            background=True,
            deadline_s=None if window_s is None else on_clock(arrival.at_s + window_s, tick_s),
            after_tokens=rng.choice([0.0, 100.0, 10_000.0]),
        )
        drawn.append(replace(arrival, request=request) if rng.random() < share else arrival)
    return tuple(drawn)


def _goes_by_times(order: str) -> bool:
    return SchedulingConfig(order=order).goes_by_times  # type: ignore[arg-type]


# ---- policies ---------------------------------------------------------------------------------------------------


def _config(
    rng: random.Random, unit_s: float, infos: Sequence[EngineInfo], order: str, *, times_known: bool
) -> SchedulingConfig:
    direct = _goes_by_times(order)
    bins, batch_size = rng.randint(1, 4), rng.choice([2, 4, 8, 12]) if direct else rng.randint(1, 6)
    release = "window" if direct and rng.random() < 0.5 else rng.choice(RELEASES)  # usually any release
    edges = tuple(sorted(rng.sample(range(1, 100), bins - 1))) if rng.random() < 0.2 else None
    config = SchedulingConfig(
        bins=bins,
        batch_size=batch_size,
        release=f"static:{rng.randint(1, batch_size)}" if release == "static" else release,
        window=rng.choice([None, batch_size, batch_size + 3]) if release == "window" and not direct else None,
        batch_wait_s=rng.choice([None, 0.0, 0.5 * unit_s, 5.0 * unit_s]),
        rate_headroom=rng.choice([0.5, 1.0]),
        rate_factor=rng.choice([1.05, 1.25, 4.0]),
        order=order,  # type: ignore[arg-type]
        preemption="on" if rng.random() < 0.8 else "off",
        preemption_factor=rng.choice([1.5, PREEMPTION_FACTOR]),
        patience=rng.choice([0.0, 12.0]),
        bins_by=rng.choice(["risk", "median"]),  # type: ignore[arg-type]
        edges=edges,
        edges_by=rng.choice(["mass", "answers", "mass"]),  # type: ignore[arg-type]
        edges_window=rng.choice([4, 4096]),
        edges_refit_every=rng.choice([0, 3, 20]),
        trust_window=WINDOW_MIN,
        queue_requests_max=rng.choice([3, 20, 1_000, 1_000]),
        retries_max=rng.randint(0, 3),
        engine_wait_s=rng.choice([0.0, unit_s, 10.0 * unit_s, 30.0]),
        circuit_faults_max=rng.randint(0, 3),
        circuit_pause_s=rng.choice([0.25, 3.0]) * unit_s,
    )
    return config.resolved(barrier=infos[0].barrier)


class ChancePlans:
    """Answers with random plans that a solver might return, wise or not."""

    def __init__(self, rng: random.Random, batch_size: int, unit_s: float) -> None:
        self._rng = rng
        self._sizes = range(1, batch_size + 1)
        self._unit_s = unit_s

    def solve(self, observed: Observed) -> DispatchPlan:
        rng = self._rng
        bins = len(observed.rates_per_s)
        queues = rng.randint(1, bins)
        return DispatchPlan(
            queue_of=tuple([index * queues // bins for index in range(bins)]),
            tables=tuple([self._table() for _ in range(queues)]),
            share=rng.choice([0.0, 0.5]),
            latency_target_s=rng.choice([None, 2.0 * self._unit_s]),
            response_s_mean=rng.choice([None, self._unit_s]),
            engines=observed.engines,
        )

    def _table(self) -> DispatchTable:
        rng = self._rng
        return DispatchTable(
            actions=self._actions(),
            other=self._actions() if rng.random() < 0.3 else (),
            advantage=tuple([rng.choice([-1.0, 0.0, 2.0]) for _ in self._sizes]) if rng.random() < 0.5 else (),
            service_s=tuple([self._unit_s * (0.5 + 0.25 * size) for size in self._sizes]),
            late_s=tuple([self._unit_s * (0.75 + 0.25 * size) for size in self._sizes]),
            wait_s_max=rng.choice([0.0, 1.0, 50.0]) * self._unit_s,
        )

    def _actions(self) -> tuple[int, ...]:
        return (0, *[self._rng.choice([0, waiting, self._rng.randint(0, waiting)]) for waiting in self._sizes])


# ---- engines ----------------------------------------------------------------------------------------------------


def _engines(
    rng: random.Random, tokens_mean: float, *, direct: bool
) -> tuple[list[EngineInfo], tuple[float, float, float]]:
    """Return the engines, and the seconds of a step, of each further sequence in it, and of a prefill."""
    barriers = rng.choice([0.0, 0.5, 1.0, 1.0] if direct else [0.0, 0.5, 1.0])
    look_ahead = rng.choice([0, 0, 1, 3])
    tokens_max = rng.choice([None, None, None, 3 * math.ceil(tokens_mean + 16)])
    infos = []
    for number in range(rng.choice([1, 1, 2, 2, 3, 5])):
        barrier = rng.random() < barriers
        slots = rng.choice([1, 4, 8, 12, 12] if direct else [1, 2, 4, 6])
        ahead = 0 if barrier else look_ahead
        infos.append(EngineInfo(f"e{number}", slots, barrier, ahead, tokens_max, by_priority=ahead > 1))
    step_s = rng.choice([0.0, 1 / 1024, 1 / 256, 1 / 64])
    step_s_more = rng.choice([0.0, step_s / 4, step_s] if direct else [0.0, 0.0, step_s / 4])
    return infos, (step_s, step_s_more, rng.choice([0.0, 0.0, 1 / 32]))


def _shared(rng: random.Random, infos: Sequence[EngineInfo], models: Sequence[str]) -> list[EngineInfo]:
    """Limit some engines to some models, and let some barrier engines share a GPU."""
    all_serve_all, workers = rng.random() < 0.4, rng.random() < 0.4
    restricted = []
    for number, info in enumerate(infos):
        serves = () if all_serve_all or rng.random() < 0.3 else tuple(rng.sample(models, rng.randint(1, len(models))))
        worker = f"w{number // 2}" if workers and info.barrier else ""
        restricted.append(msgspec.structs.replace(info, models=serves, worker=worker))
    return restricted


def _speeds(
    rng: random.Random, info: EngineInfo, costs: tuple[float, float, float], models: Sequence[str], *, times_known: bool
) -> EngineInfo:
    """Return the engine with a declared speed: right, wrong, for some models only, or none."""
    step_s, step_s_more, prefill_s = costs
    off = 1.0 if times_known else rng.choice([0.0, 0.5, 1.0, 1.0, 2.0])
    if not off:
        return info
    speed = StepTimes(off * prefill_s, tuple([off * (step_s + step_s_more * others) for others in range(SPEED_SIZES)]))
    whose = [""] if times_known or rng.random() < 0.7 else rng.sample(models, rng.randint(1, len(models)))
    return msgspec.structs.replace(info, speeds=dict.fromkeys(whose, speed))


def _life(
    rng: random.Random,
    info: EngineInfo,
    costs: tuple[float, float, float],
    kinds: frozenset[str],
    unit_s: float,
    horizon_s: float,
    tick_s: float,
) -> EngineLife:
    faults = _faults(rng, [kind for kind in ENGINE_FAULTS if kind in kinds], unit_s, horizon_s)
    return EngineLife(
        info,
        *costs,
        faults=tuple([(on_clock(at_s, tick_s), fault) for at_s, fault in faults]),
        odds=_odds(rng) if "request faults" in kinds else Odds(0.0, (), 0.0),
        one_by_one=info.barrier and rng.random() < 0.3,
        stale_s=rng.choice([0.0, 1.0]) * unit_s if "stale news" in kinds else None,
    )


def _expected(
    rng: random.Random, engines: Sequence[EngineLife], unit_s: float, tick_s: float
) -> tuple[EngineLife, ...]:
    """The engines, most of which are expected back after each loss, and some of which begin late."""
    share = rng.choice([0.0, 0.3, 1.0])
    lives = []
    for life in engines:
        late_s = on_clock(rng.choice([0.0, 1.0, 10.0]) * unit_s, tick_s) if rng.random() < share else None
        lives.append(replace(life, late_s=late_s, expected=rng.random() < 0.8))
    return tuple(lives)


def _faults(rng: random.Random, kinds: Sequence[str], unit_s: float, horizon_s: float) -> list[tuple[float, Fault]]:
    """Faults one after the other, until the horizon."""
    if not kinds or rng.random() < 0.2:
        return []
    gap_s = rng.choice([1.0, 5.0, 30.0]) * unit_s
    episodes_left = rng.choice([1, 4, 30])
    faults: list[tuple[float, Fault]] = []
    now_s = rng.choice([0.0, rng.expovariate(1 / gap_s)])
    while now_s <= horizon_s and episodes_left > 0:
        faults += _episode(rng, rng.choice(kinds), now_s, unit_s)
        now_s = faults[-1][0] + rng.expovariate(1 / gap_s)
        episodes_left -= 1
    return faults


def _episode(rng: random.Random, kind: str, now_s: float, unit_s: float) -> list[tuple[float, Fault]]:
    over_s = now_s + rng.choice([0.0, 0.3, 3.0, 20.0]) * unit_s
    back_s = over_s + rng.choice([0.0, 1.0, 10.0]) * unit_s
    lost = Lost(answered=rng.choice([0.0, 0.5, 1.0]))
    ready = Ready(slots=rng.randint(1, 6) if rng.random() < 0.2 else None)
    comes_back = [(back_s, ready)] if rng.random() < 0.9 else []
    if kind == "deaths":
        return [(now_s, lost), *comes_back]
    if kind == "hangs":
        over = [(over_s, lost), *comes_back] if rng.random() < 0.7 else [(over_s, Pace(1.0))]
        return [(now_s, Pace(0.0)), *over]
    if kind == "paces":
        return [(now_s, Pace(rng.choice([1 / 16, 1 / 2, 4.0]))), (over_s, Pace(1.0))]
    if kind == "closures":
        over = [(over_s, lost)] if rng.random() < 0.3 else []
        return [(now_s, Closed()), *over, *comes_back]
    return [(now_s, Ready(slots=rng.randint(1, 6), tokens_max=rng.choice([None, 50, 5_000])))]


def _odds(rng: random.Random) -> Odds:
    kinds = ("refused", "broken", "bad request", "early", "stalled")
    return Odds(
        request_fault=rng.choice([0.1, 0.5, 1.0]),
        kinds=tuple(rng.sample(kinds, rng.randint(1, len(kinds)))),
        at_once=rng.choice([0.0, 0.5, 1.0]),
    )


def _declining(engines: Sequence[EngineLife]) -> tuple[EngineLife, ...]:
    """The engines, whose requests are also declined where they fail."""
    return tuple(
        [
            replace(life, odds=replace(life.odds, kinds=(*life.odds.kinds, "declined"))) if life.odds.kinds else life
            for life in engines
        ]
    )


def draw_request_fault(rng: random.Random, odds: Odds, unit_s: float) -> RequestFault | None:
    """The fault that is injected into a starting request; None: no fault."""
    if rng.random() >= odds.request_fault:
        return None
    after_s = 0.0 if rng.random() < odds.at_once else rng.expovariate(1 / unit_s)
    kind = rng.choice(odds.kinds)
    if kind == "early":
        return RequestFault(after_s, "completed", rng.choice([0.0, 1.0, 3.0]))
    if kind == "stalled":  # the client does not read
        return RequestFault(after_s, "cancelled")
    if kind == "declined":
        rest_s = rng.choice([None, 0.0, 0.5 * unit_s, 20.0 * unit_s])
        return RequestFault(after_s, "failed", retryable=True, refused=True, rest_s=rest_s)
    if kind == "bad request":
        return RequestFault(after_s, "failed")
    return RequestFault(after_s, "failed", fault=True, retryable=kind == "refused")


def _drain_at_s(rng: random.Random, kinds: frozenset[str], horizon_s: float, tick_s: float) -> float | None:
    if "early drain" in kinds:
        return on_clock(rng.random() * horizon_s, tick_s)
    return None if rng.random() < 0.1 else on_clock(horizon_s, tick_s)
