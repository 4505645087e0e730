"""What a server's journal tells of dispatching: waits while the engine was free, plans, and a run in all."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bins.dispatch import DispatchPlan
from bins.profile import Profile
from llmserve.cluster.journal import Header, Step
from llmserve.cluster.observed import observations
from llmserve.energy import ModelledEnergy
from llmserve.scheduling.messages import DispatchSolved, RequestArrived, RequestEnded, SolveDispatch
from llmserve.scheduling.scheduler import Scheduler
from llmserve.simulation.report import Recorder, Summary, elapsed, summarise

LATE_S = 0.1  # the timer comes a millisecond late by design; the rest is what a busy machine's event loop may add


@dataclass(frozen=True)
class FreeWaits:
    """Waits in a bin while the engine was free.

    longest_s    of one request, all such times together
    bound_s_max  the largest bound that a request had waited under; None without a plan
    late_s_max   by which a request was still in its bin after its bound; at most 0: nobody was
    violations   requests that were, by more than LATE_S
    """

    longest_s: float
    bound_s_max: float | None
    late_s_max: float | None
    violations: int


def free_waits(header: Header, steps: Sequence[Step]) -> FreeWaits:
    """Raises AssertionError when the replayed scheduler does not do what the journal says that it did."""
    scheduler = header.scheduler()
    plan: DispatchPlan | None = None
    waited_s: dict[int, float] = defaultdict(float)
    late_s: dict[int, float] = {}
    bounds_s: set[float] = set()
    then_s = 0.0
    for step in steps:
        models = scheduler.models.values() if is_free(scheduler) else ()
        for queue in [queue for queues in models for queue in queues.bins]:
            for queued in queue:
                waited_s[queued.request.id] += step.now_s - then_s
                if plan is not None:
                    bound_s = plan.tables[queue.index].wait_s_max
                    bounds_s.add(bound_s)
                    # Whoever's bound had passed when this plan came, or the engine became free, is late from then on.
                    late = step.now_s - max(then_s, queued.arrived_at_s + bound_s)
                    late_s[queued.request.id] = max(late, late_s.get(queued.request.id, late))
        done = tuple(scheduler.handle(step.event, step.now_s))
        assert done == step.actions, f"at {step.now_s} s the scheduler says {done}, its journal {step.actions}"
        plan = step.event.plan if isinstance(step.event, DispatchSolved) else plan
        then_s = step.now_s
    return FreeWaits(
        longest_s=max(waited_s.values(), default=0.0),
        bound_s_max=max(bounds_s, default=None),
        late_s_max=max(late_s.values(), default=None),
        violations=sum(late > LATE_S for late in late_s.values()),
    )


def is_free(scheduler: Scheduler) -> bool:
    return any(engine.ready and not engine.running for engine in scheduler.engines.values())


@dataclass(frozen=True)
class Planned:
    """A plan, in force from at_s on. arrival_rate_per_s: that it was made for; 0: of a load not known yet.

    least: requests that each queue waits for, in the policy that waits longer; wait_s_max: for so long at most.
    share: of decisions that follow the mixture's other policy.  response_s, power_w: what the model expects; None
    where it expects nothing.
    """

    at_s: float
    arrival_rate_per_s: float
    queues: int
    least: list[int]
    wait_s_max: list[float]
    share: float
    response_s: float | None
    power_w: float | None
    target_met: bool


def plans_of(steps: Sequence[Step]) -> list[Planned]:
    found, rate_per_s = [], 0.0
    for step in steps:
        if isinstance(step.event, DispatchSolved):
            found.append(_planned(step.now_s, rate_per_s, step.event.plan))
        for action in step.actions:
            if isinstance(action, SolveDispatch):
                rate_per_s = sum(action.observed.rates_per_s)
    return found


def _planned(now_s: float, rate_per_s: float, plan: DispatchPlan) -> Planned:
    return Planned(
        at_s=now_s,
        arrival_rate_per_s=rate_per_s,
        queues=len(plan.tables),
        least=[max(_least(table.actions), _least(table.other)) for table in plan.tables],
        wait_s_max=[table.wait_s_max for table in plan.tables],
        share=plan.share,
        response_s=plan.response_s_mean,
        power_w=plan.power_w_mean,
        target_met=plan.target_met,
    )


def _least(actions: Sequence[int]) -> int:
    return next((waiting for waiting, size in enumerate(actions) if size), 0)


@dataclass(frozen=True)
class Run:
    """One server's pass over a round's requests.

    summary                 as the simulator reports it
    above_idle_j_per_token  by the profile, of the batches that ran
    client_s_mean           latency that the client saw, prediction and HTTP included
    planned_s_mean          latency of the requests that came after the first plan for a known load; None: none did
    pace                    median of the batches' real time over what the profile expects of their size and length
    """

    release: str
    round: int
    summary: Summary
    batches: int
    above_idle_j_per_token: float
    client_s_mean: float
    planned_s_mean: float | None
    pace: float
    waits: FreeWaits
    plans: list[Planned]


def run_of(
    header: Header, steps: Sequence[Step], profile: Profile, *, release: str, number: int, client_s: Sequence[float]
) -> Run:
    recorder, tokens = recorded(steps)
    elapsed_s, began_s = elapsed(recorder), float(np.nanmin(recorder.arrived_s))
    ran = observations(steps)
    times = profile.step_times(max([batch.size for batch in ran], default=1))
    expected_s = [times.batch_s(batch.tokens, batch.size) for batch in ran]
    expected_j = [profile.prefill_j + batch.tokens * float(profile.step_j.at(batch.size)) for batch in ran]
    plans = plans_of(steps)
    return Run(
        release=release,
        round=number,
        summary=summarise(
            recorder,
            tokens,
            times.batch_s(tokens, 1),
            header.scheduling.full_batch,
            [sum(batch.seconds for batch in ran) / elapsed_s],
            joules_between(steps, profile, began_s, began_s + elapsed_s),
        ),
        batches=len(recorder.batches),
        above_idle_j_per_token=(sum(expected_j) - profile.idle_w * sum(expected_s)) / float(tokens.sum()),
        client_s_mean=statistics.mean(client_s),
        planned_s_mean=_planned_s_mean(recorder, plans),
        pace=statistics.median(batch.seconds / s for batch, s in zip(ran, expected_s, strict=True)),
        waits=free_waits(header, steps),
        plans=plans,
    )


def recorded(steps: Sequence[Step]) -> tuple[Recorder, np.ndarray]:
    """When each request came, started and ended, and its output tokens, by its id."""
    ids = [step.event.request.id for step in steps if isinstance(step.event, RequestArrived)]
    recorder, tokens = Recorder(max(ids) + 1), np.zeros(max(ids) + 1)
    for step in steps:
        recorder(step.now_s, step.event, list(step.actions))
        if isinstance(step.event, RequestEnded):
            tokens[step.event.request_id] = step.event.output_tokens
    return recorder, tokens


def joules_between(steps: Sequence[Step], profile: Profile, from_s: float, to_s: float) -> float:
    """from_s, to_s : times of steps."""
    meter = ModelledEnergy({"": profile})
    before_j: float | None = None
    for step in itertools.takewhile(lambda step: step.now_s <= to_s, steps):
        meter.observe(step)
        if before_j is None and step.now_s >= from_s:
            before_j = meter.joules(step.now_s)
    assert before_j is not None, f"no step between {from_s} and {to_s} s"
    return meter.joules(to_s) - before_j


def _planned_s_mean(recorder: Recorder, plans: Sequence[Planned]) -> float | None:
    since_s = next((plan.at_s for plan in plans if plan.response_s is not None), np.inf)
    arrived, ended = np.array(recorder.arrived_s), np.array(recorder.ended_s)
    latency = (ended - arrived)[arrived >= since_s]
    return float(np.nanmean(latency)) if latency.size else None
