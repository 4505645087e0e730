"""Engines as the scheduler sees them: running requests, free room, speed, and the choice of an engine for a request.

The engines are a pool. Engines that share a GPU are one worker.

Need for KV cache: a request holds the prompt and the generated tokens, and frees both at the end. Requests end at
different times, so the peak need of an engine is less than the sum of the requests' totals. With h_i tokens held now,
c_i choices (each grows by one token a step) and r_i steps to go, the need just before request j ends is

    sum over i with r_i >= r_j of (h_i + c_i r_j)

and the peak is the largest of these over j. What several of them have in common of their prompts is in the cache once,
so it is subtracted as often as it is there too many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable

from bins.profile import StepTimes, batch_s
from llmserve.request import BLOCK_TOKENS, EngineInfo
from llmserve.scheduling.circuit import Circuit
from llmserve.scheduling.loaded_models import LoadedModels
from llmserve.scheduling.memory import MemoryToken, is_oversize
from llmserve.scheduling.prefills import Prefills
from llmserve.scheduling.programs.ledger import Ledger
from llmserve.scheduling.queues.waiting import FormedBatch, QueuedRequest, Run
from llmserve.scheduling.residency import Residency
from llmserve.scheduling.rests import Rests

SURE_SHARE = 0.5  # of the cache: below this share of predicted totals, a request fits without further checks
AMPLE_SHARE = 0.25  # below this share nobody counts what prompts have in common
RECHECK_S = 0.1  # after a request did not fit: it may fit later, as running requests approach their ends
PACE_MEMORY = 32  # answers after which an observation's weight has fallen to a third
PACE_SAME = 1e-6  # relative: smaller differences are rounding
PACE_LEAST, PACE_MOST = 1.0 / 64.0, 64.0  # an observed pace is clipped to these: beyond, the time was not a batch's
PROVEN_S = 10.0  # seconds after an answer for which the engine's pace counts as proven
OVERDUE_SHARE = 0.25  # an answer longer than all predictions is expected to grow by this share of itself


class Worker:
    """A GPU and the engines that share it. Only one barrier engine of a worker runs a batch at a time.

    running   number of requests on the worker's engines
    reserved  the engine and the batch for which a running batch was preempted
    """

    __slots__ = ("engines", "name", "reserved", "running")

    def __init__(self, name: str) -> None:
        self.name = name
        self.engines: list[EngineState] = []
        self.running = 0
        self.reserved: tuple[EngineState, FormedBatch] | None = None

    def reserve(self, engine: EngineState, batch: FormedBatch) -> None:
        """Keep the worker for a batch, which starts on the engine once the running batch has ended."""
        self.reserved = engine, batch

    def end_reservation(self) -> tuple[EngineState, FormedBatch]:
        """Keep the worker no longer. Returns the engine and the batch."""
        assert self.reserved is not None, f"worker {self.name} is not reserved"
        reserved, self.reserved = self.reserved, None
        return reserved


class Pace:
    """The ratio of measured to profiled seconds of one model's batches on an engine.

    before : the ratio from before the start, which counts as one answer; None: none is known.

    value          mean ratio; 1 until the first answer
    observed_at_s  time of the last answer; None before the first
    """

    __slots__ = ("_answers", "observed_at_s", "value")

    def __init__(self, before: float | None = None) -> None:
        self.value = 1.0 if before is None else before
        self.observed_at_s: float | None = None
        self._answers = 0 if before is None else 1

    def observe(self, seconds: float, profile_s: float, now_s: float) -> None:
        """profile_s : > 0. The first PACE_MEMORY answers have equal weight, so that a wrong profile shows soon."""
        self.observed_at_s = now_s
        self._answers = min(self._answers + 1, PACE_MEMORY)
        if abs(seconds - self.value * profile_s) > PACE_SAME * profile_s:
            ratio = min(max(seconds / profile_s, PACE_LEAST), PACE_MOST)
            self.value += (ratio - self.value) / self._answers


class EngineState:
    """The state of an engine, as events report it.

    running       runs on the engine, by request id
    total_tokens  sum of the tokens that these requests are predicted to hold at their ends
    models        names of the served models; empty: every model
    ready, known, expected  whether the engine takes requests, its circuit breaker aside; ever did; will do so later
    paces         by model, for models of known speed with at least one answer
    memory_token  who may block the engine while waiting for its memory
    prefills      the long prompts that it computes
    rests         from models of which it has refused requests.  left_out : the models for which others work meanwhile
    loaded        the models in its memory, where that holds few of them; else None
    closed_to     the models of which it takes no requests now because of the models in its memory (sharing.py)
    """

    __slots__ = (
        *(
            "_counted_at_s",
            "_ledger",
            "_refused",
            "_steps",
            "circuit",
            "closed_to",
            "expected",
            "info",
            "known",
            "left_out",
        ),
        *("loaded", "memory_token", "models", "paces", "prefills", "ready", "rests", "running", "total_tokens"),
        "worker",
    )

    def __init__(self, info: EngineInfo, circuit: Circuit, worker: Worker) -> None:
        self.running: dict[int, Run] = {}
        self.loaded: LoadedModels | None = None
        self.closed_to: frozenset[str] = frozenset()
        self.update(info)
        self.new_circuit(circuit)
        self.worker = worker
        self.ready = self.known = self.expected = False
        self.paces = {model: Pace(value) for model, value in info.paces.items()}
        self.memory_token, self.prefills = MemoryToken(), Prefills()
        self.total_tokens = 0
        self._ledger: Ledger | None = None  # of the running requests; None until the memory is short
        self._refused: dict[int, float] = {}  # by request id, ascending: the time before which it does not fit
        self._steps: dict[str, float] = {}  # by the name of a speed: steps so far of a refill engine, at that speed
        self._counted_at_s = 0.0

    def update(self, info: EngineInfo) -> None:
        """Replace the engine's description."""
        self.info = info
        self.models = frozenset(info.models)
        if info.barrier or not info.models_at_once:
            self.loaded, self.closed_to = None, frozenset()
            return
        if self.loaded is None:
            self.loaded = LoadedModels(info.loads_s)
        self.loaded.at_once = info.models_at_once
        self.loaded.told(info.loaded, idle=not self.running)

    def expect(self) -> None:
        """Be expected, unless the engine is ready."""
        self.expected = not self.ready

    def open(self, info: EngineInfo) -> None:
        """Take requests, with this description."""
        self.update(info)
        self.ready = self.known = True

    def close(self, *, expected: bool) -> None:
        """Take no more requests. expected : whether the engine will again"""
        self.ready, self.expected = False, expected

    def new_circuit(self, circuit: Circuit) -> None:
        """Begin anew: earlier faults and refusals no longer count."""
        self.circuit, self.rests = circuit, Rests(circuit.first_pause_s)
        self.left_out: frozenset[str] = frozenset()

    # ---- room ----

    @property
    def room(self) -> int:
        """Free slots; a barrier engine has all or none. Negative when look-ahead requests wait on the engine."""
        info = self.info
        if info.barrier:
            return 0 if self.worker.running else info.slots
        return info.slots - len(self.running)

    @property
    def room_at_once(self) -> int:
        """Requests that one start may send. A refill engine gets one, while on trial or if its memory is limited."""
        if self.info.barrier or (self.circuit.closed and self.info.tokens_max is None):
            return self.room
        return min(1, self.room)

    def takes(self, now_s: float) -> bool:
        """Whether the engine may be sent a request now, to run or to wait there (look-ahead)."""
        worker, info, circuit = self.worker, self.info, self.circuit
        if not self.ready or worker.reserved is not None:
            return False
        if circuit.open_until_s is not None and not circuit.takes(now_s):
            return False
        if info.barrier:
            return info.slots > 0 and not worker.running
        return len(self.running) < info.slots + info.look_ahead

    def serves(self, model: str) -> bool:
        return not self.models or model in self.models

    def open_to(self, model: str) -> bool:
        """Whether the engine serves the model, and is not left out for it."""
        return (not self.models or model in self.models) and model not in self.left_out and model not in self.closed_to

    def speed(self, model: str) -> StepTimes | None:
        """The model's step times; None: unknown."""
        return self.info.speeds.get(self._speed_name(model))

    def _speed_name(self, model: str) -> str:
        return model if model in self.info.speeds else ""

    def fits(self, queued: QueuedRequest, now_s: float, seconds_per_token: float) -> bool:
        """Whether the engine's memory will hold this request beside the running requests until each has ended.

        An empty engine takes any request, for there will never be more room.
        """
        if (tokens_max := self.info.tokens_max) is None or self.info.barrier or not self.running:
            return True
        if self.total_tokens + queued.total_tokens <= SURE_SHARE * tokens_max:
            return True  # the cache would hold all at their ends, even at twice their predicted totals
        if now_s < self._refused.get(queued.request.id, now_s):
            return False
        needs = [_need(run.queued, now_s - run.started_at_s, seconds_per_token) for run in self.running.values()]
        peak = peak_tokens([*needs, _need(queued, 0.0, seconds_per_token)])
        if peak <= tokens_max or (queued.request.blocks and peak - self._in_common(queued) <= tokens_max):
            return True
        self._refused.pop(queued.request.id, None)  # its new time comes last
        self._refused[queued.request.id] = now_s + RECHECK_S
        return False

    def _in_common(self, queued: QueuedRequest) -> int:
        """Tokens by which the prompts of the running requests and of this one are more than the cache has of them."""
        ledger = self._ledger
        if ledger is None:
            ledger = self._ledger = Ledger()
            for run in self.running.values():
                ledger.run(run.queued.request.id, run.queued.request.blocks, *run.queued.held())
        need = ledger.need(queued.request.id, queued.request.blocks, *queued.held())
        return self.total_tokens + queued.total_tokens - ledger.tokens - need

    def recheck_at_s(self, now_s: float) -> float | None:
        """When to check again whether a refused request fits; None: nothing was refused since the last change."""
        return next((at_s for at_s in self._refused.values() if at_s > now_s), None)

    # ---- start and end of runs ----

    def start(self, batch: FormedBatch, requests: list[QueuedRequest], now_s: float) -> None:
        """Record that these requests of the batch run. The refused request is kept: it fits no better now."""
        self._count_steps(now_s)
        name, steps = self.info.name, self._steps.get(self._speed_name(batch.model), 0.0) if self._steps else 0.0
        concurrency, limited = len(self.running) + len(requests), self.info.tokens_max is not None
        loads = self.loaded is not None and self.loaded.use(self.weights(batch.model), self.weights_running, now_s)
        for queued in requests:
            queued.run = self.running[queued.request.id] = Run(
                queued,
                name,
                batch.id,
                batch.formed_at_s,
                now_s,
                concurrency,
                steps,
                False,
                False,
                loads,
                0.0,
                queued.cached_tokens,
            )
            self.total_tokens += queued.total_tokens
            if self._ledger is not None:
                self._ledger.run(queued.request.id, queued.request.blocks, *queued.held())
            if limited and (is_oversize(queued, self.info) or self.memory_token.holder is queued):
                self.memory_token.start(queued, now_s)
        self.worker.running += len(requests)
        if self.circuit.open_until_s is not None:
            self.circuit.started(requests[0].request.id)

    def adopt(self, batch: FormedBatch, queued: QueuedRequest, ran_s: float, now_s: float) -> None:
        """Record that the request of the batch runs, and has done so for `ran_s` beside as many others as now."""
        self.start(batch, [queued], now_s)
        run = self.running[queued.request.id]
        run.started_at_s -= ran_s
        run.loads = False
        speed = self.speed(batch.model)
        if speed is not None and speed.step_s:
            run.steps_before -= ran_s / speed.step_s[min(run.concurrency, len(speed.step_s)) - 1]

    def served_s(self, run: Run, now_s: float) -> float:
        """Seconds for which a run has had a slot. Look-ahead requests wait first; all share the slots (Little). A load
        of the model does not count.
        """
        return (now_s - run.started_at_s - run.load_s) * min(1.0, self.info.slots / max(1, run.concurrency))

    def stop(self) -> tuple[int, ...]:
        """Mark the running batch as stopping. Returns its request ids, without cancelled requests."""
        stopped = [run for run in self.running.values() if not run.queued.cancelled]
        for run in stopped:
            run.stopping = True
        return tuple([run.queued.request.id for run in stopped])

    def remove(self, runs: Collection[Run], now_s: float) -> None:
        """Record that these runs have ended, whatever their outcome."""
        self._count_steps(now_s)
        for run in runs:
            queued = run.queued
            del self.running[queued.request.id]
            queued.run = None
            self.total_tokens -= queued.total_tokens
            if self._ledger is not None:
                self._ledger.drop(queued.request.id)
            if self.memory_token.holder is queued:
                self.memory_token.end(now_s)
            if self.prefills:
                self.prefills.end(queued.request.id)
            if self.circuit.trial is not None:
                self.circuit.end_trial(queued.request.id)
        self.worker.running -= len(runs)
        self._refused.clear()
        if self._ledger is not None and self.total_tokens <= AMPLE_SHARE * (self.info.tokens_max or math.inf):
            self._ledger = None
        if self.loaded is not None:
            loading = [self.weights(run.queued.request.model) for run in self.running.values() if run.loads]
            self.loaded.keep_loading(loading)

    # ---- models in its memory ----

    def weights(self, model: str) -> str:
        """The model that the engine loads for requests of this one."""
        return self.info.weights.get(model, model)

    def has_loaded(self, model: str) -> bool:
        """Whether a request of the model starts there without a load."""
        return self.loaded is None or self.weights(model) in self.loaded

    @property
    def weights_running(self) -> set[str]:
        """The models of the running requests."""
        return {self.weights(run.queued.request.model) for run in self.running.values()}

    def note_first_token(self, run: Run, first_s: float) -> None:
        """Learn from the time of a run's first token: its prompt is computed, and how long the engine takes to load a
        model.
        """
        self.prefills.end(run.queued.request.id)
        if self.loaded is None:
            return
        model, lead_s = self.weights(run.queued.request.model), first_s - run.started_at_s
        if run.loads:
            run.load_s = self.loaded.answered_after_load(model, lead_s, first_s)
        elif run.concurrency == 1:  # as the run that begins a load; others may wait inside the engine
            self.loaded.answered(model, lead_s)

    # ---- speed ----

    def pace(self, model: str) -> float:
        """Measured over profiled seconds; 1 before the first answer."""
        return self.paces[model].value if model in self.paces else 1.0

    def proven_until_s(self, model: str) -> float:
        """Until when the pace counts as proven; -inf before the first answer."""
        pace = self.paces.get(model)
        return pace.observed_at_s + PROVEN_S if pace is not None and pace.observed_at_s is not None else -math.inf

    def record_batch(self, model: str, sequences: int, tokens: float, seconds: float, now_s: float) -> bool:
        """Record a batch of `sequences` that ran for `seconds`; `tokens` : of the longest. True if the pace changed."""
        speed = self.speed(model)
        if speed is None or not speed.step_s or tokens <= 0:
            return False
        return self._record_pace(model, seconds, speed.batch_s(tokens, sequences), now_s)

    def record_run(self, run: Run, together: int, tokens: float, now_s: float) -> bool:
        """Record a batch of `together` requests of a barrier engine, or a request of a refill engine. The latter ran
        beside a changing number of others, so the engine's steps in that time are counted by the profile. A load of the
        model does not count.
        """
        model, seconds = run.queued.request.model, now_s - run.started_at_s
        steps = self._steps.get(self._speed_name(model), 0.0) - run.steps_before
        speed = self.speed(model)
        if self.info.barrier or steps <= 0 or speed is None or tokens <= 0:
            return self.record_batch(model, together, tokens, seconds - run.load_s, now_s)
        return self._record_pace(model, seconds - run.load_s, batch_s(tokens, seconds / steps, speed.prefill_s), now_s)

    def _count_steps(self, now_s: float) -> None:
        """Count the steps that the speeds allow since the last change of `running`. Call before each change."""
        info = self.info
        if info.barrier:
            return
        passed_s, self._counted_at_s = now_s - self._counted_at_s, now_s
        if not (info.speeds and self.running and info.slots):
            return
        sequences = min(len(self.running), info.slots)
        for name, speed in info.speeds.items():
            step_s = speed.step_s[min(sequences, len(speed.step_s)) - 1] if speed.step_s else 0.0
            if step_s > 0:
                self._steps[name] = self._steps.get(name, 0.0) + passed_s / step_s

    def _record_pace(self, model: str, seconds: float, profile_s: float, now_s: float) -> bool:
        if profile_s <= 0:
            return False
        pace = self.paces.setdefault(model, Pace())
        before = pace.value if pace.observed_at_s is not None else None
        pace.observe(seconds, profile_s, now_s)
        return pace.value != before


class EnginePool:
    """The engines of the scheduler.

    engines  all engines that were ever ready or expected, by name
    free     engines that take requests now, by name
    paused   engines in a pause of their circuit, by name
    resting  engines that rest from a model, by name
    sharing  engines whose models share a memory for few of them, by name
    computing  engines that compute long prompts, or owe the turn after one to those who waited (prefills.py), by name
    starts   number of requests that have started
    batches  busy barrier engines, by the number of requests in their batch and by name
    residency  what each engine has in its prefix cache
    """

    def __init__(self) -> None:
        self.batches: dict[int, dict[str, EngineState]] = {}
        self._batch_of: dict[str, int] = {}  # requests in the running batch of each busy barrier engine, by name
        self.engines: dict[str, EngineState] = {}
        self.free: dict[str, EngineState] = {}
        self.paused: dict[str, EngineState] = {}
        self.resting: dict[str, EngineState] = {}
        self.sharing: dict[str, EngineState] = {}
        self.computing: dict[str, EngineState] = {}
        self.starts = 0
        self._serving: dict[str, list[EngineState]] = {}  # cache of `serving`, by model
        self.residency = Residency()

    # ---- the pool's engines ----

    def join(self, engine: EngineState, now_s: float) -> None:
        """Add a new engine."""
        self.engines[engine.info.name] = engine
        self.update(engine, now_s)

    def update(self, engine: EngineState, now_s: float) -> None:
        """Update the pool after an engine's models or its readiness have changed."""
        self._serving.clear()
        self.residency.limit(engine.info.name, engine.info.tokens_max if engine.info.prefix_cache else 0)
        self.sharing.pop(engine.info.name, None)
        if engine.loaded is not None and engine.ready:
            self.sharing[engine.info.name] = engine
        self.refresh(engine, now_s)

    def refresh(self, engine: EngineState, now_s: float) -> None:
        """Update `free` and `batches` after the runs of an engine have changed, also for engines that share its GPU."""
        for member in engine.worker.engines:
            if member.takes(now_s):
                self.free[member.info.name] = member
            else:
                self.free.pop(member.info.name, None)
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
        """End the pauses of circuits whose time is over. True when any pause has ended."""
        over = [(name, engine) for name, engine in self.paused.items() if engine.circuit.takes(now_s)]
        for name, engine in over:
            del self.paused[name]
            self.refresh(engine, now_s)
        return bool(over)

    # ---- rests ----

    def look_at_rests(self, now_s: float) -> None:
        """Leave engines out that rest from a model while another engine of it works and does not rest."""
        for name, engine in list(self.resting.items()):
            going_on = engine.rests.going_on(now_s)
            engine.left_out = frozenset([model for model, _ in going_on if self._others_are_awake(model, now_s)])
            if not going_on:
                del self.resting[name]

    def _others_are_awake(self, model: str, now_s: float) -> bool:
        serving = self.serving(model)
        return any(other.circuit.closed and other.rests.until_s(model) <= now_s for other in serving)

    def rests_end_s(self, now_s: float) -> list[float]:
        """When the rests that leave an engine out end."""
        engines = self.resting.values()
        return [until_s for e in engines for model, until_s in e.rests.going_on(now_s) if model in e.left_out]

    # ---- engines of a model ----

    def serving(self, model: str) -> list[EngineState]:
        """Ready engines that serve the model."""
        serving = self._serving.get(model)
        if serving is None:
            serving = [engine for engine in self.engines.values() if engine.ready and engine.serves(model)]
            self._serving[model] = serving
        return serving

    def free_for(self, model: str, blocked: Collection[str] = ()) -> list[EngineState]:
        free = [engine for engine in self.free.values() if not engine.models or model in engine.models]
        if self.resting or self.sharing:
            free = [engine for engine in free if engine.open_to(model)]
        return [engine for engine in free if engine.info.name not in blocked] if blocked else free

    def others_work(self, names: Collection[str], model: str) -> bool:
        """Whether an engine other than these serves the model with a closed circuit."""
        return any(engine.info.name not in names and engine.circuit.closed for engine in self.serving(model))

    # ---- long prompts ----

    def compute(self, engine: EngineState, request_id: int, seconds: float, now_s: float) -> None:
        """Note that a long prompt was sent to an engine."""
        engine.prefills.start(request_id, seconds, now_s)
        self.computing[engine.info.name] = engine

    def look_at_prompts(self, waiting: Callable[[EngineState], int], now_s: float) -> list[float]:
        """Note which long prompts are computed, at a free slot. Returns when those of each engine that computes any
        count as computed. waiting : requests that an engine could start
        """
        times_s = []
        for name, engine in list(self.computing.items()):
            prefills = engine.prefills
            if (at_s := prefills.over_s(now_s)) is not None:
                times_s.append(at_s)
            elif prefills.turn_at is None:
                prefills.turn_at = self.starts + waiting(engine)
            elif self.starts >= prefills.turn_at:
                del self.computing[name]
        return times_s

    def may_compute(self, engine: EngineState) -> bool:
        """Whether a long prompt may start on an engine before the other requests that wait."""
        turn_at = engine.prefills.turn_at
        return not engine.prefills and (turn_at is None or self.starts >= turn_at)


def _need(queued: QueuedRequest, ran_s: float, seconds_per_token: float) -> tuple[float, float, float]:
    """(tokens held now, choices, steps to go) of one request; see the module."""
    request, expected = queued.request, queued.expected_tokens
    generated = ran_s / seconds_per_token
    tokens_now = request.prompt_tokens + request.choices * (generated + BLOCK_TOKENS)
    return tokens_now, request.choices, remaining_tokens(request.quantiles, expected, generated)


def remaining_tokens(quantiles: tuple[float, ...], expected: float, generated: float) -> float:
    """Expected further output tokens of a request that has generated `generated` tokens.

    quantiles: its equally likely lengths, () when only `expected` is known.
    """
    if generated > 0:
        longer = [length for length in quantiles if length > generated]
        if longer:
            return sum(longer) / len(longer) - generated
    return expected - generated if expected > generated else OVERDUE_SHARE * generated


def peak_tokens(requests: Iterable[tuple[float, float, float]]) -> float:
    """Peak need of requests, each (tokens held now, choices, steps to go), in tokens. O(n log n)."""
    tokens = choices = peak = 0.0
    for tokens_i, choices_i, remaining_i in sorted(requests, key=lambda request: -request[2]):
        tokens += tokens_i
        choices += choices_i
        peak = max(peak, tokens + choices * remaining_i)
    return peak
