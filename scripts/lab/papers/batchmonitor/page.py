"""The page of the BatchMonitor paper, with its single figure, from the rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from kit.figures import finish, new_figure
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from papers.batchmonitor.measure import (
    ASSUMED_BUSY_W,
    ASSUMED_IDLE_W,
    BATCH_MAX,
    CLOSE,
    CONSTANT,
    DEADLINE_S,
    ENERGY_WEIGHT,
    FIGURE,
    RULES,
    SMDP_IS_BETTER,
    V100,
    V100_BUSY_W,
    V100_IDLE_W,
    WAIT_S,
)
from papers.page import Reasons, Section
from papers.rows import Row, Rows
from papers.style import COLOURS

TITLE = "BatchMonitor and BatchDispatcher, reproduced"

OPENING = f"""\
"Efficient Adaptive Batching of DNN Inference Services for Improved Latency" (Khan, Yu, Kim, Seo): every second the rule
counts the arrivals of the last second, and chooses the smallest batch size, at least two, whose throughput exceeds
their rate. The paper compares this rule with ad-hoc batching (all waiting requests start as soon as the GPU is free)
and with the largest batch within a deadline, while the request rate climbs from 1 to 240 a second in 300 s. Except for
`rate`, all rules here are llmserve's own releases, simulated on the same arrivals by

    llmserve simulate --barrier --bins 1 --batch-size {BATCH_MAX} --predictions none \\
        --trace ARRIVALS --profile PROFILE --release RULE

* ad hoc: `greedy`
* largest batch: `deadline --latency-target-s {DEADLINE_S:g}`
* rate: the rule as printed, which is not a release of llmserve (scripts/lab/papers/batchmonitor/printed_rate.py)
* rate repaired: `rate-headroom --batch-wait-s {WAIT_S:g}`: head-room of 20 %, batches of one request allowed, the rate
  of the last arrivals, and a longest wait of {WAIT_S:g} s while the engine is free
* smdp: `table --energy-weight {ENERGY_WEIGHT:g}`: the SMDP policy, with {ENERGY_WEIGHT:g} ms as the price of a watt

Assumed, because the paper does not give these facts:

* The rate climbs evenly, arrivals are Poisson, batches have up to {BATCH_MAX} requests, and the deadline is
  {1e3 * DEADLINE_S:g} ms.
* Times and powers. The slopes of the four models are their multiply-accumulates at 6e13 a second. Their intercepts and
  the powers ({ASSUMED_BUSY_W:g} W busy, {ASSUMED_IDLE_W:g} W idle) were chosen so that the rule as printed comes near
  the printed latencies and requests per joule. Agreement with these numbers ("fitted") is therefore no evidence; the
  relations between the rules are evidence.
* One profile was not chosen in this way: ResNet50 on a V100, with times that NVIDIA published (assumed:
  {V100_BUSY_W:g} W busy, {V100_IDLE_W:g} W idle)."""


REASONS: Reasons = {
    "Ratios": {
        "requests per joule, rate above ad hoc, at most": "The paper prints no GPU, and no times or powers of batches. "
        "With the assumed ones, the batches that the rule waits for save more.",
        "latency, largest batch over rate": f"Follows the deadline, which the paper does not print: "
        f"{1e3 * DEADLINE_S:g} ms is assumed.",
        CLOSE: "As printed, a single request waits without limit for a second one, and queues grow at rates close to "
        "the throughput of the batch size. The paper does not say what it does about either.",
    }
}


def opening(rows: Rows) -> str:
    return OPENING


def comparison(rows: Rows) -> str:
    models = _models(rows)
    text = []
    for model in (models[0], models[-1]):
        cells = [
            f"{name} {_cell(rows, 'mean latency', model, name):.1f} ms and "
            f"{_cell(rows, 'requests per joule', model, name):.2f}"
            for name in ("ad hoc", "rate", "smdp")
        ]
        text.append(f"{model}: {', '.join(cells)} requests per joule")
    return (
        "Mean latency and requests per joule, idle power included. "
        + "; ".join(text)
        + ". Intervals are those of the mean over runs with different seeds."
    )


def relations(rows: Rows) -> str:
    models = _models(rows)
    gains = [rows.number("Ratios", "requests per joule, rate above ad hoc", model=model) for model in models]
    slower = [rows.number("Ratios", "latency, rate over ad hoc", model=model) for model in models]
    below = [rows.number("Ratios", "latency, largest batch over rate", model=model) for model in models]
    better = sum(int(rows.number("Ratios", SMDP_IS_BETTER, model=model)) for model in models)
    return (
        f"The rule as printed serves {min(gains):.0f} to {max(gains):.0f} % more requests per joule than ad-hoc "
        f"batching; the paper prints up to 5 %. Its latency is {min(slower):.1f} to {max(slower):.1f} times that of "
        "ad-hoc batching, whereas the paper prints nearly the same latency: a single request waits without limit for "
        "a second request, and queues grow at rates close to the throughput of the batch size. The rule is "
        f"{min(below):.1f} to {max(below):.1f} times faster than the largest batch within the deadline; this factor "
        "depends mostly on the deadline. The SMDP policy, with one price of power for all models, has less latency and "
        f"more requests per joule than the rule for {better} of {len(models)} profiles."
    )


def constant(rows: Rows) -> str:
    mean = {str(row.case["release"]): row for row in rows.of(CONSTANT, "mean latency")}
    busy = {str(row.case["release"]): row.measured or 0.0 for row in rows.of(CONSTANT, "utilisation")}
    static = next(release for release in mean if release.startswith("static:") and release != "static:8")
    size = static.partition(":")[2]
    return (
        "SMDP-J's basic scenario at a load of 0.7. Numbers are means over seeds, without the warm-up: in its first "
        "second the rule as printed has no count yet and forms batches of two, and then drains the backlog. If every "
        f"count equalled its mean, the rule would always form batches of {size}, which just match the rate: the "
        f"engine would be busy for {100 * busy[static]:.1f} % of the time, and the mean latency would be "
        f"{mean[static].measured:.0f} ms. Real counts vary. After a count above the throughput of {size}, larger "
        f"batches drain the queue in the next second: the measured mean latency is {_interval(mean['rate'])} at a "
        f"utilisation of {100 * busy['rate']:.1f} %. With head-room it is {_interval(mean['rate-headroom'])}, with "
        f"static batches of 8 {_interval(mean['static:8'])}, and with greedy batches {_interval(mean['greedy'])}. The "
        "notes of greedy and static batches have the exact values."
    )


def _interval(row: Row) -> str:
    return f"{row.measured:.2f} ms [{row.low:.2f}, {row.high:.2f}]"


def _models(rows: Rows) -> list[str]:
    return list(dict.fromkeys(str(row.case["model"]) for row in rows.of(FIGURE, "mean latency")))


def _cell(rows: Rows, quantity: str, model: str, rule: str) -> float:
    return rows.number(FIGURE, quantity, model=model, rule=rule)


def comparison_figure(rows: Rows) -> Figure:
    """Fig. 2: (a) arrivals, (b) latency, (c) requests per joule."""
    drawn, axes = new_figure(1, 3, width=15, height=4.4)
    arrivals = rows.curve(FIGURE, "arrivals a second")
    first, *bars = axes.flat
    first.plot(arrivals.at, arrivals.values, color="#555555", linewidth=0.9)
    first.set(title="(a) arrivals", xlabel="time (s)", ylabel="requests a second")
    for axis, quantity, label in zip(bars, ("mean latency", "requests per joule"), ("ms", "1/J"), strict=True):
        _bars(axis, rows, quantity)
        axis.set_ylabel(f"{quantity} ({label})")
    bars[0].set(title="(b) latency; black dash: published", yscale="log")
    bars[1].set(title="(c) energy efficiency")
    bars[0].legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    return finish(drawn)


def _bars(axis: Axes, rows: Rows, quantity: str) -> None:
    """Draw a group of bars for each model, a bar with interval for each rule, and a dash at published numbers."""
    models = _models(rows)
    width = 0.8 / len(RULES)
    for place, rule in enumerate(RULES):
        by_model = [rows.only(FIGURE, quantity, model=model, rule=rule) for model in models]
        at = np.arange(len(models)) + (place - (len(RULES) - 1) / 2) * width
        heights = np.array([row.measured for row in by_model], float)
        error = heights - np.array([row.low for row in by_model], float)
        axis.bar(at, heights, width, yerr=error, color=COLOURS[rule], label=rule if rule != "smdp" else "SMDP table")
        for x, row in zip(at, by_model, strict=True):
            if row.expected is not None:
                axis.hlines(row.expected, x - width / 2, x + width / 2, color="black", linewidth=1.6)
    axis.set_xticks(range(len(models)), [model.replace(f" {V100.split()[-2]} ", "\non ") for model in models])
    axis.grid(visible=False, axis="x")


def _comparison_rows(rows: Rows) -> Sequence[Row]:
    shown = ("mean latency", "requests per joule", "least requests per joule", "greatest requests per joule")
    return [row for row in rows.of(FIGURE) if row.quantity in shown]


SECTIONS = (
    Section("Fig. 2: latency and energy", comparison, _comparison_rows, ("fig2-comparison", comparison_figure)),
    Section("Relations between the rules", relations, lambda rows: rows.of("Ratios")),
    Section("Constant load", constant, lambda rows: rows.of(CONSTANT)),
    Section(
        "Profiles",
        lambda rows: "A batch takes the slope times its size, plus the intercept.",
        lambda rows: rows.of("Profiles"),
    ),
)
