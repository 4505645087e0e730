"""Run a world in the simulated body and check every step."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from functools import partial

import msgspec
from worlds.account import Account, Times
from worlds.drawing import PROFILE, Arrival, ChancePlans, EngineLife, Leaving, World, draw, draw_request_fault, on_clock
from worlds.faults import FaultyEngine
from worlds.story import story_of

from bins.dispatch import DispatchSolver
from llmserve.live.journal import Header, Step, replay
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import (
    Action,
    AnswerBegan,
    BatchEnded,
    DrainRequested,
    EngineLost,
    Event,
    FailRequest,
    PreemptBatch,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    StartBatch,
)
from llmserve.settings.dispatch import DispatchConfig
from llmserve.settings.policies import PLANNED
from llmserve.simulation.cluster import Delays, EngineModel, SimulatedCluster
from llmserve.simulation.engine_model import Costs, StepEngine

TWICE_EVERY = 8  # one world in this many runs twice and must give the same journal
SEQUENCES_MAX = 64  # more than any engine ever runs


class Violation(AssertionError):
    """A law is broken. The message has the law, the last steps, and the command that replays the world."""

    def __init__(self, world: World, law: str, steps: Sequence[Step]) -> None:
        self.seed = world.seed
        self.law = law
        self.steps = steps
        super().__init__(
            f"world {world.seed}: {law}\n{world.title}\n{story_of(steps[-12:])}\nreplay: {replay_line(world.seed)}"
        )


def replay_line(seed: int) -> str:
    return f"python scripts/worlds --seed {seed}"


def judge(seed: int) -> int:
    """Draw and run a world; return its number of steps. Raises Violation."""
    world = draw(seed)
    steps: list[Step] = []
    try:
        account = run(world, steps)
        account.close()
        if world.untroubled:
            account.assert_time_is_conserved()
            _assert_batches_take_their_time(world, steps)
        _assert_it_happens_again(world, steps)
    except Exception as error:  # every error of the scheduler is a finding
        law = str(error) if isinstance(error, AssertionError) and str(error) else repr(error)
        raise Violation(world, law, steps) from error
    return len(steps)


def journal(world: World) -> list[Step]:
    """Return all steps of a world."""
    steps: list[Step] = []
    run(world, steps)
    return steps


def run(world: World, steps: list[Step]) -> Account:
    """Run a world. Each step is appended to `steps` at once, so that steps before a violation are kept."""
    scheduler = _header(world).scheduler()
    unit_s, count = world.unit_s, len(world.arrivals)
    account = Account(
        world.config,
        scheduler,
        lambda now_s: 1_000 + 100 * count + 20 * (now_s + now_s / unit_s),
        _times(world),
    )
    rng = random.Random(f"{world.seed} plans and delays")
    clients = Clients(world.leavings, world.begins, world.tick_s)

    def listen(now_s: float, event: Event, actions: list[Action]) -> None:
        steps.append(Step(now_s, event, tuple(actions)))
        account.step(now_s, event, actions)
        clients.see(cluster, event, actions)

    cluster = SimulatedCluster(
        scheduler,
        [_engine(world, life) for life in world.engines],
        solver=_solver(world, rng),  # type: ignore[arg-type]
        delays=_delays(world, rng),
        late=[life.info.name for life in world.engines if life.late_s is not None],
        on_step=listen,
    )
    for arrival in world.arrivals:
        if arrival.first:
            cluster.notify(RequestArrived(arrival.request), arrival.at_s)
    if world.drain_at_s is not None:
        cluster.notify(DrainRequested(), world.drain_at_s)
    for at_s, revised in world.revised:
        cluster.notify(revised, at_s)
    for at_s, changed in (*world.tuned, *world.elsewhere, *world.cached):
        cluster.notify(changed, at_s)
    cluster.run(_others(world.arrivals), flush=False)
    leftover = [step.event.request_id for step in steps if _is_left_over(step, world, clients)]
    assert not leftover or world.drain_at_s is None, f"requests {leftover} would wait endlessly"
    return account


def _is_left_over(step: Step, world: World, clients: Clients) -> bool:
    """Whether the body gives up a waiting request because no more events will occur."""
    event = step.event
    return isinstance(event, RequestCancelled) and event.request_id not in clients.left


def _others(arrivals: Sequence[Arrival]) -> Iterator[tuple[float, Request]]:
    return ((arrival.at_s, arrival.request) for arrival in arrivals if not arrival.first)


def _times(world: World) -> Times | None:
    if world.tokens is None:
        return None
    lives = {life.info.name: life for life in world.engines}
    tokens = world.tokens

    def batch_s(info: EngineInfo, size: int) -> float:
        """The least time: where slots refill, no batch is faster than a request alone."""
        return lives[info.name].batch_s(size if info.barrier else 1, tokens)

    return Times(batch_s, tokens, world.foreseen)


def _header(world: World) -> Header:
    return Header(world.config, world.scores, world.lengths, learnt=world.learnt)


# ---- clients -------------------------------------------------------------------------------


class Clients:
    """Clients leave and receive first bytes when the world says so. left : requests whose clients have left."""

    def __init__(self, leavings: dict[int, Leaving], begins: dict[int, float], tick_s: float) -> None:
        self._leavings = leavings
        self._begins = begins
        self._begin_at_s: dict[int, float] = {}  # running requests only
        self._tick_s = tick_s
        self.left: set[int] = set()

    def see(self, cluster: SimulatedCluster, event: Event, actions: Sequence[Action]) -> None:
        for moment, request_id in _moments(event, actions):
            self._leave(cluster, moment, request_id)
            if moment == "start" and request_id in self._begins:
                self._begin_at_s[request_id] = cluster.now_s + self._begins[request_id]
            elif moment in ("end", "stop"):
                self._begin_at_s.pop(request_id, None)
        if isinstance(event, EngineLost):
            running = {id_ for engine in cluster.scheduler.engines.values() for id_ in engine.running}
            self._begin_at_s = {id_: at_s for id_, at_s in self._begin_at_s.items() if id_ in running}
        begun = [request_id for request_id, at_s in self._begin_at_s.items() if at_s <= cluster.now_s]
        for request_id in begun:
            del self._begin_at_s[request_id]
            cluster.notify(AnswerBegan(request_id), cluster.now_s)

    def _leave(self, cluster: SimulatedCluster, moment: str, request_id: int) -> None:
        leaving = self._leavings.get(request_id)
        if leaving is not None and leaving.after == moment:
            self.left.add(request_id)
            cluster.notify(RequestCancelled(request_id), on_clock(cluster.now_s + leaving.seconds, self._tick_s))


def _moments(event: Event, actions: Sequence[Action]) -> Iterator[tuple[str, int]]:
    """Yield (kind of event, request id), in order."""
    if isinstance(event, RequestArrived):
        yield "arrival", event.request.id
    elif isinstance(event, RequestEnded):
        yield "end", event.request_id
    elif isinstance(event, BatchEnded):
        for request_id in event.output_tokens:
            yield "end", request_id
    for action in actions:
        if isinstance(action, StartBatch):
            for request in action.batch.requests:
                yield "start", request.id
        elif isinstance(action, FailRequest):
            yield "end", action.request_id
        elif isinstance(action, PreemptBatch):
            for request_id in action.request_ids:
                yield "stop", request_id


def _engine(world: World, life: EngineLife) -> EngineModel:
    """The plain engine model if no fault is injected, so that the plain model is tested, too."""
    lengths = {arrival.request.id: arrival.tokens for arrival in world.arrivals}
    make = partial(StepEngine, life.info, lengths, _costs(life))
    if world.untroubled and not life.one_by_one:
        return make()
    rng = random.Random(f"{world.seed} {life.info.name}")
    return FaultyEngine(
        make,
        life.faults,
        request_fault=lambda request_id: draw_request_fault(rng, life.odds, world.unit_s),
        chance=rng.random,
        tick_s=world.tick_s,
        one_by_one=life.one_by_one,
        stale_s=life.stale_s,
        late_s=life.late_s,
        expected=life.expected,
    )


def _costs(life: EngineLife) -> Costs:
    steps_s = [life.step_s + life.step_s_more * max(0, count - 1) for count in range(SEQUENCES_MAX + 1)]
    return Costs(steps_s, [0.0] * (SEQUENCES_MAX + 1), life.prefill_s, metered=False)


def _solver(world: World, rng: random.Random) -> ChancePlans | DispatchSolver | None:
    config = world.config
    if config.release not in PLANNED:
        return None
    if world.real_plans:
        return DispatchConfig(profile=(PROFILE,)).solver(config, barrier=world.engines[0].info.barrier)
    return ChancePlans(rng, config.full_batch, world.unit_s)


def _delays(world: World, rng: random.Random) -> Delays | None:
    late_s, tick_s = world.timers_late_s, world.tick_s
    if not (late_s or tick_s or world.aborts_late_s or world.plans_late_s):
        return None

    def late(mean_s: float) -> float:
        return on_clock(rng.choice([0.0, rng.expovariate(1.0)]) * mean_s, tick_s)

    return Delays(
        abort_s=partial(late, world.aborts_late_s),
        plan_s=partial(late, world.plans_late_s),
        timer_at_s=lambda wanted_s: on_clock(wanted_s + late_s, tick_s),
    )


# ---- laws of a whole run ----------------------------------------------------------------------------------------


def _assert_it_happens_again(world: World, steps: Sequence[Step]) -> None:
    """Check that a journal replays to itself, and that a seed gives the same journal, byte for byte (8)."""
    header = msgspec.json.decode(msgspec.json.encode(_header(world)), type=Header)  # as a journal file has it
    assert replay(header, steps) == steps, "the journal does not replay to itself"
    if world.seed % TWICE_EVERY:
        return
    encoded = msgspec.json.encode(steps)
    assert msgspec.json.encode(journal(world)) == encoded, "the same seed gives another journal"
    assert msgspec.json.decode(encoded, type=list[Step]) == steps, "a step changes when it is encoded and decoded"


def _assert_batches_take_their_time(world: World, steps: Sequence[Step]) -> None:
    """Check that without trouble a barrier engine's batch takes its prefill and the steps of its longest answer."""
    lives = {life.info.name: life for life in world.engines if life.info.barrier}
    tokens = {arrival.request.id: arrival.tokens for arrival in world.arrivals}
    started: dict[str, tuple[float, float]] = {}  # engine -> start of its batch, and the batch's seconds
    for step in steps:
        if isinstance(step.event, BatchEnded):
            started_s, takes_s = started.pop(step.event.engine)
            took_s = step.now_s - started_s
            assert math.isclose(took_s, takes_s, rel_tol=1e-9, abs_tol=1e-9), f"a batch took {took_s} s, not {takes_s}"
        for action in step.actions:
            if isinstance(action, StartBatch) and action.engine in lives:
                ids = [request.id for request in action.batch.requests]
                longest = max([tokens[request_id] for request_id in ids])
                started[action.engine] = step.now_s, lives[action.engine].batch_s(len(ids), longest)
