"""The report on the results: tables, and the goals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.rows import Row, select
from kit.tables import cells, show
from rich.console import Console

from questions.vllm.arrangements import AHEAD, ORDERS, ROUTER_POLICIES, Arrangement, arrangements_of
from questions.vllm.passes import CASE

TITLES = {
    "burst": "all at once",
    "poisson-0.7": "Poisson arrivals at 0.7 of capacity",
    "poisson-0.9": "Poisson arrivals at 0.9 of capacity",
    "trace": "a trace's arrivals and lengths, scaled to 0.9",
    "routers": "two vLLM servers, Poisson arrivals at 0.9",
    "barrier": "batches run to their end, all at once",
    "memory": "all at once, a KV cache of 1,280 tokens",
    "own": "all at once, llmserve's own forecasts without a trained predictor",
    **{part: f"turns as priorities, Poisson arrivals at {part.removeprefix('ahead-')} of capacity" for part in AHEAD},
}


def read_results(path: Path) -> dict[str, Any]:
    """part -> section, whose "rows" are Rows; {} without a file."""
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for section in results.values():
        names = [name for name in CASE if name in section.get("rows", [{}])[0]]  # idle has arrangements only
        section["rows"] = [Row.of_record(record, names) for record in section.get("rows", ())]
    return results


def row_of(
    results: Mapping[str, Any], part: str, way: str, predictions: str | None = None, bins: int = 1
) -> Row | None:
    rows = select(results.get(part, {}).get("rows", ()), way=way, predictions=predictions, bins=bins)
    return rows[0] if rows else None


def ratio_of(row: Row | None, baseline: str, name: str) -> float | None:
    """None when the row or its baseline was not measured, or when some requests of the row were not answered."""
    if row is None or row["failed"] or row["dropped"]:
        return None
    return row.ratios.get(baseline, {}).get(name)


@dataclass(frozen=True, slots=True)
class Goal:
    """A limit for a measured number. value : None: not measured yet"""

    text: str
    value: float | None
    limit: float
    at_least: bool = False
    unit: str = ""

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def goals(results: Mapping[str, Any]) -> list[Goal]:
    """All goals, with the measured values."""
    all_goals = []
    ordered = [row for row in results.get("burst", {}).get("rows", ()) if row["way"] in ORDERS]
    for name, span in (("tokens_per_s_saturated", "while requests wait"), ("tokens_per_s", "to the last answer")):
        least, where = None, "the least"
        if ordered:
            least, where = min((row.ratios["direct"][name], row["arrangement"]) for row in ordered)
        all_goals.append(Goal(f"burst: throughput to direct {span}, {where}", least, 0.98, at_least=True))
    added = results.get("idle", {}).get("added_latency_ms")
    all_goals.append(Goal("idle: added median latency", added, 3.0, unit=" ms"))
    for kind, limit in (("oracle", 0.60), ("predicted", 0.75)):
        value = ratio_of(row_of(results, "burst", "shortest", kind), "direct", "latency_s_mean")
        all_goals.append(Goal(f"burst: mean latency to direct, shortest, {kind}", value, limit))
    for own, limit in (("cold", 0.75), ("warm", 0.60), ("again", 0.60)):
        rows = select(results.get("own", {}).get("rows", ()), arrangement=Arrangement("boost", own=own).name)
        value = ratio_of(rows[0] if rows else None, "direct", "latency_s_mean")
        all_goals.append(Goal(f"own: mean latency to direct, a {own} server", value, limit))
    for kind in ("oracle", "predicted"):
        row = row_of(results, "poisson-0.9", "shortest", kind)
        slowdown, p99 = ratio_of(row, "direct", "slowdown_mean"), ratio_of(row, "direct", "latency_s_p99")
        all_goals.append(Goal(f"poisson-0.9: mean slow-down to direct, shortest, {kind}", slowdown, 0.6))
        all_goals.append(Goal(f"poisson-0.9: p99 latency to direct, shortest, {kind}", p99, 1.1))
    for part in ("burst", "poisson-0.7", "poisson-0.9", "trace"):
        for kind in ("oracle", "predicted"):
            row = row_of(results, part, "shortest", kind)
            for name, text in (("latency_s_mean", "mean"), ("latency_s_p99", "p99")):
                value = ratio_of(row, "priority", name)
                all_goals.append(Goal(f"{part}: {text} latency to vLLM's priorities, shortest, {kind}", value, 1.0))
    for arrangement in arrangements_of("routers", ("fffs", "shortest"))[len(ROUTER_POLICIES) :]:
        row = row_of(results, "routers", arrangement.way, arrangement.predictions)
        name = arrangement.name.removeprefix("llmserve ")
        for policy, limit in (("round_robin", 0.85), ("power_of_two", 1.0)):
            value = ratio_of(row, policy, "latency_s_p95")
            all_goals.append(Goal(f"routers: p95 latency to {policy}, {name}", value, limit))
    bins = ratio_of(row_of(results, "barrier", "barrier", "oracle", 8), "no bins", "tokens_per_s")
    all_goals.append(Goal("barrier: throughput of 8 bins to none", bins, 1.4, at_least=True))
    killed = results.get("kill", {})
    ended = killed["answer"] + killed["error"] if killed else None
    all_goals.append(Goal("kill: answers and clear errors", ended, killed.get("requests", 500), at_least=True))
    return all_goals + [Goal(f"kill: requests that were {kind}", killed.get(kind), 0) for kind in ("lost", "twice")]


def print_report(results: Mapping[str, Any]) -> None:
    console = Console(width=180)
    for part, title in TITLES.items():
        if part in results:
            print_part(console, results[part], f"{part}: {title}")
    if "idle" in results:
        print_idle(console, results["idle"])
    if "kill" in results:
        print_kill(console, results["kill"])
    show("Reach", ("", "measured", "wanted", " "), map(_reached, goals(results)), left=(" ",), console=console)


def _reached(goal: Goal) -> tuple[str, ...]:
    sign = "at least" if goal.at_least else "at most"
    value = "not measured" if goal.value is None else f"{goal.value:.4g}{goal.unit}"
    met = {None: "", True: "met", False: "not met"}[goal.met]
    return goal.text, value, f"{sign} {goal.limit:g}{goal.unit}", met


COLUMNS = {  # of the table of a part
    "tokens/s": ("tokens_per_s", ",.0f"),
    "while\nsome wait": ("tokens_per_s_saturated", ",.0f"),
    "first token (s)\nmean": ("first_token_s_mean", ".2f"),
    "\np50": ("first_token_s_p50", ".2f"),
    "\np95": ("first_token_s_p95", ".2f"),
    "latency (s)\nmean": ("latency_s_mean", ".2f"),
    " \np50": ("latency_s_p50", ".2f"),
    " \np95": ("latency_s_p95", ".2f"),
    "\np99": ("latency_s_p99", ".2f"),
    "slow-down\nmean": ("slowdown_mean", ".2f"),
    "  \np95": ("slowdown_p95", ".2f"),
    "deadlines\nmet": ("deadlines_met", ".1%"),
    "tokens\na step": ("tokens_per_step", ".2f"),
}
RATIO_COLUMNS = {
    "tokens_per_s": "tokens/s",
    "tokens_per_step": "a step",
    "latency_s_mean": "mean",
    "latency_s_p95": "p95",
    "latency_s_p99": "p99",
    "slowdown_mean": "slow-down",
}


def print_part(console: Console, section: Mapping[str, Any], title: str) -> None:
    setting = (
        f"{section['requests']} requests of {section['mean_tokens']:.0f} tokens in the mean, "
        f"{section['rounds']} rounds, {section['slots']} slots a server"
    )
    at_once = section["load"] is None

    numbers = section["rows"][0].numbers
    columns = {"arrangement": ("arrangement", "")}
    columns |= {title: column for title, column in COLUMNS.items() if column[0] in numbers}
    lines = [[cell.replace("%", " %") for cell in line] for line in cells(section["rows"], columns)]
    if not at_once:  # where requests come one by one, the last request seldom waits
        place = list(columns.values()).index(COLUMNS["while\nsome wait"])
        lines = [[*line[:place], "", *line[place + 1 :]] for line in lines]
    show(f"{title}\n{setting}", list(columns), lines, console=console)
    _print_ratios(console, section, ({"tokens_per_s_saturated": "while some wait"} if at_once else {}) | RATIO_COLUMNS)
    for note in notes(section):
        console.print(note)
    console.print()


def _print_ratios(console: Console, section: Mapping[str, Any], shown: Mapping[str, str]) -> None:
    labels = list(dict.fromkeys(label for row in section["rows"] for label in row.ratios))
    columns = [
        f"{f'to {label}' if not place else ''}\n{name}" for label in labels for place, name in enumerate(shown.values())
    ]
    rows = []
    for row in section["rows"]:
        values = [row.ratios.get(label, {}).get(name) for label in labels for name in shown]
        if any(value is not None for value in values):
            rows.append((row["arrangement"], *("" if value is None else f"{value:.3f}" for value in values)))
    title = "ratios, round by round (medians); latencies unless said otherwise"
    show(title, ("arrangement", *columns), rows, console=console)


def notes(section: Mapping[str, Any]) -> list[str]:
    taus = ", ".join(f"{kind} {tau:.2f}" for kind, tau in section["kendall_tau"].items())
    lines = [f"Kendall's tau of the predictions: {taus}."]
    for row in section["rows"]:
        if row["dropped"]:
            lines.append(
                f"{row['arrangement']}: {row['dropped']:.0f} of {section['requests']} requests were dropped with 504; "
                "they have no latency, and missed their deadline."
            )
        if row.numbers.get("preemptions"):
            lines.append(f"{row['arrangement']}: vLLM evicted a request {row['preemptions']:.0f} times.")
        if row["failed"]:
            lines.append(f"{row['arrangement']}: {row['failed']:.0f} of {section['requests']} requests failed.")
    return lines


def print_idle(console: Console, section: Mapping[str, Any]) -> None:
    title = f"idle: one request at a time, {section['tokens']} tokens, {section['requests']} pairs"
    names = ("latency_ms_p50", "latency_ms_p95", "first_token_ms_p50", "first_token_ms_p95")
    rows = [[row["arrangement"], *(f"{row[name]:.2f}" for name in names)] for row in section["rows"]]
    added = ["added", f"{section['added_latency_ms']:.2f}", "", f"{section['added_first_token_ms']:.2f}", ""]
    columns = ("arrangement", "latency (ms)\np50", "\np95", "first token (ms)\np50", " \np95")
    show(title, columns, [*rows, added], console=console)


def print_kill(console: Console, section: Mapping[str, Any]) -> None:
    console.print(
        f"kill: of {section['requests']} requests {section['answer']} were answered, {section['error']} ended with a "
        f"clear error, {section['lost']} were lost, {section['twice']} came twice; "
        f"{section['answered_before_the_kill']} had ended before the kill. Errors: {section['errors'] or 'none'}. "
        f"Answers with another text than vLLM's own: {section['other_text']}.\n"
    )
