"""Simulated loads: shares of deadlines met at each load, with the scheduler alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kit.figures import new_figure
from kit.rows import Row, group, select, values
from kit.tables import markdown

from llmserve.commands.simulate import Case, run_cases
from llmserve.simulation.estimates import Repeated
from llmserve.simulation.progress import RunsProgress

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PREDICTIONS = "quantiles:0.5"  # with a lognormal error of sigma 0.5, which the scheduler knows
SLOS_S = (8.0, 30.0)
SIMULATED: dict[str, dict[str, Any]] = {
    "fffs": {"order": "fffs"},
    "shortest": {"order": "shortest"},
    "edf": {"order": "edf"},
    "flex, 1 bin": {"order": "flex", "bins": 1},
    "flex": {"order": "flex"},
}
STREAMED: dict[str, dict[str, Any]] = {  # shares of clients that stream; under all other policies no client streams
    "flex, half stream": {"order": "flex", "streaming": 0.5},
    "flex, all stream": {"order": "flex", "streaming": 1.0},
}
KINDS: dict[str, dict[str, Any]] = {  # of engines
    "batches to their end": {"barrier": True, "batch_size": 8},
    "slots that refill": {"slots": 32},
}
# Shares of what the engines can serve with full batches of one bin, or with full slots.
LOADS = {"batches to their end": (0.5, 0.8, 1.5, 2.5), "slots that refill": (0.5, 0.8, 1.5, 2.5)}
PROFILE = "h100-llama-3.1-8b"
LOAD_COLOURS = {
    "fffs": "#7F7F7F",
    "shortest": "#E69F00",
    "edf": "#CC79A7",
    "flex, 1 bin": "#56B4E9",
    "flex": "#0072B2",
    "flex, half stream": "#009E73",
    "flex, all stream": "#D55E00",
}


CASE = ("workload", "kind", "policy", "load")


def simulated(workloads: Mapping[str, Mapping[str, Any]], requests: int, seeds: int, jobs: int) -> list[Row]:
    """workloads : name -> fields of a Scenario"""
    keys, cases = [], []
    for name, fields in workloads.items():
        for kind, engine in KINDS.items():
            # Slots that refill are never preempted, so that streaming changes nothing there.
            orders = {**SIMULATED, **STREAMED} if engine.get("barrier") else SIMULATED
            for policy, order in orders.items():
                for load in LOADS[kind]:
                    common = {"engines": 2, "requests": requests, "predictions": PREDICTIONS, "slo_s": SLOS_S}
                    keys.append(dict(zip(CASE, (name, kind, policy, load), strict=True)))
                    cases.append(Case.of({**common, **fields, **engine, **order, "load": load}, {}))
    with RunsProgress(len(cases) * seeds) as progress:
        repeated = run_cases(cases, seeds, jobs, progress)
    return [row_of(key, runs) for key, runs in zip(keys, repeated, strict=True)]


def row_of(case: Mapping[str, Any], runs: Repeated) -> Row:
    """Means over seeds. half_width : of the 95 % confidence interval of in_time"""
    in_time = runs.estimates["in_time_share"]
    numbers = {"in_time": in_time.mean, "half_width": in_time.half_width}
    return Row(case, numbers | {name: runs.estimates[name].mean for name in ("goodput_per_s", "preempted")})


def load_tables(rows: Sequence[Row]) -> list[str]:
    """A table for each kind of engine: shares in time by workload, policy and load."""
    tables = []
    for (kind,), of_kind in group(rows, "kind").items():
        by_order = group(sorted(of_kind, key=lambda row: float(row["load"])), "workload", "policy")
        loads = values(next(iter(by_order.values())), "load")
        head = ["answers", "order", *[f"load {load:g}" for load in loads], f"in time/s at {loads[-1]:g}"]
        lines = []
        for key, same in by_order.items():
            shares = [f"{100 * row['in_time']:.1f} ± {100 * row['half_width']:.1f}" for row in same]
            lines.append([*key, *shares, f"{same[-1]['goodput_per_s']:.2f}"])
        tables.append(markdown(head, lines, title=f"Deadlines met (%), {kind}", right=True))
    return tables


def load_figure(rows: Sequence[Row]) -> Figure:
    kinds, workloads = [list(dict.fromkeys(values(rows, name))) for name in ("kind", "workload")]
    wide, high = 1.0 + 3.9 * len(workloads), 0.8 + 3.0 * len(kinds)
    figure, axes = new_figure(len(kinds), len(workloads), width=wide, height=high, sharex="row", sharey=True)
    for panels, kind in zip(axes, kinds, strict=True):
        for axis, workload in zip(panels, workloads, strict=True):
            for policy in dict.fromkeys(values(select(rows, kind=kind), "policy")):
                own = select(rows, workload=workload, kind=kind, policy=policy)
                own.sort(key=lambda row: float(row["load"]))
                axis.errorbar(
                    values(own, "load"),
                    [100 * share for share in values(own, "in_time")],
                    [100 * width for width in values(own, "half_width")],
                    color=LOAD_COLOURS[policy],
                    marker="o",
                    markersize=4,
                    linewidth=2.4 if policy == "flex" else 1.4,
                    capsize=2,
                    label=policy,
                )
            axis.set_title(f"{workload}: {kind}", fontsize=10)
        panels[0].set_ylabel("deadlines met (%)")
    for axis in axes[-1]:
        axis.set(xlabel="load (1: all that full batches of one bin, or full slots, bear)", ylim=(0, 102))
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=7, frameon=False)
    return figure
