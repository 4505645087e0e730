"""A simulated engine with a KV cache and chunked prefill, as vLLM V1 runs its requests.

StepEngine (engine_model.py) is for engines of which only the steps of their answers are known: it takes lengths that
are real numbers, static batches and loads of models, and its prompts cost nobody else a step. Here prompts are the
work, and memory is what requests compete for. Both are engines of the same costs.

An engine works in steps. In each step every decoding sequence gets one token, and what is left of `step_tokens` goes to
prompts, in order. A step takes

    step_s(n) + x C + sum over tokens of prompts (a + b p)

    n     decoding sequences
    C     tokens of their contexts;  x: `step_s_per_context_token`
    p     tokens before a token of a prompt;  a, b: `prefill_s_per_token`, `prefill_s_per_context_token`

A request is admitted when the whole of its prompt fits into the free blocks, and the prefix that is cached need not be
computed (kv_pool.py). When a decoding sequence finds no block, the sequence that was admitted last is preempted: its
blocks become free, and it is the first to be admitted again, with what it has answered so far as a part of its prompt.
The last step of a prompt gives the first token of the answer.

Steps between which the same sequences decode are one stretch: their seconds are a sum of linear growth. A request that
comes meanwhile joins at the end of the step in progress.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from numpy.typing import ArrayLike, NDArray

from llmserve.request import BLOCK_TOKENS, Batch, EngineInfo, Request
from llmserve.scheduling.messages import AnswerBegan, Event, RequestEnded
from llmserve.simulation.engine_model import Costs
from llmserve.simulation.kv_pool import KVPool, Text
from llmserve.simulation.kv_pool import Sequence as Blocks

STEP_TOKENS = 8_192  # vLLM's default of a step on a large GPU
SEQUENCES_MAX = 256  # vLLM's default there

TURN = attrgetter("turn")


@dataclass(frozen=True, slots=True)
class KVLimits:
    """What an engine has room for. kv_tokens : of its cache, in blocks of block_tokens.  step_tokens : of a step.
    sequences : that run at once
    """

    kv_tokens: int
    step_tokens: int = STEP_TOKENS
    sequences: int = SEQUENCES_MAX
    block_tokens: int = BLOCK_TOKENS


class _Job:
    """A request in the engine.

    tokens         of the prompt
    answer_tokens  that it will have, at least 1;  answered : that it has
    computed       tokens whose keys and values are in the cache
    target         tokens to compute before the next token of the answer
    cached_tokens  of the prompt, when it was first admitted; None before
    began_s        when its client had the first token of a stream; None: not yet, or no stream
    """

    __slots__ = (
        "answer_tokens",
        "answered",
        "began_s",
        "blocks",
        "cached_tokens",
        "computed",
        "length",
        "request_id",
        "streams",
        "target",
        "text",
        "tokens",
        "turn",
    )

    def __init__(self, request_id: int, text: Text, length: float, turn: float, streams: bool) -> None:
        self.request_id = request_id
        self.text = text
        self.tokens = sum([tokens for _, tokens in text])
        self.length = length
        self.answer_tokens = max(1, round(length))
        self.answered = 0
        self.turn = turn
        self.streams = streams
        self.computed = 0
        self.target = self.tokens
        self.cached_tokens: int | None = None
        self.began_s: float | None = None
        self.blocks: Blocks | None = None

    @property
    def decodes(self) -> bool:
        return self.computed >= self.target

    @property
    def is_new(self) -> bool:
        """Whether nothing has been computed since the admission."""
        return self.blocks is not None and self.computed == self.blocks.cached_tokens

    @property
    def text_now(self) -> Text:
        """The prompt with the answer so far."""
        *parts, (name, tokens) = self.text
        return (*parts, (name, tokens + self.answered))


@dataclass(slots=True)
class _Stretch:
    """Steps in which the same sequences decode.

    first_s    seconds of the first step; each further step takes growth_s more
    steps      number of steps
    decoding   the sequences that decode
    chunks     (job, tokens) of prompts; then there is one step
    """

    from_s: float
    first_s: float
    growth_s: float
    steps: int
    decoding: list[_Job]
    chunks: list[tuple[_Job, int]]

    def after_s(self, steps: int) -> float:
        """When so many of its steps have ended."""
        return self.from_s + steps * self.first_s + self.growth_s * (steps * (steps - 1) // 2)

    def steps_until(self, now_s: float) -> int:
        """Steps that have begun before now; at most all."""
        passed_s = now_s - self.from_s
        if passed_s <= 0:
            return 0
        slope = self.first_s - self.growth_s / 2
        if self.growth_s > 0:
            root = (math.sqrt(slope * slope + 2 * self.growth_s * passed_s) - slope) / self.growth_s
        elif slope > 0:
            root = passed_s / slope
        else:
            return self.steps
        steps = min(self.steps, max(1, math.ceil(root)))
        while steps > 1 and self.after_s(steps - 1) >= now_s:
            steps -= 1
        while steps < self.steps and self.after_s(steps) < now_s:
            steps += 1
        return steps


class KVEngine:
    """An engine of given costs and limits. `next_end_s` is read after each call, as the cluster does.

    lengths    output tokens by request id, rounded to whole tokens, at least one
    texts      prompts by request id; None: texts of the requests' `prompt_tokens` that share nothing
    tools      that answers call, by request id; (): no answer calls one
    streaming  ids of requests whose clients stream: the engine says when their answers begin, by AnswerBegan
    wants      of these, whether the scheduler wants to hear of it; None: of all
    on_first_token  called with each request's id and the time of its first token

    prompt_tokens, cached_tokens  sums over the requests that were admitted, each once
    preemptions                   number of preemptions by want of memory
    """

    def __init__(
        self,
        info: EngineInfo,
        lengths: Mapping[int, float] | Sequence[float],
        costs: Costs,
        limits: KVLimits,
        *,
        texts: Mapping[int, Text] | Sequence[Text] | None = None,
        tools: Sequence[tuple[str, ...]] = (),
        streaming: Collection[int] = (),
        wants: Callable[[int], bool] | None = None,
        on_first_token: Callable[[int, float], None] | None = None,
    ) -> None:
        self.info = info
        self.costs = costs
        self.limits = limits
        self.pool = KVPool(limits.kv_tokens // limits.block_tokens, limits.block_tokens)
        self.busy_s = 0.0
        self.busy_j = 0.0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.preemptions = 0
        self._job_s = 0.0
        self._lengths = lengths
        self._texts = texts
        self._tools = tools
        self._streaming = streaming
        self._wants = wants
        self._on_first_token = on_first_token
        self._waiting: deque[_Job] = deque()
        self._running: list[_Job] = []  # in the order of admission
        self._aborted: set[int] = set()
        self._events: deque[Event] = deque()  # that are due now
        self._stretch: _Stretch | None = None
        self._preempted_s = -math.inf
        self._now_s = 0.0

    # ---- for the cluster ----

    @property
    def next_end_s(self) -> float | None:
        if self._events:
            return self._now_s
        if self._stretch is None:
            self._stretch = self._next_stretch()
            if self._stretch is None:
                return None
        return self._stretch.after_s(self._stretch.steps)

    def start(self, batch: Batch, now_s: float) -> None:
        """Take these requests."""
        at_once = False
        for request in batch.requests:
            text = _own_text(request) if self._texts is None else self._texts[request.id]
            streams = request.id in self._streaming
            job = _Job(request.id, text, self._lengths[request.id], batch.turn or 0.0, streams)
            if job.tokens + job.answer_tokens > self.pool.blocks * self.limits.block_tokens:
                raise ValueError(
                    f"request {request.id} has {job.tokens + job.answer_tokens:,} tokens, more than the KV cache of "
                    f"{self.info.name}"
                )
            insort(self._waiting, job, key=TURN)
            at_once |= self._waiting[0] is job
        if at_once:  # otherwise the first of the queue goes on waiting for what it waits for
            self._interrupt(now_s)

    def abort(self, request_id: int, now_s: float) -> None:
        """Drop a request if the engine has it, at the end of the step in progress."""
        for job in self._waiting:
            if job.request_id == request_id:
                self._waiting.remove(job)
                self._interrupt(now_s)
                return
        self._events = deque([event for event in self._events if event.request_id != request_id])  # type: ignore[union-attr]
        if any(job.request_id == request_id for job in self._running):
            self._aborted.add(request_id)
            self._interrupt(now_s)

    def end(self, now_s: float) -> Event | None:
        """Take and return the event at next_end_s, which must be now; None: only steps have ended."""
        if not self._events:
            assert self._stretch is not None, f"nothing ends on {self.info.name} at {now_s}"
            self._carry_out(self._stretch)
        return self._events.popleft() if self._events else None

    def _interrupt(self, now_s: float) -> None:
        """End the stretch with the step in progress."""
        stretch = self._stretch
        if stretch is None:
            self._now_s = max(self._now_s, now_s)
            return
        stretch.steps = stretch.steps_until(now_s)
        if not stretch.steps:
            self._stretch = None

    # ---- what the steps are ----

    def _next_stretch(self) -> _Stretch | None:
        """Choose what runs from now on; None: nothing can."""
        if self._aborted:
            for job in [job for job in self._running if job.request_id in self._aborted]:
                self._leave(job)
            self._aborted.clear()
        self._grow()
        decoding = [job for job in self._running if job.decodes]
        chunks = self._chunks(self.limits.step_tokens - len(decoding))
        if not self._running:
            return None
        costs = self.costs
        context = sum([job.tokens + job.answered for job in decoding])
        first_s = costs.step_s[len(decoding)] + costs.step_s_per_context_token * context
        first_s += sum([costs.prompt_s(job.computed, tokens, job.is_new) for job, tokens in chunks])
        growth_s = costs.step_s_per_context_token * len(decoding)
        steps = 1 if chunks else self._steps_with_memory(decoding)
        return _Stretch(self._now_s, first_s, growth_s, steps, decoding, chunks)

    def _grow(self) -> None:
        """Take the blocks for the next token of each decoding sequence; preempt the last sequences if they lack."""
        place = 0
        while place < len(self._running):
            job = self._running[place]
            assert job.blocks is not None
            if not job.decodes or self.pool.grow(job.blocks, job.tokens + job.answered):
                place += 1
                continue
            self._preempt(self._running[-1])

    def _preempt(self, job: _Job) -> None:
        assert len(self._running) > 1, "one sequence alone has the whole cache"
        self._leave(job)
        job.computed = 0
        job.target = job.tokens + job.answered
        self._waiting.appendleft(job)
        self.preemptions += 1
        self._preempted_s = self._now_s

    def _leave(self, job: _Job) -> None:
        assert job.blocks is not None
        self._running.remove(job)
        self.pool.release(job.blocks)
        job.blocks = None

    def _chunks(self, budget: int) -> list[tuple[_Job, int]]:
        """Share out the tokens of a step that prompts get, and admit the requests that have a share."""
        chunks: list[tuple[_Job, int]] = []
        for job in self._running:
            if not job.decodes and budget:
                budget -= self._take_chunk(job, budget, chunks)
        if self._preempted_s == self._now_s:
            return chunks
        while self._waiting and budget > 0 and len(self._running) < self.limits.sequences:
            job = self._waiting[0]
            blocks = self.pool.admit(job.text_now)
            if blocks is None:
                break
            self._waiting.popleft()
            job.blocks = blocks
            job.computed = blocks.cached_tokens
            if job.cached_tokens is None:
                job.cached_tokens = blocks.cached_tokens
                self.prompt_tokens += job.tokens
                self.cached_tokens += blocks.cached_tokens
            self._running.append(job)
            budget -= self._take_chunk(job, budget, chunks)
        return chunks

    def _take_chunk(self, job: _Job, budget: int, chunks: list[tuple[_Job, int]]) -> int:
        tokens = min(budget, job.target - job.computed)
        chunks.append((job, tokens))
        assert job.blocks is not None
        job.blocks.computed = job.computed + tokens
        return tokens

    def _steps_with_memory(self, decoding: list[_Job]) -> int:
        """Steps until the first sequence ends, or until the free blocks are used up; at least one."""
        most = min([job.answer_tokens - job.answered for job in decoding])
        if self._blocks_for(decoding, most) <= self.pool.free:
            return most
        least = 1
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (middle, most) if self._blocks_for(decoding, middle) <= self.pool.free else (least, middle)
        return least

    def _blocks_for(self, decoding: list[_Job], steps: int) -> int:
        """Further blocks that the sequences need for so many steps."""
        block_tokens = self.limits.block_tokens
        return sum(
            [
                max(0, -(-(job.tokens + job.answered + steps - 1) // block_tokens) - job.blocks.blocks)
                for job in decoding
                if job.blocks is not None
            ]
        )

    def _carry_out(self, stretch: _Stretch) -> None:
        """The steps of a stretch have ended."""
        steps, running = stretch.steps, len(self._running)
        ended_s = stretch.after_s(steps)
        passed_s = ended_s - self._now_s
        self.busy_s += passed_s
        self.busy_j += passed_s * self.costs.power_w[running]
        self._job_s += passed_s * running
        self._now_s = ended_s
        self._stretch = None
        for job in stretch.decoding:
            assert job.blocks is not None
            self.pool.grow(job.blocks, job.tokens + job.answered + steps - 1)
            job.answered += steps
            job.computed = job.target = job.blocks.computed = job.tokens + job.answered - 1
            if job.answered >= job.answer_tokens:
                self._finish(job)
        for job, tokens in stretch.chunks:
            job.computed += tokens
            if job.decodes:
                self._give_token(job)

    def _give_token(self, job: _Job) -> None:
        """The last step of a prompt gives a token."""
        job.answered += 1
        aborted = job.request_id in self._aborted
        if job.answered == 1 and not aborted:
            if self._on_first_token is not None:
                self._on_first_token(job.request_id, self._now_s)
            if job.streams:
                job.began_s = self._now_s
                if self._wants is None or self._wants(job.request_id):
                    self._events.append(AnswerBegan(job.request_id))
        if job.answered >= job.answer_tokens:
            self._finish(job)

    def _finish(self, job: _Job) -> None:
        self._leave(job)
        if job.request_id in self._aborted:
            self._aborted.remove(job.request_id)
        else:
            self._events.append(
                RequestEnded(
                    self.info.name,
                    job.request_id,
                    "completed",
                    job.length,
                    cached_tokens=job.cached_tokens,
                    decode_s=None if job.began_s is None else self._now_s - job.began_s,
                    tools=self._tools[job.request_id] if self._tools else (),
                )
            )

    # ---- results ----

    def alone_s(self, lengths: ArrayLike, prompt_tokens: ArrayLike) -> NDArray[np.float64]:
        """Seconds of requests that run alone, with nothing cached. lengths, prompt_tokens : (...). Returns (...)."""
        answers = np.maximum(1, np.round(np.asarray(lengths, dtype=float)))
        prompts = np.maximum(1, np.round(np.asarray(prompt_tokens, dtype=float)))
        costs, later = self.costs, answers - 1
        prefill_s = np.ceil(prompts / self.limits.step_tokens) * costs.step_s[0] + costs.prefill_s
        prefill_s += costs.prefill_s_per_token * prompts
        prefill_s += costs.prefill_s_per_context_token * prompts * (prompts - 1) / 2
        contexts = later * prompts + later * answers / 2
        answer_s: NDArray[np.float64] = later * costs.step_s[1] + costs.step_s_per_context_token * contexts
        return prefill_s + answer_s

    def utilisation(self, elapsed_s: float) -> float:
        """Busy share of the time of its sequences."""
        return self._job_s / (elapsed_s * self.limits.sequences) if elapsed_s > 0 else 0.0

    def energy_j(self, elapsed_s: float) -> float | None:
        """Joules of a run of elapsed_s seconds, with the idle time; None when the joules are not known."""
        if not self.costs.metered:
            return None
        return self.busy_j + self.costs.idle_w * max(0.0, elapsed_s - self.busy_s)


def _own_text(request: Request) -> Text:
    return ((request.id, max(1, round(request.prompt_tokens))),)
