"""How far dispatch plans are from the joint optimum, on two bins that share one engine.

The scheduler solves the decision process of each queue alone. It then serves the queue that saves most for each second
of the engine (bins/dispatch.py). This script solves two small queues jointly, by policy iteration over both queue
lengths. It evaluates the plan's policy exactly in the same joint process, beside greedy, which serves the longer queue.

    python scripts/lab dispatch.gap [--json FILE]
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from kit.arguments import parser_of
from kit.results import write_json
from kit.rows import Row
from kit.tables import show

from bins.average_cost import SemiMarkov, evaluate, policy_iteration
from bins.curve import Curve
from bins.dispatch import DispatchPlan, DispatchSolver, Objective, Observed
from bins.profile import Profile
from bins.service import Array, ServiceTimes
from bins.smdp_model import MS_PER_S
from llmserve.request import Request
from llmserve.scheduling.queues.waiting import BinQueue, QueuedRequest
from llmserve.scheduling.release import Table

BATCH, STATES = 4, 22  # largest batch; queue lengths 0 .. STATES - 1
SHORT, LONG = (20.0, 30.0, 40.0, 60.0), (150.0, 200.0, 300.0, 500.0)  # equally likely output lengths
PROFILE = Profile(
    "small",
    Curve.affine(0.5e-3, 5e-3),
    Curve.affine(0.2, 2.0),
    idle_w=90.0,
    source="made up: a step of 5 ms and 400 W with a lone sequence",
    energy_source="modelled",
)
LOADS = (0.1, 0.3, 0.5, 0.7, 0.85)
WEIGHTS = (0.0, 1.0, 5.0, 20.0)
STATE_PAIRS = [(first, second) for first in range(STATES) for second in range(STATES)]


@dataclass(frozen=True)
class Joint:
    """Both queues as one process. actions : (0, 0) waits, (queue, size) serves a batch of this size"""

    model: SemiMarkov
    actions: list[tuple[int, int]]

    def policy(self, choice: list[tuple[int, int]]) -> np.ndarray:
        """The policy that takes choice[i] in state i, as indices of actions."""
        index = {action: place for place, action in enumerate(self.actions)}
        return np.array([index[action] for action in choice])


def services() -> list[ServiceTimes]:
    step_s = PROFILE.step_s.at(np.arange(1, BATCH + 1))
    return [ServiceTimes.longest_of(lengths, step_s) for lengths in (SHORT, LONG)]


def joint(rates: list[float], energy_weight: float) -> Joint:
    """The joint process. A full queue drops arrivals; the loads make that rare."""
    total = sum(rates)
    sizes = np.arange(1, BATCH + 1)
    step_s, step_j = PROFILE.step_s.at(sizes), PROFILE.step_j.at(sizes)
    actions = [(0, 0)] + [(queue, size) for queue in (0, 1) for size in range(1, BATCH + 1)]
    count = len(STATE_PAIRS)
    cost = np.full((len(actions), count), np.inf)
    sojourn = np.ones((len(actions), count))
    transition = np.zeros((len(actions), count, count))
    waiting = np.array([sum(lengths) for lengths in STATE_PAIRS])
    sojourn[0] = 1 / total
    cost[0] = (MS_PER_S * waiting / total + energy_weight * PROFILE.idle_w) / total
    for place, (first, second) in enumerate(STATE_PAIRS):
        after = [min(first + 1, STATES - 1) * STATES + second, first * STATES + min(second + 1, STATES - 1)]
        for rate, target in zip(rates, after, strict=True):
            transition[0, place, target] += rate / total
    for index, (queue, size) in enumerate(actions[1:], start=1):
        service = services()[queue]
        mean, second_moment = float(service.mean_s[size - 1]), float(service.second_moment_s2[size - 1])
        joules = mean / step_s[size - 1] * step_j[size - 1]
        kernels = [shifted(part, rates) for part in service.parts_s[size - 1]]
        for place, state in enumerate(STATE_PAIRS):
            if state[queue] < size:
                continue
            rest = [state[0] - size, state[1]] if queue == 0 else [state[0], state[1] - size]
            sojourn[index, place] = mean
            request_s = (state[0] + state[1]) * mean + total * second_moment / 2  # summed over all requests
            cost[index, place] = MS_PER_S * request_s / total + energy_weight * joules
            transition[index, place] = np.mean(
                [np.outer(first[rest[0]], second[rest[1]]).ravel() for first, second in kernels], axis=0
            )
    return Joint(SemiMarkov(cost, sojourn, transition), actions)


def shifted(seconds: float, rates: list[float]) -> list[Array]:
    """For each queue a matrix (states, states): probabilities of its length after the arrivals of these seconds."""
    kernels = []
    for rate in rates:
        p = ServiceTimes.deterministic([seconds]).arrivals(rate, STATES)[0]
        kernel = np.zeros((STATES, STATES))
        for length in range(STATES):
            kernel[length, length:] = p[: STATES - length]
            kernel[length, -1] += 1 - kernel[length].sum()
        kernels.append(kernel)
    return kernels


def planned(plan: DispatchPlan) -> list[tuple[int, int]]:
    """The action of release `table` in each state of a free engine: of the ready queues the most urgent is served.

    Of two full queues the scheduler serves the queue that was full first. A state does not contain that order.
    """
    release = Table(BATCH)
    release.plan = plan
    choice = []
    for lengths in STATE_PAIRS:
        ready = []
        for queue in [queue_of(index, length) for index, length in enumerate(lengths) if length]:
            if size := release.size(queue, 0.0, True):
                ready.append((release.urgency(queue, 0.0), queue.index, size))
        choice.append(max(ready)[1:] if ready else (0, 0))
    return choice


def queue_of(index: int, length: int) -> BinQueue:
    """A bin with this many requests, which have just arrived."""
    queue = BinQueue(index)
    for request_id in range(length):
        queue.append(QueuedRequest(Request(request_id), index, 0.0))
    return queue


def greedy() -> list[tuple[int, int]]:
    choice = []
    for first, second in STATE_PAIRS:
        queue = int(second > first)
        size = min((first, second)[queue], BATCH)
        choice.append((queue, size) if size else (0, 0))
    return choice


def measure() -> list[Row]:
    rows = []
    full_s = [float(service.mean_s[-1]) / BATCH for service in services()]
    for load in LOADS:
        for weight in WEIGHTS:
            rates = [load / sum(full_s)] * 2
            both = joint(rates, weight)
            lengths = (tuple(SHORT), tuple(LONG))
            solver = DispatchSolver(PROFILE, BATCH, Objective(energy_weight=weight), barrier=True)
            plan = solver.plan_of(Observed(tuple(rates), lengths, engines=1, slots=BATCH, queues=2), 2)
            start = both.policy(greedy())
            optimum = policy_iteration(both.model, start)
            plan_ms, greedy_ms = evaluate(both.model, both.policy(planned(plan))), evaluate(both.model, start)
            costs = {"optimum_ms": optimum.average_cost, "plan_ms": plan_ms, "greedy_ms": greedy_ms}
            rows.append(Row({"load": load, "energy_weight": weight}, costs))
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    args = parser.parse_args()
    rows = measure()
    lines = []
    for row in rows:
        gaps = [row[name] / row["optimum_ms"] - 1 for name in ("plan_ms", "greedy_ms")]
        cells = (f"{row['load']:g}", f"{row['energy_weight']:g}", f"{row['optimum_ms']:.1f}")
        lines.append((*cells, *(f"+{gap:.2%}" for gap in gaps)))
    show(None, ("load", "ms/W", "optimum (ms)", "plan", "greedy"), lines)
    write_json(args.json, [row.record for row in rows])
