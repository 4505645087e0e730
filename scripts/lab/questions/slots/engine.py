"""An engine of unknown slots in virtual time: steps that slow down as they fill, prefill in chunks, stalls, a restart.

A step adds a token to each running sequence and reads at most `chunk` tokens of the first prompt that is not read. It
takes step_s * (1 + running / spread), and token_s for each token of a prompt that it reads. Requests beyond the slots
wait inside, in the order of their arrival. Each way takes way_s / 2. A stall stops everything. A restart loses all
requests.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from llmserve.engines.slots import SlotsLearner
from llmserve.request import Batch, EngineInfo
from llmserve.scheduling.messages import EngineLost, EngineReady, Event, RequestEnded

NAME = "engine"


@dataclass(frozen=True)
class World:
    """An engine and its requests. slots_after : from a restart in the middle on; None: no restart. streams : share"""

    slots: int
    slots_after: int | None
    requests: int
    step_s: float
    spread: float
    token_s: float
    chunk: int
    way_s: float
    stall_share: float
    stall_s: float
    streams: float
    tokens: float
    tokens_sigma: float
    prompt: float
    prompt_sigma: float

    @property
    def most(self) -> int:
        return max(self.slots, self.slots_after or 0)


@dataclass(frozen=True, slots=True)
class Job:
    tokens: int
    prompt: int
    stream: bool


def drawn(seed: int) -> World:
    """A world at random. Slots from 1 to 512, evenly on a logarithmic scale, with 1, 4 and 8 more often."""
    rng = random.Random(seed)

    def between(least: float, most: float) -> float:
        return math.exp(rng.uniform(math.log(least), math.log(most)))

    def slots() -> int:
        return rng.choice([1, 4, 8]) if rng.random() < 0.3 else round(between(1, 512))

    first, after = slots(), slots() if rng.random() < 0.25 else None
    most, step_s = max(first, after or 0), between(0.004, 0.08)
    return World(
        slots=first,
        slots_after=after,
        requests=400 + 8 * most,
        step_s=step_s,
        spread=rng.choice([8.0, 32.0, 128.0, math.inf] if most < 32 else [64.0, 256.0, math.inf]),
        token_s=step_s * between(2e-3, 3e-2),
        chunk=rng.choice([256, 512, 2048]),
        way_s=between(0.0003, 0.01),
        stall_share=rng.choice([0.0, 0.0, 0.0, 0.002]),
        stall_s=rng.uniform(0.5, 3.0),
        streams=rng.choice([1.0, 1.0, 0.5, 0.0]),
        tokens=between(32, 512),
        tokens_sigma=rng.choice([0.1, 0.5, 1.0]),
        prompt=between(16, 1024),
        prompt_sigma=rng.choice([0.2, 1.0]),
    )


def jobs_of(world: World, seed: int) -> list[Job]:
    rng = random.Random(seed + 1)

    def length(median: float, sigma: float, most: int) -> int:
        return max(1, min(most, round(median * math.exp(rng.gauss(0.0, sigma)))))

    return [
        Job(
            length(world.tokens, world.tokens_sigma, 2_048),
            length(world.prompt, world.prompt_sigma, 8_192),
            rng.random() < world.streams,
        )
        for _ in range(world.requests)
    ]


class UnknownEngine:
    """The engine as a model of a simulated cluster. learner : None: the front-end knows the slots

    ends       (time, request-seconds of waiting inside until then) of each answer
    numbers    the learner's slots after each answer
    restarted  answers at the restart; None: there was none
    """

    def __init__(self, world: World, jobs: Sequence[Job], learner: SlotsLearner | None, known_ahead: int) -> None:
        self.world, self.learner = world, learner
        self.info = EngineInfo(NAME, world.slots if learner is None else learner.slots, False, known_ahead)
        self.ends: list[tuple[float, float]] = []
        self.numbers: list[int] = []
        self.restarted: int | None = None
        self._slots = world.slots
        self._jobs = jobs
        self._rng = random.Random(world.requests)
        self._now_s = self._step = self._waited_s = self._stalled_until_s = self._unread = 0.0
        self._serial = 0
        self._empty()
        self._at_once: deque[Event] = deque()  # events that follow without delay; then a restart, if it is due
        self._restarts = False

    def _empty(self) -> None:
        self._coming: deque[tuple[float, int]] = deque()
        self._waiting: deque[int] = deque()
        self._prefill: deque[int] = deque()
        self._running: list[tuple[float, int]] = []  # heap: (step of the last token, request)
        self._going: list[tuple[float, int, bool, int]] = []  # heap: (time, serial, ends, request) on their way out

    # ---- for the cluster ----

    @property
    def next_end_s(self) -> float | None:
        if self._at_once or self._restarts:
            return self._now_s
        at_s = min(self._going[0][0] if self._going else math.inf, self._next_s())
        return at_s if at_s < math.inf else None

    def start(self, batch: Batch, now_s: float) -> None:
        self._run(now_s)
        for request in batch.requests:
            if self.learner is not None:
                self.learner.sent(request.id, now_s)
            self._coming.append((now_s + self.world.way_s / 2, request.id))

    def abort(self, request_id: int, now_s: float) -> None:
        raise NotImplementedError("no request is aborted here")

    def end(self, now_s: float) -> Event | None:
        if self._restarts and not self._at_once:
            self._restart()
        if self._at_once:
            return self._at_once.popleft()
        self._run(now_s)
        if not self._going or self._going[0][0] > now_s:
            return None
        _, _, ends, request_id = heapq.heappop(self._going)
        if not ends:
            if self.learner is not None:
                self.learner.began(request_id, now_s)
            return self._followed(None)
        tokens = self._jobs[request_id].tokens
        self.ends.append((now_s, self._waited_s))
        if self.learner is not None:
            self.learner.ended(request_id, now_s, tokens)
            self.numbers.append(self.learner.slots)
        self._restarts = self.world.slots_after is not None and len(self.ends) == self.world.requests // 2
        return self._followed(RequestEnded(NAME, request_id, "completed", tokens))

    def _followed(self, event: Event | None) -> Event | None:
        """The scheduler hears of another number first."""
        learner = self.learner
        if learner is None or (learner.slots, learner.look_ahead) == (self.info.slots, self.info.look_ahead):
            return event
        self._describe(learner.slots, learner.look_ahead)
        if event is not None:
            self._at_once.append(event)
        return EngineReady(self.info)

    def _describe(self, slots: int, look_ahead: int) -> None:
        self.info = msgspec.structs.replace(self.info, slots=slots, look_ahead=look_ahead)

    def _restart(self) -> None:
        assert self.world.slots_after is not None, "checked"
        self._restarts = False
        self.restarted, self._slots = len(self.ends), self.world.slots_after
        self._empty()
        if self.learner is not None:
            self.learner.restarted()
            self._describe(self.learner.slots, self.learner.look_ahead)
        else:
            self._describe(self._slots, self.info.look_ahead)
        self._at_once += [EngineLost(NAME, (), expected=True), EngineReady(self.info)]

    # ---- the passing of time ----

    def _step_s(self) -> float:
        reading = self.world.chunk * self.world.token_s if self._prefill else 0.0
        return self.world.step_s * (1.0 + len(self._running) / self.world.spread) + reading

    def _next_s(self) -> float:
        """When something changes inside."""
        at_s, step_s = math.inf, self._step_s()
        if self._running:
            at_s = self._now_s + max(0.0, self._running[0][0] - self._step) * step_s
        if self._prefill:
            at_s = min(at_s, self._now_s + max(0.0, self._unread) / self.world.chunk * step_s)
        if at_s < math.inf:
            at_s += max(0.0, self._stalled_until_s - self._now_s)
        return min(at_s, max(self._now_s, self._coming[0][0])) if self._coming else at_s

    def _run(self, until_s: float) -> None:
        """Carry out what changes until then."""
        while (at_s := self._next_s()) <= until_s:
            self._pass(at_s)
            while self._coming and self._coming[0][0] <= at_s:
                self._waiting.append(self._coming.popleft()[1])
            if self._prefill and self._unread <= 1e-6:
                request_id = self._prefill.popleft()
                heapq.heappush(self._running, (self._step + self._jobs[request_id].tokens, request_id))
                if self._jobs[request_id].stream:
                    self._tell(request_id, ends=False)
                self._read_next()
            while self._running and self._running[0][0] <= self._step + 1e-9:
                _, request_id = heapq.heappop(self._running)
                self._tell(request_id, ends=True)
                if self._rng.random() < self.world.stall_share:
                    self._stalled_until_s = at_s + self.world.stall_s
            while self._waiting and len(self._running) + len(self._prefill) < self._slots:
                self._prefill.append(self._waiting.popleft())
                if len(self._prefill) == 1:
                    self._read_next()
        self._pass(until_s)

    def _read_next(self) -> None:
        self._unread = self._jobs[self._prefill[0]].prompt if self._prefill else 0.0

    def _pass(self, until_s: float) -> None:
        """Let time pass without a change."""
        if until_s <= self._now_s:
            return
        self._waited_s += (until_s - self._now_s) * len(self._waiting)
        steps = max(0.0, until_s - max(self._now_s, self._stalled_until_s)) / self._step_s()
        self._now_s = until_s
        self._step += steps
        if self._prefill:
            self._unread -= steps * self.world.chunk

    def _tell(self, request_id: int, *, ends: bool) -> None:
        self._serial += 1
        heapq.heappush(self._going, (self._now_s + self.world.way_s / 2, self._serial, ends, request_id))
