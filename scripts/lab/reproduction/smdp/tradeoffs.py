"""SMDP-J, Fig. 4, 5, 7, 8, 9, and SMDP-C, Fig. 5: latency, power and cost of SMDP policies beside the benchmarks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from bins.smdp import Evaluation
from reproduction.rows import Case, Curve, Row, claim
from reproduction.smdp.policies import CASE_LOADS
from reproduction.smdp.scenarios import (
    BATCH_MAX,
    DISTRIBUTIONS,
    SQUARED_COV,
    STATIC,
    Array,
    Effort,
    Scenario,
    basic,
    benchmarks,
    constant_time,
    logarithmic_energy,
)

CLOSE = 0.1  # what "very close" is taken for
SMALL = 0.01  # tolerance of published numbers of two digits
SAME_MS = 0.005  # mean response times that differ by less are printed the same


def costs(figure: str, scenario: Scenario, weights: Array) -> Iterator[Row]:
    """Average cost against w2 of SMDP policies and benchmarks (Fig. 4)."""
    for load in (0.1, 0.3, 0.7):
        queue = scenario.queue(load)
        found = {name: [each.cost_ms(w) for w in weights] for name, each in benchmarks(queue).items()}
        found["smdp"] = [queue.solve(w).average_cost for w in weights.tolist()]
        for name, values in found.items():
            case: Case = {"rho": load, "policy": name}
            yield Row(figure, case, "average cost g", "ms", None, curve=Curve.of("w2", weights, values))
        smdp = np.array(found.pop("smdp"))
        least = np.min(list(found.values()), axis=0)
        holds = bool((smdp <= least * (1 + 1e-9)).all())
        yield claim(figure, {"rho": load}, "the SMDP policy costs least at every w2", holds)
        gap = 100 * float(np.max(least / smdp - 1))
        yield Row(figure, {"rho": load}, "best of the others above SMDP, at most", "%", gap)
        ranked = list(found)
        at_zero = [found[name][0] for name in ranked]
        yield claim(
            figure, {"rho": load, "w2": 0.0}, "cost rises from greedy to static 8, 16, 32", at_zero == sorted(at_zero)
        )
        yield Row(
            figure, {"rho": load, "w2": 0.0}, "greedy above SMDP", "%", 100 * (found["greedy"][0] / float(smdp[0]) - 1)
        )
        last: Case = {"rho": load, "w2": float(weights[-1])}
        for name in ("greedy", "static 32"):
            yield Row(figure, last, f"{name} above SMDP", "%", 100 * (found[name][-1] / float(smdp[-1]) - 1))


def tradeoffs(figure: str, scenario: Scenario, effort: Effort, loads: Sequence[float], **extra: str) -> Iterator[Row]:
    """Mean response time and power of SMDP policies along w2, each policy once; and of the benchmarks along rho."""
    for load in loads:
        queue = scenario.queue(load)
        steps: list[tuple[float, float, float]] = []
        for weight in effort.weights:
            found = queue.solve(weight).evaluation
            if not steps or not math.isclose(found.response_s_mean * 1e3, steps[-1][1], rel_tol=1e-7):
                steps.append((weight, found.response_s_mean * 1e3, found.power_w_mean))
        weights, response_ms, power_w = np.array(steps).T
        case: Case = {**extra, "rho": load, "policy": "smdp"}
        yield Row(figure, case, "mean response time W", "ms", None, curve=Curve.of("w2", weights, response_ms))
        yield Row(figure, case, "mean power P", "W", None, curve=Curve.of("w2", weights, power_w))
    for name in ("greedy", *(f"static {size}" for size in STATIC)):
        stable = [(load, each[name]) for load in loads if name in (each := benchmarks(scenario.queue(load)))]
        at = [load for load, _ in stable]
        case = {**extra, "policy": name}
        response_ms = np.array([each.response_s_mean * 1e3 for _, each in stable])
        yield Row(figure, case, "mean response time W", "ms", None, curve=Curve.of("rho", at, response_ms))
        yield Row(
            figure,
            case,
            "mean power P",
            "W",
            None,
            curve=Curve.of("rho", at, [each.power_w_mean for _, each in stable]),
        )


def pareto(figure: str, scenario: Scenario, effort: Effort) -> Iterator[Row]:
    """Whether a benchmark ever has both a lower latency and a lower power than an SMDP policy."""
    beaten, compared = 0, 0
    for load in effort.loads:
        queue = scenario.queue(load)
        found = list(benchmarks(queue).values())
        for weight in effort.weights:
            smdp = queue.solve(weight).evaluation
            for other in found:
                compared += 1
                beaten += _beats(other, smdp)
    note = f"{compared} pairs compared, {beaten} where it has"
    yield claim(figure, {}, "no benchmark has both less latency and less power", beaten == 0, note)


def _beats(one: Evaluation, other: Evaluation) -> bool:
    """Less latency and less power, by more than rounding."""
    bound = 1.0 - 1e-9
    return one.response_s_mean < other.response_s_mean * bound and one.power_w_mean < other.power_w_mean * bound


def basic_tradeoffs(effort: Effort) -> Iterator[Row]:
    """Fig. 5."""
    figure = "Fig. 5"
    yield from tradeoffs(figure, basic(), effort, effort.loads)
    yield from pareto(figure, basic(), effort)
    queue = basic().queue(0.7)
    greedy = queue.evaluate(queue.greedy())
    better = [
        weight
        for weight in np.linspace(0.0, 1.0, 101).tolist()
        if (found := queue.solve(weight).evaluation).response_s_mean < greedy.response_s_mean
        and found.power_w_mean < greedy.power_w_mean
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
    yield claim(
        figure,
        {"policy": "static 16", "rho": 0.9},
        "responds much later than SMDP policies",
        static > 1.5 * worst,
        note,
    )


def _least_power_below(figure: str, load: float = 0.3, bound_ms: float = 5.0) -> Iterator[Row]:
    """The text's example: W below 5 ms at rho = 0.3, for the least power."""
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
    yield Row(figure, case, "greatest w2 with this W", "ms/W", greatest, 1.3, SMALL, note=note)


def _last(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Where a condition that holds at low and not at high ends, within 1e-6."""
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def constant_times(effort: Effort) -> Iterator[Row]:
    """Fig. 7: a service time that does not depend on the size."""
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
    yield claim(
        figure,
        {"policy": "greedy"},
        "W grows far less than in the basic scenario",
        grown["constant"] < grown["basic"] / 2,
    )
    ours = [benchmarks(constant_time().queue(load))["static 32"].response_s_mean for load in effort.loads]
    theirs = [benchmarks(basic().queue(load))["static 32"].response_s_mean for load in effort.loads]
    falls = all(a > b for a, b in itertools.pairwise(ours))
    yield claim(figure, {"policy": "static 32"}, "W falls as rho rises", falls)
    lower = all(a < b for a, b in zip(ours, theirs, strict=True))
    yield claim(figure, {"policy": "static 32"}, "W is below the basic scenario's", lower)
    close = True
    for load in (0.6, 0.7, 0.8, 0.9):
        found = benchmarks(constant_time().queue(load))
        ratio = found["static 32"].response_s_mean / found["greedy"].response_s_mean
        close = close and abs(ratio - 1) < CLOSE
        yield Row(figure, {"rho": load}, "W of static 32 over W of greedy", "1", ratio)
    yield claim(figure, {"rho": "0.6 and above"}, "W of static 32 is very close to greedy's (within a tenth)", close)


def logarithmic_energies(effort: Effort) -> Iterator[Row]:
    """Fig. 8: an energy that grows with the logarithm of the size."""
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
    """Fig. 9, and how far a single threshold is from the optimum."""
    figure = "Fig. 9"
    greedy: dict[float, list[Evaluation]] = {load: [] for load in (0.3, 0.7)}
    for name in DISTRIBUTIONS:
        scenario = basic(name)
        yield from tradeoffs(figure, scenario, effort, tuple(greedy), service=name)
        for load, found in greedy.items():
            found.append(scenario.queue(load).evaluate(scenario.queue(load).greedy()))
        yield Row(figure, {"service": name}, "squared coefficient of variation", "1", SQUARED_COV[name])
    for load, found in greedy.items():
        slower = all(a.response_s_mean < b.response_s_mean for a, b in itertools.pairwise(found))
        yield claim(figure, {"rho": load, "policy": "greedy"}, "W rises with the variability", slower)
        frugal = all(a.power_w_mean > b.power_w_mean for a, b in itertools.pairwise(found))
        yield claim(figure, {"rho": load, "policy": "greedy"}, "P falls with the variability", frugal)
        yield Row(
            figure,
            {"rho": load, "policy": "greedy"},
            "W, hyperexponential over deterministic",
            "1",
            found[-1].response_s_mean / found[0].response_s_mean,
        )


def thresholds(effort: Effort) -> Iterator[Row]:
    """What one threshold, the best of 1 .. B_max, costs above the optimum: at most, over loads and weights."""
    for name in DISTRIBUTIONS:
        gaps: list[tuple[float, float, float]] = []
        for load in CASE_LOADS if effort.exhaustive else (0.7,):
            queue = basic(name).queue(load)
            found = [queue.evaluate(queue.threshold(least)) for least in range(1, BATCH_MAX + 1)]
            for weight in (0.0, 0.5, 1.0, 2.0, 5.0, 15.0):
                optimum = queue.solve(weight).average_cost
                gaps.append((min(each.cost_ms(weight) for each in found) / optimum - 1, load, weight))
        gap, load, weight = max(gaps)
        note = f"at rho = {load:g}, w2 = {weight:g}, of {len(gaps)} settings"
        yield Row(
            "Thresholds",
            {"service": name},
            "best single threshold above the optimum, at most",
            "%",
            100 * max(gap, 0.0),
            note=note,
        )
