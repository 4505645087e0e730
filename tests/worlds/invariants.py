"""Invariants of a scheduler after every step: the laws of DESIGN that its internal state can show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from copy import copy
from itertools import product

from llmserve.request import EngineInfo
from llmserve.scheduling.choice.candidates import Whose
from llmserve.scheduling.choice.fixed_choice import FixedChoice
from llmserve.scheduling.choice.moment_choice import MomentChoice
from llmserve.scheduling.engines import EngineState
from llmserve.scheduling.group import Group
from llmserve.scheduling.memory import is_large
from llmserve.scheduling.queues.waiting import Amount, QueuedRequest
from llmserve.scheduling.scheduler import Scheduler


def check(scheduler: Scheduler) -> None:
    """Assert all invariants. O(requests)."""
    requests, group = scheduler.requests, scheduler.group
    _check_places(requests, group)
    _check_counts(group, requests)
    for name, engine in group.pool.engines.items():
        takes = engine.takes(scheduler._now_s)
        assert (name in group.pool.free) == takes, f"{name} is wrongly listed as free or not"
        _check_engine(engine)
    counted = sorted((name, size) for size, engines in group.pool.batches.items() for name in engines)
    batches = {name: len(engine.running) for name, engine in group.pool.engines.items() if engine.info.barrier}
    running = sorted((name, size) for name, size in batches.items() if size)
    assert counted == running, f"batches {counted} are counted, not those that run"
    with _tokens_kept(group):
        _check_nothing_waits_in_vain(scheduler, group)


@contextmanager
def _tokens_kept(group: Group) -> Iterator[None]:
    """Keep the engines' memory tokens as they are. A token notes when others last waited for its holder, and a check
    that asks what could start would count as waiting.
    """
    tokens = {name: engine.memory_token for name, engine in group.pool.engines.items()}
    for engine in group.pool.engines.values():
        engine.memory_token = copy(engine.memory_token)
    yield
    for name, token in tokens.items():
        group.pool.engines[name].memory_token = token


def passable(scheduler: Scheduler, engines: Collection[EngineInfo]) -> set[int]:
    """Requests that later ones may pass: they need more than their fair share of the memory of one of these engines, or
    wait in a batch behind one that does.
    """
    large = {
        queued.request.id
        for queued in scheduler.requests.values()
        if any(engine.serves(queued.request.model) and is_large(queued, engine) for engine in engines)
    }
    formed = [queued.formed for queued in scheduler.requests.values() if queued.formed is not None]
    behind = {id_ for batch in formed if batch.requests and batch.first.request.id in large for id_ in batch.requests}
    return large | behind


def _check_counts(group: Group, requests: dict[int, QueuedRequest]) -> None:
    for model, queues in group.queues.items():
        waiting = sum([len(queue) for queue in queues.bins]) + len(queues.formed)
        assert queues.waiting == waiting, f"{model!r} has {waiting} waiting requests, not {queues.waiting}"
        own = [queued for queued in requests.values() if queued.request.model == model]
        assert queues.present == len(own), f"{model!r} has {len(own)} requests, not {queues.present}"
        amount = Amount()
        for queued in own:
            if queued.run is None:
                amount.add(queued)
        told = [(one.guessed, one.tokens, one.prompt_us, one.work_us, one.long_us) for one in (amount, queues.amount)]
        assert told[0] == told[1], f"{model!r} has {told[0]} to do, not {told[1]}"
        row = queues.fair._row
        assert row == sorted(row, key=lambda entry: entry[:2]), "shares are out of order"
        assert queues.fair.contended == (len(row) > 1), "a share waits alone, or does not"
        places = [share.place for *_, share in row] if queues.fair.contended else []  # of one alone, they may be old
        assert all(entry[:2] == place for entry, place in zip(row, places, strict=False)), (
            "a share is not where it was put"
        )
    assert group.tally.waiting == sum([queues.waiting for queues in group.queues.values()]), "waiting is miscounted"
    for fair in {queues.fair for queues in group.queues.values()}:
        competing = {queues.model for queues in group.queues.values() if queues.fair is fair}
        waits_here = [queued for queued in requests.values() if queued.run is None]
        counts = Counter([queued.request.share for queued in waits_here if queued.request.model in competing])
        assert counts == {share.name: share.waiting for share in fair}, "the waiting requests of a share are miscounted"
    waits = {model for model, queues in group.queues.items() if queues.waiting}
    assert set(group.tally.queues) == waits, f"{set(group.tally.queues) ^ waits} wait, or do not"
    present = sum([queues.present for queues in group.queues.values()])
    assert group.present == present, f"there are {present} requests, not {group.present}"


def _check_nothing_waits_in_vain(scheduler: Scheduler, group: Group) -> None:
    """Check that no request waits past its release, and that no engine idles beside work that it could run."""
    dispatch, now_s = scheduler._dispatch, scheduler._now_s
    for queues in group.queues.values():
        for queue in queues.bins:
            released = dispatch.forming.size(queues, queue, now_s, None)
            early = dispatch.forming.forms_early(queues)
            assert released == 0 or not early, f"bin {queue.index} of {queues.model!r} waits past its release"
    choice = dispatch.choice(group, now_s)
    if isinstance(choice, FixedChoice):
        _check_formed(choice, group, scheduler)
    else:
        assert isinstance(choice, MomentChoice), f"{choice} chooses by no order"
        _check_idle(choice, group)


def _check_formed(choice: FixedChoice, group: Group, scheduler: Scheduler) -> None:
    """Check batches in order over all models: the next batch of one blocks later batches of other models."""
    while first := choice._first(choice._startable())[0]:
        queues, batch = first
        engine = choice.engine_for(queues, batch, choice._blocked)
        assert engine is None, f"batch {batch.id} waits while an engine is free"
        choice.hold(queues, batch)
    for queues in choice._startable():
        idle = choice.idle(queues)
        for queue in queues.bins if idle is not None else ():
            size = scheduler._dispatch.forming.size(queues, queue, scheduler._now_s, idle)
            assert size == 0, f"bin {queue.index} of {queues.model!r} waits while an engine is free"


def _check_idle(choice: MomentChoice, group: Group) -> None:
    for name in group.pool.free:
        engines = choice._sharing(name)
        if any(engine.recheck_at_s(choice._now_s) is not None for engine in engines):
            continue
        shares = list(choice._shares(engines)) if engines else []
        for share, by_least in product(shares, (False, True)):
            whose = Whose(share, every=False) if share is not None else None
            while in_time := choice._pick(engines, whose, by_least=by_least) or choice._trial(engines):
                assert not choice.may_start(in_time), f"{name} is idle while {in_time.count} could be in time"
                if not choice.passes(in_time):
                    break


def _check_places(requests: dict[int, QueuedRequest], group: Group) -> None:
    """Check that each request is in exactly one place, and that its own record names that place."""
    engines = group.pool.engines
    reserved = [engine.worker.reserved[1] for engine in engines.values() if engine.worker.reserved is not None]
    placed: list[int] = []
    for queues in group.queues.values():
        for queued in [queued for queue in queues.bins for queued in queue]:
            assert queued.formed is None, f"request {queued.request.id} is in a bin and in a batch"
            placed.append(queued.request.id)
        for batch in queues.formed.batches():
            placed += batch.requests
            assert all(queued.formed is batch for queued in batch.requests.values()), f"batch {batch.id} is unknown"
    placed += {request_id: None for batch in reserved for request_id in batch.requests}
    waiting = set(placed)
    for name, engine in engines.items():
        for request_id, run in engine.running.items():
            assert run.queued.run is run, f"request {request_id} does not record its run"
            assert run.engine == name, f"request {request_id} records a run on {run.engine}, not on {name}"
            placed.append(request_id)
    assert len(placed) == len(set(placed)), "a request is in two places"
    assert set(placed) == set(requests), "a request is in no place, or an ended request is in a place"
    for request_id, queued in requests.items():
        assert (queued.run is None) == (request_id in waiting), f"request {request_id} is not where its record says"


def _check_engine(engine: EngineState) -> None:
    info, name = engine.info, engine.info.name
    if info.barrier:
        batches = {run.batch_id for peer in engine.worker.engines for run in peer.running.values()}
        assert len(batches) <= 1, f"the barrier worker of {name} runs batches {batches}"
    totals = sum([run.queued.total_tokens for run in engine.running.values()])
    assert engine.total_tokens == totals, f"{name} has {engine.total_tokens} tokens reserved, not {totals}"
    trial = engine.circuit.trial
    assert trial is None or trial in engine.running, f"{name} waits for a trial that it does not run"
    if engine.worker.reserved is not None:
        assert engine.worker.running, f"{name} is kept free for a batch that could run"
        reserved, batch = engine.worker.reserved
        takes = reserved.ready and reserved.circuit.closed and reserved.serves(batch.model)
        assert takes, f"batch {batch.id} waits for {reserved.info.name}, which takes none of its requests"
