"""Numbers from a server's journal: waits while the engine was free, dispatch plans, and totals of a run."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bins.dispatch import DispatchPlan
from bins.profile import Profile
from llmserve.live.journal import Header, Step
from llmserve.observe.energy import ModelledEnergy
from llmserve.scheduling.messages import DispatchSolved, RequestArrived, RequestEnded, SolveDispatch
from llmserve.scheduling.scheduler import Scheduler
from llmserve.simulation.observed import observations
from llmserve.simulation.report import Recorder, Summary, elapsed, summarise

LATE_S = 0.1  # the timer is a millisecond late by design; the rest allows for the event loop of a busy machine


@dataclass(frozen=True)
class FreeWaits:
    """Waits in a bin while the engine was free.

    longest_s    largest total wait of a request
    bound_s_max  largest bound on the wait of a request; None without a plan
    late_s_max   longest time that a request stayed in its bin after its bound; 0 or less: no request did; None without
                 a plan
    violations   number of requests that stayed more than LATE_S after their bound
    """

    longest_s: float
    bound_s_max: float | None
    late_s_max: float | None
    violations: int


def free_waits(header: Header, steps: Sequence[Step]) -> FreeWaits:
    """Replay the journal. Raises AssertionError when the replayed scheduler acts differently than the journal."""
    scheduler = header.scheduler()
    plan: DispatchPlan | None = None
    waited_s: dict[int, float] = defaultdict(float)
    late_s: dict[int, float] = {}
    bounds_s: set[float] = set()
    last_s = 0.0
    for step in steps:
        models = scheduler.models.values() if is_free(scheduler) else ()
        for queue in [queue for queues in models for queue in queues.bins]:
            for queued in queue:
                waited_s[queued.request.id] += step.now_s - last_s
                if plan is not None:
                    bound_s = plan.tables[queue.index].wait_s_max
                    bounds_s.add(bound_s)
                    # A bound that passed before the plan came or the engine became free counts from then on.
                    late = step.now_s - max(last_s, queued.arrived_at_s + bound_s)
                    late_s[queued.request.id] = max(late, late_s.get(queued.request.id, late))
        actions = tuple(scheduler.handle(step.event, step.now_s))
        assert actions == step.actions, f"at {step.now_s} s the scheduler returns {actions}, its journal {step.actions}"
        plan = step.event.plan if isinstance(step.event, DispatchSolved) else plan
        last_s = step.now_s
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
    """A plan.

    at_s                time from which the plan is in force
    arrival_rate_per_s  rate for which the plan was made; 0: the load was not known yet
    least               by queue: number of requests for which it waits, in the policy of the mixture that waits longer
    wait_s_max          by queue: longest wait for this number
    share               share of decisions that follow the other policy of the mixture
    response_s          mean response time that the model expects, and power_w its power; None: no expectation
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
    plans, rate_per_s = [], 0.0
    for step in steps:
        if isinstance(step.event, DispatchSolved):
            plans.append(_planned(step.now_s, rate_per_s, step.event.plan))
        for action in step.actions:
            if isinstance(action, SolveDispatch):
                rate_per_s = sum(action.observed.rates_per_s)
    return plans


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
    """A server's pass over the requests of a round.

    summary                 the same as of a simulation
    above_idle_j_per_token  energy of the batches above idle, by the profile
    client_s_mean           mean latency for the client, including prediction and HTTP
    planned_s_mean          mean latency of the requests after the first plan for a known load; None: no such request
    pace                    median of the real time of a batch over the profile's time for its size and length
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
    batches = observations(steps)
    times = profile.step_times(max([batch.size for batch in batches], default=1))
    expected_s = [times.batch_s(batch.tokens, batch.size) for batch in batches]
    expected_j = [profile.prefill_j + batch.tokens * float(profile.step_j.at(batch.size)) for batch in batches]
    plans = plans_of(steps)
    return Run(
        release=release,
        round=number,
        summary=summarise(
            recorder,
            tokens,
            times.batch_s(tokens, 1),
            header.scheduling.full_batch,
            [sum(batch.seconds for batch in batches) / elapsed_s],
            joules_between(steps, profile, began_s, began_s + elapsed_s),
        ),
        batches=len(recorder.batches),
        above_idle_j_per_token=(sum(expected_j) - profile.idle_w * sum(expected_s)) / float(tokens.sum()),
        client_s_mean=statistics.mean(client_s),
        planned_s_mean=_planned_s_mean(recorder, plans),
        pace=statistics.median(batch.seconds / s for batch, s in zip(batches, expected_s, strict=True)),
        waits=free_waits(header, steps),
        plans=plans,
    )


def recorded(steps: Sequence[Step]) -> tuple[Recorder, np.ndarray]:
    """The times of arrival, start and end of each request, and output tokens by the id of the request."""
    ids = [step.event.request.id for step in steps if isinstance(step.event, RequestArrived)]
    recorder, tokens = Recorder(max(ids) + 1), np.zeros(max(ids) + 1)
    for step in steps:
        recorder(step.now_s, step.event, list(step.actions))
        if isinstance(step.event, RequestEnded):
            tokens[step.event.request_id] = step.event.output_tokens
    return recorder, tokens


def joules_between(steps: Sequence[Step], profile: Profile, from_s: float, to_s: float) -> float:
    """Modelled energy between two times, which must be times of steps."""
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
