"""How fast a bin's decision process is solved: exactly, and by relative value iteration as in the paper.

    python scripts/lab dispatch.smdp --output docs/results/smdp-speed.json

Times include the set-up: service times, energies, arrivals, equations. The cases take turns, and medians over rounds
are reported, so that a busy machine slows all cases alike. The benchmark fails unless both solvers find the same policy
in all states that are visited.
"""

from __future__ import annotations

import os

# Matrices this small gain nothing from threads, and on a busy machine threads cost 100 ms instead of 0.2 ms.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import platform
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from kit.arguments import add_results, parser_of
from kit.results import write_json
from kit.rows import in_rounds, medians
from kit.tables import show

from bins.average_cost import Policy, SemiMarkov, relative_value_iteration, stationary
from bins.profile import PROFILES
from bins.service import ServiceTimes
from bins.smdp import Queue

LOAD, ENERGY_WEIGHT = 0.9, 1.0
STATES_MAX, OVERFLOW_COST, EPSILON = 70, 100.0, 0.01  # SMDP-J, Table II
LENGTHS = np.random.default_rng(0).lognormal(5.2, 0.8, 4_000)  # output tokens of a bin
NEVER_VISITED = 1e-9  # largest share of decisions of a state that counts as not visited

EXACT, VALUES = "exact, B_max 32", "relative value iteration, B_max 32"


def basic(batch_max: int) -> Queue:
    """SMDP-J's basic scenario: GoogLeNet on a Tesla P4, deterministic."""
    profile, sizes = PROFILES["p4-googlenet"], np.arange(1, batch_max + 1)
    service = ServiceTimes.deterministic(profile.step_s.at(sizes))
    return Queue(LOAD * batch_max / float(service.mean_s[-1]), service, profile.step_j.at(sizes))


def empirical() -> Queue:
    """An H100 whose batches of up to 32 last as long as their longest answer."""
    profile, sizes = PROFILES["h100-llama-3.1-8b"], np.arange(1, 33)
    service = ServiceTimes.longest_of(LENGTHS, profile.step_s.at(sizes))
    energy_j = service.mean_s * profile.power_w(sizes)
    return Queue(LOAD * 32 / float(service.mean_s[-1]), service, energy_j, profile.idle_w)


def truncated() -> SemiMarkov:
    return basic(32).truncated(ENERGY_WEIGHT, states_max=STATES_MAX, overflow_cost=OVERFLOW_COST)


CASES: dict[str, Callable[[], object]] = {
    EXACT: lambda: basic(32).solve(ENERGY_WEIGHT),
    VALUES: lambda: relative_value_iteration(truncated(), epsilon=EPSILON),
    "exact, B_max 256": lambda: basic(256).solve(ENERGY_WEIGHT),
    f"exact, B_max 32, longest of {LENGTHS.size:,} lengths": lambda: empirical().solve(ENERGY_WEIGHT),
}


def same_policy() -> int:
    """The number of visited states. Raises AssertionError unless both solvers choose the same action in all of them."""
    model = truncated()
    by_values: Policy = relative_value_iteration(model, epsilon=EPSILON).policy
    visited = np.flatnonzero(stationary(model.under(by_values)[2])[:-1] > NEVER_VISITED)
    exact = basic(32).solve(ENERGY_WEIGHT).policy
    assert (by_values[visited] == exact[visited]).all(), "both solvers find the same policy"  # an action is its index
    return int(visited.size)


def measure(rounds: int) -> dict[str, float]:
    """Median milliseconds of each case."""

    def timed(case: Callable[[], object], number: int) -> dict[str, float]:
        began_s = time.perf_counter()
        case()
        return {"ms": (time.perf_counter() - began_s) * 1e3}

    measures = {name: partial(timed, case) for name, case in CASES.items()}
    rows = list(in_rounds(rounds, "case", measures, lambda row: f"{row['ms']:.1f} ms"))
    return {row["case"]: row["ms"] for row in medians(rows, "round")}


def main() -> None:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of the processes that solve
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    add_results(parser)
    args = parser.parse_args()
    visited = same_policy()
    medians_ms = measure(args.rounds)
    ratio = medians_ms[VALUES] / medians_ms[EXACT]
    rows = [(name, f"{median_ms:.2f}") for name, median_ms in medians_ms.items()]
    compared = (f"value iteration / exact, same policy in {visited} visited states", f"{ratio:.0f}x")
    title = f"Time to solve at load {LOAD:g}, energy weight {ENERGY_WEIGHT:g}"
    show(title, ("case", "median (ms)"), [*rows, (), compared])
    results = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas_threads": os.environ["OPENBLAS_NUM_THREADS"],
        "rounds": args.rounds,
        "median_ms": {name: round(median_ms, 3) for name, median_ms in medians_ms.items()},
        "value_iteration_over_exact": round(ratio, 1),
        "states_visited": visited,
    }
    write_json(args.output, results, indent=2)
