"""Shares of a scheduler in simulated time: clients that ask once, or again as soon as they are answered; and random
worlds of such shares, with the largest gaps between their services as seen from outside.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, count
from typing import Literal
from unittest.mock import patch

import msgspec

from llmserve.request import EngineInfo, Request
from llmserve.scheduling.fair import ANSWER_WEIGHT, PROMPT_WEIGHT, cost
from llmserve.scheduling.messages import (
    BatchEnded,
    EngineReady,
    Event,
    FailRequest,
    RequestArrived,
    RequestEnded,
    StartBatch,
    TimerFired,
)
from llmserve.scheduling.queues.waiting import QueuedRequest
from llmserve.scheduling.scheduler import Scheduler
from llmserve.settings.policies import SchedulingConfig
from llmserve.settings.policy_names import ORDERS

Charged = Literal["forecast", "length", "generated"]
SLOTS = (2, 4, 8)
STEP_S, TICK_S = 0.01, 0.05  # of a token on a slot; between two charges of tokens as they are generated


@dataclass(frozen=True)
class Ask:
    """A question.

    tokens : real length of the answer.  prefix : with which its prompt begins; 0: none.  then : what its client does
    once it is answered
    """

    share: str
    tokens: float = 20.0
    predicted: float | None = 20.0
    prompt_tokens: float = 0.0
    weight: float = 1.0
    prefix: int = 0
    then: Callable[[], None] = lambda: None


class Clients:
    """seconds : of a batch on an engine, by the tokens of its longest answer; a slot that refills runs a batch of one

    latencies : seconds, by share.  refused : requests, by share
    on_start, on_step : told of each start, by its question and the tokens of its prompt that the engine has yet to
    compute, and of each step
    """

    def __init__(
        self,
        scheduler: Scheduler,
        infos: list[EngineInfo],
        seconds: Callable[[float], float],
        on_start: Callable[[Ask, float], None] = lambda ask, computed: None,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.scheduler, self.now_s = scheduler, 0.0
        self.latencies: dict[str, list[float]] = defaultdict(list)
        self.refused: Counter[str] = Counter()
        self._seconds, self._on_start, self._on_step = seconds, on_start, on_step
        self._ids, self._serial = count(), count()
        self._ends: list[tuple[float, int, Event]] = []
        self._asked: dict[int, tuple[Ask, float]] = {}
        self._cached: set[tuple[str, int]] = set()  # (engine, prefix)
        self._barrier = {info.name: info.barrier for info in infos}
        for info in infos:
            self._step(EngineReady(info))

    def ask(self, ask: Ask) -> int:
        request = Request(
            next(self._ids),
            ask.predicted,
            prompt_tokens=ask.prompt_tokens,
            blocks=(ask.prefix,) if ask.prefix else (),
            block_tokens=ask.prompt_tokens,
            share=ask.share,
            weight=ask.weight,
        )
        self._asked[request.id] = ask, self.now_s
        self._step(RequestArrived(request))
        return request.id

    def real_cost(self, queued: QueuedRequest) -> float:
        """What a request will cost by the real length of its answer, weighted tokens."""
        return queued.cost_of(self._asked[queued.request.id][0].tokens)

    def run(self, until_s: float) -> None:
        while True:
            times_s = [self._ends[0][0]] if self._ends else []
            times_s += [self.scheduler.wake_at_s] if self.scheduler.wake_at_s is not None else []
            if not times_s or min(times_s) > until_s:
                self.now_s = until_s
                return
            self.now_s = max(self.now_s, min(times_s))
            self._step(heapq.heappop(self._ends)[2] if self._is_end_due() else TimerFired())

    def _is_end_due(self) -> bool:
        return bool(self._ends) and self._ends[0][0] <= self.now_s

    def _step(self, event: Event) -> None:
        answered: list[Ask] = []
        if isinstance(event, RequestEnded | BatchEnded):
            for id_ in [event.request_id] if isinstance(event, RequestEnded) else list(event.output_tokens):
                ask, asked_s = self._asked.pop(id_)
                self.latencies[ask.share].append(self.now_s - asked_s)
                answered.append(ask)
        for action in self.scheduler.handle(event, self.now_s):
            if isinstance(action, FailRequest):
                self.refused[self._asked.pop(action.request_id)[0].share] += 1
            elif isinstance(action, StartBatch):
                self._start(action)
        self._on_step()
        for ask in answered:
            ask.then()

    def _start(self, action: StartBatch) -> None:
        tokens = {request.id: self._asked[request.id][0].tokens for request in action.batch.requests}
        for id_ in tokens:
            ask = self._asked[id_][0]
            self._on_start(ask, 0.0 if (action.engine, ask.prefix) in self._cached else ask.prompt_tokens)
        self._cached |= {(action.engine, prefix) for id_ in tokens if (prefix := self._asked[id_][0].prefix)}
        ends: list[tuple[float, Event]] = [
            (length, RequestEnded(action.engine, id_, "completed", length)) for id_, length in tokens.items()
        ]
        if self._barrier[action.engine]:
            ends = [(max(tokens.values()), BatchEnded(action.engine, action.batch.id, tokens))]
        for length, end in ends:
            heapq.heappush(self._ends, (self.now_s + self._seconds(length), next(self._serial), end))


# ---- random worlds ----


@dataclass(frozen=True)
class Client:
    share: str
    weight: float
    tokens: float
    prompt_tokens: float
    sigma: float
    in_flight: int


def drawn(rng: random.Random, slots: Sequence[int] = SLOTS) -> tuple[SchedulingConfig, list[EngineInfo], list[Client]]:
    """A configuration, engines with one of these numbers of slots, and shares that keep asking.

    Batches of barrier engines are of one bin: a batch holds requests of one bin only, whoever waits in the others.
    """
    barrier, size = rng.random() < 0.3, rng.choice(slots)
    config = SchedulingConfig(order=rng.choice(list(ORDERS)))
    if barrier:
        release, bins = rng.choice([("greedy", 1), ("window", None)])
        config = msgspec.structs.replace(config, batch_size=size, release=release, bins=bins)
    infos = [EngineInfo(f"e{number}", size, barrier) for number in range(rng.choice([1, 1, 2]))]
    shares = [
        Client(
            f"share {number}",
            rng.choice([0.5, 1.0, 1.0, 4.0]),
            rng.choice([5.0, 20.0, 100.0]),
            rng.choice([0.0, 10.0, 200.0]),
            rng.choice([0.0, 0.8]),
            rng.choice([1, size, 5 * size]),
        )
        for number in range(rng.randint(2, 5))
    ]
    return config.resolved(barrier=barrier), infos, shares


def prompt_cost(queued: QueuedRequest) -> float:
    return queued.cost_of(0.0)


def charge_generated(scheduler: Scheduler, now_s: float) -> None:
    """Charge the tokens that running requests have generated since the last time."""
    for queued in scheduler.requests.values():
        if queued.run is not None:
            so_far = queued.cost_of((now_s - queued.run.started_at_s) / STEP_S)
            queued.share.charge(max(0.0, so_far - queued.charged))
            queued.charged = max(queued.charged, so_far)


class Ledger:
    """Service of shares as seen from outside, and the largest gaps between shares that wait at the same time."""

    def __init__(self) -> None:
        self.served: Counter[str] = Counter()
        self.longest = self.prompt = 0.0
        self._since: dict[tuple[str, str], tuple[float, float]] = {}  # least and greatest difference since both wait
        self.gaps: dict[tuple[str, str], float] = {}

    def started(self, ask: Ask, computed: float) -> None:
        self.served[ask.share] += cost(computed, ask.tokens) / ask.weight
        self.longest = max(self.longest, ask.prompt_tokens + ask.tokens)
        self.prompt = max(self.prompt, ask.prompt_tokens)

    def look(self, waiting: set[str], shares: list[str]) -> None:
        for pair in combinations(shares, 2):
            if not set(pair) <= waiting:
                self._since.pop(pair, None)
                continue
            gap = self.served[pair[0]] - self.served[pair[1]]
            least, greatest = self._since.get(pair, (gap, gap))
            self._since[pair] = min(least, gap), max(greatest, gap)
            self.gaps[pair] = max(self.gaps.get(pair, 0.0), max(greatest, gap) - min(least, gap))


def gaps(
    seed: int,
    seconds: float = 10.0,
    *,
    slots: Sequence[int] = SLOTS,
    forecast: str | None = None,
    charged: Charged = "forecast",
) -> Iterator[tuple[float, float]]:
    """(gap, VTC's bound) of each pair of shares in one random world.

    forecast : "exact", "noisy", "none" or "one" (a client claims 1 token); None: drawn
    charged : when a request starts, its forecast or, as no forecast can do better, its real length; or the tokens of
    its answer as they are generated, as VTC does without forecasts
    """
    rng = random.Random(seed)
    config, infos, shares = drawn(rng, slots)
    ledger = Ledger()
    forecast = forecast or rng.choice(["exact", "noisy", "none", "one"])
    scheduler, names = config.scheduler(), [client.share for client in shares]

    def look() -> None:
        waiting = [queued.request.share for queued in scheduler.requests.values() if queued.run is None]
        ledger.look(set(waiting), names)
        for queued in scheduler.requests.values():
            ledger.longest = max(ledger.longest, queued.request.prompt_tokens + queued.likely_tokens)

    world = Clients(scheduler, infos, lambda tokens: STEP_S * tokens, ledger.started, look)

    def ask(client: Client) -> None:
        tokens = max(1.0, round(client.tokens * rng.lognormvariate(0.0, client.sigma)))
        noisy = tokens * rng.lognormvariate(0.0, 0.5)
        predicted = {"exact": tokens, "noisy": noisy, "none": None, "one": 1.0}[forecast]
        then: Callable[[], None] = partial(ask, client)
        prefix = rng.randint(1, 2) if client.prompt_tokens else 0
        world.ask(Ask(client.share, tokens, predicted, client.prompt_tokens, client.weight, prefix, then))

    for client in shares:
        for _ in range(client.in_flight):
            ask(client)
    if charged == "forecast":
        world.run(seconds)
    else:
        with patch.object(QueuedRequest, "cost", property(world.real_cost if charged == "length" else prompt_cost)):
            while world.now_s < seconds:
                world.run(world.now_s + TICK_S)
                if charged == "generated":
                    charge_generated(scheduler, world.now_s)
    weights = {client.share: client.weight for client in shares}
    places = sum(info.slots for info in infos)
    for pair, gap in ledger.gaps.items():
        bound = 2 * max(PROMPT_WEIGHT * ledger.prompt, ANSWER_WEIGHT * places * ledger.longest)
        yield gap, bound / min(weights[name] for name in pair)
