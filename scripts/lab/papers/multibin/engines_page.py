"""The page of Multi-Bin's figures on a real engine: texts and figures, from the rows."""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")

import numpy as np
from kit.figures import finish, log_ticks, new_figure
from matplotlib.figure import Figure

from papers.multibin.engines import (
    BATCHING,
    BESIDES,
    GAIN,
    IMPLIED,
    IS_LINEAR,
    LINEAR,
    ORACLE,
    PREDICTED,
    PUBLISHED,
    R_SQUARED,
    RATE,
    RATE_OVER_ONE,
    RISING,
    SLOPE,
    VLLM,
    VLLM_PYTHON,
)
from papers.multibin.figures import doubling_bins
from papers.page import Reasons, Section, rows_of
from papers.rows import Rows

TITLE = "Multi-Bin Batching, reproduced: engines"

OPENING = f"""\
Figures 1 (a), 5, 7 and 11 of "Multi-Bin Batching for Increasing LLM Inference Throughput" (Guldogan, Kunde, Lee,
Pedarsani) on a real engine; the simulations are in [multibin.md](multibin.md). The paper measures Phi-3.5-mini
(Fig. 1, 5, 7) and Vicuna-13B (Fig. 11) on an A100. This page measures llmserve's embedded engine with the demo model on
the CPU, which runs static batches as the paper's engine does. Fig. 5 also has vLLM on the CPU if {VLLM_PYTHON} names an
interpreter that has vLLM.

How to read the numbers:

* Seconds and tokens a second depend on this machine. Only shapes and ratios can be compared with the paper.
* A gain depends on the spread of the lengths, and on how well prompts predict them. Both differ from the paper. So each
  measured gain is compared with the gain that the observed lengths imply ("derived"): a batch takes as long as its
  longest answer takes on the engine alone. "ok" means within 10 %. The notes have the paper's gains."""


REASONS: Reasons = {
    LINEAR: {
        IS_LINEAR: "Each length is timed three times, on a processor that other programs share: some answers take "
        "longer than answers of more tokens.",
    },
    ORACLE: {
        RISING: "8 and 16 bins gain the same within what one pass shows. The gains that the observed batches imply "
        "rise with the number of bins.",
    },
    PREDICTED: {
        GAIN: "One pass on cores that other programs share: a slower minute of the machine is a smaller gain. Both "
        "arrangements of this figure ran last, and are below what their batches imply.",
    },
}


def opening(rows: Rows) -> str:
    if any(row.case.get("engine") == VLLM for row in rows.of(LINEAR)):
        return OPENING
    return f"{OPENING}\n\nFig. 5 of vLLM is missing: {VLLM_PYTHON} was not set, or this was a quick run."


def batching(rows: Rows) -> str:
    times = rows.of(BATCHING, RATE_OVER_ONE)[0]
    return (
        "The gain of batching itself: full batches of answers with one length, without padding. Batches of "
        f"{times.case['batch']:g} make {times.measured:.1f} times the tokens a second of batches of one."
    )


def linear(rows: Rows) -> str:
    texts = []
    for row in rows.of(LINEAR, R_SQUARED):
        engine = str(row.case["engine"])
        token_ms, besides_ms = (rows.number(LINEAR, quantity, engine=engine) for quantity in (SLOPE, BESIDES))
        texts.append(f"{engine}: {token_ms:.2f} ms a token and {besides_ms:.1f} ms fixed, R² = {row.measured:.4f}")
    return (
        "Answers of fixed lengths, one at a time, in random order; the line is a least-squares fit. "
        f"{'; '.join(texts)}. The paper shows the same relation without numbers. A step takes slightly longer with a "
        "longer context, which bends the line and can make the fixed time negative."
    )


def gains(rows: Rows) -> str:
    measured = {
        figure: ", ".join(f"{row.measured:.2f} (k = {row.case['k']:g})" for row in rows.of(figure, GAIN))
        for figure in (ORACLE, PREDICTED)
    }
    return (
        "Held-out prompts of the demo model come at once, for each arrangement in turn. Batches are static, of 8 "
        "requests; if no bin has 8 requests, a bin releases fewer (release `greedy`). Oracle lengths are the lengths "
        "of the first run, because the demo model decodes greedily. The predictor is the demo model's, and bins use "
        f"its median. Gains with oracle lengths: {measured[ORACLE]}; with the predictor: {measured[PREDICTED]}. The "
        f"paper has {PUBLISHED[ORACLE][4]:g} with 4 bins and about {PUBLISHED[ORACLE][32]:g} with 32 bins for known "
        f"lengths, and {PUBLISHED[PREDICTED][4]:g} with 4 bins for its predictor. Gains are larger here, because the "
        "demo model's lengths have a wider spread than a chat model's; by the lengths in the batches prediction loses "
        "little, because the prompts reveal the lengths. People's prompts to large models are closer to the paper: the "
        "table has the gains that their lengths, and this project's predictor, imply with an endless backlog "
        "([prediction.md](../results/prediction.md)). With many bins and few requests, the last, partial batches of "
        "all bins limit the gain."
    )


def batching_figure(rows: Rows) -> Figure:
    drawn, ((axis,),) = new_figure(1, 1, width=6, height=4)
    by_size = rows.of(BATCHING, RATE)
    sizes = [float(row.case["batch"]) for row in by_size]
    rates = np.array([row.measured for row in by_size], float)
    error = np.array([row.high or 0.0 for row in by_size]) - rates
    axis.errorbar(sizes, rates, error, color="#0072b2", marker="o", markersize=4)
    axis.set(xlabel="batch size", ylabel="output tokens a second", ylim=(0, None))
    log_ticks(axis)
    return finish(drawn)


def linear_figure(rows: Rows) -> Figure:
    engines = rows.of(LINEAR, "time of an answer")
    drawn, (panels,) = new_figure(1, len(engines), width=6 * len(engines), height=4)
    for axis, row in zip(panels, engines, strict=True):
        assert row.curve is not None
        engine = str(row.case["engine"])
        tokens = np.array(row.curve.at)
        token_ms, besides_ms = (rows.number(LINEAR, quantity, engine=engine) for quantity in (SLOPE, BESIDES))
        axis.plot(tokens, row.curve.values, "o", color="#0072b2", markersize=3.5, label="measured")
        label = f"{token_ms:.3g} ms a token, R² = {rows.number(LINEAR, R_SQUARED, engine=engine):.4f}"
        axis.plot(tokens, (token_ms * tokens + besides_ms) / 1e3, color="#d55e00", linewidth=1.3, label=label)
        axis.set(title=engine, xlabel="output tokens", ylabel="time (s)", xlim=(0, None), ylim=(0, None))
        axis.legend(loc="upper left")
    return finish(drawn)


def gains_figure(rows: Rows) -> Figure:
    """Fig. 7 and 11: measured gains, gains that the same lengths and people's lengths imply, published gains."""
    drawn, (panels,) = new_figure(1, 2, width=12, height=4.4)
    for axis, figure, title in zip(
        panels, (ORACLE, PREDICTED), ("Fig. 7: oracle lengths", "Fig. 11: with a predictor"), strict=True
    ):
        embedded, people = rows.of(figure, GAIN), rows.of(figure, IMPLIED)
        at = [float(row.case["k"]) for row in embedded]
        axis.plot(at, [row.measured for row in embedded], "o-", color="#0072b2", label="measured, embedded engine")
        axis.plot(at, [row.expected for row in embedded], "k_", markersize=16, label="implied by the same lengths")
        x = [float(row.case["k"]) for row in people]
        axis.plot(x, [row.measured for row in people], ":", color="#555555", label="implied by people's prompts")
        paper = PUBLISHED[figure]
        axis.plot(list(paper), list(paper.values()), "D", color="#d55e00", label="the paper, A100")
        axis.axhline(1.0, color="#bbbbbb", linewidth=0.9)
        axis.set(title=title, ylabel="throughput over one bin")
        doubling_bins(axis, sorted({*at, *x}))
        axis.legend()
    return finish(drawn)


SECTIONS = (
    Section("Fig. 1 (a): batching", batching, rows_of(BATCHING), ("fig1a-batching", batching_figure)),
    Section("Fig. 5: time against tokens", linear, rows_of(LINEAR), ("fig5-linear", linear_figure)),
    Section(
        "Fig. 7 and 11: bins, by oracle lengths and by a predictor",
        gains,
        lambda rows: [*rows.of(ORACLE), *rows.of(PREDICTED)],
        ("fig7-fig11-gains", gains_figure),
    ),
)
