"""The time and the energy that a simulated engine takes for its requests.

An engine works in steps. A step adds one token to every running sequence; its seconds and joules depend on the number
of running sequences. The unit of work is a job: the whole batch of a barrier engine, or one request of a refill engine.

    n      running sequences
    P(n)   W, the power of the engine: step_j(n) / step_s(n) of its profile
    step   virtual time: steps done so far, a real number; it grows by dt / step_s(n) in dt seconds
    end    of a job: its first step plus its length in tokens, whichever jobs join or leave

So the order of the ends is known without stepping through tokens; a change of n changes only the conversion to seconds.
This is exact, also for lengths that are real numbers, and takes O(log n) per job.

A client that streams receives its first byte when the first step of its job ends, after the prefill; if the job is
shorter than a step, at the end of the job.

An engine may hold few models at once, and load the others on demand (`Loading`). As Ollama does, it takes its requests
one after another: a request of a model that it does not have waits until another model has no job any more, and those
behind it wait, too; then the load takes its time, and the prefill follows.

Energy is counted as in `ModelledEnergy` (observe/energy.py). A static batch takes prefill_j once, at its start, and
P(n) after its prefill. On a refill engine a request in prefill counts as one of the n, and takes no other energy.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, itemgetter

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from bins.profile import Profile, StepTimes
from bins.risk import risk
from llmserve.request import Batch, EngineInfo
from llmserve.scheduling.messages import AnswerBegan, BatchEnded, Event, RequestEnded

PREFILL_END = itemgetter(0)
TURN = attrgetter("turn")


@dataclass(frozen=True, slots=True)
class Costs:
    """Time and power of an engine. Plain lists, indexed by the number n of running sequences: each event reads them.

    step_s               seconds of a step of n sequences, from n = 0 (a step of prompts alone) to the largest n
    power_w              watts during such a step
    prefill_s            seconds before a job's first token; prefill_j joules of a static batch for its prefill
    prefill_s_per_token  further seconds for each token of the job's prompts, which are read one after another
    idle_w               watts while nothing runs
    metered              whether the joules are known

    Only KVEngine knows contexts, and what they cost (bins/profile.py):
    prefill_s_per_context_token  further seconds of a token of a prompt, for each token before it
    step_s_per_context_token     further seconds of a step, for each token of its sequences' contexts
    """

    step_s: list[float]
    power_w: list[float]
    prefill_s: float = 0.0
    prefill_j: float = 0.0
    prefill_s_per_token: float = 0.0
    idle_w: float = 0.0
    metered: bool = True
    prefill_s_per_context_token: float = 0.0
    step_s_per_context_token: float = 0.0

    @classmethod
    def constant(
        cls, step_s: float, prefill_s: float, sequences_max: int, *, prefill_s_per_token: float = 0.0
    ) -> Costs:
        """The same step time for any number of sequences, without energy."""
        return cls(
            [step_s] * (sequences_max + 1),
            [0.0] * (sequences_max + 1),
            prefill_s,
            prefill_s_per_token=prefill_s_per_token,
            metered=False,
        )

    @classmethod
    def of(cls, profile: Profile, sequences_max: int) -> Costs:
        """Raises ValueError when the profile has fewer sequences than sequences_max."""
        if profile.slots_max is not None and sequences_max > profile.slots_max:
            raise ValueError(f"the profile {profile.name} is of {profile.slots_max} sequences, not {sequences_max}")
        times = profile.step_times(max(2, sequences_max))
        one_s, two_s = times.step_s[:2]
        return cls(
            step_s=[max(0.0, 2 * one_s - two_s), *times.step_s[:sequences_max]],
            power_w=[math.nan, *profile.power_w(np.arange(1, sequences_max + 1)).tolist()],
            prefill_s=times.prefill_s,
            prefill_j=profile.prefill_j,
            prefill_s_per_token=profile.prefill_s_per_token,
            idle_w=profile.idle_w,
            metered=profile.energy_known,
            prefill_s_per_context_token=profile.prefill_s_per_context_token,
            step_s_per_context_token=profile.step_s_per_context_token,
        )

    def prompt_s(self, before: int, tokens: int, first: bool) -> float:
        """Seconds that a chunk of a prompt adds to a step. before : tokens of the prompt before it.  first : of its
        prompt
        """
        positions = tokens * before + tokens * (tokens - 1) // 2
        seconds = self.prefill_s_per_token * tokens + self.prefill_s_per_context_token * positions
        return seconds + self.prefill_s if first else seconds

    @property
    def times(self) -> StepTimes:
        """Times of batches of 1, 2, ... sequences, without prefill_s_per_token."""
        return StepTimes(self.prefill_s, tuple(self.step_s[1:]))

    def batch_s(self, lengths: Sequence[float], size: int, prompt_tokens_mean: float = 0.0) -> float:
        """Expected seconds of a static batch of `size` requests; their lengths are drawn from `lengths` (ascending)."""
        return self.times.batch_s(risk(lengths, size), size, self.prefill_s_per_token * size * prompt_tokens_mean)

    def slot_s(self, tokens_mean: float, slots: int, prompt_tokens_mean: float = 0.0) -> float:
        """Mean seconds that a request holds its slot on a refill engine whose `slots` slots are all in use.

        Every step counts as a step of all slots, also while some slots are in prefill.
        """
        return self.times.batch_s(tokens_mean, slots, self.prefill_s_per_token * prompt_tokens_mean)

    def alone_s(self, lengths: ArrayLike, prompt_tokens: ArrayLike = 0.0) -> NDArray[np.float64]:
        """Seconds of requests that run alone on an engine. lengths, prompt_tokens : (...). Returns (...)."""
        prompts_s = self.prefill_s_per_token * np.asarray(prompt_tokens, dtype=float)
        return self.times.batch_s(np.asarray(lengths, dtype=float), 1, prompts_s)


@dataclass(frozen=True, slots=True)
class Loading:
    """The models in an engine's memory. models_at_once : how many it holds.  load_s : seconds of a load"""

    models_at_once: int
    load_s: float


class _Job(msgspec.Struct, eq=False):
    """Requests that begin and end together.

    lengths        output tokens by request id, without aborted requests
    longest        the longest of these lengths
    prompt_tokens  tokens of all prompts at the start
    sequences      number of requests at the start: a static batch keeps its rows
    turn           the smallest waits least, among those that wait in the engine
    unanswered     ids of requests whose clients stream and have received no byte
    model          of the requests
    began          virtual time at the start of the first step
    """

    batch_id: int
    lengths: dict[int, float]
    longest: float
    prompt_tokens: float
    sequences: int
    turn: float
    unanswered: list[int]
    model: str = ""
    began: float = 0.0

    @property
    def next_tokens(self) -> float:
        """Tokens from the start of the job to its next event: first bytes, then the end."""
        return min(1.0, self.longest) if self.unanswered else self.longest


class StepEngine:
    """An engine of given costs.

    A barrier engine's batch of b takes prefill_s + longest length * step_s(b) (Multi-Bin, Section 3). A refill
    engine's requests share its steps; requests beyond its slots wait inside the engine for a free slot. A request's
    prefill takes a slot, prefill_s, and prefill_s_per_token for its prompt. A prefill neither slows other requests down
    nor is slowed by them.
    lengths : output tokens by request id.  streaming : ids of requests for which the engine gives AnswerBegan.
    loading : None: it has all models; not for a barrier engine

    loads    number of loads so far
    """

    def __init__(
        self,
        info: EngineInfo,
        lengths: Mapping[int, float] | Sequence[float],
        costs: Costs,
        streaming: Collection[int] = (),
        *,
        loading: Loading | None = None,
    ) -> None:
        self.info = info
        self.costs = costs
        self.loads = 0
        self._loading = loading
        self._ready_s: dict[str, float] = {}  # when each model in the memory is loaded, in the order of their last use
        self.busy_s = 0.0  # seconds with at least one job
        self.busy_j = 0.0
        self._job_s = 0.0  # job-seconds
        self._lengths = lengths
        self._streaming = streaming
        self._step_s = costs.step_s
        self._power_w = costs.power_w
        self._barrier = info.barrier
        self._jobs_max = 1 if info.barrier else info.slots
        self._jobs = 0  # number of jobs with a slot: in prefill, or running
        self._now_s = 0.0
        self._step = 0.0
        self._sequences = 0
        self._serial = 0
        self._waiting: deque[_Job] = deque()
        self._prefill: deque[tuple[float, _Job]] = deque()  # (end of the prefill in seconds, job), in order
        self._running: list[tuple[float, int, _Job]] = []  # heap: (step of first bytes or end, serial, job)
        self._changed = False  # since _next_end_s was computed
        self._next_end_s: float | None = None

    # ---- for the cluster ----

    @property
    def next_end_s(self) -> float | None:
        if self._changed:
            self._next_end_s = self._find_next_end_s()
            self._changed = False
        return self._next_end_s

    def start(self, batch: Batch, now_s: float) -> None:
        """Take these requests. A refill engine may get a batch in parts, and more requests than it has slots."""
        self._advance(now_s)
        if self._barrier:
            assert not self._jobs, f"barrier engine {self.info.name} was sent two batches"
            lengths = {request.id: self._lengths[request.id] for request in batch.requests}
            prompt_tokens = sum([request.prompt_tokens for request in batch.requests])
            self._begin(self._job(batch.id, lengths, max(lengths.values()), prompt_tokens))
            return
        for request in batch.requests:
            length = self._lengths[request.id]
            job = self._job(batch.id, {request.id: length}, length, request.prompt_tokens, batch.turn or 0.0)
            job.model = batch.model
            if self._jobs < self._jobs_max and not self._waiting and self._has_memory(batch.model):
                self._begin(job)
            else:
                insort(self._waiting, job, key=TURN)

    def _job(
        self, batch_id: int, lengths: dict[int, float], longest: float, prompt_tokens: float, turn: float = 0.0
    ) -> _Job:
        streaming = self._streaming
        unanswered = [request_id for request_id in lengths if request_id in streaming] if streaming else []
        return _Job(batch_id, lengths, longest, prompt_tokens, len(lengths), turn, unanswered)

    def end(self, now_s: float) -> Event:
        """Take and return the event at next_end_s, which must be now: a job ends, or an answer begins."""
        assert now_s == self.next_end_s, f"nothing ends on {self.info.name} at {now_s}"
        self._advance(now_s)
        self._step, serial, job = self._running[0]  # the exact step, so that rounding errors do not add up
        if job.unanswered:
            request_id = job.unanswered.pop(0)
            heapq.heapreplace(self._running, (job.began + job.next_tokens, serial, job))
            self._changed = True
            return AnswerBegan(request_id)
        heapq.heappop(self._running)
        self._sequences -= job.sequences
        self._free_slot()
        if self._barrier:
            return BatchEnded(self.info.name, job.batch_id, job.lengths)
        ((request_id, length),) = job.lengths.items()
        return RequestEnded(self.info.name, request_id, "completed", length)

    def abort(self, request_id: int, now_s: float) -> None:
        """Drop a request if the engine has it. The batch goes on to its longest remaining answer, if any remains."""
        self._advance(now_s)
        jobs = chain(self._waiting, (job for _, job in self._prefill), (job for *_, job in self._running))
        job = next((job for job in jobs if request_id in job.lengths), None)
        if job is None:
            return
        del job.lengths[request_id]
        if request_id in job.unanswered:
            job.unanswered.remove(request_id)
        if not job.lengths:
            self._drop(job)
            return
        job.longest = max(job.lengths.values())
        if self._running:  # the job is a batch, so no other job runs
            self._running = [(max(job.began + job.next_tokens, self._step), self._serial, job)]
        self._changed = True

    def _drop(self, job: _Job) -> None:
        """Drop an aborted job that waits, is in prefill or runs; O(jobs)."""
        if job in self._waiting:
            self._waiting.remove(job)
            self._begin_waiting()
            return
        running = [entry for entry in self._running if entry[2] is not job]
        if len(running) < len(self._running):
            heapq.heapify(running)
            self._running = running
            self._sequences -= job.sequences
        else:
            self._prefill = deque([entry for entry in self._prefill if entry[1] is not job])
        self._free_slot()

    # ---- slots ----

    def _free_slot(self) -> None:
        """Give the slot of a job that left to the job of the smallest turn, or that has waited longest."""
        self._jobs -= 1
        self._changed = True
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        while self._waiting and self._jobs < self._jobs_max and self._has_memory(self._waiting[0].model):
            self._begin(self._waiting.popleft())

    def _has_memory(self, model: str) -> bool:
        """Whether the model is in the memory, or can be loaded now."""
        if self._loading is None or model in self._ready_s or len(self._ready_s) < self._loading.models_at_once:
            return True
        return not self._models_with_jobs >= self._ready_s.keys()

    @property
    def _models_with_jobs(self) -> set[str]:
        return {job.model for job in chain((job for _, job in self._prefill), (job for *_, job in self._running))}

    def _load_end_s(self, loading: Loading, model: str) -> float:
        """Use a model from now on; return when it is loaded."""
        ready_s = self._ready_s.pop(model, None)
        if ready_s is None:
            self.loads += 1
            ready_s = self._now_s + loading.load_s
            if len(self._ready_s) >= loading.models_at_once:
                busy = self._models_with_jobs
                del self._ready_s[next(other for other in self._ready_s if other not in busy)]
        self._ready_s[model] = ready_s
        return ready_s

    def _begin(self, job: _Job) -> None:
        self._jobs += 1
        self._changed = True
        costs = self.costs
        if self._barrier:
            self.busy_j += costs.prefill_j
        prefill_s = costs.prefill_s + costs.prefill_s_per_token * job.prompt_tokens
        from_s = self._now_s
        if self._loading is not None:
            from_s = max(from_s, self._load_end_s(self._loading, job.model))
        if from_s + prefill_s > self._now_s:
            insort(self._prefill, (from_s + prefill_s, job), key=PREFILL_END)
        else:
            self._run(job)

    def _run(self, job: _Job) -> None:
        if not self._sequences:
            self._step = 0.0  # small numbers are more exact
        job.began = self._step
        self._sequences += job.sequences
        self._serial += 1
        heapq.heappush(self._running, (self._step + job.next_tokens, self._serial, job))

    # ---- the passing of time ----

    def _advance(self, now_s: float) -> None:
        """Advance the time to now. Prefills may end meanwhile, jobs may not."""
        while self._prefill and self._prefill[0][0] <= now_s:
            ready_s, job = self._prefill.popleft()
            self._advance_steps(ready_s)
            self._run(job)
        if now_s > self._now_s:
            self._advance_steps(now_s)

    def _advance_steps(self, now_s: float) -> None:
        """Advance the time to now while the same jobs run; count their steps and energy."""
        passed_s = now_s - self._now_s
        self._now_s = now_s
        jobs, sequences = self._jobs, self._sequences
        if not jobs:
            return
        self.busy_s += passed_s
        self._job_s += passed_s * jobs
        if sequences and passed_s > 0:  # steps may take no time
            self._step += passed_s / self._step_s[sequences]
        drawing = sequences if self._barrier else jobs
        if drawing:
            self.busy_j += passed_s * self._power_w[drawing]

    def _find_next_end_s(self) -> float | None:
        """When the first job ends or answers, after the jobs in prefill have joined; O(jobs in prefill)."""
        at_s, step, sequences = self._now_s, self._step, self._sequences
        first = self._running[0][0] if self._running else math.inf
        for ready_s, job in self._prefill:
            if sequences:
                if at_s + (first - step) * self._step_s[sequences] <= ready_s:
                    break
                step += (ready_s - at_s) / self._step_s[sequences]
            at_s = ready_s
            sequences += job.sequences
            first = min(first, step + job.next_tokens)
        return at_s + max(0.0, first - step) * self._step_s[sequences] if sequences else None

    # ---- results ----

    def alone_s(self, lengths: ArrayLike, prompt_tokens: ArrayLike) -> NDArray[np.float64]:
        """Seconds of requests that run alone on the engine. lengths, prompt_tokens : (...). Returns (...)."""
        return self.costs.alone_s(lengths, prompt_tokens)

    def utilisation(self, elapsed_s: float) -> float:
        """Busy share of the engine's time; on a refill engine, of its slots' time."""
        return self._job_s / (elapsed_s * self._jobs_max) if elapsed_s > 0 else 0.0

    def energy_j(self, elapsed_s: float) -> float | None:
        """Joules of a run of elapsed_s seconds, with the idle time; None when the joules are not known."""
        if not self.costs.metered:
            return None
        return self.busy_j + self.costs.idle_w * max(0.0, elapsed_s - self.busy_s)


class TimedEngine(StepEngine):
    """An engine whose steps all take the same time, for any number of sequences."""

    def __init__(
        self,
        info: EngineInfo,
        lengths: Mapping[int, float] | Sequence[float],
        *,
        step_s: float,
        prefill_s: float = 0.0,
        prefill_s_per_token: float = 0.0,
        streaming: Collection[int] = (),
    ) -> None:
        costs = Costs.constant(step_s, prefill_s, info.slots, prefill_s_per_token=prefill_s_per_token)
        super().__init__(info, lengths, costs, streaming)


class ProfileEngine(StepEngine):
    """An engine whose steps take the time and energy of a measured engine (bins/profile.py)."""

    def __init__(
        self,
        info: EngineInfo,
        lengths: Mapping[int, float] | Sequence[float],
        profile: Profile,
        streaming: Collection[int] = (),
    ) -> None:
        super().__init__(info, lengths, Costs.of(profile, info.slots), streaming)
