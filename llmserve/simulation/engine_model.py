"""How long a simulated engine takes for what it is given, and what that costs in energy.

An engine works in steps; each step adds a token to every sequence that runs, and takes as long, and as many joules, as
so many sequences do. What runs is a job: a barrier engine's whole batch, or one request of a refill engine.

    n      sequences that run
    P(n)   W, what the engine draws meanwhile: step_j(n) / step_s(n) of its profile
    step   virtual time: steps done so far, a real number; it grows by dt / step_s(n) in dt seconds
    end    of a job: the step at which it began, plus its length in tokens; joining and leaving do not move it

So the order of the ends is known without stepping through tokens, and only the conversion to seconds changes when n
does: exact for lengths that are real numbers too, at O(log n) a job.

A client that streams sees its first byte when the first step of its job ends, after the prefill; of a job that is
shorter than a step, at its end.

Energy is counted as `llmserve.energy.ModelledEnergy` counts it. A static batch takes prefill_j once, as it begins, and
P(n) from the end of its prefill on. Where slots refill, a request in prefill counts among the n, and that is all.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from bins.profile import Profile, StepTimes
from bins.risk import risk
from llmserve.request import Batch, EngineInfo
from llmserve.scheduling.messages import AnswerBegan, BatchEnded, Event, RequestEnded

PREFILL_END = itemgetter(0)


@dataclass(frozen=True, slots=True)
class Costs:
    """What an engine's work costs. Plain lists, indexed by the sequences that run: they are read at every event.

    step_s               seconds of a step of n sequences, n = 0 (never read) to the most that can run; power_w watts
                         meanwhile
    prefill_s            before a job's first token; prefill_j joules of a static batch for that
    prefill_s_per_token  more of them, for each token of the job's prompts, which are read one after the other
    idle_w               watts while nothing runs
    metered              whether the joules are known
    """

    step_s: list[float]
    power_w: list[float]
    prefill_s: float = 0.0
    prefill_j: float = 0.0
    prefill_s_per_token: float = 0.0
    idle_w: float = 0.0
    metered: bool = True

    @classmethod
    def constant(
        cls, step_s: float, prefill_s: float, sequences_max: int, *, prefill_s_per_token: float = 0.0
    ) -> Costs:
        """However many sequences run, and nothing is known of energy."""
        return cls(
            [step_s] * (sequences_max + 1),
            [0.0] * (sequences_max + 1),
            prefill_s,
            prefill_s_per_token=prefill_s_per_token,
            metered=False,
        )

    @classmethod
    def of(cls, profile: Profile, sequences_max: int) -> Costs:
        """Raises ValueError when the profile is not of so many sequences."""
        if profile.slots_max is not None and sequences_max > profile.slots_max:
            raise ValueError(f"the profile {profile.name} is of {profile.slots_max} sequences, not {sequences_max}")
        times = profile.step_times(sequences_max)
        return cls(
            step_s=[math.nan, *times.step_s],
            power_w=[math.nan, *profile.power_w(np.arange(1, sequences_max + 1)).tolist()],
            prefill_s=times.prefill_s,
            prefill_j=profile.prefill_j,
            idle_w=profile.idle_w,
            metered=profile.energy_known,
        )

    @property
    def times(self) -> StepTimes:
        """How long batches of 1, 2, ... sequences take, but for what their prompts add."""
        return StepTimes(self.prefill_s, tuple(self.step_s[1:]))

    def batch_s(self, lengths: Sequence[float], size: int, prompt_tokens_mean: float = 0.0) -> float:
        """Expected seconds of a static batch of `size` requests, each drawn from `lengths` (ascending, tokens)."""
        return self.times.batch_s(risk(lengths, size), size, self.prefill_s_per_token * size * prompt_tokens_mean)

    def slot_s(self, tokens_mean: float, slots: int, prompt_tokens_mean: float = 0.0) -> float:
        """Mean seconds that a request holds its slot on a refill engine whose `slots` slots are all taken.

        Every step is counted as one of all slots, also while some of them are in prefill.
        """
        return self.times.batch_s(tokens_mean, slots, self.prefill_s_per_token * prompt_tokens_mean)

    def alone_s(self, lengths: ArrayLike, prompt_tokens: ArrayLike = 0.0) -> NDArray[np.float64]:
        """Seconds of requests that have an engine for themselves. lengths, prompt_tokens : (...). Returns (...)."""
        prompts_s = self.prefill_s_per_token * np.asarray(prompt_tokens, dtype=float)
        return self.times.batch_s(np.asarray(lengths, dtype=float), 1, prompts_s)


class _Job(msgspec.Struct, eq=False):
    """What begins and ends as one.

    lengths        output tokens by request id, of those that are not aborted
    longest        of these
    prompt_tokens  of all that it began with
    sequences      that it began with: a static batch keeps its rows
    unanswered     requests whose clients stream and have seen no byte
    began          step at which its first step begins
    """

    batch_id: int
    lengths: dict[int, float]
    longest: float
    prompt_tokens: float
    sequences: int
    unanswered: list[int]
    began: float = 0.0

    @property
    def next_tokens(self) -> float:
        """Tokens from its beginning to what the scheduler is told of next: first bytes, then the end."""
        return min(1.0, self.longest) if self.unanswered else self.longest


class StepEngine:
    """An engine of given costs.

    A barrier engine's batch of b takes prefill_s + longest length * step_s(b) (Multi-Bin, Section 3). A refill
    engine's requests share its steps; what is sent beyond its slots waits inside until one is free. A request's
    prefill takes prefill_s, what its prompt adds to that, and a slot, but neither slows the others down nor is slowed
    by them.
    lengths : output tokens by request id.  streaming : ids of requests whose first bytes it tells of.
    """

    def __init__(
        self,
        info: EngineInfo,
        lengths: Mapping[int, float] | Sequence[float],
        costs: Costs,
        streaming: Collection[int] = (),
    ) -> None:
        self.info = info
        self.costs = costs
        self.busy_s = 0.0  # with a job
        self.busy_j = 0.0
        self._job_s = 0.0  # job-seconds
        self._lengths = lengths
        self._streaming = streaming
        self._step_s = costs.step_s
        self._power_w = costs.power_w
        self._barrier = info.barrier
        self._jobs_max = 1 if info.barrier else info.slots
        self._jobs = 0  # that have a slot: in prefill, or running
        self._now_s = 0.0
        self._step = 0.0
        self._sequences = 0
        self._serial = 0
        self._waiting: deque[_Job] = deque()
        self._prefill: deque[tuple[float, _Job]] = deque()  # (its end in seconds, job), in order
        self._running: list[tuple[float, int, _Job]] = []  # heap: (step of its first bytes or end, serial, job)
        self._changed = False  # since the next end was found
        self._next_end_s: float | None = None

    # ---- what the cluster asks for ----

    @property
    def next_end_s(self) -> float | None:
        if self._changed:
            self._next_end_s = self._find_next_end_s()
            self._changed = False
        return self._next_end_s

    def start(self, batch: Batch, now_s: float) -> None:
        """Take these requests. A refill engine may be sent a batch in parts, and more than it has slots for."""
        self._advance(now_s)
        if self._barrier:
            assert not self._jobs, f"barrier engine {self.info.name} was sent two batches"
            lengths = {request.id: self._lengths[request.id] for request in batch.requests}
            prompt_tokens = sum([request.prompt_tokens for request in batch.requests])
            self._begin(self._job(batch.id, lengths, max(lengths.values()), prompt_tokens))
            return
        for request in batch.requests:
            length = self._lengths[request.id]
            job = self._job(batch.id, {request.id: length}, length, request.prompt_tokens)
            if self._jobs < self._jobs_max:
                self._begin(job)
            else:
                self._waiting.append(job)

    def _job(self, batch_id: int, lengths: dict[int, float], longest: float, prompt_tokens: float) -> _Job:
        streaming = self._streaming
        unanswered = [request_id for request_id in lengths if request_id in streaming] if streaming else []
        return _Job(batch_id, lengths, longest, prompt_tokens, len(lengths), unanswered)

    def end(self, now_s: float) -> Event:
        """What ends at next_end_s, which must be now: a job, or the wait for the first byte of an answer."""
        assert now_s == self.next_end_s, f"nothing ends on {self.info.name} at {now_s}"
        self._advance(now_s)
        self._step, serial, job = self._running[0]  # the very step: rounding does not pile up
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
        """Let go of a request, if it is still here. Its batch goes on to the longest answer that is left, if any is."""
        self._advance(now_s)
        here = chain(self._waiting, (job for _, job in self._prefill), (job for *_, job in self._running))
        job = next((job for job in here if request_id in job.lengths), None)
        if job is None:
            return
        del job.lengths[request_id]
        if request_id in job.unanswered:
            job.unanswered.remove(request_id)
        if not job.lengths:
            self._drop(job)
            return
        job.longest = max(job.lengths.values())
        if self._running:  # a batch, so that nothing else runs
            self._running = [(max(job.began + job.next_tokens, self._step), self._serial, job)]
        self._changed = True

    def _drop(self, job: _Job) -> None:
        """Forget an aborted job, wherever it is; O(jobs)."""
        if job in self._waiting:
            self._waiting.remove(job)
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
        """A job has left its slot: the one that has waited longest gets it."""
        self._jobs -= 1
        self._changed = True
        if self._waiting:
            self._begin(self._waiting.popleft())

    def _begin(self, job: _Job) -> None:
        self._jobs += 1
        self._changed = True
        costs = self.costs
        if self._barrier:
            self.busy_j += costs.prefill_j
        prefill_s = costs.prefill_s + costs.prefill_s_per_token * job.prompt_tokens
        if prefill_s > 0:
            insort(self._prefill, (self._now_s + prefill_s, job), key=PREFILL_END)
        else:
            self._run(job)

    def _run(self, job: _Job) -> None:
        if not self._sequences:
            self._step = 0.0  # the smaller, the more exact
        job.began = self._step
        self._sequences += job.sequences
        self._serial += 1
        heapq.heappush(self._running, (self._step + job.next_tokens, self._serial, job))

    # ---- the passing of time ----

    def _advance(self, now_s: float) -> None:
        """Let time pass up to now; nothing ends on the way, but prefills do."""
        while self._prefill and self._prefill[0][0] <= now_s:
            ready_s, job = self._prefill.popleft()
            self._pass(ready_s)
            self._run(job)
        if now_s > self._now_s:
            self._pass(now_s)

    def _pass(self, now_s: float) -> None:
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
        """When the first job ends or answers, those in prefill joining in the meantime; O(jobs in prefill)."""
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

    # ---- what it came to ----

    def utilisation(self, elapsed_s: float) -> float:
        """Share of its time (of its slots' time, on a refill engine) that it was at work."""
        return self._job_s / (elapsed_s * self._jobs_max) if elapsed_s > 0 else 0.0

    def energy_j(self, elapsed_s: float) -> float | None:
        """Joules of a run of so many seconds, its idle time included; None when its costs do not tell."""
        if not self.costs.metered:
            return None
        return self.busy_j + self.costs.idle_w * max(0.0, elapsed_s - self.busy_s)


class TimedEngine(StepEngine):
    """An engine whose every step takes the same time, however many sequences run."""

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
    """An engine whose steps take the time and energy of a measured one (bins/profile.py)."""

    def __init__(
        self,
        info: EngineInfo,
        lengths: Mapping[int, float] | Sequence[float],
        profile: Profile,
        streaming: Collection[int] = (),
    ) -> None:
        super().__init__(info, lengths, Costs.of(profile, info.slots), streaming)
