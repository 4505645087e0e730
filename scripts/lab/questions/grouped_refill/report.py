"""Tables, the verdict, and the figure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.figures import BLUE, GREEN, GREY, ORANGE, PINK, new_figure, save
from kit.rows import Row, group, median, ratio, select
from kit.tables import cells, show
from rich.console import Console

from questions.grouped_refill.costs import Costs, threshold_share

CASE = ("setting", "load", "slots", "group", "round")
RATIOS = (
    "tokens_per_cpu_s",
    "tokens_per_s",
    "latency_s_mean",
    "latency_s_p99",
    "first_token_s_mean",
    "token_s_mean",
    "steps_with_prompts",
)
GAIN, LATENCY = 1.10, 1.0  # wanted: at least such a throughput at no more than such a mean latency, to single slots
COLORS = {"default": BLUE, "small budget": ORANGE, "large budget": GREEN, "whole prompts": PINK}


@dataclass(frozen=True)
class Results:
    """settings : by name: what was measured once on a server.  rows : one of each pass"""

    settings: Mapping[str, Any]
    rows: Sequence[Row]

    @classmethod
    def read(cls, path: Path) -> Results:
        """Nothing without a file."""
        found = json.loads(path.read_text()) if path.exists() else {"settings": {}, "rows": []}
        return cls(found["settings"], [Row.of_record(record, CASE) for record in found["rows"]])

    def costs(self, setting: str) -> Costs:
        found = self.settings[setting]["costs"]
        return Costs(*({int(size): value for size, value in found[name].items()} for name in ("step_s", "prompt_s")))


def compared(rows: Sequence[Row]) -> list[Row]:
    """A row for each case without the round: medians, and ratios to single slots, round by round."""
    names = CASE[:-1]
    merged = []
    for key, same in group(rows, *names).items():
        case = dict(zip(names, key, strict=True))
        single = select(rows, **{**case, "group": 1})
        ratios = {name: ratio(same, single, name, "round") for name in RATIOS}
        merged.append(Row(case, {name: median(same, name) for name in same[0].numbers}, {"single": ratios}))
    return merged


def best(rows: Sequence[Row]) -> Row:
    """The row of the group with the largest throughput to single slots, when all requests came at once.

    rows : of compared()
    """
    groups = [row for row in rows if row["group"] > 1 and not row["load"].startswith("poisson")]
    return max(groups, key=lambda row: row.ratios["single"]["tokens_per_cpu_s"])


def verdict(rows: Sequence[Row]) -> str:
    row = best(rows)
    ratios = row.ratios["single"]
    gain, latency = ratios["tokens_per_cpu_s"], ratios["latency_s_mean"]
    where = f"{row['setting']}, {row['load']}, {row['slots']} slots, groups of {row['group']}"
    answer = "Yes" if gain >= GAIN and latency <= LATENCY else "No"
    return (
        f"{answer}: groups reach at most {gain:.3f} of single slots' tokens/s, "
        f"with {latency:.3f} of their mean latency ({where})."
    )


COLUMNS = {
    "load": ("load", ""),
    "slots": ("slots", ""),
    "group": ("group", ""),
    "tokens/s": ("tokens_per_s", ",.1f"),
    "while\nsome wait": ("tokens_per_s_saturated", ",.1f"),
    "of CPU\ntime": ("tokens_per_cpu_s", ",.1f"),
    "latency (s)\nmean": ("latency_s_mean", ".2f"),
    "\np99": ("latency_s_p99", ".2f"),
    "first\ntoken (s)": ("first_token_s_mean", ".2f"),
    "between\ntokens (s)": ("token_s_mean", ".4f"),
    "steps": ("steps", ",.0f"),
    "with\nprompts": ("steps_with_prompts", ",.0f"),
}
RATIO_HEADS = (
    "to single:\nCPU time",
    "\ntokens/s",
    "mean",
    "p99",
    "first\ntoken",
    "between",
    "steps with\nprompts",
)


def print_report(results: Results, console: Console | None = None) -> None:
    console = console or Console(width=190)
    rows = compared(results.rows)
    for setting, section in results.settings.items():
        own = select(rows, setting=setting)
        lines = [
            [*line, *(f"{value:.3f}" for value in row.ratios["single"].values())]
            for line, row in zip(cells(own, COLUMNS), own, strict=True)
        ]
        title = f"{setting}: {' '.join(section['flags']) or 'vLLM as it is'}; {section['rounds']} rounds, medians"
        show(title, (*COLUMNS, *RATIO_HEADS), lines, left=("load",), console=console)
        print_costs(console, results, setting)
    console.print(verdict(rows))


def print_costs(console: Console, results: Results, setting: str) -> None:
    section, costs = results.settings[setting], results.costs(setting)
    (alpha, beta), (a, b) = costs.line, costs.interruption
    steps = ", ".join(f"{count}: {1e3 * step_s:.1f}" for count, step_s in costs.step_s.items())
    lost = ", ".join(f"{size}: {1e3 * prompt_s:.1f}" for size, prompt_s in costs.prompt_s.items())
    read_gb_per_s = 4 * section["weights"] / costs.step_s[1] / 1e9
    console.print(
        f"A step of decoding by sequences (ms): {steps}; {1e3 * alpha:.1f} + {1e3 * beta:.2f} n. A step of 16 takes "
        f"{costs.step_s[16] / costs.step_s[1]:.1f} times a step of 1 (memory-bound: once; compute-bound: 16 times). "
        f"One sequence reads the weights at {read_gb_per_s:.1f} GB/s, memory gives {section['read_gb_per_s']:.1f}.\n"
        f"Decoding loses per prompt of 512 tokens, by prompts that come at once (ms): {lost}; per interruption "
        f"{1e3 * a:.1f} + {1e3 * b:.1f} per prompt."
    )
    for slots, size in sorted({(row["slots"], row["group"]) for row in results.rows if row["group"] > 1}):
        tokens = section["tokens_mean"]
        gain = costs.request_s(slots, 1, tokens) / costs.request_s(slots, size, tokens)
        console.print(
            f"{slots} slots, groups of {size}: expected {gain:.3f} of single slots' tokens/s for answers of {tokens} "
            f"tokens; groups lose where answers are longer than {costs.break_even_tokens(slots, size):.0f} tokens; "
            f"{GAIN:.2f} needs interruptions of {1e3 * costs.interruption_for(GAIN, slots, size, tokens):.0f} ms."
        )
    share = threshold_share(a, alpha, section["tokens_mean"])
    console.print(f"Proposition 1 of the paper, with these costs: refill when {share:.2f} of the slots are free.\n")


def draw(results: Results, path: Path) -> None:
    """Throughput of bursts by group; times of one setting by group; the time of a step by sequences."""
    rows = compared(results.rows)
    figure, ((left, middle, right),) = new_figure(1, 3, width=12, height=3.9)
    for (setting, slots), own in group(select(rows, load="burst"), "setting", "slots").items():
        values = [row.ratios["single"]["tokens_per_cpu_s"] for row in own]
        style, label = ("-", setting) if slots == 8 else ("--", None)
        left.plot([row["group"] / slots for row in own], values, f"o{style}", ms=4, color=COLORS[setting], label=label)
    left.axhline(GAIN, color=GREY, lw=1, ls=":")
    left.text(0.5, GAIN, "wanted", ha="right", va="bottom", fontsize=8, color=GREY)
    left.set(xlabel="group, share of the slots", ylabel="tokens/s to single slots", ylim=(0.85, 1.15))
    left.set_title("bursts (solid: 8 slots, dashed: 16)", fontsize=10)
    left.legend(loc="lower left")
    styles = {"burst": "-", "poisson-0.7": ":", "poisson-0.9": "--"}
    times = {
        "latency_s_mean": (BLUE, "latency"),
        "first_token_s_mean": (ORANGE, "to the first token"),
        "token_s_mean": (GREEN, "between tokens"),
    }
    for load, style in styles.items():
        own = select(rows, setting="default", slots=8, load=load)
        for name, (color, label) in times.items() if own else ():
            values = [row.ratios["single"][name] for row in own]
            shown = label if load == "burst" else None
            middle.plot([str(row["group"]) for row in own], values, f"o{style}", ms=4, color=color, label=shown)
    middle.axhline(1, color=GREY, lw=1)
    middle.set(xlabel="group, of 8 slots", ylabel="mean time to single slots")
    middle.set_title("default (solid: burst, dotted: load 0.7, dashed: 0.9)", fontsize=10)
    if len(middle.lines) > 1:
        middle.legend(loc="upper left")
    draw_steps(right, results)
    save(figure, path)


def draw_steps(axes: Any, results: Results) -> None:
    setting = next(iter(results.settings))
    steps = results.costs(setting).step_s
    counts, times = list(steps), [1e3 * step_s for step_s in steps.values()]
    axes.plot(counts, times, "o-", color=BLUE, label="measured")
    axes.plot(counts, [times[0]] * len(counts), ":", color=GREY, label="if memory-bound")
    axes.plot(counts, [times[0] * count for count in counts], "--", color=GREY, label="if compute-bound")
    axes.set(xlabel="sequences", ylabel="ms", ylim=(0, 3 * max(times)))
    axes.set_title("a step of decoding", fontsize=10)
    axes.legend()
