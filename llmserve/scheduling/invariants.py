"""What holds of a scheduler after every step, in one place (DESIGN's laws that one state can show)."""

from __future__ import annotations

from llmserve.scheduling.dispatch import Dispatch
from llmserve.scheduling.engines import EngineState
from llmserve.scheduling.groups import Groups
from llmserve.scheduling.queues import QueuedRequest


def check(requests: dict[int, QueuedRequest], groups: Groups, dispatch: Dispatch, now_s: float) -> None:
    """Assert all of them. O(requests)."""
    groups.check()
    _check_places(requests, groups)
    for group in groups:
        waiting = {name: sum([len(queue) for queue in each.bins]) for name, each in group.queues.items()}
        for model, queues in group.queues.items():
            counted = waiting[model] + len(queues.formed)
            assert queues.waiting == counted, f"{model!r} has {counted} waiting requests, not {queues.waiting}"
        assert group.tally.waiting == sum([queues.waiting for queues in group.queues.values()]), "waiting is miscounted"
        waits = {model for model, queues in group.queues.items() if queues.waiting}
        assert set(group.tally.queues) == waits, f"{set(group.tally.queues) ^ waits} wait, or do not"
        present = sum([queued.group == group.name for queued in requests.values()])
        assert group.present == present, f"{group.name} has {present} requests, not {group.present}"
        for engine in group.pool.engines.values():
            takes = engine.takes(now_s)
            assert (engine.info.name in group.pool.free) == takes, (
                f"{engine.info.name} is wrongly listed as free or busy"
            )
        dispatch.check(group, now_s)
    for engine in groups.engines.values():
        _check_engine(engine)


def _check_places(requests: dict[int, QueuedRequest], groups: Groups) -> None:
    """Each request is in exactly one place, and its own account of that is right."""
    reserved = [engine.worker.reserved[1] for engine in groups.engines.values() if engine.worker.reserved is not None]
    found: list[int] = []
    for group in groups:
        for queues in group.queues.values():
            for queued in [queued for queue in queues.bins for queued in queue]:
                assert queued.formed is None, f"request {queued.request.id} is in a bin and in a batch"
                found.append(queued.request.id)
            for batch in queues.formed.batches():
                found += batch.requests
                assert all(queued.formed is batch for queued in batch.requests.values()), f"batch {batch.id} is unknown"
    found += {request_id: None for batch in reserved for request_id in batch.requests}
    waiting = set(found)
    for name, engine in groups.engines.items():
        for request_id, run in engine.running.items():
            assert run.queued.run is run, f"request {request_id} does not know of its run"
            assert run.engine == name, f"request {request_id} believes to run on {run.engine}, not on {name}"
            found.append(request_id)
    assert len(found) == len(set(found)), "a request is in two places"
    assert set(found) == set(requests), "a request is in no place, or one that is over in some"
    for request_id, queued in requests.items():
        assert (queued.run is None) == (request_id in waiting), f"request {request_id} is not where it believes to be"
        group = groups.by_name[queued.group]
        waits = queued.run is None and queued.formed not in reserved
        assert not waits or not groups.is_misplaced(group, queued.request), (
            f"request {request_id} waits in the wrong group, {group.name}"
        )


def _check_engine(engine: EngineState) -> None:
    info, name = engine.info, engine.info.name
    if info.barrier:
        batches = {run.batch_id for each in engine.worker.engines for run in each.running.values()}
        assert len(batches) <= 1, f"the barrier worker of {name} runs batches {batches}"
    totals = sum([run.queued.total_tokens for run in engine.running.values()])
    assert engine.total_tokens == totals, f"{name} has {engine.total_tokens} tokens on account, not {totals}"
    trial = engine.circuit.trial
    assert trial is None or trial in engine.running, f"{name} waits for a trial that it does not run"
    if engine.worker.reserved is not None:
        assert engine.worker.busy, f"{name} is kept free for a batch that could run"
