"""What waiting costs and saves: releases compared in simulation, with the real scheduler.

One engine of a published profile (Llama-3.1-8B on an H100, idle power counted), batches of up to 32, lengths known.

    load       barrier engine, Poisson arrivals at shares of its throughput without padding
    refill     the same on an engine whose slots refill
    trace      barrier engine, recorded arrivals and lengths (--conversation, --code), whose bursts no table expects
    saturated  all requests at once: throughput of table over full
    cost       SMDP-J's basic scenario: no release may cost less than the SMDP's policy

    python scripts/lab dispatch --conversation azure_conv.csv.gz --code azure_code.csv.gz \\
        --output docs/results

The files are CSV with columns arrival_s, input_tokens, output_tokens. `load`, `refill` and `saturated` draw their
lengths from the conversation trace. Energy per token is all energy of the engine, also while idle, over output tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy is imported: each core has a run of its own

import msgspec
import numpy as np
from kit import tables as bench_tables
from kit.arguments import parser_of
from kit.figures import BLUE, GREEN, GREY, ORANGE, new_figure, save
from kit.progress import counted
from kit.results import write_json
from kit.rows import Row, medians, select, values
from papers.batchmonitor.printed_rate import PrintedScheduling

from bins import profile
from bins.service import ServiceTimes
from bins.smdp import Queue
from bins.smdp_model import MS_PER_S
from llmserve.commands.simulate import Scenario, simulate
from llmserve.settings.dispatch import DispatchConfig
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.workload import read_lengths

ENGINE, BASIC = "h100-llama-3.1-8b", "p4-googlenet"
BATCH = 32
LOADS = (0.1, 0.3, 0.6)
REFILL_LOADS = (0.02, 0.1, 0.3)
BASIC_LOADS = (0.1, 0.3, 0.5, 0.7, 0.9)
BASIC_WEIGHTS = (0.0, 0.5, 1.0, 2.0, 5.0, 15.0)
SEEDS = (1, 2, 3)
REQUESTS = {"load": 8_000, "refill": 8_000, "trace": 6_000, "saturated": 4_000, "cost": 40_000}


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One simulation. part, case, rule : its place in the tables"""

    part: str
    case: str
    rule: str
    scenario: Scenario
    scheduling: SchedulingConfig
    dispatch: DispatchConfig = DispatchConfig()


QUANTITIES = (  # in part cost a token is an image
    *("latency_s_mean", "latency_s_p50", "latency_s_p95", "waiting_s_p99", "power_w_mean", "energy_j_per_token"),
    *("output_tokens_per_s", "batch_size_mean", "utilisation"),
)


def measure(run: Run) -> Row:
    summary = simulate(run.scenario, run.scheduling, dispatch=run.dispatch)
    case = {"part": run.part, "case": run.case, "rule": run.rule, "seed": run.scenario.seed}
    return Row(case, {name: getattr(summary, name) for name in QUANTITIES})


def settings(release: str, bins: int = 1, **more: Any) -> SchedulingConfig:
    return SchedulingConfig(bins=bins, batch_size=BATCH, release=release, queue_requests_max=10**9, **more)


def rate_as_printed() -> SchedulingConfig:
    return PrintedScheduling(bins=1, batch_size=BATCH, queue_requests_max=10**9)


# ---- the runs ---------------------------------------------------------------------------------------------------


Rule = tuple[str, SchedulingConfig, DispatchConfig]
"""Its name in the tables, the release of batches, and the objective of a table of sizes."""


def ruled(name: str, release: str, bins: int = 1, **more: Any) -> Rule:
    return name, settings(release, bins, **more), DispatchConfig()


def tabled(name: str, dispatch: DispatchConfig) -> Rule:
    return name, settings("table", 8), dispatch


def baselines(bins: Iterable[int]) -> Iterator[Rule]:
    for count in bins:
        yield ruled(f"greedy, {count} bins" if count > 1 else "greedy, 1 bin", "greedy", count)
    yield ruled("timeout 15 s, 1 bin", "timeout", 1, batch_wait_s=15.0)
    yield ruled("timeout 15 s, 4 bins", "timeout", 4, batch_wait_s=15.0)
    yield ruled("full, 8 bins", "full", 8)
    yield "rate as printed, 1 bin", rate_as_printed(), DispatchConfig()
    yield ruled("rate with head-room, 1 bin", "rate-headroom", 1, batch_wait_s=15.0)


def tables() -> Iterator[Rule]:
    for weight in (0.0, 5.0, 20.0):
        yield tabled(f"table, {weight:g} ms/W", DispatchConfig(energy_weight=weight))


def runs_of(part: str, case: str, rules: Iterable[Rule], **scenario: Any) -> Iterator[Run]:
    """scenario : fields of the Scenario other than the part's number of requests and the profile"""
    common = Scenario(**{"requests": REQUESTS[part], "profile": ENGINE, **scenario})
    for rule, scheduling, dispatch in rules:
        yield Run(part=part, case=case, rule=rule, scenario=common, scheduling=scheduling, dispatch=dispatch)


def load_runs(args: argparse.Namespace, targets_s: dict[str, float]) -> Iterator[Run]:
    """targets_s : latency target of `table` by case; empty: the runs from which the targets are computed"""
    capacity, lengths = capacity_per_s(args.conversation), lengths_of(args)
    for load, seed in itertools.product(LOADS, SEEDS):
        case, rate = f"load {load:g}", load * capacity
        rules = list(baselines((1, 2, 4, 8)))
        if targets_s:
            target = DispatchConfig(latency_target_s=round(targets_s[case], 2), latency_target_percentile=95.0)
            rules = [*tables(), tabled("table, p95 within 1.4 of greedy's", target)]
        yield from runs_of("load", case, rules, arrival_rate=rate, lengths=lengths, barrier=True, seed=seed)


def refill_runs(args: argparse.Namespace) -> Iterator[Run]:
    capacity, lengths = capacity_per_s(args.conversation), lengths_of(args)
    all_rules = [
        ruled("greedy", "greedy"),
        ruled("timeout 5 s", "timeout", batch_wait_s=5.0),
        ruled("full", "full"),
        *tables(),
        tabled("table, mean within 3 s", DispatchConfig(latency_target_s=3.0)),
    ]
    rules = [(name, msgspec.structs.replace(config, order="fffs"), dispatch) for name, config, dispatch in all_rules]
    for load, seed in itertools.product(REFILL_LOADS, SEEDS):
        rate = load * capacity
        yield from runs_of(
            "refill", f"load {load:g}", rules, arrival_rate=rate, lengths=lengths, slots=BATCH, seed=seed
        )


def trace_runs(args: argparse.Namespace) -> Iterator[Run]:
    target = tabled("table, mean within 8 s", DispatchConfig(latency_target_s=8.0))
    for case, path in (("conversation", args.conversation), ("code", args.code)):
        rules = [*baselines((1, 2, 8)), *tables(), target]
        yield from runs_of("trace", case, rules, trace=str(path), barrier=True, seed=SEEDS[0])


def saturated_runs(args: argparse.Namespace) -> Iterator[Run]:
    table = tabled("table, 20 ms/W", DispatchConfig(energy_weight=20.0))
    rules = [ruled("full, 8 bins", "full", 8), ruled("greedy, 8 bins", "greedy", 8), table]
    for seed in SEEDS:
        at_once = {"arrival_rate": np.inf, "lengths": lengths_of(args), "barrier": True, "seed": seed}
        yield from runs_of("saturated", "all at once", rules, **at_once)


def cost_runs() -> Iterator[Run]:
    """Requests have one token, so that a batch takes the profile's time for its size."""
    rules = [
        ruled("greedy", "greedy"),
        *(ruled(f"static {size}", f"static:{size}") for size in (8, 16, 32)),
        ruled("timeout 5 ms", "timeout", batch_wait_s=0.005),
        ruled("timeout 20 ms", "timeout", batch_wait_s=0.02),
        ("rate as printed", rate_as_printed(), DispatchConfig()),
        ruled("rate with head-room", "rate-headroom", batch_wait_s=0.02),
    ]
    image = {"lengths": "constant:1", "profile": BASIC, "barrier": True, "seed": SEEDS[0]}
    for load in BASIC_LOADS:
        yield from runs_of("cost", f"load {load:g}", rules, load=load, **image)


def lengths_of(args: argparse.Namespace) -> str:
    return f"file:{args.conversation}:output_tokens"


def capacity_per_s(lengths: Path) -> float:
    """Requests per second of full batches if no answer had to wait for the longest one of its batch."""
    tokens = float(read_lengths(f"{lengths}:output_tokens").mean())
    return BATCH / (tokens * float(profile.resolve(ENGINE).step_s.at([BATCH])[0]))


# ---- running ----------------------------------------------------------------------------------------------------


def measure_all(runs: Iterable[Run], jobs: int) -> list[Row]:
    """Medians over seeds, in the order of the runs."""
    all_runs = list(runs)
    rows = []
    with ProcessPoolExecutor(jobs) as pool, counted(len(all_runs)) as done:
        for row in pool.map(measure, all_runs):
            rows.append(row)
            done(f"{row['part']}, {row['case']}, {row['rule']}")
    return medians(rows, "seed")


def with_rule(rows: Iterable[Row], kind: str, **case: str) -> list[Row]:
    """The rows of a case whose rule begins with `kind`."""
    return [row for row in select(rows, **case) if row["rule"].startswith(kind)]


def best_greedy(rows: Iterable[Row], case: str) -> Row:
    """The row of the greedy rule with the least mean latency."""
    return min(with_rule(rows, "greedy", part="load", case=case), key=lambda row: float(row["latency_s_mean"]))


def goals(rows: list[Row]) -> list[str]:
    """Sentences on what `table` saves beside the greedy rule with the least mean latency."""
    sentences = []
    for case in dict.fromkeys(values(select(rows, part="load"), "case")):
        greedy = best_greedy(rows, case)
        for row in with_rule(rows, "table", part="load", case=case):
            energy, mean, p95 = [
                row[name] / greedy[name] for name in ("energy_j_per_token", "latency_s_mean", "latency_s_p95")
            ]
            sentences.append(
                f"{case}: {row['rule']}: {1 - energy:.1%} less energy per token than {greedy['rule']}, "
                f"mean latency {mean:.2f}, 95th percentile {p95:.2f} of its"
            )
    at_once = {row["rule"]: row["output_tokens_per_s"] for row in select(rows, part="saturated")}
    full = at_once.pop("full, 8 bins")
    return sentences + [
        f"all at once: {rule}: throughput {rate / full:.3f} of full's" for rule, rate in at_once.items()
    ]


def costs(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Average costs (ms) in the basic scenario: simulated for each rule, and exact for the SMDP's policy."""
    basic, sizes = profile.resolve(BASIC), np.arange(1, BATCH + 1)
    service = ServiceTimes.deterministic(basic.step_s.at(sizes))
    records = []
    for load in BASIC_LOADS:
        queue = Queue(load * BATCH / float(service.mean_s[-1]), service, basic.step_j.at(sizes))
        for weight in BASIC_WEIGHTS:
            optimum = queue.solve(weight).average_cost
            for row in select(rows, part="cost", case=f"load {load:g}"):
                cost = MS_PER_S * row["latency_s_mean"] + weight * row["power_w_mean"]
                case = {"load": load, "energy_weight": weight, "rule": row["rule"]}
                records.append({**case, "cost_ms": cost, "smdp_cost_ms": optimum})
    return records


# ---- tables and the figure --------------------------------------------------------------------------------------

COLUMNS = {
    "case": ("case", ""),
    "rule": ("rule", ""),
    "mean (s)": ("latency_s_mean", ".2f"),
    "p50": ("latency_s_p50", ".2f"),
    "p95": ("latency_s_p95", ".2f"),
    "J/token": ("energy_j_per_token", ".3f"),
    "batch": ("batch_size_mean", ".1f"),
    "busy": ("utilisation", ".2f"),
    "tokens/s": ("output_tokens_per_s", ".0f"),
}


def show(rows: list[Row], cost_rows: list[dict[str, Any]], markdown: bool) -> None:
    for part in dict.fromkeys(part for part in values(rows, "part") if part != "cost"):
        cells = bench_tables.cells(select(rows, part=part), COLUMNS)
        if markdown:
            print(f"\n{part}\n\n{bench_tables.markdown(list(COLUMNS), cells)}")
        else:
            bench_tables.show(part, list(COLUMNS), cells, left=("rule",))
    print("\n" + "\n".join(goals(rows)))
    if cost_rows:
        least = min(cost_rows, key=lambda row: row["cost_ms"] / row["smdp_cost_ms"])
        ratio = least["cost_ms"] / least["smdp_cost_ms"]
        print(f"\ncost: the least of {len(cost_rows)} simulated costs is {ratio:.4f} of the SMDP's: {least['rule']}")


PLOTTED = ("latency_s_p95", "energy_j_per_token")


def plot(rows: list[Row], path: Path) -> None:
    """Energy against the 95th percentile of latency, with one panel for each load."""
    cases = [f"load {load:g}" for load in LOADS]
    figure, (axes,) = new_figure(1, len(cases), width=4 * len(cases), height=4)
    kinds = {
        "greedy": ("o", BLUE),
        "timeout": ("^", GREEN),
        "full": ("v", GREY),
        "table": ("s", ORANGE),
    }
    for axis, case in zip(axes, cases, strict=True):
        for kind, (marker, colour) in kinds.items():
            points = [values(with_rule(rows, kind, part="load", case=case), name) for name in PLOTTED]
            axis.plot(*points, marker, color=colour, label=kind)
        axis.set_xscale("log")
        axis.set_xticks([5, 10, 20, 50, 100, 200, 500], labels=["5", "10", "20", "50", "100", "200", "500"])
        axis.minorticks_off()
        axis.set_xlim(5, 600)
        axis.set_title(case)
        axis.set_xlabel("95th percentile of latency (s)")
        axis.set_ylim(bottom=0)
    axes[0].set_ylabel("energy per output token (J)")
    axes[0].legend()
    save(figure, path, dpi=110)


def main() -> None:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of the processes that solve
    parser = parser_of(__doc__)
    parser.add_argument("--conversation", type=Path, metavar="FILE", help="trace of a chat service")
    parser.add_argument("--code", type=Path, metavar="FILE", help="trace of a code service, bursty")
    parser.add_argument("--results", type=Path, metavar="FILE", help="show and draw an earlier --output; nothing runs")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="processes")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write dispatch.json and dispatch.png here")
    args = parser.parse_args()
    if args.results:
        records = json.loads(args.results.read_text(encoding="utf-8"))
        rows, cost_rows = (
            [Row.of_record(record, ("part", "case", "rule")) for record in records["rows"]],
            records["costs"],
        )
    else:
        rows = measured(parser, args)
        cost_rows = costs(rows)
    show(rows, cost_rows, args.markdown)
    if args.output and not args.results:
        setting = {"seeds": SEEDS, "requests": REQUESTS, "engine": ENGINE}
        result = {**setting, "rows": [row.record for row in rows], "goals": goals(rows), "costs": cost_rows}
        write_json(args.output / "dispatch.json", result)
    if args.output:
        plot(rows, args.output / "dispatch.png")


def measured(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[Row]:
    """All rows; the latency targets of `table` follow from what greedy took."""
    for path in (args.conversation, args.code):
        if path is None or not path.is_file():
            parser.error(f"there is no file {path}" if path else "--conversation and --code are needed")
    rows = measure_all(load_runs(args, {}), args.jobs)
    targets_s = {case: 1.4 * best_greedy(rows, case)["latency_s_p95"] for case in dict.fromkeys(values(rows, "case"))}
    later = [*load_runs(args, targets_s), *refill_runs(args), *trace_runs(args), *saturated_runs(args), *cost_runs()]
    return sorted(rows + measure_all(later, args.jobs), key=lambda row: (row["part"], row["case"]))
