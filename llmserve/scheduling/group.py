"""A serving group: the queues of all models, and the engines; and how batches form out of bins.

A scheduler has one group (Shepherd, Section 3.2): more groups are more servers (llmserve/machines).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import count

from llmserve.scheduling.engines import EnginePool, EngineState
from llmserve.scheduling.fair import FairShares
from llmserve.scheduling.programs.programs import Programs
from llmserve.scheduling.queues.model_queues import ModelQueues, Tally
from llmserve.scheduling.queues.waiting import BinQueue, FormedBatch, QueuedRequest
from llmserve.scheduling.rates import CompletionRate

Completed = tuple[ModelQueues, bool, float, float]  # of a request: its queues; guessed, likely_tokens, prompt_s


class Group:
    """A serving group: waiting requests by model, and the engines that serve them. new_queues : makes a model's queues

    queues      by model
    tally       counts waiting requests
    present     requests that wait or run
    pool        the engines
    programs    what is known of programs, and what engines keep for them
    rate        rate at which the work of requests ends
    starts      rate at which that of waiting requests starts, while programs come
    arrived_in  queues in which requests have arrived since the last dispatch
    without_engine  queues of models that no working engine serves
    wake_at_s   when more could start without an event; None: not before the next event
    """

    def __init__(self, new_queues: Callable[[str, Tally], ModelQueues], programs: Programs) -> None:
        self.queues: dict[str, ModelQueues] = {}
        self.tally = Tally()
        self.present = 0
        self.pool = EnginePool()
        self.programs = programs
        self.rate, self.starts = CompletionRate[Completed](), CompletionRate[Completed]()
        self.arrived_in: dict[str, ModelQueues] = {}
        self.without_engine: list[ModelQueues] = []
        self.planned: list[ModelQueues] = []  # queues whose release follows plans
        self.timed: list[ModelQueues] = []  # queues whose release may release more as time passes
        self.wake_at_s: float | None = None
        self._new_queues = new_queues

    def queues_of(self, model: str, now_s: float) -> ModelQueues:
        """The model's queues, made on first use."""
        queues = self.queues.get(model)
        if queues is None:
            queues = self.queues[model] = self._new_queues(model, self.tally)
            queues.no_engine_since_s = now_s
            queues.set_engines(self.pool.serving(model), now_s)
            for engine in queues.engines[:1]:
                neighbours = (self.queues.get(name) for name in engine.info.models or self.queues)
                queues.fair = next((other.fair for other in neighbours if other is not None), queues.fair)
            if queues.no_engine_since_s is not None:
                self.without_engine.append(queues)
            if queues.release.plans:
                self.planned.append(queues)
            if queues.release.timed:
                self.timed.append(queues)
        return queues

    def refresh_engines(self, now_s: float) -> list[ModelQueues]:
        """Update the queues after engines became ready or not, circuits opened or closed, or served models changed.

        Returns the queues that no working engine serves from now on.
        """
        before = self.without_engine
        for queues in self.queues.values():
            queues.set_engines(self.pool.serving(queues.model), now_s)
        for engine in self._known_engines():
            served = [queues for queues in self.queues.values() if engine.serves(queues.model)]
            for queues in served:
                if queues.fair is not served[0].fair:
                    queues.compete(served[0].fair)
        self.without_engine = [queues for queues in self.queues.values() if queues.no_engine_since_s is not None]
        return [queues for queues in self.without_engine if queues not in before]

    def _known_engines(self) -> list[EngineState]:
        return [engine for engine in self.pool.engines.values() if engine.known]

    # ---- shares ----

    def served(self) -> list[tuple[tuple[str, ...], dict[str, float]]]:
        """Weighted tokens by share that were served here since the last call, by the models that compete for engines.

        Models whose shares were served nothing are in the list, too: others may have served the shares.
        """
        models: dict[FairShares, list[str]] = {}
        for model, queues in self.queues.items():
            models.setdefault(queues.fair, []).append(model)
        return [(tuple(names), fair.take_given()) for fair, names in models.items()]

    def serve_elsewhere(self, model: str, tokens: Mapping[str, float]) -> None:
        """Charge the shares that compete for the model's engines. tokens : weighted, by share"""
        if model in self.queues:
            self.queues[model].fair.serve_elsewhere(tokens)

    # ---- requests ----

    def enter(self, queues: ModelQueues) -> None:
        """Count one more request that waits or runs."""
        queues.present += 1
        self.present += 1

    def leave(self, queues: ModelQueues, requests: int = 1) -> None:
        queues.present -= requests
        self.present -= requests

    def started(self, queued: QueuedRequest, engine: EngineState, now_s: float) -> None:
        """A request starts while programs come."""
        self.programs.started(queued, engine, now_s)
        if now_s > queued.arrived_at_s:
            self.starts.observe(now_s, self.completed(queued))
        if not self.tally.waiting:
            self.starts.idle()

    def ended(self, queued: QueuedRequest, now_s: float) -> None:
        """A request has left its engine, for good."""
        self.rate.observe(now_s, self.completed(queued))

    def completed(self, queued: QueuedRequest) -> Completed:
        """What the rates keep of a request."""
        return self.queues[queued.request.model], queued.guessed, queued.likely_tokens, queued.prompt_s

    @property
    def waiting_s(self) -> float:
        """Seconds of a slot that all waiting requests take."""
        return sum([queues.waiting_s for queues in self.tally.queues.values()])

    def drain_time_s(self, work_s: float, further: float = 0.0) -> float | None:
        """Predicted seconds until waiting requests of so many seconds of a slot have started, and so many mean requests
        more; None: unknown.

        Each end lets another request start, so the rate at which work ends tells it. But the end of a program's step
        lets only the program's next step start, where memory is short: then the starts of those that have waited tell
        it.
        """
        starts_s = self.starts.drain_time_s(work_s, _seconds, further)
        return self.rate.drain_time_s(work_s, _seconds, further) if starts_s is None else starts_s

    def idle(self) -> None:
        """Nothing waits or runs."""
        self.rate.idle()
        self.starts.idle()

    def forget(self, models: Iterable[str]) -> None:
        """Remove the queues of these models, if no engine serves the model and no request of it is present."""
        engines = self._known_engines()
        for model in models:
            queues = self.queues.get(model)
            if queues is not None and not queues.present and not any(engine.serves(model) for engine in engines):
                del self.queues[model]
                self.tally.deferred.pop(model, None)
        self.planned = [queues for queues in self.planned if queues.model in self.queues]
        self.timed = [queues for queues in self.timed if queues.model in self.queues]
        self.without_engine = [queues for queues in self.without_engine if queues.model in self.queues]

    @property
    def needs_dispatch(self) -> bool:
        """Whether an arrival may lead to an action or a timer; False when all engines are busy."""
        return bool(self.pool.free or self.pool.paused or self.timed or self.arrived_in)

    def note_wake(self, dues_s: list[float], now_s: float) -> None:
        """Set `wake_at_s`. dues_s : times at which more batches could start; this list is extended."""
        if not self.tally.waiting:
            self.wake_at_s = None
            return
        if self.pool.paused:
            pauses_s = [engine.circuit.open_until_s for engine in self.pool.paused.values()]
            dues_s += [until_s for until_s in pauses_s if until_s is not None]
        if self.pool.resting:
            dues_s += self.pool.rests_end_s(now_s)
        self.wake_at_s = min(dues_s) if dues_s else None


def _seconds(completed: Completed) -> float:
    queues, guessed, tokens, prompt_s = completed
    return queues.seconds(int(guessed), 0.0 if guessed else tokens, prompt_s)


class Forming:
    """The forming of batches out of bins.

    batch_size  largest batch
    draining    whether arrivals have ended, so that bins wait for no further requests
    """

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.draining = False
        self._batch_ids = count(1)

    def size(self, queues: ModelQueues, queue: BinQueue, now_s: float, idle: bool | None) -> int:
        """Number of requests that a bin releases now; see Release.size."""
        if not queue.requests:
            return 0
        if self.draining and (idle is not None or not queues.release.fills):
            return min(len(queue), self.batch_size)
        return queues.release.size(queue, now_s, idle)

    def forms_early(self, queues: ModelQueues) -> bool:
        """Whether batches may form before an engine is free. While several shares wait, only batches of one may: until
        an engine is free, nobody knows which shares will have been served least.
        """
        return self.batch_size == 1 or not queues.fair.contended

    def take_in(self, queues: ModelQueues, queue: BinQueue, queued: QueuedRequest, now_s: float) -> None:
        """Put a new request into its bin, and form all batches that the release allows; a batch of this request alone
        needs no bin.
        """
        if queues.at_once:
            queues.formed.push(self.form(queues, queue.index, [queued], now_s))
        else:
            queue.append(queued)
            self.form_early(queues, queue, now_s)

    def form_early(self, queues: ModelQueues, queue: BinQueue, now_s: float) -> None:
        """Form all batches that the release allows although no engine may be free."""
        early = self.batch_size == 1 or not queues.fair.contended
        if not early:
            queues.tally.deferred[queues.model] = queues
        while queue.requests and (size := self.size(queues, queue, now_s, None)) and (early or size == 1):
            self.push(queues, queue, size, now_s)

    def form_deferred(self, group: Group, now_s: float) -> bool:
        """Form the batches that did not form early while several shares waited, where only one waits now. True if some
        may have formed.
        """
        tally = group.tally
        alone = [q for q in tally.queues.values() if q.model in tally.deferred and self.forms_early(q)]
        for queues in alone:
            del tally.deferred[queues.model]
            self.form_all_early(queues, now_s)
        return bool(alone)

    def form_all_early(self, queues: ModelQueues, now_s: float) -> None:
        for queue in queues.bins:
            self.form_early(queues, queue, now_s)

    def push(self, queues: ModelQueues, queue: BinQueue, size: int, now_s: float) -> None:
        """Form a batch of `size` requests of a bin, or fewer if a window is cut, and queue the batch."""
        queues.formed.push(self.form(queues, queue.index, queue.take(size), now_s))

    def form(self, queues: ModelQueues, bin_index: int, requests: list[QueuedRequest], now_s: float) -> FormedBatch:
        """Form a batch of requests that have left their bins."""
        if queues.dirty:
            queues.tell(requests)  # they will not be sorted there
        return FormedBatch(next(self._batch_ids), bin_index, now_s, requests, queues.model)
