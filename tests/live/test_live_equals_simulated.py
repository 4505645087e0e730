"""The same requests through both bodies: over HTTP to fake engines, and simulated.

The real server serves each world once, in front of two engines. First come a few single requests and two bursts, which
show how much time HTTP adds to an engine's own time on this machine; then 500 requests at 0.7 of the engines' capacity,
in surges, a fifth of them with deadlines. The journal file of the run has the arrivals and the engines; the simulated
body serves these arrivals again.

* With the recorded engine time of each request and the recorded times of timers, the simulated body writes the journal
  of the live run, float for float: the bodies differ only in timing, and no noise of the machine can change that.
* With only the engines' set times (a prefill, and a step for each token), the time that HTTP added before the 500 came,
  and the lateness of the event loop meanwhile, the simulation predicts the mean latency, mean waiting and throughput of
  the 500: the measured ones lie in INTERVAL. Nothing in INTERVAL is fitted to the 500 requests, and with wrong engines
  in the simulation the measured ones lie outside.

INTERVAL : 5 % below the least to 5 % above the greatest of 12 simulated runs. In six of them HTTP adds to each request
the time that it added to a lone request (the quicker half of them); in six the time that it added in a burst on all
slots, and each turn of the event loop has a measured lateness. Added times are drawn at random, because a millisecond
decides which requests share a batch, so that a single run is a matter of chance. On a quiet machine the interval of
latencies is about 0.9 to 1.2 times the measured latency. A busy machine widens it; on a machine that is too busy, a
second run has half the pace, where HTTP weighs half as much.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import heapq
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import aiohttp
import msgspec
import numpy as np
import pytest
from front import until
from numpy.typing import NDArray

from llmserve.engines.timed.server import FakeEngine
from llmserve.live import journal
from llmserve.live.journal import Header, Journal, Step
from llmserve.request import Batch, EngineInfo, Request
from llmserve.scheduling.messages import (
    Action,
    BatchEnded,
    EngineReady,
    Event,
    FailRequest,
    RequestArrived,
    RequestEnded,
    StartBatch,
    TimerFired,
)
from llmserve.scheduling.scheduler import Scheduler
from llmserve.server.serving import serving
from llmserve.settings.policies import SchedulingConfig
from llmserve.settings.tree import Config, EngineConfig, ServerConfig
from llmserve.simulation.cluster import EngineModel, SimulatedCluster
from llmserve.simulation.engine_model import TimedEngine

pytestmark = pytest.mark.slow

try:
    from uvloop import run as run_loop  # the loop of `llmserve serve`
except ImportError:
    from asyncio import run as run_loop

ENGINES, SLOTS = 2, 8
PREFILL_S = 0.01
BATCH_WAIT_S = 0.06
TOKENS = (20, 80)  # shortest and longest answer
EDGE = 36.0  # the edge between two bins of predicted tokens
LONE_EVERY_S = 0.04  # slow enough that few run at once
RATE_PER_S = 76.0
SURGE_S, CALM_S, SURGE, CALM = 0.8, 1.2, 2.0, 1 / 3  # durations, and multiples of the mean rate
SLO_S = 0.2  # the deadline of a fifth of the requests
BUSY_S = 0.005  # mean lateness of the event loop that shows a busy machine
TURNS = 4  # turns of the event loop per request: to the engine, in it, its timer, and back
RUNS, MARGIN = 6, 0.05  # see INTERVAL

# Request ids count up from 1.
LONE = range(1, 17)
BURSTS = range(17, 17 + 2 * ENGINES * SLOTS)  # two bursts, each with one request per slot
MAIN = range(BURSTS.stop, BURSTS.stop + 500)


@dataclass(frozen=True)
class World:
    """The engines and the release of a test.

    step_s  seconds per token, such that RATE_PER_S is 0.7 of the throughput with full batches, or with full slots
    pace    factor of all durations except those that HTTP adds, which weigh less then
    """

    barrier: bool
    release: str
    step_s: float
    pace: float = 1.0

    @property
    def prefill_s(self) -> float:
        return self.pace * PREFILL_S

    @property
    def scheduling(self) -> SchedulingConfig:
        return SchedulingConfig(bins=2, edges=(EDGE,), release=self.release, batch_wait_s=self.pace * BATCH_WAIT_S)

    def alone_s(self, tokens: float) -> float:
        """Seconds that an engine is set to take for an answer alone."""
        return self.prefill_s + self.step_s * tokens

    def slower(self, times: float) -> World:
        return replace(self, step_s=times * self.step_s, pace=times * self.pace)


WORLDS = {
    "barrier, greedy": World(barrier=True, release="greedy", step_s=0.0019),
    "barrier, timeout": World(barrier=True, release="timeout", step_s=0.0019),
    "refill, greedy": World(barrier=False, release="greedy", step_s=0.00275),
}


class Ask(NamedTuple):
    tokens: int
    predicted_tokens: float  # unique: identifies the request in the journal
    slo_s: float | None


def draw_asks(count: int, rng: np.random.Generator, slo_share: float = 0.0) -> list[Ask]:
    """Predictions fall short of the truth by up to a half; a prediction above max_tokens would be cut by the server."""
    tokens = rng.integers(TOKENS[0], TOKENS[1] + 1, count)
    predicted = tokens * rng.uniform(0.5, 1.0, count)
    slos = [SLO_S if hurried else None for hurried in rng.random(count) < slo_share]
    return [Ask(*fields) for fields in zip(tokens.tolist(), predicted.tolist(), slos, strict=True)]


def draw_arrivals(count: int, rng: np.random.Generator) -> list[float]:
    """Seconds. A Poisson process whose rate alternates between above and below the engines' throughput."""
    at_s, now_s = [], 0.0
    for _ in range(count):
        surges = now_s % (SURGE_S + CALM_S) < SURGE_S
        now_s += rng.exponential(1 / (RATE_PER_S * (SURGE if surges else CALM)))
        at_s.append(now_s)
    return at_s


# ---- the live run -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Live:
    """Results of a live run.

    header, steps  its journal file
    tokens         tokens of each answer, by request id
    answers_s      waiting time of clients, by request id, without those whose deadline passed
    late_s         lateness of the event loop, sampled while MAIN was served
    """

    world: World
    header: Header
    steps: list[Step]
    tokens: dict[int, int]
    answers_s: dict[int, float]
    late_s: list[float]

    @property
    def arrivals(self) -> list[tuple[float, Request]]:
        return arrivals(self.steps)

    @property
    def engines(self) -> list[EngineInfo]:
        return [step.event.engine for step in self.steps if isinstance(step.event, EngineReady)]


def arrivals(steps: Iterable[Step]) -> list[tuple[float, Request]]:
    return [(step.now_s, step.event.request) for step in steps if isinstance(step.event, RequestArrived)]


@pytest.fixture(scope="module", params=WORLDS.values(), ids=WORLDS)
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Live:
    gc.collect()
    gc.freeze()  # a full collection in a test session would stop the event loop for tenths of a second
    try:
        run = run_loop(serve(request.param, tmp_path_factory.mktemp("live") / "journal"))
        if mean(run.late_s) > BUSY_S:
            run = run_loop(serve(request.param.slower(2), tmp_path_factory.mktemp("slower") / "journal"))
        return run
    finally:
        gc.unfreeze()


async def serve(world: World, path: Path) -> Live:
    rng = np.random.default_rng(6)
    lone, bursts, main = draw_asks(len(LONE), rng), draw_asks(len(BURSTS), rng), draw_asks(len(MAIN), rng, 0.2)
    half = len(bursts) // 2
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(_client(world, path))
        await client.send(lone, [LONE_EVERY_S * index for index in range(len(lone))])
        await client.send(bursts[:half], [0.0] * half)
        await client.send(bursts[half:], [0.0] * half)
        late_s = await stack.enter_async_context(_lateness())
        await client.send(main, draw_arrivals(len(main), rng))
    header, steps = journal.read(path)
    tokens = {ask.predicted_tokens: ask.tokens for ask in (*lone, *bursts, *main)}
    by_id = {request.id: tokens[request.predicted_tokens] for _, request in arrivals(steps)}
    return Live(world, header, steps, by_id, client.answers_s, late_s)


@contextlib.asynccontextmanager
async def _client(world: World, path: Path) -> AsyncIterator[Client]:
    """A client of a server that writes its journal to `path`, in front of fake engines."""
    async with AsyncExitStack() as stack:
        fakes = [
            FakeEngine(slots=SLOTS, step_s=world.step_s, prefill_s=world.prefill_s, barrier=world.barrier)
            for _ in range(ENGINES)
        ]
        urls = [(await stack.enter_async_context(fake)).url for fake in fakes]
        config = Config(
            server=ServerConfig(port=0, journal=str(path)),
            engines=EngineConfig(engine=tuple(urls), slots=SLOTS, barrier=world.barrier),
            scheduling=world.scheduling,
        )
        cluster, url = await stack.enter_async_context(serving(config))
        await until(lambda: all(cluster.engines_ready.values()))
        session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        yield Client(await stack.enter_async_context(session), url, world.pace)


class Client:
    """pace : see World.  answers_s : see Live."""

    def __init__(self, session: aiohttp.ClientSession, url: str, pace: float) -> None:
        self.answers_s: dict[int, float] = {}
        self._session = session
        self._url = f"{url}/v1/completions"
        self._pace = pace

    async def send(self, asks: Sequence[Ask], at_s: Sequence[float]) -> None:
        """Send each request at its time from now on, seconds at pace 1; return when all have ended."""
        await asyncio.gather(*map(self._send, asks, at_s))

    async def _send(self, ask: Ask, after_s: float) -> None:
        await asyncio.sleep(self._pace * after_s)
        headers = {"x-llmserve-predicted-tokens": repr(ask.predicted_tokens)}
        if ask.slo_s is not None:
            headers["x-llmserve-slo-ms"] = str(1e3 * self._pace * ask.slo_s)
        body = {"model": "fake", "prompt": "hello", "max_tokens": ask.tokens}
        sent_at_s = time.monotonic()
        async with self._session.post(self._url, json=body, headers=headers) as response:
            await response.read()
            assert response.status in (200, 504), response.status
            if response.status == 200:
                request_id = int(response.headers["x-request-id"].removeprefix("llmserve-"))
                self.answers_s[request_id] = time.monotonic() - sent_at_s


@contextlib.asynccontextmanager
async def _lateness() -> AsyncIterator[list[float]]:
    """How late the event loop wakes a task that sleeps inside the block, seconds."""
    late_s = [0.0]

    async def watch() -> None:
        while True:
            due_s = time.monotonic() + 0.005
            await asyncio.sleep(0.005)
            late_s.append(time.monotonic() - due_s)

    watching = asyncio.create_task(watch())
    try:
        yield late_s
    finally:
        watching.cancel()


# ---- the simulated run --------------------------------------------------------------------------------------------


def simulate(
    live: Live, scheduler: Scheduler, engines: Sequence[EngineModel], book: Journal | None = None
) -> list[Step]:
    """Steps of the simulated body for the live run's arrivals."""
    steps: list[Step] = []

    def keep(now_s: float, event: Event, actions: list[Action]) -> None:
        steps.append(Step(now_s, event, tuple(actions)))

    cluster = SimulatedCluster(scheduler, list(engines), journal=book, on_step=keep)
    cluster.run(iter(live.arrivals), flush=False)  # the live run was not drained either
    return steps


def timed_engines(live: Live, infos: Iterable[EngineInfo], took_s: Mapping[int, float]) -> list[TimedEngine]:
    """took_s : seconds of each request on an engine, by its id."""
    step_s, prefill_s = live.world.step_s, live.world.prefill_s
    lengths = {request_id: (seconds - prefill_s) / step_s for request_id, seconds in took_s.items()}
    return [TimedEngine(info, lengths, step_s=step_s, prefill_s=prefill_s) for info in infos]


# ---- figures of a run --------------------------------------------------------------------------------------------


class Times(NamedTuple):
    """Seconds, by request id.  ended : its engine finished it.  done : on a barrier engine, its batch was finished."""

    arrived: dict[int, float]
    started: dict[int, float]
    ended: dict[int, float]
    done: dict[int, float]


def times_of(steps: Iterable[Step], barrier: bool) -> Times:
    arrived, started, ended, together = {}, {}, {}, {}
    for step in steps:
        event = step.event
        if isinstance(event, RequestArrived):
            arrived[event.request.id] = step.now_s
        elif isinstance(event, RequestEnded):
            ended[event.request_id] = step.now_s
        elif isinstance(event, BatchEnded):
            ended |= dict.fromkeys(event.output_tokens, step.now_s)
        for action in step.actions:
            if isinstance(action, StartBatch):
                ids = [request.id for request in action.batch.requests]
                started |= dict.fromkeys(ids, step.now_s)
                together |= {id_: ids if barrier else [id_] for id_ in ids}
    done = {id_: max(ended[member] for member in together[id_]) for id_ in ended}
    return Times(arrived, started, ended, done)


class Figures(NamedTuple):
    """Means over the answered requests in MAIN.

    answer_s   seconds that a client waits for its answer
    latency_s  seconds from arrival until the engine is done: on a barrier engine with the whole batch, as papers count
    waiting_s  seconds from arrival to start
    """

    answer_s: float
    latency_s: float
    waiting_s: float
    throughput_per_s: float


def figures(times: Times, answers_s: Mapping[int, float]) -> Figures:
    """answers_s : by request id."""
    ids = [id_ for id_ in MAIN if id_ in times.ended]
    elapsed_s = max(times.ended.values()) - times.arrived[MAIN.start]
    return Figures(
        answer_s=mean([answers_s[id_] for id_ in ids]),
        latency_s=mean([times.done[id_] - times.arrived[id_] for id_ in ids]),
        waiting_s=mean([times.started[id_] - times.arrived[id_] for id_ in ids]),
        throughput_per_s=len(ids) / elapsed_s,
    )


def measured(live: Live) -> Figures:
    return figures(times_of(live.steps, live.world.barrier), live.answers_s)


def predicted_interval(
    live: Live, engines: Sequence[EngineInfo] | None = None, header: Header | None = None
) -> tuple[Figures, Figures]:
    """Lower and upper end of INTERVAL, for the live run's engines and scheduler or for others."""
    rng = np.random.default_rng(7)
    engines, header = engines or live.engines, header or live.header
    rows = []
    for added_s, gateway_s in (_added_alone(live), _added_in_bursts(live, rng)):
        for _ in range(RUNS):
            drawn = zip(live.tokens.items(), rng.choice(added_s, len(live.tokens)).tolist(), strict=True)
            took_s = {id_: live.world.alone_s(tokens) + extra_s for (id_, tokens), extra_s in drawn}
            steps = simulate(live, header.scheduler(), timed_engines(live, engines, took_s))
            rows.append(_simulated_figures(live, steps, took_s, gateway_s))
    return Figures(*np.min(rows, axis=0) * (1 - MARGIN)), Figures(*np.max(rows, axis=0) * (1 + MARGIN))


def _added_alone(live: Live) -> tuple[NDArray[np.float64], float]:
    """Seconds that HTTP added to lone requests: a sample of those on an engine, and the rest of a client's wait."""
    on_engine_s, elsewhere_s = _added(live, LONE)
    quicker = len(LONE) // 2
    return np.sort(on_engine_s)[:quicker], float(np.sort(elsewhere_s)[:quicker].mean())


def _added_in_bursts(live: Live, rng: np.random.Generator) -> tuple[NDArray[np.float64], float]:
    """The same for requests in bursts, on an event loop as late as while MAIN was served."""
    on_engine_s, elsewhere_s = _added(live, BURSTS)
    late_s = rng.choice(live.late_s, (len(MAIN), TURNS)).sum(axis=1)
    return rng.choice(on_engine_s, len(MAIN)) + late_s, float(elsewhere_s.mean() + late_s.mean())


def _added(live: Live, ids: Sequence[int]) -> NDArray[np.float64]:
    """Seconds that HTTP added to each request, on an engine and in the rest of its client's wait: shape (2, ids)."""
    arrived, started, ended, _ = times_of(live.steps, live.world.barrier)
    on_engine_s = [ended[id_] - started[id_] - live.world.alone_s(live.tokens[id_]) for id_ in ids]
    elsewhere_s = [live.answers_s[id_] - (ended[id_] - arrived[id_]) for id_ in ids]
    return np.array([on_engine_s, elsewhere_s])


def _simulated_figures(live: Live, steps: list[Step], took_s: Mapping[int, float], gateway_s: float) -> Figures:
    times = times_of(steps, live.world.barrier)
    # The simulator ends a static batch as one; on a live engine each answer ends with its own last token.
    own_end_s = {id_: times.started[id_] + took_s[id_] for id_ in times.ended} if live.world.barrier else times.ended
    return figures(times, {id_: at_s - times.arrived[id_] + gateway_s for id_, at_s in own_end_s.items()})


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# ---- with recorded times -------------------------------------------------------------------------------------------


class RecordedEngine:
    """Ends each request as in the live run, and as long after its start."""

    def __init__(self, info: EngineInfo, live: Live) -> None:
        self.info = info
        self._recorded = times_of(live.steps, live.world.barrier)
        self._events = {
            step.event.request_id: step.event for step in live.steps if isinstance(step.event, RequestEnded)
        }
        self._running: list[tuple[float, int]] = []  # heap: (end, request id)

    @property
    def next_end_s(self) -> float | None:
        return self._running[0][0] if self._running else None

    def start(self, batch: Batch, now_s: float) -> None:
        started, ended = self._recorded.started, self._recorded.ended
        for id_ in [request.id for request in batch.requests]:
            assert id_ in ended, f"request {id_} starts at {now_s:.3f} s; in the live run it never ran"
            later_s = now_s - started[id_]  # exactly 0 where the bodies agree, so that the end is the same float
            heapq.heappush(self._running, (ended[id_] + later_s, id_))

    def abort(self, request_id: int, now_s: float) -> None:
        raise AssertionError("no client left in the live run")

    def end(self, now_s: float) -> Event:
        _, request_id = heapq.heappop(self._running)
        return msgspec.structs.replace(self._events[request_id], engine=self.info.name)


class TimersAsRecorded:
    """A scheduler whose timers fire as late as in the live run."""

    def __init__(self, scheduler: Scheduler, fired_at_s: Iterable[float]) -> None:
        self._scheduler = scheduler
        self._fire_at_s = deque(fired_at_s)

    @property
    def requests(self) -> Mapping[int, object]:
        return self._scheduler.requests

    @property
    def batch_lane(self) -> object:
        return self._scheduler.batch_lane

    @property
    def wake_at_s(self) -> float | None:
        return self._fire_at_s[0] if self._fire_at_s else None

    def handle(self, event: Event, now_s: float) -> list[Action]:
        if isinstance(event, TimerFired):
            self._fire_at_s.popleft()
        return self._scheduler.handle(event, now_s)


# ---- the laws -----------------------------------------------------------------------------------------------------


def test_the_live_journal_replays_exactly(live: Live) -> None:
    assert [request.id for _, request in live.arrivals] == [*LONE, *BURSTS, *MAIN]
    assert first_difference(journal.replay(live.header, live.steps), live.steps) is None


def test_the_simulated_journal_replays_exactly(live: Live, tmp_path: Path) -> None:
    took_s = {id_: live.world.alone_s(tokens) for id_, tokens in live.tokens.items()}
    with Journal(live.header, path=tmp_path / "journal") as book:
        simulate(live, live.header.scheduler(), timed_engines(live, live.engines, took_s), book)
    header, steps = journal.read(tmp_path / "journal")
    assert arrivals(steps) == live.arrivals
    assert first_difference(journal.replay(header, steps), steps) is None


def test_with_the_timing_of_the_live_run_the_simulated_body_writes_its_journal(live: Live) -> None:
    timers = [step.now_s for step in live.steps if isinstance(step.event, TimerFired)]
    scheduler = TimersAsRecorded(live.header.scheduler(), timers)
    steps = simulate(live, scheduler, [RecordedEngine(info, live) for info in live.engines])
    assert any(isinstance(action, FailRequest) for step in steps for action in step.actions), "no deadline passed"
    # Simulated engines are ready at time 0, live ones are expected, and ready after their first probe.
    assert first_difference(steps[ENGINES:], live.steps[2 * ENGINES :]) is None


def first_difference(steps: list[Step], other_steps: list[Step]) -> tuple[Step | None, Step | None] | None:
    """The first pair of different steps; None: there is none."""
    return next((pair for pair in zip_longest(steps, other_steps) if pair[0] != pair[1]), None)


def test_the_simulation_predicts_the_live_run(live: Live) -> None:
    low_values, high_values = predicted_interval(live)
    for name, lowest, is_, highest in zip(Figures._fields, low_values, measured(live), high_values, strict=True):
        assert lowest <= is_ <= highest, f"{name} is {is_:.4f}, predicted were {lowest:.4f} to {highest:.4f}"


def test_the_simulation_of_one_engine_less_does_not_predict_it(live: Live) -> None:
    low, _ = predicted_interval(live, live.engines[1:])
    assert measured(live).latency_s < low.latency_s


def test_the_simulation_of_engines_with_half_the_slots_does_not_predict_it(live: Live) -> None:
    engines = [msgspec.structs.replace(info, slots=SLOTS // 2) for info in live.engines]
    batch_size = min(live.header.scheduling.full_batch, SLOTS // 2)
    scheduling = msgspec.structs.replace(live.header.scheduling, batch_size=batch_size)
    low, _ = predicted_interval(live, engines, msgspec.structs.replace(live.header, scheduling=scheduling))
    assert measured(live).latency_s < low.latency_s
