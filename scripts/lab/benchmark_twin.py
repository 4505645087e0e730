#!/usr/bin/env python
"""The twin: what a replay costs, and how soon --tune finds the right order after a change of traffic, simulated.

    python scripts/lab/benchmark_twin.py --output docs/results/twin.json --figure docs/results/twin.png

A simulated engine of 32 slots serves five minutes at load 0.6, then six minutes of answers four times as long at load
0.95; predictions have quantiles with an error of 0.65. The tuner of `llmserve serve --tune mean` runs by the virtual
clock. The settings in force one to six minutes after the change are judged by other requests of the new traffic: their
mean latency over that of the best candidate, of those that keep the p99 within 1.10 of first come first served.
The margin, the window and the other numbers of the tuner were chosen with seed 101.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import numpy as np
from bench.arguments import add_results, numbers, parser_of
from bench.figures import BLUE, ORANGE, new_figure, save
from bench.progress import log
from bench.results import day_and_machine, rounded, write_json
from numpy.typing import NDArray

from llmserve.live.journal import Header, Journal
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import Action, Event
from llmserve.settings.policies import SchedulingConfig, named, order_settings
from llmserve.simulation.cluster import SimulatedCluster
from llmserve.simulation.engine_model import Costs, StepEngine
from llmserve.simulation.predictions import predict
from llmserve.simulation.report import Recorder
from llmserve.simulation.twin.choice import P99_BOUND
from llmserve.simulation.twin.live import STEPS_A_LINE
from llmserve.simulation.twin.replay import ORDERS
from llmserve.simulation.twin.tuner import EVERY_S, STEPS_MAX, Tuner, answer

SLOTS, STEP_S = 32, 0.005
ENGINE = EngineInfo("engine0", SLOTS, False)
TOKENS_MAX = 16_384.0
MU = 4.5
SIGMAS = (0.8, 1.0, 1.5)  # of the logarithms of the lengths
BEFORE_S, AFTER_S, CHECKED_S = 300.0, 360.0, 60.0
LOADS, TIMES_LONGER = (0.6, 0.95), (1.0, 4.0)
JUDGED = 30_000  # requests that judge the settings
QUEUE_REQUESTS_MAX = 10**9
CONFIG = SchedulingConfig(queue_requests_max=QUEUE_REQUESTS_MAX).resolved(barrier=False)


@dataclass(frozen=True)
class Traffic:
    """arrivals_s, tokens : (requests,), and the requests with their forecasts."""

    arrivals_s: NDArray[np.float64]
    tokens: NDArray[np.float64]
    requests: list[Request]


def lengths(rng: np.random.Generator, sigma: float, factor: float, count: int) -> NDArray[np.float64]:
    drawn: NDArray[np.float64] = np.minimum(TOKENS_MAX, factor * rng.lognormal(MU, sigma, count))
    return drawn


def rate_per_s(sigma: float, factor: float, load: float) -> float:
    """Arrivals a second at which the slots are busy to this share."""
    mean = float(lengths(np.random.default_rng(7), sigma, factor, 400_000).mean())
    return load * SLOTS / (mean * STEP_S)


def traffic(seed: int, sigma: float, parts: list[tuple[float, float, int]]) -> Traffic:
    """parts : (load, factor of the lengths, requests) of each part, one after the other."""
    rng = np.random.default_rng(seed)
    gaps = [rng.exponential(1.0 / rate_per_s(sigma, factor, load), count) for load, factor, count in parts]
    tokens = np.concatenate([lengths(rng, sigma, factor, count) for _, factor, count in parts])
    predictions = predict("quantiles:0.65", tokens, rng)
    assert predictions is not None, "quantiles are predictions"
    assert predictions.quantiles is not None, "quantiles are predicted"
    pairs = zip(predictions.medians.tolist(), predictions.quantiles.tolist(), strict=True)
    requests = [Request(number, median, quantiles=tuple(row)) for number, (median, row) in enumerate(pairs)]
    return Traffic(np.cumsum(np.concatenate(gaps)), tokens, requests)


def cluster_of(work: Traffic, config: SchedulingConfig, **options: Any) -> SimulatedCluster:
    costs = Costs.constant(STEP_S, 0.0, SLOTS)
    return SimulatedCluster(Header(config).scheduler(), [StepEngine(ENGINE, work.tokens.tolist(), costs)], **options)


def latencies_s(work: Traffic, settings: dict[str, Any]) -> NDArray[np.float64]:
    """(requests,)"""
    recorder = Recorder(len(work.requests))
    cluster = cluster_of(work, msgspec.structs.replace(CONFIG, **settings), on_step=recorder)
    cluster.run(iter(zip(work.arrivals_s.tolist(), work.requests, strict=True)))
    return np.array(recorder.ended_s) - np.array(recorder.arrived_s)


# ---- a change of traffic ------------------------------------------------------------------------------------------


def judged(seed: int, sigma: float) -> dict[str, tuple[float, float]]:
    """(mean, p99) over first come first served of each candidate, for requests of the new traffic."""
    work = traffic(1_000 + seed, sigma, [(LOADS[1], TIMES_LONGER[1], JUDGED)])
    results = {named(settings): latencies_s(work, settings) for settings in ORDERS}
    first = results["fffs"]
    return {
        name: (float(each.mean() / first.mean()), float(np.percentile(each, 99) / np.percentile(first, 99)))
        for name, each in results.items()
    }


def tuned_run(seed: int, sigma: float) -> list[tuple[float, str]]:
    """(seconds after the change, settings) of the start and of each change of the order."""
    counts = [
        round(seconds * rate_per_s(sigma, factor, load))
        for seconds, load, factor in zip((BEFORE_S, AFTER_S), LOADS, TIMES_LONGER, strict=True)
    ]
    work = traffic(seed, sigma, list(zip(LOADS, TIMES_LONGER, counts, strict=True)))
    change_s = float(work.arrivals_s[counts[0] - 1])
    journal = Journal(Header(CONFIG), steps_max=STEPS_MAX)
    history = [(-change_s, named(order_settings(CONFIG)))]
    next_s = EVERY_S

    def tune(now_s: float, event: Event, actions: list[Action]) -> None:
        nonlocal next_s
        if now_s < next_s:
            return
        next_s = now_s + EVERY_S
        question = tuner.question(now_s)
        tuned = None if question is None else tuner.take(answer(question))
        if tuned is not None:
            history.append((now_s - change_s, named(tuned.settings)))
            cluster.notify(tuned, now_s)

    cluster = cluster_of(work, CONFIG, journal=journal, on_step=tune)
    tuner = Tuner("mean", journal, cluster.scheduler)
    cluster.run(iter(zip(work.arrivals_s.tolist(), work.requests, strict=True)))
    return history


def changed(seed: int, sigma: float) -> dict[str, Any]:
    """The settings in force at regular times after the change, judged."""
    truth, history = judged(seed, sigma), tuned_run(seed, sigma)
    best = min([mean for mean, p99 in truth.values() if p99 <= P99_BOUND])
    checks = []
    for after_s in np.arange(CHECKED_S, AFTER_S + 1, CHECKED_S).tolist():
        name = [settings for at_s, settings in history if at_s <= after_s][-1]
        checks.append({"after_s": after_s, "settings": name, "over_best": truth[name][0] / best, "p99": truth[name][1]})
    default = truth[named(order_settings(CONFIG))]
    log(f"sigma {sigma}, seed {seed}: {checks[2]}")
    return {
        **{"sigma": sigma, "seed": seed, "best": best, "candidates": truth, "history": history, "checks": checks},
        "default_over_best": default[0] / best,
        "default_p99": default[1],
    }


# ---- what it costs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """Processor seconds of an answer about 5,000 requests, and of the event loop for a question of all steps."""

    answer_s: float
    question_s: float
    slice_s: float
    steps: int

    @property
    def event_loop_share(self) -> float:
        return self.question_s / EVERY_S


def cost(seed: int) -> Cost:
    work = traffic(seed, 1.0, [(0.95, 1.0, 5_000)])
    journal = Journal(Header(CONFIG), steps_max=STEPS_MAX)
    cluster = cluster_of(work, CONFIG, journal=journal)
    cluster.run(iter(zip(work.arrivals_s.tolist(), work.requests, strict=True)))
    tuner = Tuner("mean", journal, cluster.scheduler)
    began = time.process_time()
    question = tuner.question(cluster.now_s)
    assert question is not None, "all requests have ended"
    asked_s = time.process_time() - began
    slices_s = []
    for start in range(0, len(question.steps), STEPS_A_LINE):
        began = time.process_time()
        msgspec.json.encode(question.steps[start : start + STEPS_A_LINE])
        slices_s.append(time.process_time() - began)
    began = time.process_time()
    answer(question)
    answer_s = time.process_time() - began
    times = STEPS_MAX / len(question.steps)  # a full journal
    return Cost(answer_s, times * (asked_s + sum(slices_s)), max(slices_s), len(question.steps))


# ---- the command --------------------------------------------------------------------------------------------------


def draw(path: Any, rows: list[dict[str, Any]]) -> None:
    figure, axes = new_figure(1, len(SIGMAS), width=10.0, height=3.6)
    for axis, sigma in zip(np.ravel(axes), SIGMAS, strict=True):
        for row in [row for row in rows if row["sigma"] == sigma]:
            after = [check["after_s"] / 60.0 for check in row["checks"]]
            axis.plot(after, [check["over_best"] for check in row["checks"]], "o-", color=BLUE, ms=4)
            axis.axhline(row["default_over_best"], color=ORANGE, linewidth=0.9)
        axis.axhline(1.05, color="#999999", linewidth=0.8, linestyle=":")
        axis.set(title=f"lognormal, sigma {sigma}", xlabel="minutes after the change", ylabel="mean over the best")
    save(figure, path)


def main(args: argparse.Namespace) -> None:
    costs = [cost(seed) for seed in args.seeds]
    for each in costs:
        log(f"{each}, {each.event_loop_share:.4%} of the event loop")
    rows = [changed(seed, sigma) for sigma in SIGMAS for seed in args.seeds]
    result = {
        **day_and_machine(),
        "seeds": args.seeds,
        "costs": [{**asdict(each), "event_loop_share": each.event_loop_share} for each in costs],
        "changes": rows,
    }
    write_json(args.output, rounded(result))
    if args.figure is not None:
        draw(args.figure, rows)


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=numbers, default=(1, 2, 3), metavar="N,N,...", help="of the traffic")
    add_results(parser, "--figure")
    main(parser.parse_args())
