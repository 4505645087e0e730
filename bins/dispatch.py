"""The plan for the present load, which release `table` follows: how many queues, and which batch size when.

A plan gives the number of queues into which bins are merged, and for each queue the batch size by the number of waiting
requests. It is made from the observed arrival rates and lengths and from the engines' profile: for 1, 2, 4, ... queues
each queue's decision process (bins/smdp.py) is solved, and the number of queues of least cost is chosen. At low load
one queue has lower latency and energy than many, for many queues fill more slowly; at high load many queues have a
higher throughput.

Queues that share engines are solved one by one. In each queue's process, the engines are free again after the batch's
own time, lengthened by the share of time that other queues use (`busy_elsewhere`); this share is found by repeated
solving (PASSES). docs/results/dispatch.md measures the distance from the joint optimum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np

from bins.average_cost import NotConverged
from bins.profile import Profile
from bins.refill import RefillEngine
from bins.service import ServiceTimes
from bins.several_queues import Choice, least_cost, least_energy, within_percentile
from bins.smdp import Queue, Solution
from bins.smdp_model import MS_PER_S, Unstable

PASSES = 3  # iterations over the queues' shares of the engines
JOINED_MAX = 0.7  # load of a refill engine up to which requests join it rather than wake another
LOAD_MAX = 0.95  # above this load waiting gains nothing, and the plan is greedy
STAY = 0.03  # relative cost by which another number of queues must be better than the present number
SURE_DEVIATIONS = 3.0  # standard deviations added to the expected time until the missing requests have arrived
LATE = 0.9  # share of batches that have ended by `late_s`
PARTS = 16  # slices of the distribution of a batch's longest length
ERROR_MAX = 1e-5  # relative: rates and lengths are not known more exactly


@dataclass(frozen=True, slots=True)
class Objective:
    """The operator's objective.

    energy_weight      ms of mean response time that one watt is worth
    latency_target_s   instead of the weight: least energy with the mean response time within this target
    percentile         ... with this percentile of the response time (50 < percentile < 100); None: the mean
    """

    energy_weight: float = 0.0
    latency_target_s: float | None = None
    percentile: float | None = None


@dataclass(frozen=True, slots=True)
class Observed:
    """The load and the engines for which a plan is made.

    rates_per_s  arrivals a second of each bin; all zero: unknown
    lengths      for each bin, equally likely output lengths, tokens, ascending
    engines      number of ready engines, >= 1
    slots        sequences that each engine runs at once
    queues       number of queues of the present plan; 0: none, or its load was unknown
    pace         measured seconds for each second of the engines' profile
    """

    rates_per_s: tuple[float, ...]
    lengths: tuple[tuple[float, ...], ...]
    engines: int
    slots: int
    queues: int
    pace: float = 1.0


@dataclass(frozen=True, slots=True)
class DispatchTable:
    """The policy of one queue. Index: number of waiting requests (the last entry also holds for more), or batch size.

    actions     by waiting requests: requests to serve now; 0: wait
    other       by waiting requests: actions of the second policy of a mixture; () without a mixture
    advantage   by waiting requests: cost that serving saves over waiting, ms for each second of the engine's time
    service_s   by batch size from 1 on: expected time of a batch
    late_s      by batch size from 1 on: time within which 9 of 10 batches end
    wait_s_max  longest wait for an engine that is free; arrivals at the observed rate would almost surely end it before
    """

    actions: tuple[int, ...]
    other: tuple[int, ...]
    advantage: tuple[float, ...]
    service_s: tuple[float, ...]
    late_s: tuple[float, ...]
    wait_s_max: float


@dataclass(frozen=True, slots=True)
class DispatchPlan:
    """queue_of: for each bin, the queue in which its requests wait.  share: share of decisions that follow `other`.

    response_s_mean, power_w_mean: expected by the model; None without a solution (unknown rates, or overload).
    target_met: whether the model expects to meet the objective.  engines: number of engines that the plan is made for.
    fallback: why this is not the best plan. "overload": no plan carries the load, so that no request waits for others;
    "unsolved": a decision process could not be solved, so that its number of queues, or every one, was left out; "".
    """

    queue_of: tuple[int, ...]
    tables: tuple[DispatchTable, ...]
    share: float = 0.0
    latency_target_s: float | None = None
    response_s_mean: float | None = None
    power_w_mean: float | None = None
    target_met: bool = True
    engines: int = 1
    fallback: str = ""


# ---- the plan ---------------------------------------------------------------------------------------------------


class DispatchSolver:
    """Makes plans for engines of one profile.

    batch_size  largest batch
    barrier     whether engines run batches to their end; else requests join running ones, and only idle engines wait
    merges      whether plans may merge bins into fewer queues and let requests wait; else plans only give batch times
    """

    def __init__(
        self, profile: Profile, batch_size: int, objective: Objective, *, barrier: bool, merges: bool = True
    ) -> None:
        self.profile = profile
        self.objective = objective
        self._barrier = barrier
        self._merges = merges
        if profile.slots_max is not None and batch_size > profile.slots_max:
            raise ValueError(f"the profile {profile.name} is of batches up to {profile.slots_max}, not {batch_size}")
        sizes = np.arange(1, batch_size + 1)
        self._sizes = sizes
        self._step_s, self._step_j = profile.step_s.at(sizes), profile.step_j.at(sizes)
        self.solve = lru_cache(maxsize=256)(self._solve)
        self._at_pace = lru_cache(maxsize=8)(
            lambda pace: DispatchSolver(profile.at_pace(pace), batch_size, objective, barrier=barrier, merges=merges)
        )

    def _solve(self, observed: Observed) -> DispatchPlan:
        """Returns the greedy plan for an overload or a process that cannot be solved, and says so in the plan."""
        if observed.pace != 1.0:
            return self._at_pace(observed.pace).solve(replace(observed, pace=1.0))
        bins = len(observed.rates_per_s)
        if not self._merges or not any(observed.rates_per_s):
            return self.greedy(observed)
        if not self._barrier:
            return self._refill(observed)
        plans: dict[int, DispatchPlan] = {}
        near = _counts(bins, observed.queues)
        fallback = ""
        for count in [*near, *(far for far in _counts(bins, 0) if far not in near)]:
            if plans and count not in near:
                break  # numbers far from the present one are tried only if no near number has a plan
            try:
                plans[count] = self.plan_of(observed, count)
            except Unstable:
                continue
            except (NotConverged, np.linalg.LinAlgError):
                fallback = "unsolved"
        if not plans:
            return replace(self.greedy(observed), fallback=fallback or "overload")
        return replace(plans[self._best(plans, observed.queues)], fallback=fallback)

    def plan_of(self, observed: Observed, count: int) -> DispatchPlan:
        """The plan with `count` queues. Raises Unstable, NotConverged."""
        target_s, level = self.objective.latency_target_s, self.objective.percentile
        if target_s is not None and level is not None:
            choice, queues = within_percentile(partial(self._choose, observed, count), target_s, level)
        else:
            choice, queues = self._choose(observed, count, target_s)
        others = choice.others or (None,) * count
        return DispatchPlan(
            queue_of=_queue_of(len(observed.rates_per_s), count),
            tables=tuple([self._table(*inputs) for inputs in zip(queues, choice.solutions, others, strict=True)]),
            share=choice.share,
            latency_target_s=self.objective.latency_target_s,
            response_s_mean=choice.response_s_mean,
            power_w_mean=choice.power_w_mean,
            target_met=choice.target_met,
            engines=observed.engines,
        )

    def _best(self, plans: dict[int, DispatchPlan], in_force: int) -> int:
        """The number of queues of least cost. The number in force stays while no other is better by more than STAY."""

        def rank(count: int) -> tuple[bool, float]:
            plan = plans[count]
            assert plan.response_s_mean is not None, "a solved plan has an expected response time"
            assert plan.power_w_mean is not None, "a solved plan has an expected power"
            stays = 1.0 - STAY if count == in_force else 1.0
            if self.objective.latency_target_s is None:
                return False, stays * (
                    MS_PER_S * plan.response_s_mean + self.objective.energy_weight * plan.power_w_mean
                )
            return not plan.target_met, stays * (plan.power_w_mean if plan.target_met else plan.response_s_mean)

        return min(plans, key=lambda count: (*rank(count), count))

    def _choose(self, observed: Observed, count: int, response_s_max: float | None) -> tuple[Choice, list[Queue]]:
        """The best policies of `count` queues, and the queues. response_s_max : target of the mean response time.

        Raises Unstable, NotConverged.
        """
        queues = self._queues(observed, count)
        loads = [queue.load for queue in queues]  # as if no other queue used the engines
        if sum(loads) > LOAD_MAX:
            raise Unstable(f"{count} queues load the engines by {sum(loads):.3g}")
        busy = loads
        choice = None
        for _ in range(PASSES if count > 1 else 1):
            elsewhere = [min(sum(busy) - own, 1.0 - load / LOAD_MAX) for own, load in zip(busy, loads, strict=True)]
            shared = [queue.beside(share) for queue, share in zip(queues, elsewhere, strict=True)]
            if response_s_max is None:
                choice = least_cost(shared, self.objective.energy_weight, choice)
            else:
                choice = least_energy(shared, response_s_max)
            used = [solution.evaluation.utilisation for solution in choice.solutions]
            used = [own * min(1.0, LOAD_MAX / sum(used)) for own in used]  # their sum is at most LOAD_MAX
            busy = [(before + now) / 2 for before, now in zip(busy, used, strict=True)]  # damps oscillation
        assert choice is not None, "there is at least one pass"
        return choice, shared

    def _queues(self, observed: Observed, count: int) -> list[Queue]:
        bins = len(observed.rates_per_s)
        total = sum(observed.rates_per_s)
        least = 1e-3 * total / bins  # rate of a bin without present arrivals
        queues = []
        for members in _members(bins, count):
            rate = sum(max(observed.rates_per_s[index], least) for index in members)
            service = self._service(_merged(observed, members))
            energy = self.profile.prefill_j + (service.mean_s - self.profile.prefill_s) * self._step_j / self._step_s
            queues.append(
                Queue(
                    arrival_rate_per_s=rate,
                    service=service,
                    energy_j=energy,
                    idle_power_w=self.profile.idle_w,
                    engines=observed.engines,
                    response_weight=rate / total,
                    error_max=ERROR_MAX,
                )
            )
        return queues

    def _service(self, lengths: Sequence[float]) -> ServiceTimes:
        return ServiceTimes.longest_of(lengths, self._step_s, prefill_s=self.profile.prefill_s, parts=PARTS)

    def _table(self, queue: Queue, solution: Solution, other: Solution | None) -> DispatchTable:
        largest = int(self._sizes[-1])
        least = int(np.argmax(solution.policy > 0))  # smallest number of waiting requests that is served
        if other is not None:
            least = max(least, int(np.argmax(other.policy > 0)))
        values = solution.values[:, :largest]
        saved = values[0] - values[1:].min(axis=0)
        saved[0] = 0.0
        advantage = saved / queue.service.mean_s[values[1:].argmin(axis=0)]
        return DispatchTable(
            actions=tuple(solution.policy[: largest + 1].tolist()),
            other=tuple(other.policy[: largest + 1].tolist()) if other is not None else (),
            advantage=tuple(advantage.round(9).tolist()),
            service_s=tuple(queue.service.mean_s.tolist()),
            late_s=_late_s(queue.service),
            wait_s_max=_sure_s(least, queue.arrival_rate_per_s),
        )

    def greedy(self, observed: Observed) -> DispatchPlan:
        """The plan in which a free engine always starts a batch; with a queue for each bin, for highest throughput."""
        bins = len(observed.rates_per_s)
        count = bins if self._barrier else 1
        tables = []
        actions = tuple(range(int(self._sizes[-1]) + 1))
        for members in _members(bins, count):
            service = self._service(_merged(observed, members))
            tables.append(DispatchTable(actions, (), (), tuple(service.mean_s.tolist()), _late_s(service), 0.0))
        target_s = self.objective.latency_target_s
        return DispatchPlan(
            queue_of=_queue_of(bins, count),
            tables=tuple(tables),
            latency_target_s=target_s,
            target_met=target_s is None or not any(observed.rates_per_s),
            engines=observed.engines,
        )

    def _refill(self, observed: Observed) -> DispatchPlan:
        """A plan of one queue for refill engines, which gain nothing from requests of similar length in a batch."""
        bins = len(observed.rates_per_s)
        lengths = _merged(observed, range(bins))
        rate = sum(observed.rates_per_s)
        sizes = np.arange(1, observed.slots + 1)
        most = min(observed.slots, int(self._sizes[-1]))
        for used in range(1, observed.engines + 1):  # new requests join busy engines, so that other engines stay idle
            engine = RefillEngine(
                arrival_rate_per_s=rate / used,
                tokens_mean=float(np.mean(lengths)),
                step_s=self.profile.step_s.at(sizes),
                step_j=self.profile.step_j.at(sizes),
                idle_power_w=self.profile.idle_w,
            )
            if engine.load <= JOINED_MAX:
                break
        try:
            least, response_s, power_w, met = engine.best(
                self.objective.energy_weight, self.objective.latency_target_s, most
            )
        except Unstable:
            return replace(self.greedy(observed), fallback="overload")
        actions = tuple(count if count >= least else 0 for count in range(int(self._sizes[-1]) + 1))
        service = self._service(lengths)
        table = DispatchTable(actions, (), (), tuple(service.mean_s.tolist()), _late_s(service), _sure_s(least, rate))
        return DispatchPlan(
            queue_of=(0,) * bins,
            tables=(table,),
            latency_target_s=self.objective.latency_target_s,
            response_s_mean=response_s,
            power_w_mean=used * power_w + (observed.engines - used) * self.profile.idle_w,
            target_met=met,
            engines=observed.engines,
        )


def _late_s(service: ServiceTimes) -> tuple[float, ...]:
    """The ninth decile of a batch's time, by size, over its equally likely parts."""
    return tuple(service.parts_s[:, math.ceil(LATE * service.weights.size) - 1].tolist())


def _sure_s(count: int, rate_per_s: float) -> float:
    """Seconds within which `count` requests almost surely arrive at this rate."""
    return (count + SURE_DEVIATIONS * math.sqrt(count)) / rate_per_s


def _counts(bins: int, in_force: int) -> list[int]:
    """Numbers of queues to try, of 1, 2, 4, ... and `bins`: in_force and its neighbours; all if in_force is none."""
    counts = [*(1 << power for power in range((bins - 1).bit_length())), bins]
    if in_force not in counts:
        return counts
    place = counts.index(in_force)
    return counts[max(0, place - 1) : place + 2]


def _queue_of(bins: int, count: int) -> tuple[int, ...]:
    return tuple(index * count // bins for index in range(bins))


def _members(bins: int, count: int) -> list[list[int]]:
    queue_of = _queue_of(bins, count)
    return [[index for index in range(bins) if queue_of[index] == queue] for queue in range(count)]


def _merged(observed: Observed, members: Sequence[int]) -> list[float]:
    """Equally likely lengths of these bins together; each bin is weighted by its share of the arrivals."""
    rates = [observed.rates_per_s[index] for index in members]
    most = max(rates)
    if most <= 0:
        return [length for index in members for length in observed.lengths[index]]
    lengths: list[float] = []
    for index, rate in zip(members, rates, strict=True):
        lengths += list(observed.lengths[index]) * round(8 * rate / most)
    return lengths
