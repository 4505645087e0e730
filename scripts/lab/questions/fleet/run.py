"""A fleet of 10,000 GPUs in 850 groups behind 100 gateways, over a day with bursts, while nodes and racks die.

    python scripts/lab fleet --output docs/results/fleet.json --plot docs/results/fleet.png

The real scheduler runs in each group; engines are simulated (4 slots, 20 ms a token, 0.2 s before the first). 85 pools
of 4 models have 10 groups each. The day's curve passes in 240 s: rates, restarts and exchanges keep their real speed,
only the curve is faster. At its peak the load is 85 % of the capacity of all GPUs; a third of the models has a burst,
20 s of three times its rate, the excess from a single key. 20 nodes of 8 GPUs and 2 racks of 8 nodes die for 60 s, and
the scheduler of a lost group is back after 10 s. Answers have 400 tokens on average; the deadline is 60 s.

    day       the fleet as described
    calm      a tenth of the fleet, and nothing dies
    alone     85 groups as large, each alone in its pool, with its own gateway, with the same traffic for each GPU
    full      a tenth of the fleet for a minute at 130 % of the capacity, without bursts or deaths; "full, alone" beside
    step      what a step of one group's scheduler costs while 1, 85 or 850 groups are there; beside it, a step of one
              scheduler that holds 1, 85 or 850 groups itself
"""

from __future__ import annotations

import math
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from kit.arguments import add_results, parser_of
from kit.figures import BLUE, GREEN, GREY, ORANGE, new_figure, save
from kit.progress import log, shared
from kit.results import day_and_machine, read_parts, rounded, write_json
from kit.tables import markdown

from llmserve.request import EngineInfo
from llmserve.scheduling.messages import EngineReady, RequestArrived, RequestEnded, StartBatch
from llmserve.settings.policies import SchedulingConfig
from questions.fleet.group import EngineSpeed, GroupProcess
from questions.fleet.layout import Deaths, drawn_deaths, places
from questions.fleet.rounds import Fleet, Results, Settings, outcomes
from questions.fleet.traffic import Traffic, drawn_bursts

GPUS, GROUPS, POOLS, DOORS = 10_000, 850, 85, 100
SPEED, MODEL_SHARES = EngineSpeed(), (0.4, 0.3, 0.2, 0.1)
TOKENS_MEAN, SLO_S, PEAK_LOAD, BURSTS_EACH = 400.0, 60.0, 0.85, 0.33
NODES, RACKS, DOWN_S, RESTART_S = 20, 2, 60.0, 10.0
FULL_S, FULL_LOAD, FULL_FROM_S = 60.0, 1.3, 20.0  # full answers are counted from here: the first have ended by then
STEP_SIZES, STEP_ROUNDS, STEP_REPEATS, WARM_S = (1, 85, 850), 60, 5, 3
BIN_S = 5.0


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--span-s", type=float, default=240.0, help="simulated seconds of the day")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the GPUs, groups, pools and gateways")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps-only", action="store_true", help="measure `step` only: the runs in --output stay")
    add_results(parser, "--plot")
    args = parser.parse_args()
    sizes = [max(1, round(size * args.scale)) for size in STEP_SIZES]
    if args.steps_only:
        steps = step_costs(sizes)
        print(step_table(steps))
        if args.output:
            write_json(args.output, {**read_parts(args.output), **rounded({**day_and_machine(), "steps": steps})})
        return
    day = fleet_of(args.span_s, args.scale, args.seed, args.processes)
    runs = {
        "day": day,
        "calm": replace(fleet_of(args.span_s, 0.1 * args.scale, args.seed, 1), deaths=Deaths()),
        "alone": alone_of(args.span_s, args.seed),
        "full": full(fleet_of(FULL_S, 0.1 * args.scale, args.seed, 1)),
        "full, alone": full(alone_of(FULL_S, args.seed)),
    }
    results, summaries = {}, {}
    for name, settings in runs.items():
        began_s = time.perf_counter()
        results[name] = run(name, settings)
        summaries[name] = summary(settings, results[name]) | {"wall_s": round(time.perf_counter() - began_s, 1)}
        log(f"{name}: {summaries[name]}")
    steps = step_costs(sizes)
    print("\n\n".join((table(summaries), step_table(steps))))
    if args.output:
        write_json(args.output, rounded({**day_and_machine(), "runs": summaries, "steps": steps}))
    if args.plot:
        draw(runs, results, args.plot)


# ---- the fleets -----------------------------------------------------------------------------------------------------


def fleet_of(span_s: float, scale: float, seed: int, processes: int) -> Settings:
    gpus, groups, pools, gateways = (max(1, round(number * scale)) for number in (GPUS, GROUPS, POOLS, DOORS))
    rng = np.random.default_rng(seed)
    nodes, racks = round(NODES * scale), round(RACKS * scale)
    deaths = drawn_deaths(gpus, span_s, nodes=nodes, racks=racks, down_s=DOWN_S, restart_s=RESTART_S, rng=rng)
    return _settings(gpus, groups, pools, gateways, span_s, seed, deaths, processes)


def alone_of(span_s: float, seed: int) -> Settings:
    """Groups of the fleet's size, each with a pool of its own."""
    return replace(
        _settings(GPUS // 10, GROUPS // 10, GROUPS // 10, GROUPS // 10, span_s, seed + 1, Deaths(), 1), exchange=False
    )


def full(settings: Settings) -> Settings:
    """More than the engines can serve, all the time. Nothing dies and nothing bursts."""
    traffic = replace(settings.traffic, curve=lambda part: FULL_LOAD / PEAK_LOAD, bursts=(), slo_s=math.inf)
    return replace(settings, traffic=traffic, deaths=Deaths())


def _settings(
    gpus: int, groups: int, pools: int, gateways: int, span_s: float, seed: int, deaths: Deaths, processes: int
) -> Settings:
    where = tuple(places(gpus, groups, pools))
    of_pools = np.bincount([place.pool for place in where], [len(place.engines) for place in where])
    peak_per_s = tuple((PEAK_LOAD * SPEED.requests_per_s(TOKENS_MEAN) * of_pools).tolist())
    bursts = drawn_bursts(pools, len(MODEL_SHARES), span_s, BURSTS_EACH, np.random.default_rng(seed + 1_000))
    traffic = Traffic(peak_per_s, MODEL_SHARES, span_s, gateways, TOKENS_MEAN, SLO_S, bursts, seed=seed)
    return Settings(where, deaths, traffic, SPEED, len(MODEL_SHARES), processes=processes)


def run(name: str, settings: Settings) -> Results:
    with shared() as part:
        every = max(1, int(settings.traffic.span_s) // 20)

        def progress(at_s: float) -> None:
            if at_s % every == 0 and at_s <= settings.traffic.span_s:
                part(f"{name}: {at_s:.0f} s of {settings.traffic.span_s:.0f} s", at_s / settings.traffic.span_s)

        return Fleet(settings).run(progress)


# ---- the figures ----------------------------------------------------------------------------------------------------


def summary(settings: Settings, results: Results) -> dict[str, Any]:
    gpus = sum(len(place.engines) for place in settings.places)
    span_s = settings.traffic.span_s
    down_s = sum(b - a for place in settings.places for gpu in place.engines for a, b in settings.deaths.of_engine(gpu))
    ended, arrived = np.array(results.ended_s), np.array(results.arrived_s)
    done = np.array(results.outcomes) == "completed"
    in_time = done & (ended - arrived <= settings.traffic.slo_s)
    served, offered = np.array(results.tokens), np.array(results.offered_tokens)
    counted = in_time & (ended >= FULL_FROM_S) & (ended < span_s)
    burst = np.array(results.bursts)
    latency_s, waited_s = (ended - arrived)[done], np.array(results.waited_s)[done]
    rounds, groups = results.rounds, len(settings.places)
    step_us = results.step_ns / 1e3
    behind = np.array(results.behind or [0.0])
    return {
        "gpus": gpus,
        "groups": groups,
        "gateways": settings.traffic.gateways,
        "requests": results.sent,
        **{f"{name}_requests": count for name, count in outcomes(results).items()},
        "moved_requests": int(np.count_nonzero(np.array(results.groups) > 1)),
        "gpu_s_down": round(down_s, 1),
        "tokens_per_gpu_s": float(served[counted].sum() / (gpus * (span_s - FULL_FROM_S) - down_s)),
        "requests_in_time": float(in_time.mean()),
        "tokens_in_time": float(served[in_time].sum() / offered.sum()),
        "latency_s_p50": float(np.percentile(latency_s, 50)),
        "latency_s_p99": float(np.percentile(latency_s, 99)),
        "waited_s_p99": float(np.nanpercentile(waited_s, 99)),
        "waited_s_p99_of_others": float(np.nanpercentile(waited_s[~burst[done]], 99)),
        "behind_tokens_p50": float(np.percentile(behind, 50)),
        "behind_tokens_p99": float(np.percentile(behind, 99)),
        "behind_tokens_max": float(behind.max()),
        "steps_per_group_s": results.step_ns.size / rounds / groups,
        "step_us_p50": float(np.percentile(step_us, 50)),
        "group_ms_per_s": float(results.step_ns.size / rounds / groups * np.percentile(step_us, 50) / 1e3),
        "routed_per_gateway_s": results.routed / rounds / settings.traffic.gateways,
        "route_us": results.gateway_s / results.routed * 1e6,
        "controller_rows_per_s": results.controller_rows / rounds,
        "controller_ms_per_s": results.controller_s / rounds * 1e3,
    }


def table(summaries: dict[str, dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for of in summaries.values() for name in of))
    lines = [[name.replace("_", " "), *(_shown(of.get(name, 0)) for of in summaries.values())] for name in names]
    return markdown(["", *summaries], lines)


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


# ---- what a step costs ----------------------------------------------------------------------------------------------


def step_costs(sizes: Sequence[int]) -> list[dict[str, float]]:
    """Medians over repeats in turns. Of each size: a step of a group beside others; a step of a scheduler of all."""
    measured: dict[int, list[tuple[float, float]]] = {size: [] for size in sizes}
    beside = {size: _groups_beside(size) for size in sizes}
    for _ in range(STEP_REPEATS):
        for size in sizes:
            measured[size].append((beside[size](), _step_us_of_one_scheduler(size)))
    return [
        {
            "groups": size,
            "step_us_beside": statistics.median(own for own, _ in of),
            "step_us_of_one_scheduler": statistics.median(one for _, one in of),
        }
        for size, of in measured.items()
    ]


def _groups_beside(size: int) -> Callable[[], float]:
    """Make so many groups, all with running requests. The result runs the first for a while: its median step, us."""
    settings = _settings(12 * size, size, size, 1, 1e6, 0, Deaths(), 1)
    settings = replace(settings, traffic=replace(settings.traffic, curve=lambda part: 0.9, bursts=()))
    step_ns: array[int] = array("q")
    models = tuple(f"m{k}" for k in range(settings.models))
    scheduling, scores = SchedulingConfig().resolved(barrier=False), settings.traffic.forecasts(500)
    groups = [GroupProcess(place, Deaths(), scheduling, SPEED, models, scores, step_ns) for place in settings.places]
    sent = [item for second in range(WARM_S) for item in settings.traffic.second(second, second * 1_000_000)]
    for group in groups:
        group.round(float(WARM_S), [item for item in sent if item.pool == group.place.pool], {})
    alone = replace(settings.traffic, peak_per_s=settings.traffic.peak_per_s[:1])
    clock = iter(range(WARM_S, 1_000_000, STEP_ROUNDS))

    def measure() -> float:
        begin = next(clock)
        rounds = [alone.second(second, second * 1_000_000) for second in range(begin, begin + STEP_ROUNDS)]
        before = len(step_ns)
        for number, arrivals in enumerate(rounds):
            groups[0].round(begin + number + 1.0, arrivals, {})
        return statistics.median(step_ns[before:]) / 1e3

    return measure


def _step_us_of_one_scheduler(size: int) -> float:
    """The median step of one scheduler with the engines of so many groups, 12 for each model, a request at a time."""
    scheduler = SchedulingConfig().resolved(barrier=False).scheduler()
    for number in range(12 * size):
        info = EngineInfo(f"e{number}", SPEED.slots, False, models=(f"m{number // 12}",))
        scheduler.handle(EngineReady(info), 0.0)
    traffic = Traffic((1_000.0,), (1.0,), 10.0, 1, TOKENS_MEAN, SLO_S)
    steps_us = []
    for item in traffic.second(5, 0):
        request = msgspec.structs.replace(item.request, model=f"m{item.request.id % size}", deadline_s=None)
        began_ns = time.perf_counter_ns()
        actions = scheduler.handle(RequestArrived(request), item.at_s)
        steps_us.append((time.perf_counter_ns() - began_ns) / 1e3)
        for action in actions:
            if isinstance(action, StartBatch):
                began_ns = time.perf_counter_ns()
                scheduler.handle(RequestEnded(action.engine, request.id, "completed", item.tokens), item.at_s)
                steps_us.append((time.perf_counter_ns() - began_ns) / 1e3)
    return statistics.median(steps_us)


def step_table(steps: Sequence[dict[str, float]]) -> str:
    head = ["groups", "step of one group's scheduler (us)", "step of one scheduler of all groups (us)"]
    lines = [
        [f"{of['groups']:,}", f"{of['step_us_beside']:.1f}", f"{of['step_us_of_one_scheduler']:.1f}"] for of in steps
    ]
    return markdown(head, lines)


# ---- the picture ----------------------------------------------------------------------------------------------------


def draw(runs: dict[str, Settings], results: dict[str, Results], path: Path) -> None:
    """Goodput, p99 of the latency, and what is down, over the day."""
    figure, axes = new_figure(3, 1, width=9, height=8, sharex=True, height_ratios=(3, 3, 2))
    goodput, latency, down = axes[:, 0]
    day = runs["day"]
    bins_s = np.arange(0.0, day.traffic.span_s + BIN_S, BIN_S)
    for name, colour in (("alone", GREY), ("calm", GREEN), ("day", ORANGE)):
        of, gpus = results[name], sum(len(place.engines) for place in runs[name].places)
        done = np.array(of.outcomes) == "completed"
        ended, arrived = np.array(of.ended_s)[done], np.array(of.arrived_s)[done]
        tokens, burst = np.array(of.tokens)[done], np.array(of.bursts)[done]
        rate = np.histogram(ended, bins_s, weights=tokens)[0] / BIN_S / gpus
        goodput.plot(bins_s[:-1], rate, color=colour, label=name, linewidth=1.2)
        if name != "alone":
            p99 = [_p99((ended - arrived)[~burst & (arrived >= at) & (arrived < at + BIN_S)]) for at in bins_s[:-1]]
            latency.plot(bins_s[:-1], p99, color=colour, label=f"{name}, but bursts", linewidth=1.2)
    at_s = np.arange(0.0, day.traffic.span_s, 1.0)
    spans = [span for place in day.places for gpu in place.engines for span in day.deaths.of_engine(gpu)]
    down.step(at_s, [sum(a <= t < b for a, b in spans) for t in at_s], color=ORANGE, label="GPUs down")
    restarting = [span for place in day.places for span in day.deaths.of_group(place)]
    down.step(at_s, [sum(a <= t < b for a, b in restarting) for t in at_s], color=BLUE, label="groups down")
    goodput.set(ylabel="tokens/s of a GPU", title=_title(day), ylim=(0, None))
    latency.set(ylabel="p99 of the latency (s)", ylim=(0, None))
    down.set(ylabel="down", xlabel="second of the simulated day")
    for axis in (goodput, latency, down):
        axis.legend(loc="upper left")
    save(figure, path, dpi=110)


def _p99(values: Any) -> float:
    return float(np.percentile(values, 99)) if values.size else float("nan")


def _title(day: Settings) -> str:
    gpus = sum(len(place.engines) for place in day.places)
    return f"{gpus:,} GPUs in {len(day.places)} groups behind {day.traffic.gateways} gateways"
