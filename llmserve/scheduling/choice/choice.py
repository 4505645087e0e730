"""What the choosers share: on which engine a batch may start now.

FixedChoice   (fixed_choice.py)   the next batch by an order with fixed keys
MomentChoice  (moment_choice.py)  the next batch by an order of the moment
SpareChoice   (spare_choice.py)   items of batch jobs, in slots that no waiting request could take
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from llmserve.scheduling.choice.placement import preferred
from llmserve.scheduling.engines import EngineState
from llmserve.scheduling.group import Forming, Group
from llmserve.scheduling.memory import is_large, is_oversize
from llmserve.scheduling.queues.model_queues import ModelQueues
from llmserve.scheduling.queues.waiting import FormedBatch, QueuedRequest

Start = tuple[EngineState, ModelQueues, FormedBatch, int]  # the first `int` requests of the batch shall start


class Choice:
    """The choice of the batches that start in one dispatch, and of their engines.

    _alone : whether nothing else can start, so that an oversize request may start on an idle engine without its memory
    token (memory.py), and a long prompt where none is being computed (prefills.py)
    """

    def __init__(self, group: Group, forming: Forming, now_s: float) -> None:
        self._group = group
        self._pool = group.pool
        self._forming = forming
        self._now_s = now_s
        self._alone = False
        self._prompts_over_s = self._pool.look_at_prompts(self._waiting_for, now_s) if self._pool.computing else ()

    def _sort(self, waiting: Collection[ModelQueues]) -> None:
        """Sort requests again that have changed, some of many, and form batches of the bins to which they moved."""
        for queues in waiting:
            if queues.dirty:
                for queue in queues.sort_some():
                    self._forming.form_early(queues, queue, self._now_s)

    def starts(self) -> Iterator[Start]:
        """Yield the starts in turn. The caller must carry out each start before it asks for the next."""
        raise NotImplementedError

    @property
    def recheck_at_s(self) -> float | None:
        """When more could start without an event; None: only after an event."""
        return None

    def idle_after(self, queues: ModelQueues) -> bool | None:
        """Whether all engines with room for the model run nothing, after all starts; None: no engine has room."""
        return self._idle(queues)

    def _idle(self, queues: ModelQueues, blocked: Collection[str] = (), look_ahead: bool = False) -> bool | None:
        """Whether all engines with room for the model run nothing; None: no engine has room.

        blocked : names of engines that are left out.  look_ahead : busy engines with look-ahead places count, too
        """
        idle = None
        for engine in self._pool.free_for(queues.model, blocked):
            has_room = engine.room > 0
            if engine.running and (has_room or look_ahead):
                return False
            if has_room:
                idle = True
        return idle

    # ---- engines for a batch ----

    def _others_work(self, queues: ModelQueues, batch: FormedBatch) -> bool:
        """Whether an engine works that the batch does not avoid."""
        return self._pool.others_work(batch.avoid, queues.model)

    def _willing(
        self, queues: ModelQueues, batch: FormedBatch, engines: Sequence[EngineState]
    ) -> Sequence[EngineState]:
        """The engines, of these, whose circuit takes the batch, without the avoided engines while another works."""
        if batch.avoid and self._others_work(queues, batch):
            engines = [engine for engine in engines if engine.info.name not in batch.avoid]
        return [e for e in engines if e.circuit.closed or not e.circuit.refuses(batch, self._now_s)]

    def _best_for(
        self, queues: ModelQueues, queued: QueuedRequest, engines: Sequence[EngineState]
    ) -> EngineState | None:
        """The best of these willing engines whose memory holds the request, and which need not compute another long
        prompt before it; None: there is none.

        An oversize request also needs the engine's memory token. An engine that has the model in its memory is better
        than one that would have to load it. Under a release that follows plans a request joins
        running requests, for idle engines wait until the plan lets a batch start.
        """
        now_s, per_token_s = self._now_s, queues.service.seconds_per_token
        counted: Sequence[EngineState] = ()
        if queued.turn is not None:
            programs = self._group.programs
            engines = programs.home(queued, engines)
            counted = [engine for engine in engines if programs.counts(engine, queued)]
        if counted:
            fitting = [engine for engine in counted if self._has_room(queued, engine)]
        else:
            fitting = [
                engine
                for engine in engines
                if engine.fits(queued, now_s, per_token_s)
                and (not is_oversize(queued, engine.info) or self._gets_token(queued, engine))
            ]
        if self._pool.computing:
            fitting = [engine for engine in fitting if not self._comes_behind(queues, queued, engine)]
        if queues.release.plans:
            fitting = [engine for engine in fitting if engine.running] or fitting
        if len(fitting) <= 1:
            return fitting[0] if fitting else None
        if self._pool.sharing:
            fitting = [engine for engine in fitting if engine.has_loaded(queues.model)] or fitting
        return preferred(self._pool, queues, queued, fitting, now_s)

    def _comes_behind(self, queues: ModelQueues, queued: QueuedRequest, engine: EngineState) -> bool:
        """Whether a request with a long prompt must wait until the engine has computed another long one, and has
        started those who waited for that.
        """
        pool = self._pool
        if engine.info.name not in pool.computing or pool.may_compute(engine) or (self._alone and not engine.prefills):
            return False
        request, prompts = queued.request, queues.prompts
        if not queues.is_long(prompts.prefill_s(request.prompt_tokens)):
            return False
        cached_tokens = self._pool.residency.hit_tokens(engine.info.name, request)
        return queues.is_long(prompts.prefill_s(request.prompt_tokens, cached_tokens))

    def _waiting_for(self, engine: EngineState) -> int:
        """Waiting requests that the engine could start."""
        return sum([queues.waiting for queues in self._group.tally.queues.values() if engine.open_to(queues.model)])

    def _lets_pass(self, queues: ModelQueues, queued: QueuedRequest, engine: EngineState) -> bool:
        """Whether others may start on the engine while the request waits for room there."""
        return is_large(queued, engine.info) or self._comes_behind(queues, queued, engine)

    def _has_room(self, queued: QueuedRequest, engine: EngineState) -> bool:
        """Whether an engine has room for a step of a program beside the others (programs/programs.py)."""
        return self._group.programs.fits(queued, engine, self._now_s)

    def _gets_token(self, queued: QueuedRequest, engine: EngineState) -> bool:
        """Whether an oversize request may start on an engine whose memory holds the request."""
        return engine.memory_token.is_open_to(queued, self._now_s) or (self._alone and not engine.running)
