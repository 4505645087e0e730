"""The live runs as tables and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgspec
from kit.results import day_and_machine
from kit.tables import markdown

from questions.deadlines.ledger import ENDS
from questions.deadlines.runs import Run
from questions.deadlines.serving import Engines
from questions.deadlines.traffic import Setting


def live_tables(setting: Setting, runs: Sequence[Run]) -> list[str]:
    """Two Markdown tables: medians over rounds, but sums of the counts of preemptions."""
    policies = list(dict.fromkeys(run.policy for run in runs))
    by_policy = {policy: [run for run in runs if run.policy == policy] for policy in policies}
    quick, slow = setting.streams
    met = ["order", "all", quick.name, "steady", "in the burst", slow.name, "goodput/s"]
    met += [f"{stream.name}, p50 / p99 (s)" for stream in setting.streams]
    cost = ["order", "batches stopped", "requests preempted", *ENDS, "stopped (s)", "too late (s)", "busy (s)"]
    shares, costs = [], []
    for policy, own in by_policy.items():
        parts = ((None, "all"), (quick.name, "all"), (quick.name, "steady"), (quick.name, "burst"), (slow.name, "all"))
        row = [f"{statistics.median(run.share(*part) for run in own):.1%}".replace("%", " %") for part in parts]
        row.append(f"{statistics.median(run.goodput_per_s(setting) for run in own):.1f}")
        shares.append([policy, *row, *[_latencies(own, stream.name) for stream in setting.streams]])
        ended = [sum(run.preempted[end] for run in own) for end in ENDS]
        counts = [sum(run.stops for run in own), sum(ended), *ended]
        names = ("stopped_s", "too_late_s", "busy_s")
        seconds = [statistics.median(getattr(run, name) for run in own) for name in names]
        costs.append([policy, *map(str, counts), *[f"{value:.1f}" for value in seconds]])
    rounds = max(run.round for run in runs)
    in_time = f"Deadlines met, medians of {rounds} rounds; latencies of those in time"
    took = f"What it took: counts of all {rounds} rounds, engine time the median of a round"
    return [markdown(met, shares, title=in_time, right=True), markdown(cost, costs, title=took, right=True)]


def _latencies(runs: Sequence[Run], stream: str) -> str:
    counts = [run.counts[stream] for run in runs]
    latencies = [(c.latency_s_p50, c.latency_s_p99) for c in counts if c.latency_s_p50 is not None]
    return " / ".join(f"{statistics.median(values):.2f}" for values in zip(*latencies, strict=True)) or "-"


def live_result(engines: Engines, setting: Setting, seed: int, runs: Sequence[Run]) -> dict[str, Any]:
    """JSON of the runs; only the first round, which is drawn, keeps its bars and missed deadlines."""
    records = [asdict(run) for run in runs]
    for record in records:
        if record["round"] > 1:
            record["bars"], record["missed"] = [], []
    return {
        **day_and_machine(),
        "engines": engines.description,
        "seed": seed,
        "setting": asdict(setting),
        "profiles": {model: asdict(profile) for model, profile in engines.profiles.items()},
        "runs": records,
    }


def live_from(result: Mapping[str, Any]) -> tuple[str, Setting, list[Run]]:
    """The description of the engines, the setting and the runs in a JSON result."""
    return result["engines"], msgspec.convert(result["setting"], Setting), msgspec.convert(result["runs"], list[Run])
