"""The page of the BatchMonitor paper, with its one figure, from the rows measured."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np
from bench.figures import finish, new_figure
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from reproduction.batchmonitor.measure import (
    ASSUMED_BUSY_W,
    ASSUMED_IDLE_W,
    BATCH_MAX,
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
from reproduction.page import WIDTH, Section
from reproduction.rows import Row, Rows
from reproduction.style import COLOURS

TITLE = "BatchMonitor and BatchDispatcher, reproduced"

OPENING = f"""\
"Efficient Adaptive Batching of DNN Inference Services for Improved Latency" (Khan, Yu, Kim, Seo): every second the
arrivals of the last one choose the smallest batch, of at least two, whose throughput exceeds their rate. It is compared
with ad-hoc batching (what is there goes as soon as the GPU is free) and with the largest batch within a deadline, while
the request rate goes from 1 to 240 a second in 300 s. All rules here but `rate` are llmserve's own releases, on the
same arrivals, simulated as by

    llmserve simulate --barrier --bins 1 --batch-size {BATCH_MAX} --predictions none \\
        --trace ARRIVALS --profile PROFILE --release RULE

* ad hoc: `greedy`
* largest batch: `deadline --latency-target-s {DEADLINE_S:g}`
* rate: as printed, which llmserve does not serve by (scripts/lab/reproduction/batchmonitor/printed_rate.py)
* rate repaired: `rate-headroom --batch-wait-s {WAIT_S:g}`: head-room of 20 %, batches of one, the rate of the last
  arrivals, and nobody waits longer than that while the engine is free
* smdp: `table --energy-weight {ENERGY_WEIGHT:g}`: the SMDP's policy, a watt worth {ENERGY_WEIGHT:g} ms

What the paper does not say, and is assumed:

* An even climb of the rate, Poisson arrivals, batches up to {BATCH_MAX}, a deadline of {1e3 * DEADLINE_S:g} ms.
* Times and powers. The four models' slopes are their multiply-accumulates at 6e13 a second; their intercepts and the
  powers ({ASSUMED_BUSY_W:g} W busy, {ASSUMED_IDLE_W:g} W idle) were chosen so that the rule as printed comes near the
  latencies and the requests per joule that the paper prints. That these agree ("fitted") is therefore no evidence;
  what the rules do beside each other is.
* One profile was not chosen so: ResNet50 on a V100, whose times NVIDIA published (assumed: {V100_BUSY_W:g} W busy,
  {V100_IDLE_W:g} W idle)."""


def opening(rows: Rows) -> str:
    """First of all, how much of the paper is reproduced."""
    counts = rows.counts()
    if "published" not in counts:
        return OPENING
    agree, independent = counts["published"]
    fitted = counts["fitted"][1]
    verdict = (
        f"{agree} of {independent} independent statements of the paper agree with what is measured here; the other "
        f"{fitted} numbers compared are those that the assumptions below were chosen to meet."
    )
    return textwrap.fill(verdict, WIDTH) + "\n\n" + OPENING


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
        + ". Intervals are of the mean over runs with different seeds."
    )


def relations(rows: Rows) -> str:
    models = _models(rows)
    gains = [rows.number("Ratios", "requests per joule, rate above ad hoc", model=model) for model in models]
    slower = [rows.number("Ratios", "latency, rate over ad hoc", model=model) for model in models]
    below = [rows.number("Ratios", "latency, largest batch over rate", model=model) for model in models]
    better = sum(int(rows.number("Ratios", SMDP_IS_BETTER, model=model)) for model in models)
    return (
        f"The rule as printed serves {min(gains):.0f} to {max(gains):.0f} % more requests per joule than ad-hoc "
        f"batching; the paper says up to 5 %. It pays with {min(slower):.1f} to {max(slower):.1f} times the latency, "
        "where the paper has nearly the same: a lone request waits for a second one without a limit, and near the "
        f"rate that a batch size can just serve queues grow. It is {min(below):.1f} to {max(below):.1f} times faster "
        "than the largest batch within the deadline, which is a matter of the deadline above all. The SMDP policy, "
        f"at one price for all, is better than it in both for {better} of {len(models)} profiles."
    )


def constant(rows: Rows) -> str:
    mean = {str(row.case["release"]): row for row in rows.of(CONSTANT, "mean latency")}
    busy = {str(row.case["release"]): row.measured or 0.0 for row in rows.of(CONSTANT, "utilisation")}
    known = next(release for release in mean if release.startswith("static:") and release != "static:8")
    size = known.partition(":")[2]
    return (
        "On SMDP-J's basic scenario at a load of 0.7; means over seeds, without the warm-up, in which the rule as "
        "printed drains the backlog of its first second, when there is no count yet and batches are of two. If every "
        f"count were its mean, the rule would form batches of {size} for ever, which just match the rate: the engine "
        f"would be busy for {100 * busy[known]:.1f} % of the time and the mean latency {mean[known].measured:.0f} ms. "
        f"Counts scatter, and whenever one is above the throughput of {size} the next second's larger batches drain "
        f"what waits: measured are {_interval(mean['rate'])} at a utilisation of {100 * busy['rate']:.1f} %, "
        f"{_interval(mean['rate-headroom'])} with head-room, {_interval(mean['static:8'])} of static batches of 8 and "
        f"{_interval(mean['greedy'])} of greedy ones. The simulated means of greedy and static batches stand "
        "beside their exact values."
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
    """A group for each model, a bar for each rule, with intervals; a dash where the paper prints a number."""
    models = _models(rows)
    width = 0.8 / len(RULES)
    for place, rule in enumerate(RULES):
        found = [rows.one(FIGURE, quantity, model=model, rule=rule) for model in models]
        at = np.arange(len(models)) + (place - (len(RULES) - 1) / 2) * width
        heights = np.array([row.measured for row in found], float)
        error = heights - np.array([row.low for row in found], float)
        axis.bar(at, heights, width, yerr=error, color=COLOURS[rule], label=rule if rule != "smdp" else "SMDP table")
        for x, row in zip(at, found, strict=True):
            if row.expected is not None:
                axis.hlines(row.expected, x - width / 2, x + width / 2, color="black", linewidth=1.6)
    axis.set_xticks(range(len(models)), [model.replace(f" {V100.split()[-2]} ", "\non ") for model in models])
    axis.grid(visible=False, axis="x")


def _comparison_rows(rows: Rows) -> Sequence[Row]:
    shown = ("mean latency", "requests per joule", "least requests per joule", "greatest requests per joule")
    return [row for row in rows.of(FIGURE) if row.quantity in shown]


SECTIONS = (
    Section("Fig. 2: latency and energy", comparison, _comparison_rows, ("fig2-comparison", comparison_figure)),
    Section("What the rules do beside each other", relations, lambda rows: rows.of("Ratios")),
    Section("At a constant load", constant, lambda rows: rows.of(CONSTANT)),
    Section(
        "Profiles",
        lambda rows: "Milliseconds of a batch: slope times its size, plus the intercept.",
        lambda rows: rows.of("Profiles"),
    ),
)
