"""Simulated loads: shares of deadlines met against load, by the scheduler alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.figures import new_figure
from bench.tables import markdown

from llmserve.simulate import Case, run_cases
from llmserve.simulation.estimates import Repeated
from llmserve.simulation.progress import RunsProgress

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PREDICTIONS = "quantiles:0.5"  # of an error of 0.5 in the logarithm, and known
SLOS_S = (8.0, 30.0)
SIMULATED: dict[str, dict[str, Any]] = {
    "fffs": {"order": "fffs"},
    "shortest": {"order": "shortest"},
    "edf": {"order": "edf"},
    "flex, 1 bin": {"order": "flex", "bins": 1},
    "flex": {"order": "flex"},
}
STREAMED: dict[str, dict[str, Any]] = {  # shares of clients that stream; of all others nobody does
    "flex, half stream": {"order": "flex", "streaming": 0.5},
    "flex, all stream": {"order": "flex", "streaming": 1.0},
}
KINDS: dict[str, dict[str, Any]] = {  # of engines
    "batches to their end": {"barrier": True, "batch_size": 8},
    "slots that refill": {"slots": 32},
}
# Of what the engines can serve, each kind in its own way: full batches of one bin, or slots that are all taken.
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


@dataclass(frozen=True)
class Cell:
    """Means over seeds. half_width : of the 95 % confidence interval of in_time."""

    workload: str
    kind: str
    policy: str
    load: float
    in_time: float
    half_width: float
    goodput_per_s: float
    preempted: float


def simulated(workloads: Mapping[str, Mapping[str, Any]], requests: int, seeds: int, jobs: int) -> list[Cell]:
    """workloads : fields of a Scenario by name."""
    keys, cases = [], []
    for name, given in workloads.items():
        for kind, engine in KINDS.items():
            # Only batches that run to their end are preempted, so that elsewhere streaming changes nothing.
            orders = {**SIMULATED, **STREAMED} if engine.get("barrier") else SIMULATED
            for policy, order in orders.items():
                for load in LOADS[kind]:
                    common = {"engines": 2, "requests": requests, "predictions": PREDICTIONS, "slo_s": SLOS_S}
                    keys.append((name, kind, policy, load))
                    cases.append(Case.of({**common, **given, **engine, **order, "load": load}, {}))
    with RunsProgress(len(cases) * seeds) as told:
        found = run_cases(cases, seeds, jobs, told)
    return [cell_of(key, repeated) for key, repeated in zip(keys, found, strict=True)]


def cell_of(key: tuple[str, str, str, float], repeated: Repeated) -> Cell:
    in_time, goodput = repeated.estimates["in_time_share"], repeated.estimates["goodput_per_s"]
    return Cell(*key, in_time.mean, in_time.half_width, goodput.mean, repeated.estimates["preempted"].mean)


def load_tables(cells: Sequence[Cell]) -> list[str]:
    """A table for each kind of engine: shares in time by workload, policy and load."""
    tables = []
    for kind in dict.fromkeys(cell.kind for cell in cells):
        rows: dict[tuple[str, str], list[Cell]] = {}
        for cell in sorted([cell for cell in cells if cell.kind == kind], key=lambda cell: cell.load):
            rows.setdefault((cell.workload, cell.policy), []).append(cell)
        loads = [cell.load for cell in next(iter(rows.values()))]
        head = ["answers", "order", *[f"load {load:g}" for load in loads], f"in time/s at {loads[-1]:g}"]
        lines = []
        for key, mine in rows.items():
            shares = [f"{100 * cell.in_time:.1f} ± {100 * cell.half_width:.1f}" for cell in mine]
            lines.append([*key, *shares, f"{mine[-1].goodput_per_s:.2f}"])
        tables.append(markdown(head, lines, title=f"Deadlines met (%), {kind}", right=True))
    return tables


def load_figure(cells: Sequence[Cell]) -> Figure:
    kinds = list(dict.fromkeys(cell.kind for cell in cells))
    workloads = list(dict.fromkeys(cell.workload for cell in cells))
    wide, high = 1.0 + 3.9 * len(workloads), 0.8 + 3.0 * len(kinds)
    figure, axes = new_figure(len(kinds), len(workloads), width=wide, height=high, sharex="row", sharey=True)
    for row, kind in zip(axes, kinds, strict=True):
        for axis, workload in zip(row, workloads, strict=True):
            for policy in dict.fromkeys(cell.policy for cell in cells if cell.kind == kind):
                mine = sorted(
                    [c for c in cells if (c.workload, c.kind, c.policy) == (workload, kind, policy)],
                    key=lambda cell: cell.load,
                )
                axis.errorbar(
                    [cell.load for cell in mine],
                    [100 * cell.in_time for cell in mine],
                    [100 * cell.half_width for cell in mine],
                    color=LOAD_COLOURS[policy],
                    marker="o",
                    markersize=4,
                    linewidth=2.4 if policy == "flex" else 1.4,
                    capsize=2,
                    label=policy,
                )
            axis.set_title(f"{workload}: {kind}", fontsize=10)
        row[0].set_ylabel("deadlines met (%)")
    for axis in axes[-1]:
        axis.set(xlabel="load (1: all that full batches of one bin, or full slots, bear)", ylim=(0, 102))
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=7, frameon=False)
    return figure
