"""How far dispatch plans are from the joint optimum, on two bins that share one engine.

The scheduler solves each queue's decision process alone and serves the queue whose serving saves most for each second
of the engine (bins/dispatch.py). Two queues small enough are solved jointly here, by policy iteration over both queue
lengths at once; the plan's own policy is evaluated exactly in the same joint process, beside greedy (of two waiting
queues the longer goes first).

    python scripts/lab/measure_dispatch_gap.py [--json FILE]
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from bench.arguments import parser_of
from bench.results import write_json
from bench.tables import show

from bins.average_cost import SemiMarkov, evaluate, policy_iteration
from bins.curve import Curve
from bins.dispatch import DispatchPlan, DispatchSolver, Objective, Observed
from bins.profile import Profile
from bins.service import Array, ServiceTimes
from bins.smdp_model import MS_PER_S
from llmserve.request import Request
from llmserve.scheduling.queues import BinQueue, QueuedRequest
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


@dataclass(frozen=True)
class Joint:
    """Both queues as one process. actions: (0, 0) waits, (queue, size) serves."""

    model: SemiMarkov
    actions: list[tuple[int, int]]

    def policy(self, choose: list[tuple[int, int]]) -> np.ndarray:
        """Of an action for each state."""
        index = {action: place for place, action in enumerate(self.actions)}
        return np.array([index[action] for action in choose])


def services() -> list[ServiceTimes]:
    step_s = PROFILE.step_s.at(np.arange(1, BATCH + 1))
    return [ServiceTimes.longest_of(lengths, step_s) for lengths in (SHORT, LONG)]


def joint(rates: list[float], energy_weight: float) -> Joint:
    """The joint process; what comes to a full queue is lost, which the loads make rare."""
    total = sum(rates)
    sizes = np.arange(1, BATCH + 1)
    step_s, step_j = PROFILE.step_s.at(sizes), PROFILE.step_j.at(sizes)
    actions = [(0, 0)] + [(queue, size) for queue in (0, 1) for size in range(1, BATCH + 1)]
    states = [(one, two) for one in range(STATES) for two in range(STATES)]
    count = len(states)
    cost = np.full((len(actions), count), np.inf)
    sojourn = np.ones((len(actions), count))
    transition = np.zeros((len(actions), count, count))
    waiting = np.array([one + two for one, two in states])
    sojourn[0] = 1 / total
    cost[0] = (MS_PER_S * waiting / total + energy_weight * PROFILE.idle_w) / total
    for place, (one, two) in enumerate(states):
        up = [min(one + 1, STATES - 1) * STATES + two, one * STATES + min(two + 1, STATES - 1)]
        for rate, target in zip(rates, up, strict=True):
            transition[0, place, target] += rate / total
    for index, (queue, size) in enumerate(actions[1:], start=1):
        service = services()[queue]
        mean, second = float(service.mean_s[size - 1]), float(service.second_moment_s2[size - 1])
        joules = mean / step_s[size - 1] * step_j[size - 1]
        kernels = [shifted(part, rates) for part in service.parts_s[size - 1]]
        for place, state in enumerate(states):
            if state[queue] < size:
                continue
            left = [state[0] - size, state[1]] if queue == 0 else [state[0], state[1] - size]
            sojourn[index, place] = mean
            held = (state[0] + state[1]) * mean + total * second / 2
            cost[index, place] = MS_PER_S * held / total + energy_weight * joules
            transition[index, place] = np.mean(
                [np.outer(one[left[0]], two[left[1]]).ravel() for one, two in kernels], axis=0
            )
    return Joint(SemiMarkov(cost, sojourn, transition), actions)


def shifted(seconds: float, rates: list[float]) -> list[Array]:
    """For each queue (states, states): where arrivals during so many seconds lead from each length."""
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
    """What release `table` says in each state, of a free engine: the most urgent of the willing queues goes.

    Only of two full queues the scheduler would take the one that was full first, which a state does not tell.
    """
    release = Table(BATCH)
    release.plan = plan
    choice = []
    for lengths in ((one, two) for one in range(STATES) for two in range(STATES)):
        willing = []
        for queue in [queue_of(index, length) for index, length in enumerate(lengths) if length]:
            if size := release.size(queue, 0.0, True):
                willing.append((release.urgency(queue, 0.0), queue.index, size))
        choice.append(max(willing)[1:] if willing else (0, 0))
    return choice


def queue_of(index: int, length: int) -> BinQueue:
    """A bin in which so many wait, since just now."""
    queue = BinQueue(index)
    for request_id in range(length):
        queue.append(QueuedRequest(Request(request_id), index, 0.0))
    return queue


def greedy() -> list[tuple[int, int]]:
    choice = []
    for one, two in ((one, two) for one in range(STATES) for two in range(STATES)):
        queue = int(two > one)
        size = min((one, two)[queue], BATCH)
        choice.append((queue, size) if size else (0, 0))
    return choice


def measure() -> list[dict[str, float]]:
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
            rows.append(
                {
                    "load": load,
                    "energy_weight": weight,
                    "optimum_ms": optimum.average_cost,
                    "plan_ms": evaluate(both.model, both.policy(planned(plan))),
                    "greedy_ms": evaluate(both.model, start),
                }
            )
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
    write_json(args.json, rows)


if __name__ == "__main__":
    main()
