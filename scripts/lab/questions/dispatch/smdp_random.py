"""How well random decision processes of a bin are solved: all of them, how fast, in how much memory, how exactly.

    python scripts/lab dispatch.smdp_random --output docs/results/smdp-random.json

Problems have batches of up to 1 to 256, times and energies that are straight lines, concave curves or steps of the
size, service laws of SMDP-J or random mixtures of gamma distributions, loads from 0.01 to 0.98 and energy weights from
0 to 100. Seconds are those of the processor, set-up included, so that other work on the machine counts little. Where a
truncated model is small enough, value iteration solves it too, until it knows the average cost to 1e-9; these are the
differences. All problems are drawn anew by --seed.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # seconds of one core

import platform
import resource
import statistics
import time
from dataclasses import dataclass

import numpy as np
from kit.arguments import add_results, parser_of, whole
from kit.progress import log
from kit.results import write_json
from kit.tables import show

from bins.average_cost import NotConverged, relative_value_iteration
from bins.service import Array, ServiceTimes
from bins.smdp import Queue
from bins.smdp_model import Unstable

LAWS = ("deterministic", "erlang", "exponential", "hyperexponential", "mixture")
BATCH_MAX, LOAD_MIN, LOAD_MAX, WEIGHT_MAX = 256, 0.01, 0.98, 100.0
NO_WEIGHT = 0.3  # share of problems without a price of energy
TAIL = 1e-13  # probability beyond the states of the truncated model, about
OVERFLOW = 100.0  # abstract cost of overflow over the average cost: more than waiting costs
EPSILON = 1e-9  # relative span of the average cost at which value iteration ends
ITERATIONS_MAX = 50_000
TRANSITIONS_MAX = 4_000_000  # of a truncated model
WORK_MAX = 2e10  # transitions times iterations of value iteration


@dataclass(frozen=True)
class Problem:
    law: str
    load: float
    energy_weight: float
    queue: Queue

    @property
    def batch_max(self) -> int:
        return int(self.queue.service.sizes[-1])


def draw(rng: np.random.Generator) -> Problem:
    """Half of the problems have a batch size that is uniform, the others one whose logarithm is."""
    uniform = rng.random() < 0.5
    batch_max = int(rng.integers(1, BATCH_MAX + 1) if uniform else np.exp(rng.uniform(0.0, np.log(BATCH_MAX + 1))))
    sizes = np.arange(1, batch_max + 1)
    mean_s = 1e-3 * 10 ** rng.uniform(-1, 3) * curve(sizes, rng)
    energy_j = 100.0 * float(mean_s[0]) * 10 ** rng.uniform(-1, 1) * curve(sizes, rng)
    law = str(rng.choice(LAWS))
    service = mixture(mean_s, rng) if law == "mixture" else getattr(ServiceTimes, law)(mean_s)
    load = rng.uniform(LOAD_MIN, LOAD_MAX)
    energy_weight = 0.0 if rng.random() < NO_WEIGHT else rng.uniform(0.0, WEIGHT_MAX)
    least_w = float((energy_j / service.mean_s).min())
    idle_power_w = 0.0 if rng.random() < 0.5 else rng.uniform(0.0, 0.9) * least_w
    rate_per_s = load / float((service.mean_s / sizes).min())
    return Problem(law, load, energy_weight, Queue(rate_per_s, service, energy_j, idle_power_w))


def curve(sizes: Array, rng: np.random.Generator) -> Array:
    """(sizes,) non-decreasing from 1 on: fixed + size^power, a fifth of them in steps of 2, 4, ... or 32 sizes."""
    power = 1.0 if rng.random() < 0.5 else rng.uniform(0.0, 1.0)
    fixed = 10 ** rng.uniform(-2, 2)
    values = (fixed + sizes**power) / (fixed + 1)
    if rng.random() < 0.2:
        step = 2 ** rng.integers(1, 6)
        values = np.interp(np.ceil(sizes / step) * step, sizes, values)
    result: Array = values
    return result


def mixture(mean_s: Array, rng: np.random.Generator) -> ServiceTimes:
    """Two to five parts whose means differ by up to a factor of 16; each part fixed, Erlang or exponential."""
    parts = int(rng.integers(2, 6))
    factors, weights = 10 ** rng.uniform(-0.5, 0.7, parts), rng.dirichlet(np.ones(parts))
    factors /= weights @ factors
    shape = float(rng.choice([1.0, 2.0, 4.0, np.inf]))
    return ServiceTimes(np.arange(1, mean_s.size + 1), mean_s[:, None] * factors, weights, shape)


def solve(problem: Problem) -> tuple[float | None, float, int]:
    """Average cost (None: not solved), seconds of the processor, and iterations."""
    began_s = time.process_time()
    try:
        solution = problem.queue.solve(problem.energy_weight)
    except (Unstable, NotConverged, np.linalg.LinAlgError) as error:
        log(f"not solved, {problem.law}, batches of {problem.batch_max}, load {problem.load:.4g}: {error}")
        return None, time.process_time() - began_s, 0
    return solution.average_cost, time.process_time() - began_s, solution.iterations


def by_value_iteration(problem: Problem, average_cost: float) -> float | None:
    """The average cost of a truncated model; nan: value iteration did not converge; None: the model is too large."""
    queue, largest = problem.queue, problem.batch_max
    fastest = int(queue.service.sizes[np.argmax(queue.service.sizes / queue.service.mean_s)])
    eta = queue.service.tail_decay(queue.arrival_rate_per_s, fastest)
    states_max = 2 * largest + int(np.log(1.0 / TAIL) / eta)
    transitions = (largest + 1) * (states_max + 2) ** 2
    if transitions > TRANSITIONS_MAX:
        return None
    model = queue.truncated(problem.energy_weight, states_max=states_max, overflow_cost=OVERFLOW * average_cost)
    iterations_max = min(ITERATIONS_MAX, int(WORK_MAX / transitions))
    try:
        return relative_value_iteration(
            model, epsilon=EPSILON * average_cost, iterations_max=iterations_max
        ).average_cost
    except NotConverged:
        return float("nan")


def main() -> None:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of the processes that solve
    parser = parser_of(__doc__)
    parser.add_argument("--problems", type=whole(1), default=1000, metavar="N")
    parser.add_argument("--seed", type=int, default=2026)
    add_results(parser)
    args = parser.parse_args()
    costs: list[float | None] = []
    seconds, iterations = [], []
    for number in range(args.problems):
        cost, taken_s, taken = solve(draw(np.random.default_rng([args.seed, number])))
        costs.append(cost)
        seconds.append(taken_s)
        iterations.append(taken)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    log("all solved; now value iteration")
    differences, endless = [], 0
    for number, cost in enumerate(costs):
        problem = draw(np.random.default_rng([args.seed, number]))
        other = None if cost is None else by_value_iteration(problem, cost)
        if other is None or cost is None:
            continue
        if np.isnan(other):
            endless += 1
            continue
        differences.append(abs(cost / other - 1.0))
        if differences[-1] > 1e-8:
            log(f"problem {number}, {problem.law}, batches of {problem.batch_max}: {cost:.12g} and {other:.12g}")
    results = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "seed": args.seed,
        "problems": args.problems,
        "solved": sum(cost is not None for cost in costs),
        "seconds_median": round(statistics.median(seconds), 4),
        "seconds_p99": round(float(np.percentile(seconds, 99)), 4),
        "seconds_max": round(max(seconds), 4),
        "iterations_max": max(iterations),
        "memory_mib_peak": round(peak_mib, 1),
        "value_iteration_compared": len(differences),
        "value_iteration_not_converged": endless,
        "value_iteration_difference_max": float(f"{max(differences, default=0.0):.2g}"),
    }
    show("Random decision processes", ("quantity", "value"), [(name, f"{value}") for name, value in results.items()])
    write_json(args.output, results, indent=2)
