"""SMDP-J, Fig. 4, 5, 7, 8, 9, and SMDP-C, Fig. 5: latency, power and cost of SMDP policies beside the benchmarks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike

from bins.smdp import Evaluation
from papers.rows import Case, Row, claim
from papers.smdp.policies import CASE_LOADS
from papers.smdp.scenarios import (
    BATCH_MAX,
    BENCHMARKS,
    DISTRIBUTIONS,
    SQUARED_COV,
    Array,
    Effort,
    Scenario,
    basic,
    benchmarks,
    constant_time,
    logarithmic_energy,
)

CLOSE = "W of static 32 is very close to greedy's (within a tenth)"
CLOSE_WITHIN = 0.1  # relative
GREATEST = "greatest w2 with this W"
SMALL = 0.01  # tolerance of published numbers with two digits
SAME_MS = 0.005  # mean response times with a smaller difference print the same


def costs(figure: str, scenario: Scenario, weights: Array) -> Iterator[Row]:
    """Average cost against w2 of SMDP policies and benchmarks (Fig. 4)."""
    for load in (0.1, 0.3, 0.7):
        queue = scenario.queue(load)
        costs_ms = {name: [result.cost_ms(w) for w in weights] for name, result in benchmarks(queue).items()}
        costs_ms["smdp"] = [queue.solve(w).average_cost for w in weights.tolist()]
        for name, values in costs_ms.items():
            case: Case = {"rho": load, "policy": name}
            yield Row.of_curve(figure, case, "average cost g", "ms", "w2", weights, values)
        smdp = np.array(costs_ms.pop("smdp"))
        least = np.min(list(costs_ms.values()), axis=0)
        holds = bool((smdp <= least * (1 + 1e-9)).all())
        yield claim(figure, {"rho": load}, "the SMDP policy costs least at every w2", holds)
        gap = 100 * float(np.max(least / smdp - 1))
        yield Row(figure, {"rho": load}, "best of the others above SMDP, at most", "%", gap)
        at_zero = [values[0] for values in costs_ms.values()]
        first: Case = {"rho": load, "w2": 0.0}
        yield claim(figure, first, "cost rises from greedy to static 8, 16, 32", at_zero == sorted(at_zero))
        yield Row(figure, first, "greedy above SMDP", "%", 100 * (costs_ms["greedy"][0] / float(smdp[0]) - 1))
        last: Case = {"rho": load, "w2": float(weights[-1])}
        for name in ("greedy", "static 32"):
            yield Row(figure, last, f"{name} above SMDP", "%", 100 * (costs_ms[name][-1] / float(smdp[-1]) - 1))


def tradeoffs(figure: str, scenario: Scenario, effort: Effort, loads: Sequence[float], **extra: str) -> Iterator[Row]:
    """Mean response time and power of SMDP policies against w2, each policy once; and of the benchmarks against rho."""

    def curves(case: Case, along: str, at: ArrayLike, response_ms: ArrayLike, power_w: ArrayLike) -> Iterator[Row]:
        yield Row.of_curve(figure, case, "mean response time W", "ms", along, at, response_ms)
        yield Row.of_curve(figure, case, "mean power P", "W", along, at, power_w)

    for load in loads:
        queue = scenario.queue(load)
        steps: list[tuple[float, float, float]] = []
        for weight in effort.weights:
            smdp = queue.solve(weight).evaluation
            if not steps or not math.isclose(smdp.response_s_mean * 1e3, steps[-1][1], rel_tol=1e-7):
                steps.append((weight, smdp.response_s_mean * 1e3, smdp.power_w_mean))
        yield from curves({**extra, "rho": load, "policy": "smdp"}, "w2", *np.array(steps).T)
    by_load = {load: benchmarks(scenario.queue(load)) for load in loads}
    for name in BENCHMARKS:
        stable = {load: by_name[name] for load, by_name in by_load.items() if name in by_name}
        response_ms = [result.response_s_mean * 1e3 for result in stable.values()]
        power_w = [result.power_w_mean for result in stable.values()]
        yield from curves({**extra, "policy": name}, "rho", list(stable), response_ms, power_w)


def pareto(figure: str, scenario: Scenario, effort: Effort) -> Iterator[Row]:
    """Check that no benchmark has both less latency and less power than an SMDP policy."""
    beaten, compared = 0, 0
    for load in effort.loads:
        queue = scenario.queue(load)
        results = list(benchmarks(queue).values())
        for weight in effort.weights:
            smdp = queue.solve(weight).evaluation
            for benchmark in results:
                compared += 1
                beaten += _beats(benchmark, smdp)
    note = f"{compared} pairs compared, {beaten} where it has"
    yield claim(figure, {}, "no benchmark has both less latency and less power", beaten == 0, note)


def _beats(a: Evaluation, b: Evaluation) -> bool:
    """Return whether a has less latency and less power than b, by more than rounding."""
    bound = 1.0 - 1e-9
    return a.response_s_mean < b.response_s_mean * bound and a.power_w_mean < b.power_w_mean * bound


def basic_tradeoffs(effort: Effort) -> Iterator[Row]:
    figure = "Fig. 5"
    yield from tradeoffs(figure, basic(), effort, effort.loads)
    yield from pareto(figure, basic(), effort)
    queue = basic().queue(0.7)
    greedy = queue.evaluate(queue.greedy())
    better = [
        weight
        for weight in np.linspace(0.0, 1.0, 101).tolist()
        if (smdp := queue.solve(weight).evaluation).response_s_mean < greedy.response_s_mean
        and smdp.power_w_mean < greedy.power_w_mean
    ]
    note = f"w2 = {better[0]:g} to {better[-1]:g}" if better else ""
    yield claim(figure, {"rho": 0.7}, "an SMDP policy has less latency and less power than greedy", bool(better), note)
    yield from _least_power_below(figure)
    speed = float(basic().requests_per_ms(8) / basic().requests_per_ms(BATCH_MAX))
    yield Row(figure, {"policy": "static 8"}, "unstable from rho", "1", speed)
    yield claim(figure, {"policy": "static 8", "rho": "0.8 and above"}, "unstable", speed <= 0.8)
    loaded = basic().queue(0.9)
    static = benchmarks(loaded)["static 16"].response_s_mean
    worst = max(loaded.solve(weight).evaluation.response_s_mean for weight in (0.0, 1.0, 5.0))
    note = f"{static * 1e3:.1f} ms; SMDP with w2 up to 5 at most {worst * 1e3:.1f} ms"
    late: Case = {"policy": "static 16", "rho": 0.9}
    yield claim(figure, late, "responds much later than SMDP policies", static > 1.5 * worst, note)


def _least_power_below(figure: str, load: float = 0.3, bound_ms: float = 5.0) -> Iterator[Row]:
    """The example of the text: the least power with W below 5 ms at rho = 0.3."""
    queue = basic().queue(load)

    def response_ms(weight: float) -> float:
        return queue.solve(weight).evaluation.response_s_mean * 1e3

    greatest = _last(lambda weight: response_ms(weight) < bound_ms, 0.0, 100.0)
    best_ms = response_ms(greatest)
    least = _last(lambda weight: response_ms(weight) < best_ms - SAME_MS, 0.0, greatest)
    case: Case = {"rho": load, "below": f"{bound_ms:g} ms"}
    yield Row(figure, case, "W of the least power", "ms", best_ms)
    yield Row(figure, case, "P of the least power", "W", queue.solve(greatest).evaluation.power_w_mean)
    yield Row(figure, case, "least w2 with this W", "ms/W", least, note=f"within {SAME_MS:g} ms")
    note = "the largest of the weights that the paper looks at, which it does not list"
    yield Row(figure, case, GREATEST, "ms/W", greatest, 1.3, SMALL, note=note)


def _last(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Return the point where a condition ends that holds at low and not at high, within 1e-6."""
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def constant_times(effort: Effort) -> Iterator[Row]:
    """Fig. 7: a service time that is independent of the batch size."""
    figure = "Fig. 7"
    yield from tradeoffs(figure, constant_time(), effort, effort.loads)
    yield from pareto(figure, constant_time(), effort)
    for name, scenario, published in (("constant", constant_time(), 32.0), ("basic", basic(), 4.0)):
        speedup = scenario.requests_per_ms(BATCH_MAX) / scenario.requests_per_ms(1)
        case: Case = {"times": name}
        yield Row(figure, case, "speed-up at b = 32", "1", speedup, published, SMALL, kind="derived")
    grown = {}
    for name, scenario in (("constant", constant_time()), ("basic", basic())):
        low, high = (scenario.queue(load) for load in (0.1, 0.9))
        grown[name] = high.evaluate(high.greedy()).response_s_mean / low.evaluate(low.greedy()).response_s_mean
        yield Row(figure, {"times": name, "policy": "greedy"}, "W at rho 0.9 over W at 0.1", "1", grown[name])
    text = "W grows far less than in the basic scenario"
    yield claim(figure, {"policy": "greedy"}, text, grown["constant"] < grown["basic"] / 2)
    constant_s, basic_s = (
        [benchmarks(scenario.queue(load))["static 32"].response_s_mean for load in effort.loads]
        for scenario in (constant_time(), basic())
    )
    falls = all(a > b for a, b in itertools.pairwise(constant_s))
    yield claim(figure, {"policy": "static 32"}, "W falls as rho rises", falls)
    lower = all(a < b for a, b in zip(constant_s, basic_s, strict=True))
    yield claim(figure, {"policy": "static 32"}, "W is below the basic scenario's", lower)
    close = True
    for load in (0.6, 0.7, 0.8, 0.9):
        results = benchmarks(constant_time().queue(load))
        ratio = results["static 32"].response_s_mean / results["greedy"].response_s_mean
        close = close and abs(ratio - 1) < CLOSE_WITHIN
        yield Row(figure, {"rho": load}, "W of static 32 over W of greedy", "1", ratio)
    yield claim(figure, {"rho": "0.6 and above"}, CLOSE, close)


def logarithmic_energies(effort: Effort) -> Iterator[Row]:
    """Fig. 8: an energy that grows with the logarithm of the batch size."""
    figure = "Fig. 8"
    yield from tradeoffs(figure, logarithmic_energy(), effort, effort.loads)
    yield from pareto(figure, logarithmic_energy(), effort)
    for name, scenario, falls in (("logarithmic", logarithmic_energy(), True), ("basic", basic(), False)):
        powers = [benchmarks(scenario.queue(load))["greedy"].power_w_mean for load in (0.6, 0.8)]
        holds = (powers[1] < powers[0]) == falls
        note = f"{powers[0]:.1f} W and {powers[1]:.1f} W"
        text = f"greedy draws {'less' if falls else 'more'} at rho 0.8 than at 0.6"
        yield claim(figure, {"energy": name}, text, holds, note)
    for name, scenario in (("logarithmic", logarithmic_energy()), ("basic", basic())):
        gain = (32 / scenario.energy_mj[31]) / (8 / scenario.energy_mj[7])
        yield Row(figure, {"energy": name}, "requests per joule at b = 32 over b = 8", "1", float(gain))


def distributions(effort: Effort) -> Iterator[Row]:
    """Fig. 9: distributions of the service time."""
    figure = "Fig. 9"
    greedy: dict[float, list[Evaluation]] = {load: [] for load in (0.3, 0.7)}
    for name in DISTRIBUTIONS:
        scenario = basic(name)
        yield from tradeoffs(figure, scenario, effort, tuple(greedy), service=name)
        for load, results in greedy.items():
            results.append(scenario.queue(load).evaluate(scenario.queue(load).greedy()))
        yield Row(figure, {"service": name}, "squared coefficient of variation", "1", SQUARED_COV[name])
    for load, results in greedy.items():
        case: Case = {"rho": load, "policy": "greedy"}
        slower = all(a.response_s_mean < b.response_s_mean for a, b in itertools.pairwise(results))
        yield claim(figure, case, "W rises with the variability", slower)
        frugal = all(a.power_w_mean > b.power_w_mean for a, b in itertools.pairwise(results))
        yield claim(figure, case, "P falls with the variability", frugal)
        ratio = results[-1].response_s_mean / results[0].response_s_mean
        yield Row(figure, case, "W, hyperexponential over deterministic", "1", ratio)


def thresholds(effort: Effort) -> Iterator[Row]:
    """The greatest excess cost of the best single threshold (1 .. B_max) over the optimum, of all loads and w2."""
    for name in DISTRIBUTIONS:
        gaps: list[tuple[float, float, float]] = []
        for load in CASE_LOADS if effort.exhaustive else (0.7,):
            queue = basic(name).queue(load)
            results = [queue.evaluate(queue.threshold(least)) for least in range(1, BATCH_MAX + 1)]
            for weight in (0.0, 0.5, 1.0, 2.0, 5.0, 15.0):
                optimum = queue.solve(weight).average_cost
                gaps.append((min(result.cost_ms(weight) for result in results) / optimum - 1, load, weight))
        gap, load, weight = max(gaps)
        note = f"at rho = {load:g}, w2 = {weight:g}, of {len(gaps)} settings"
        quantity = "best single threshold above the optimum, at most"
        yield Row("Thresholds", {"service": name}, quantity, "%", 100 * max(gap, 0.0), note=note)
