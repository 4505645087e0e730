"""Several queues that share engines: their best policies at one common weight of energy against response time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bins.average_cost import Policy
from bins.smdp import Evaluation, Queue, Solution
from bins.smdp_model import MS_PER_S

CYCLES = 30  # iterations of the fixed point for the length of a cycle
SEARCHES_MAX = 40  # breakpoints of the weight that are tried
SHARE_STEPS = 20  # steps of the search for a mixture's share
NEAR = 1e-3  # relative: precision with which a mixture meets the target
WEIGHT_MAX = 1e9  # ms/W, so large that only energy counts
SAMPLES = 10_000  # response times sampled for a percentile
SAMPLING_ERROR = 0.02  # relative error of such a percentile, about
PERCENTILE_ROUNDS, PERCENTILE_NEAR = 6, 0.03


@dataclass(frozen=True)
class Choice:
    """Policies of several queues; a mixture of `solutions` and `others` if `others` is not empty.

    response_s_mean  mean over all requests; alone_s : without waits for other queues' batches, which no process models
    power_w_mean     mean of all engines together
    share            share of decisions that follow `others`
    """

    solutions: tuple[Solution, ...]
    response_s_mean: float
    power_w_mean: float
    alone_s: float
    others: tuple[Solution, ...] = ()
    share: float = 0.0
    target_met: bool = True

    def cost_ms(self, energy_weight: float) -> float:
        """The cost that the decision processes minimise."""
        return MS_PER_S * self.alone_s + energy_weight * self.power_w_mean

    @property
    def policies(self) -> tuple[Policy, ...]:
        return tuple(solution.policy for solution in self.solutions)


def least_cost(queues: Sequence[Queue], energy_weight: float, start: Choice | None = None) -> Choice:
    """Each queue's optimal policy at a weight, ms/W. Raises Unstable, NotConverged."""
    starts = start.policies if start is not None else (None,) * len(queues)
    solutions = tuple(queue.solve(energy_weight, policy) for queue, policy in zip(queues, starts, strict=True))
    return Choice(solutions, *_sums(queues, [solution.evaluation for solution in solutions]))


def least_energy(queues: Sequence[Queue], response_s_max: float) -> Choice:
    """The policies of least power whose mean response time is within the target; the fastest if none meet it.

    As the weight grows, the response time rises in steps. The search goes from breakpoint to breakpoint: at the weight
    where two policies cost the same, a better policy replaces one of them; if there is none, the two are mixed so that
    the target is met exactly. Raises Unstable, NotConverged.
    """
    fast = least_cost(queues, 0.0)
    if fast.response_s_mean >= response_s_max:
        return replace(fast, target_met=False)
    slow = least_cost(queues, WEIGHT_MAX, fast)
    if slow.response_s_mean <= response_s_max:
        return slow
    for _ in range(SEARCHES_MAX):
        saved_w = fast.power_w_mean - slow.power_w_mean
        if saved_w <= 0:
            return fast
        weight = MS_PER_S * max(0.0, slow.alone_s - fast.alone_s) / saved_w
        between = least_cost(queues, weight, fast)
        saved = fast.cost_ms(weight) - between.cost_ms(weight)
        if saved <= 1e-9 * fast.cost_ms(weight):
            break
        if between.response_s_mean <= response_s_max:
            fast = between
        else:
            slow = between
    return _mixed(queues, fast, slow, response_s_max)


def _mixed(queues: Sequence[Queue], fast: Choice, slow: Choice, response_s_max: float) -> Choice:
    """A mixture of both choices whose mean response time is the target.

    The response time is increasing and concave in the share of `slow`. The share is found by false position with the
    Illinois rule: an end that stays twice counts half, for it might stay for ever.
    """
    aim_s = response_s_max * (1.0 - NEAR / 2)
    shares, beyond_s = [0.0, 1.0], [fast.response_s_mean - aim_s, slow.response_s_mean - aim_s]
    best, last = fast, -1
    for _ in range(SHARE_STEPS):
        share = shares[0] + (shares[1] - shares[0]) * max(0.0, -beyond_s[0]) / (beyond_s[1] - beyond_s[0])
        pairs = zip(queues, fast.policies, slow.policies, strict=True)
        choice = Choice(
            fast.solutions,
            *_sums(queues, [queue.evaluate(first, second, share) for queue, first, second in pairs]),
            others=slow.solutions,
            share=share,
        )
        if choice.response_s_mean <= response_s_max:
            best = choice
        off_s = choice.response_s_mean - aim_s
        if abs(off_s) <= NEAR / 2 * response_s_max:
            break
        side = int(off_s > 0)
        shares[side], beyond_s[side] = share, off_s
        if side == last:
            beyond_s[1 - side] /= 2
        last = side
    return best


def _sums(queues: Sequence[Queue], evaluations: Sequence[Evaluation]) -> tuple[float, float, float]:
    """(mean response time over all requests, mean power, mean response time without waits for other queues' batches).

    Idle power, which each evaluation includes, counts once.
    """
    idle_w = queues[0].engines * queues[0].idle_power_w
    above_idle_w = sum(own.power_w_mean - idle_w for own in evaluations)
    weights = [queue.response_weight for queue in queues]
    alone_s = sum(weight * own.response_s_mean for weight, own in zip(weights, evaluations, strict=True))
    used = sum(own.utilisation for own in evaluations)
    if used > 1.0 and len(queues) > 1:  # overload: the queues take turns, and the engines are always busy
        turns_s = _turns_s(queues, evaluations)
        response_s = sum(
            weight * max(own.response_s_mean, turn_s)
            for weight, own, turn_s in zip(weights, evaluations, turns_s, strict=True)
        )
        return response_s, idle_w + above_idle_w / used, alone_s
    waiting_s = 0.0
    for queue, (own, others) in zip(queues, _beside_others(evaluations), strict=True):
        probability, waits_s = _met_busy(queue, own, others)
        waiting_s += queue.response_weight * probability * waits_s
    return alone_s + waiting_s, idle_w + above_idle_w, alone_s


def _turns_s(queues: Sequence[Queue], evaluations: Sequence[Evaluation]) -> list[float]:
    """Mean response time of each queue's requests when the batches of all queues follow each other without a pause.

    A cycle runs one batch of each queue that has one ready. Its length is a fixed point, found by iteration from full
    batches. A request waits for half a cycle, and then for its own batch.
    """

    def batch_s(queue: Queue, own: Evaluation, cycle_s: float) -> float:
        size = max(own.batch_size_mean, queue.arrival_rate_per_s * cycle_s)
        return float(np.interp(size, queue.service.sizes, queue.service.mean_s))

    pairs = list(zip(queues, evaluations, strict=True))
    cycle_s = sum(float(queue.service.mean_s[-1]) for queue in queues) / queues[0].engines
    for _ in range(CYCLES):
        cycle_s = (
            sum(
                min(1.0, queue.arrival_rate_per_s * cycle_s / own.batch_size_mean) * batch_s(queue, own, cycle_s)
                for queue, own in pairs
            )
            / queues[0].engines
        )
    return [cycle_s / 2 + batch_s(queue, own, cycle_s) for queue, own in pairs]


def _met_busy(queue: Queue, own: Evaluation, others: Sequence[Evaluation]) -> tuple[float, float]:
    """(probability that a request finds its queue at rest and all engines busy with other queues' batches, mean wait in
    that case in seconds).

    The queue's own process only models that its engines return later from its own batches. A request waits for the rest
    of the running batch, and for half of the batches that other queues bring in that time: of two waiting queues,
    either may go first.
    """
    busy = sum(other.utilisation for other in others)
    if not others or busy <= 0:
        return 0.0, 0.0
    remaining = max(1e-9, 1.0 - own.utilisation)
    at_rest = max(0.0, 1.0 - own.utilisation * queue.engines * queue.occupied)
    residual_s = sum(other.utilisation * other.residual_s for other in others) / busy
    return at_rest * min(1.0, busy / remaining) ** queue.engines, residual_s / (1.0 - min(1.0, busy) / 2)


def _beside_others(evaluations: Sequence[Evaluation]) -> list[tuple[Evaluation, list[Evaluation]]]:
    """Each queue's evaluation, with the evaluations of the other queues."""
    return [(own, [*evaluations[:index], *evaluations[index + 1 :]]) for index, own in enumerate(evaluations)]


def percentile(queues: Sequence[Queue], choice: Choice, level: float) -> float:
    """Percentile of all requests' response times, seconds, by sampling the queues' models (always the same draws)."""
    rng = np.random.default_rng(0)
    samples = []
    pairs = _beside_others([solution.evaluation for solution in choice.solutions])
    for index, (queue, (own, others)) in enumerate(zip(queues, pairs, strict=True)):
        count = max(1, round(SAMPLES * queue.response_weight))
        other = choice.others[index].policy if choice.others else None
        response_s = queue.draw_responses(choice.solutions[index].policy, count, rng, other, choice.share)
        probability, waits_s = _met_busy(queue, own, others)
        samples.append(response_s + (rng.random(count) < probability) * rng.exponential(waits_s, count))
    return float(np.percentile(np.concatenate(samples), level))


def within_percentile(
    choose: Callable[[float], tuple[Choice, list[Queue]]], target_s: float, level: float
) -> tuple[Choice, list[Queue]]:
    """The policies of least power whose percentile of response times is within the target, and their queues.

    choose: the policies of least power for a target of the mean, and their queues. The ratio of percentile and mean
    changes slowly, so the mean is sought that yields the target percentile. If none does, the fastest policies.
    """
    best, queues = choose(0.0)
    reached_s = percentile(queues, best, level)
    best = replace(best, target_met=reached_s <= target_s)
    if not best.target_met:
        return best, queues
    bound_s = (1.0 - SAMPLING_ERROR) * target_s
    aim_s = (1.0 - PERCENTILE_NEAR / 2) * bound_s
    low, high = (best.response_s_mean, reached_s), None  # (mean, percentile) within the target, and beyond the target
    for _ in range(PERCENTILE_ROUNDS):
        if low[1] >= aim_s or (high is not None and high[1] <= low[1]):
            break  # near enough, or the difference is below the sampling error
        if high is None:
            mean_s = low[0] * aim_s / low[1]
        else:
            mean_s = low[0] + (high[0] - low[0]) * (aim_s - low[1]) / (high[1] - low[1])
        choice, beside = choose(mean_s)
        reached_s = percentile(beside, choice, level)
        if reached_s > bound_s:
            high = mean_s, reached_s
            continue
        low = mean_s, reached_s
        if choice.power_w_mean < best.power_w_mean:
            best, queues = choice, beside
    return best, queues
