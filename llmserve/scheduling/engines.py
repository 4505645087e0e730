"""Engines as the scheduler sees them: what each runs, what it could take, and which one takes what.

The engines of a serving group are a pool. Engines that share a GPU are one worker.

How much of an engine's KV cache its requests will need: a request holds its prompt and what it has generated, and gives
all back when it ends. Requests end at different times, so the most that is ever needed at once is less than the sum of
their totals. With h_i tokens held now, c_i choices (each grows by one token a step) and r_i steps to go, the need just
before request j ends is

    sum over i with r_i >= r_j of (h_i + c_i r_j)

and the peak is the largest of these over j.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable

from bins.profile import StepTimes
from llmserve.request import EngineInfo
from llmserve.scheduling.circuit import Circuit
from llmserve.scheduling.queues import BLOCK_TOKENS, FormedBatch, QueuedRequest, Run

SURE_SHARE = 0.5  # of the cache: with predictions that fill less of it nothing is looked at closely
LOOK_AGAIN_S = 0.1  # after a request did not fit: time alone may make it fit
PACE_MEMORY = 32  # answers after which a pace's weight has fallen to a third
PACE_SAME = 1e-6  # differences of rounding, not of speed
PACE_LEAST, PACE_MOST = 1.0 / 64.0, 64.0  # beyond these something else happened than a batch
PROVEN_S = 10.0  # so long what an engine's last answer showed of its pace is taken for true
OVERDUE_SHARE = 0.25  # an answer longer than all predictions is expected to grow by this share of itself
PREFIX_ENGINES_MAX = 4  # remembered per prefix, the latest ones
IMBALANCE = 0.25  # share of its slots by which an engine may be busier than another and still be preferred for a prefix


class Worker:
    """A GPU and the engines that share it. Barrier engines of one worker run one batch at a time between them.

    running   requests on these
    group     that it runs requests of
    next      the group that it joins when these have ended; None: it stays
    reserved  a batch that the one which runs was told to make room for, and its engine
    """

    __slots__ = ("engines", "group", "name", "next", "reserved", "running")

    def __init__(self, name: str, group: str) -> None:
        self.name = name
        self.group = group
        self.next: str | None = None
        self.engines: list[EngineState] = []
        self.running = 0
        self.reserved: tuple[EngineState, FormedBatch] | None = None


class Pace:
    """Seconds that an engine takes for each second that it was told to take, of one model: what batches really took.

    value      1 until the first answer
    seen_at_s  of the last answer; None before the first
    """

    __slots__ = ("_answers", "seen_at_s", "value")

    def __init__(self) -> None:
        self.value = 1.0
        self.seen_at_s: float | None = None
        self._answers = 0

    def observe(self, seconds: float, told_s: float, now_s: float) -> None:
        """told_s : > 0. The first answers count alike, so that a profile that is wrong is soon found out."""
        self.seen_at_s = now_s
        self._answers = min(self._answers + 1, PACE_MEMORY)
        if abs(seconds - self.value * told_s) > PACE_SAME * told_s:
            took = min(max(seconds / told_s, PACE_LEAST), PACE_MOST)
            self.value += (took - self.value) / self._answers


class EngineState:
    """running       what is on it, by request id
    total_tokens  sum of what these are predicted to hold at their ends
    models        that it serves; empty: whatever is asked for
    ready         it takes requests, as far as its body is concerned
    paces         by model, of those that it has answered for and whose speed is known
    """

    __slots__ = ("_refused", "circuit", "info", "models", "paces", "ready", "running", "total_tokens", "worker")

    def __init__(self, info: EngineInfo, circuit: Circuit, worker: Worker) -> None:
        self.know(info)
        self.circuit = circuit
        self.worker = worker
        self.ready = True
        self.paces: dict[str, Pace] = {}
        self.running: dict[int, Run] = {}
        self.total_tokens = 0
        self._refused: tuple[int, float] | None = None  # a request that does not fit before a time

    def know(self, info: EngineInfo) -> None:
        """What it is from now on."""
        self.info = info
        self.models = frozenset(info.models)

    # ---- room ----

    @property
    def room(self) -> int:
        """Slots without a request; of a barrier engine all or none. Negative by what waits there to look ahead."""
        info = self.info
        if info.barrier:
            return 0 if self.worker.running else info.slots
        return info.slots - len(self.running)

    @property
    def room_at_once(self) -> int:
        """Requests that it is given at once: on trial, and where memory is scarce, one by one."""
        if self.info.barrier or (self.circuit.closed and self.info.tokens_max is None):
            return self.room
        return min(1, self.room)

    def takes(self, now_s: float) -> bool:
        """Whether it may be sent anything now, be it only to wait there."""
        worker, info = self.worker, self.info
        if not self.ready or worker.next is not None or worker.reserved is not None or not self.circuit.takes(now_s):
            return False
        if info.barrier:
            return info.slots > 0 and not worker.running
        return len(self.running) < info.slots + info.look_ahead

    @property
    def takes_for_group(self) -> bool:
        """It is ready, and not about to come from another group."""
        return self.ready and self.worker.next is None

    def serves(self, model: str) -> bool:
        return not self.models or model in self.models

    def speed(self, model: str) -> StepTimes | None:
        """None where it is not known."""
        speeds = self.info.speeds
        return speeds.get(model) or speeds.get("") if speeds else None

    def fits(self, queued: QueuedRequest, now_s: float, seconds_per_token: float) -> bool:
        """Whether its memory will hold this request beside those that it runs, until each has ended.

        An empty engine takes anything, for no other moment would be better.
        """
        tokens_max = self.info.tokens_max
        if tokens_max is None or self.info.barrier or not self.running:
            return True
        if self.total_tokens + queued.total_tokens <= SURE_SHARE * tokens_max:
            return True  # all of them at their ends at once, and twice as long as predicted
        if self._refused is not None and self._refused[0] == queued.request.id and now_s < self._refused[1]:
            return False
        needs = [_need(run.queued, now_s - run.started_at_s, seconds_per_token) for run in self.running.values()]
        if peak_tokens([*needs, _need(queued, 0.0, seconds_per_token)]) <= tokens_max:
            return True
        self._refused = queued.request.id, now_s + LOOK_AGAIN_S
        return False

    @property
    def look_again_at_s(self) -> float | None:
        """When what did not fit is worth another look; None: nothing was refused since the last change."""
        return self._refused[1] if self._refused is not None else None

    # ---- in and out ----

    def start(self, batch: FormedBatch, requests: list[QueuedRequest], now_s: float) -> None:
        """Run these requests of the batch. What did not fit before fits no better now."""
        name, concurrency = self.info.name, len(self.running) + len(requests)
        for queued in requests:
            queued.run = self.running[queued.request.id] = Run(
                queued, name, batch.id, batch.formed_at_s, now_s, concurrency
            )
            self.total_tokens += queued.total_tokens
        self.worker.running += len(requests)
        if self.circuit.open_until_s is not None:
            self.circuit.started(requests[0].request.id)

    def stop(self) -> tuple[int, ...]:
        """Tell the batch that runs to stop, for others; its request ids, without those whose clients have gone."""
        stopped = [run for run in self.running.values() if not run.queued.cancelled]
        for run in stopped:
            run.stopping = True
        return tuple([run.queued.request.id for run in stopped])

    def let_go(self, runs: Collection[Run]) -> None:
        for run in runs:
            queued = run.queued
            del self.running[queued.request.id]
            queued.run = None
            self.total_tokens -= queued.total_tokens
            if self.circuit.trial is not None:
                self.circuit.let_go(queued.request.id)
        self.worker.running -= len(runs)
        self._refused = None

    # ---- how fast it is ----

    def pace(self, model: str) -> float:
        """Seconds for each second that it was told to take; 1 while nothing has shown otherwise."""
        known = self.paces.get(model)
        return known.value if known is not None else 1.0

    def proven_until_s(self, model: str) -> float:
        """Until when its pace is taken for true; -inf when nothing has shown it."""
        known = self.paces.get(model)
        return known.seen_at_s + PROVEN_S if known is not None and known.seen_at_s is not None else -math.inf

    def took(self, model: str, sequences: int, tokens: float, seconds: float, now_s: float) -> bool:
        """It has run so many sequences for so long, the longest of them `tokens`. True when its pace has changed."""
        speed = self.speed(model)
        if speed is None or not speed.step_s or tokens <= 0:
            return False
        told_s = speed.batch_s(tokens, sequences)
        if told_s <= 0:
            return False
        pace = self.paces.setdefault(model, Pace())
        before = pace.value if pace.seen_at_s is not None else None
        pace.observe(seconds, told_s, now_s)
        return pace.value != before


class PrefixMemory:
    """The last `prefixes_max` hashes of prompt beginnings, each with the engines that served it last.

    A request brings hashes of ever longer beginnings; the longest one that is known counts.
    """

    def __init__(self, prefixes_max: int = 16_384) -> None:
        self._prefixes_max = prefixes_max
        self._engines: OrderedDict[int, tuple[str, ...]] = OrderedDict()  # hash -> names, the latest first

    def __len__(self) -> int:
        return len(self._engines)

    def served(self, prefixes: tuple[int, ...], engine: str) -> None:
        for prefix in prefixes:
            others = [name for name in self._engines.pop(prefix, ()) if name != engine]
            self._engines[prefix] = (engine, *others[: PREFIX_ENGINES_MAX - 1])
        while len(self._engines) > self._prefixes_max:
            self._engines.popitem(last=False)

    def among(self, prefixes: tuple[int, ...], engines: Collection[str]) -> list[str]:
        """Those of `engines` that served the longest beginning any of them served; [] when none did."""
        for prefix in reversed(prefixes):
            known = [name for name in self._engines.get(prefix, ()) if name in engines]
            if known:
                return known
        return []

    def forget(self, engine: str) -> None:
        """It has lost its cache."""
        for prefix, names in list(self._engines.items()):
            left = tuple(name for name in names if name != engine)
            if left:
                self._engines[prefix] = left
            else:
                del self._engines[prefix]


class EnginePool:
    """The engines of one group.

    engines  all that have run its requests and none of another group's since, by name
    free     those that take something now, by name
    paused   those whose circuit's pause is not over, by name
    batches  those that run a batch to its end, by the number of its requests and by name
    """

    def __init__(self) -> None:
        self.batches: dict[int, dict[str, EngineState]] = {}
        self._batch_of: dict[str, int] = {}  # requests of the batch that runs, by name, where there are
        self.engines: dict[str, EngineState] = {}
        self.free: dict[str, EngineState] = {}
        self.paused: dict[str, EngineState] = {}
        self._serving: dict[str, list[EngineState]] = {}  # by model, as far as it was asked for
        self._prefixes = PrefixMemory()

    # ---- who is there ----

    def join(self, engine: EngineState, now_s: float) -> None:
        self.engines[engine.info.name] = engine
        open_until_s = engine.circuit.open_until_s
        if engine.ready and open_until_s is not None and open_until_s > now_s:
            self.paused[engine.info.name] = engine
        self.know(engine, now_s)

    def leave(self, engine: EngineState) -> None:
        """It runs nothing, and runs nothing more for this group."""
        name = engine.info.name
        for engines in (self.engines, self.free, self.paused):
            engines.pop(name, None)
        self._count_batch(engine, 0)
        self.forget_prefixes(engine)
        self._serving.clear()

    def know(self, engine: EngineState, now_s: float) -> None:
        """It serves other models, or has begun or ceased to take requests."""
        self._serving.clear()
        self.look_at(engine, now_s)

    def look_at(self, engine: EngineState, now_s: float) -> None:
        """Whether it, and those that share its GPU, take something now; after every change of what it runs."""
        for each in engine.worker.engines:
            if each.takes(now_s):
                self.free[each.info.name] = each
            else:
                self.free.pop(each.info.name, None)
        if engine.info.barrier and self._batch_of.get(engine.info.name, 0) != len(engine.running):
            self._count_batch(engine, len(engine.running))

    def _count_batch(self, engine: EngineState, requests: int) -> None:
        name = engine.info.name
        before = self._batch_of.pop(name, 0)
        if before:
            del self.batches[before][name]
            if not self.batches[before]:
                del self.batches[before]
        if requests:
            self._batch_of[name] = requests
            self.batches.setdefault(requests, {})[name] = engine

    def end_pauses(self, now_s: float) -> bool:
        """True when one is over."""
        over = [(name, engine) for name, engine in self.paused.items() if engine.circuit.takes(now_s)]
        for name, engine in over:
            del self.paused[name]
            self.look_at(engine, now_s)
        return bool(over)

    # ---- who serves what ----

    def serving(self, model: str) -> list[EngineState]:
        """Ready ones, those of a worker among them that joins the group when others' requests have ended on it."""
        known = self._serving.get(model)
        if known is None:
            known = [engine for engine in self.engines.values() if engine.ready and engine.serves(model)]
            self._serving[model] = known
        return known

    def free_for(self, model: str, blocked: Collection[str] = ()) -> list[EngineState]:
        found = [engine for engine in self.free.values() if not engine.models or model in engine.models]
        return [engine for engine in found if engine.info.name not in blocked] if blocked else found

    def another_works(self, name: str, model: str) -> bool:
        return any(engine.info.name != name and engine.circuit.closed for engine in self.serving(model))

    # ---- which one ----

    def preferred(self, engines: Iterable[EngineState], prefixes: tuple[int, ...]) -> EngineState:
        """The one with the most room; or one that has served the same prefix lately and is hardly busier."""
        best = min(engines, key=lambda engine: (-engine.room, engine.info.name))
        if not prefixes:
            return best
        near = {
            engine.info.name: engine for engine in engines if engine.room + IMBALANCE * engine.info.slots >= best.room
        }
        known = self._prefixes.among(prefixes, near)
        return min([near[name] for name in known], key=lambda engine: -engine.room, default=best)

    def served(self, requests: Iterable[QueuedRequest], engine: EngineState) -> None:
        if len(self.engines) > 1:
            for queued in requests:
                if queued.request.prefixes:
                    self._prefixes.served(queued.request.prefixes, engine.info.name)

    def forget_prefixes(self, engine: EngineState) -> None:
        """It has lost its cache."""
        self._prefixes.forget(engine.info.name)


def _need(queued: QueuedRequest, ran_s: float, seconds_per_token: float) -> tuple[float, float, float]:
    """(held now, choices, steps to go) of one request; see the module."""
    request, expected = queued.request, queued.expected_tokens
    generated = ran_s / seconds_per_token
    held = request.prompt_tokens + request.choices * (generated + BLOCK_TOKENS)
    return held, request.choices, remaining_tokens(request.quantiles, expected, generated)


def remaining_tokens(quantiles: tuple[float, ...], expected: float, generated: float) -> float:
    """Output tokens that a request is expected to generate still, having generated so many.

    quantiles: its equally likely lengths, () when only `expected` is known.
    """
    if generated > 0:
        longer = [length for length in quantiles if length > generated]
        if longer:
            return sum(longer) / len(longer) - generated
    left = expected - generated
    return left if left > 0 else OVERDUE_SHARE * generated


def peak_tokens(requests: Iterable[tuple[float, float, float]]) -> float:
    """The most that (held now, choices, steps to go) will need at once, tokens. O(n log n)."""
    held = choices = peak = 0.0
    for held_i, choices_i, remaining_i in sorted(requests, key=lambda request: -request[2]):
        held += held_i
        choices += choices_i
        peak = max(peak, held + choices * remaining_i)
    return peak
