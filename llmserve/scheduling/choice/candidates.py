"""The batches that an order of the moment compares: what each bin's release lets go now, and the formed batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from llmserve.scheduling.choice.batch_times import Timetable
from llmserve.scheduling.choice.orders import Candidate, Running
from llmserve.scheduling.engines import EngineState
from llmserve.scheduling.fair import Share
from llmserve.scheduling.group import Forming, Group
from llmserve.scheduling.queues.deadline_queue import DeadlineQueue, FormedRow
from llmserve.scheduling.queues.model_queues import ModelQueues
from llmserve.scheduling.queues.waiting import FormedBatch, Run


class Whose(NamedTuple):
    """The share of which a batch must hold requests: one, or as many as wait and have room in the batch (every)."""

    share: Share
    every: bool


class Opening(NamedTuple):
    """An engine that could start a batch now.

    room      requests that the engine has, or would have, room for
    by_least  whether batch times assume the shortest answers, instead of average ones
    whose     requests that the batch must hold; None: any
    running   a batch on the engine that could be stopped for the new one
    at_least  smallest useful size of the new batch, requests of `running` included
    """

    engine: EngineState
    room: int
    by_least: bool = False
    whose: Whose | None = None
    running: Running | None = None
    at_least: float = 1

    def runs_of(self, model: str) -> Sequence[Run]:
        """The runs of `running`, if they are of this model."""
        running = self.running
        return running.runs if running is not None and running.runs[0].queued.request.model == model else ()

    @property
    def share(self) -> Share | None:
        """The share of which the batch must hold a request; None: of any."""
        return self.whose.share if self.whose is not None else None

    @property
    def one_of_share(self) -> Share | None:
        """The share of which slots that refill take one request at a time; None: of none in particular."""
        return None if self.engine.info.barrier else self.share


class Candidates:
    """The candidates of one dispatch.

    asks    whether releases may let bins wait
    skipped shares whose large batches, or long prompts (True), others may pass on this engine
    """

    def __init__(self, group: Group, forming: Forming, times: Timetable, now_s: float, *, asks: bool) -> None:
        self._group, self._forming, self._times = group, forming, times
        self._now_s, self._asks = now_s, asks
        self.skipped: set[tuple[Share, bool]] = set()

    def on(self, engine: EngineState, whose: Whose | None = None) -> Iterator[Candidate]:
        """The candidates of all models for this engine."""
        opening = Opening(engine, engine.room_at_once, whose=whose)
        for queues in self._group.tally.queues.values():
            if engine.open_to(queues.model):
                yield from self.of(queues, opening)

    def most(self, opening: Opening) -> int:
        """Size of the largest batch that could start."""
        return min(self._forming.batch_size, opening.room)

    def of(self, queues: ModelQueues, opening: Opening) -> Iterator[Candidate]:
        """A candidate for each bin with requests that the release lets go now, and for each formed batch."""
        most = 1 if opening.one_of_share is not None else self.most(opening)
        formed = self._formed_for(opening.share, queues) if queues.formed else ()
        for batch in formed:
            if batch.passable:  # it has waited longer than the requests of its bin: among equals it comes first
                yield self.formed(queues, batch, opening, most)
        yield from self._of_bins(queues, opening, most)
        for batch in formed:
            if not batch.passable:
                yield self.formed(queues, batch, opening, most)

    def _formed_for(self, share: Share | None, queues: ModelQueues) -> list[FormedBatch]:
        """The formed batches that may be next. share : of which the batch must hold a request; None: of any"""
        return [
            batch
            for batch in queues.formed.batches()
            if not batch.avoid
            and not (batch.passable and (batch.share, batch.behind is not None) in self.skipped)
            and (share is None or batch.has(share))
        ]

    def formed(self, queues: ModelQueues, batch: FormedBatch, opening: Opening, most: int) -> Candidate:
        row, times_s = FormedRow(batch), self._batch_times(queues, batch.bin, opening)
        return Candidate(opening.engine, queues.model, row, times_s, min(most, len(times_s)), len(row), batch=batch)

    def _of_bins(self, queues: ModelQueues, opening: Opening, most: int) -> Iterator[Candidate]:
        """A candidate for each bin with requests that the release lets go, the shortest answers first."""
        engine, runs, whose = opening.engine, opening.runs_of(queues.model), opening.whose
        within = opening.share if opening.one_of_share is None else None
        held = whose.share.waiting if whose is not None and whose.every else 1
        waits, idle = self._asks and queues.release.waits, bool(runs) or not engine.running
        shorter: tuple[DeadlineQueue, ...] = ()
        waiting = 0
        for whole, queue in _parts_of(opening.one_of_share, queues):
            waiting += len(queue)
            same = [run for run in runs if run.queued.bin <= queue.index] if runs else ()
            all_of_it = min(len(whole), self._forming.batch_size)
            released = self._forming.size(queues, whole, self._now_s, idle) if waits else all_of_it
            times_s = self._batch_times(queues, queue.index, opening)
            if released >= all_of_it:
                yield Candidate(
                    engine, queues.model, queue, times_s, most, waiting + len(same), shorter, same, None, within, held
                )
            elif released:  # the release limits the size, so no requests of shorter bins are added
                at_most = min(most, released)
                yield Candidate(engine, queues.model, queue, times_s, at_most, len(queue), share=within, held=held)
            shorter = (queue, *shorter)

    def _batch_times(self, queues: ModelQueues, bin_index: int, opening: Opening) -> Sequence[float]:
        times = self._times.of(opening.engine, queues.model, bin_index, queues.binning.tokens(bin_index))
        return times.least if opening.by_least else times.expected


def _parts_of(share: Share | None, queues: ModelQueues) -> Iterator[tuple[DeadlineQueue, DeadlineQueue]]:
    """The bins that hold requests, each with the requests of the share in it. share : None: all requests"""
    for whole in queues.bins:
        assert isinstance(whole, DeadlineQueue)
        part = whole if share is None else whole.of_share(share)
        if part is not None and part.requests:
            yield whole, part
